"""The file of failures that a run leaves although it is cut: conftest.py writes it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_failures_and_files_that_cannot_be_imported_are_noted(tmp_path):
    suite, noted = tmp_path / "suite", tmp_path / "noted"
    suite.mkdir()
    (suite / "test_one.py").write_text(
        "def test_good():\n    pass\n\n\ndef test_bad():\n    assert 'this' == 'that'\n"
    )
    (suite / "test_two.py").write_text("import no_such_module\n")
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {
        "TILEWISE_TEST_FAILURES": str(noted),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider",
               "--continue-on-collection-errors", str(suite)]  # fmt: skip
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", "2"]  # once, not by each worker
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "1 failed, 1 passed, 1 error" in done.stdout, done.stdout + done.stderr
    text = noted.read_text()
    assert sum(line.startswith("== ") for line in text.splitlines()) == 2, text
    assert "test_one.py::test_bad (call)" in text
    assert "assert 'this' == 'that'" in text
    assert "test_two.py (collect)" in text
    assert "No module named 'no_such_module'" in text
