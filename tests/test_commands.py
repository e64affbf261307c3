"""All commands of ``tilewise`` alike: help, --json and exit codes."""

import json
import re
import subprocess
import sys

import pytest

from tilewise import cli, marked, matrix, metrics_page

COMMANDS = [["doctor"], ["tune"], *(["bench", name] for name in cli._BENCHES)]


def run(*words):
    command = [sys.executable, "-m", "tilewise.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_what_a_script_needs(words):
    done = run(*words, "--help")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "--json" in text
    assert re.search(r"Exit codes: 0; (1 .*; )?2 for a ", text), text
    # An option's help follows its name, on its line or indented below.
    shown = done.stdout.partition("options:")[2]
    options = re.findall(r"^  (-\S+(?: \S+)*)((?: {2,}\S.*)?(?:\n {20,}\S.*)*)", shown, re.M)
    assert len(options) > 1
    assert [name for name, said in options if not said.strip()] == []
    # Of what takes a value, the default too.
    takes = [(name, said) for name, said in options if re.search(r" (?!-)\S", name)]
    assert [name for name, said in takes if "(default:" not in " ".join(said.split())] == []


@pytest.mark.parametrize("check", [False, True], ids=["write", "check"])
def test_pages_tell_scripts_what_became_of_them(tmp_path, capsys, check):
    page = tmp_path / "page.md"
    page.write_text("old")
    code = marked.write_or_check(page, "old", "new", "results", check, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told == {"page": str(page), "source": "results", "stale": True, "written": not check}
    assert (code, page.read_text()) == ((1, "old") if check else (0, "new"))


@pytest.mark.parametrize("page", [matrix, metrics_page], ids=["matrix", "metrics_page"])
def test_pages_are_looked_for_in_a_checkout(page, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert page.main([]) == 2
    told = capsys.readouterr().err
    assert re.fullmatch(r"\S+\.md is not there; accepted: .*, from the root of a checkout\n", told)


def test_doctor_where_torch_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_DOCTOR", ("no_such_torch", ""))
    assert cli.main(["doctor"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("tilewise doctor: no_such_torch is not there; accepted: ")


@pytest.mark.vllm
def test_a_dry_run_of_servers_as_json():
    pytest.importorskip("vllm")
    done = run(
        "bench", "serve", "--dry-run", "--json", "--backends", "TILEWISE,FLASH_ATTN",
        "--workloads", "s_1k_128_c64", "--runs", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    jobs = json.loads(done.stdout)
    assert [len(job["clients"]) > 0 for job in jobs] == [True, True]
    assert "--attention-backend TILEWISE" in jobs[0]["server"]
    assert "--attention-backend FLASH_ATTN" in jobs[1]["server"]


def test_fp8_accuracy_asks_for_the_interpreter_itself(monkeypatch):
    """As a new user calls it on a machine without a GPU; the tests' own process has it on."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    words = ["bench", "fp8-accuracy", "--device", "cpu", "--keys", "64", "--queries", "17"]
    words += ["--heads", "1", "--draws", "0", "--head-dim"]
    done = run(*words, "32")
    assert done.returncode == 0, done.stderr
    assert "per block, rotated" in done.stdout
    refused = run(*words, "16")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "fp8_matmul with head_dim=16; accepted: 17 to 256\n"
