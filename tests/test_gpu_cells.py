"""``gpu_cells``: every native feature has GPU tests that exist, and results are read right."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_cells
import pytest
from gpu_cells import ROWS, Outcome, cells, matches, parse, read, report

from tilewise import support

TESTS = Path(__file__).resolve().parent


def test_every_native_row_has_tests_and_no_other_row():
    assert set(ROWS) == {row.key for row in support.TABLE if row.native}
    assert all(cell.tests for cell in cells())


def test_the_tests_exist():
    for cell in cells():
        for file, name, _ in cell.tests:
            tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in names, f"{file}::{name}"


@pytest.mark.vllm
@pytest.mark.slow
def test_their_cases_exist_and_run_on_a_gpu():
    """As pytest collects them, not as a file's text looks."""
    files = sorted({file for cell in cells() for file, _, _ in cell.tests})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "collected", "--collect-only", "-m", ""]
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, *(str(TESTS / file) for file in files)],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
        timeout=300, cwd=TESTS.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            case = json.loads(line)
            file, name, _ = parse(case["id"])
            parameters = case["id"].partition("[")[2].removesuffix("]")
            found[f"{Path(file).name}::{name}", parameters] = case["gpu"]
    assert len(found) > 300
    for cell in cells():
        for test in cell.tests:
            cases = [on_gpu for case, on_gpu in found.items() if matches(test, case)]
            assert cases, f"no case of {gpu_cells.text_of(test)}"
            assert all(cases), f"{gpu_cells.text_of(test)} is no GPU test"


def test_the_readme_has_this_list(capsys):
    assert gpu_cells.main(["--readme", "--check"]) == 0, "run `python3 tests/gpu_cells.py --readme`"
    assert "up to date" in capsys.readouterr().out


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_x[one-2]"/>
<testcase classname="test_a" name="test_x[two]"><failure>no</failure></testcase>
<testcase classname="tests.test_a" name="test_y"><skipped/></testcase>
<testcase classname="tests.test_a" name="test_z"><error/></testcase>
</testsuite></testsuites>"""


def test_results_are_read(tmp_path):
    (tmp_path / "a.xml").write_text(JUNIT)
    states = read([tmp_path / "a.xml"])
    assert states == {
        ("test_a.py::test_x", "one-2"): "passed", ("test_a.py::test_x", "two"): "failed",
        ("test_a.py::test_y", ""): "skipped", ("test_a.py::test_z", ""): "failed",
    }  # fmt: skip
    by_test = {
        text: gpu_cells.outcome(parse(text), states)
        for text in (
            "test_a.py::test_x", "test_a.py::test_x[one*]", "test_a.py::test_y",
            "test_a.py::test_z", "test_b.py::test_x",
        )
    }  # fmt: skip
    assert [made.shown for made in by_test.values()] == [False, True, False, False, False]
    assert [str(made) for made in by_test.values()] == [
        "1 passed, 1 failed: two", "1 passed", "1 skipped", "1 failed: it", "not run",
    ]  # fmt: skip
    # A later file has the last word.
    (tmp_path / "b.xml").write_text(JUNIT.replace("<failure>no</failure>", ""))
    states = read([tmp_path / "a.xml", tmp_path / "b.xml"])
    assert gpu_cells.outcome(parse("test_a.py::test_x"), states) == Outcome(passed=2)


def test_a_cell_is_shown_when_all_of_its_tests_are(tmp_path, capsys, monkeypatch):
    names = {f"{file}::{name}": pattern for c in cells() for file, name, pattern in c.tests}
    patterns = [test for cell in cells() for test in cell.tests]
    states = {
        (f"{file}::{name}", pattern.replace("*", "x")): "passed" for file, name, pattern in patterns
    }
    assert len(names) > 60
    lines, whole = report(states)
    assert whole
    assert sum(line.startswith("shown") for line in lines) == len(cells())
    del states["test_vllm_features_gpu.py::test_lora_adapters_are_attended_with", "x"]
    lines, whole = report(states)
    assert not whole
    assert [line for line in lines if line.startswith("NOT SHOWN")] == ["NOT SHOWN LoRA"]

    (tmp_path / "a.xml").write_text(JUNIT)
    assert gpu_cells.main([str(tmp_path / "a.xml")]) == 1
    assert "NOT SHOWN sliding window" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu_cells.main([])
    assert "accepted: one or more, or --readme" in capsys.readouterr().err


def test_what_a_run_that_was_cut_had_printed(tmp_path):
    log = tmp_path / "cut.log"
    log.write_text(
        "tests/test_a.py::test_one PASSED                         [  9%]\n"
        "tests/test_a.py::test_two[x-1 of 2] \n"
        "[gw0] [ 12%] PASSED tests/test_a.py::test_two[x-1 of 2] \n"
        "[gw1] [ 99%] FAILED tests/test_b.py::test_three \n"
        "tests/test_b.py::test_four rc 124\n"
    )
    assert read([log]) == {
        ("test_a.py::test_one", ""): "passed",
        ("test_a.py::test_two", "x-1 of 2"): "passed",
        ("test_b.py::test_three", ""): "failed",
    }
