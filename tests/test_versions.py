"""`tilewise bench kernels --versions`: other checkouts' kernels beside this one's."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tilewise.bench import kernels, versions

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path):
    """A copy of what a version is made of."""
    for part in ("plugin", "kernels"):
        shutil.copytree(ROOT / part, tmp_path / "old" / part)
    return tmp_path / "old"


@pytest.fixture(autouse=True)
def _leave_no_packages(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("tilewise_at_")]:
        del sys.modules[name]


def test_a_copy_imports_itself_alone(checkout, tmp_path):
    package = versions.copy_package("one", checkout, tmp_path)
    assert package == "tilewise_at_one"
    copied = {p.relative_to(tmp_path / package) for p in (tmp_path / package).rglob("*.py")}
    plugin = {p.relative_to(ROOT / "plugin") for p in (ROOT / "plugin").glob("*.py")}
    assert copied == plugin | {p.relative_to(ROOT) for p in (ROOT / "kernels").glob("*.py")}
    assert (tmp_path / package / "tuned.json").is_file()
    for path in (tmp_path / package).rglob("*.py"):
        assert not re.search(r"^\s*(from|import) tilewise\b", path.read_text(), re.M), path


def test_each_version_runs_its_own_kernels(checkout, tmp_path):
    launch = checkout / "kernels" / "launch.py"
    text = launch.read_text()
    assert "LOG2E = " in text
    launch.write_text(re.sub(r"^LOG2E = .*$", "LOG2E = 1.0", text, flags=re.M))
    out = tmp_path / "result.json"
    command = [
        "--smoke", "--gate-only", "--cases", "dec_b1_1k", "--providers", "tilewise",
        "--out", str(out), "--versions", f"broken={checkout}", f"same={ROOT}",
    ]  # fmt: skip
    assert kernels.main(command) == kernels.EXIT_GATE
    rows = {row["provider"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["broken"]["gate"] == "failed"
    assert rows["same"]["gate"] == rows["tilewise"]["gate"] == "passed"
    assert rows["same"]["rel_error"] == rows["tilewise"]["rel_error"]
    # Products of fp8 are for caches of fp8.
    assert "only prefills over an fp8 cache" in str(rows["same_fp8"])


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["here"], "'here' is not NAME=FOLDER"),
        (["=x"], "'=x' is not NAME=FOLDER"),
        (["a="], "'a=' is not NAME=FOLDER"),
        (["A-b=."], "NAME of lower-case letters"),
        (["a=.", "a=.."], "version a is there twice"),
        (["tilewise=."], "a version cannot be named tilewise"),
        (["a=/nowhere"], "/nowhere is no checkout of tilewise: it has no plugin/"),
    ],
)
def test_what_is_no_version_is_refused(texts, why, capsys):
    texts = [text if not text.endswith("=.") else f"{text[:-1]}{ROOT}" for text in texts]
    assert kernels.main(["--smoke", "--cases", "dec_b1_1k", "--versions", *texts]) == 2
    assert why in capsys.readouterr().err
