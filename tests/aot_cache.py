"""Kernels compiled ahead of time for the tests; what they take is kept between runs.

Compilation runs in a process of its own, ``aot_job.py``, since the interpreter's switch must be off
there. Results are kept in pytest's cache by a digest of variants, sources and Triton's version.
Tests ask for them by the fixture ``compiled`` of ``conftest.py``.
"""

import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
OLD_TRITON = Path(sys.prefix) / "triton36"

# What decides which kernels are compiled, beside the kernels.
POLICY_MODULES = (
    "arch", "geometry", "pieces", "policy", "prefix_rule", "prefix_tiles", "tiles", "tuned",
)  # fmt: skip
SOURCES = (
    "kernels/*.py", *(f"plugin/{name}.py" for name in POLICY_MODULES), "plugin/tuned.json",
    "bench/aot*.py", "bench/sass.py", "tests/aot_job.py",
)  # fmt: skip
# And of one kind of job only.
MORE_SOURCES = {
    "ladder": ("bench/ladder/*.py",),
    "command": ("bench/resources.py", "bench/variants.py"),
}


def rows(kind, variants, old_triton, folder, tmp_path):
    """What ``aot_job.py`` says of every variant, from ``folder`` if it is there."""
    digest = hashlib.sha256(json.dumps([kind, variants, triton_version(old_triton)]).encode())
    for pattern in (*SOURCES, *MORE_SOURCES.get(kind, ())):
        for source in sorted(ROOT.glob(pattern)):
            digest.update(source.read_bytes())
    kept = folder / f"{digest.hexdigest()[:24]}.json"
    if not kept.exists():
        job = tmp_path / "variants.json"
        job.write_text(json.dumps(variants))
        command = [sys.executable, str(TESTS / "aot_job.py"), kind, str(job)]
        env = environment(old_triton)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(lines) == len(variants)
        # Renamed when complete, so that a run that is stopped leaves no half of a file.
        part = kept.with_suffix(f".{os.getpid()}.part")
        part.write_text(f"[{','.join(lines)}]")
        part.replace(kept)
    return json.loads(kept.read_text())


def environment(old_triton):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONSAFEPATH"] = "1"
    if old_triton:
        # Before what is there: the checkout may be on the path by this variable.
        paths = [str(OLD_TRITON), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return env


@cache
def triton_version(old_triton):
    probe = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    env = environment(old_triton)
    version = subprocess.run(probe, env=env, capture_output=True, text=True, check=True).stdout
    assert version.startswith("3.6.") == old_triton, f"compiling with Triton {version}"
    return version
