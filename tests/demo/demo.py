"""The demo: a real model chats, and is served, through tilewise's kernels in vLLM.

Runs on the GPU if there is one, else on the CPU with the same kernels in Triton's interpreter.
Each step is a process of its own, because what Triton and vLLM read from the environment has to
be there before they are imported.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import convert
from demo_common import (
    BACKEND,
    DEFAULT_CACHE,
    DEMO_DIR,
    engine_environment,
    heading,
    log_tail,
    pick_device,
    say,
    show_table,
)

STEP_TIMEOUT_S = 1500
NEEDED = ("torch", "triton", "transformers", "vllm", "tilewise")


def run_step(name: str, device: str, work: Path, *arguments: str) -> dict[str, Any]:
    """Run one script of this folder; return its report, or a failed one if it left none."""
    report, log = work / f"{name}.json", work / f"{name}.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, str(DEMO_DIR / f"{name}.py"), *arguments]
    command += ["--device", device, "--report", str(report)]
    started = time.monotonic()
    with log.open("wb") as sink:
        step = subprocess.Popen(command, stderr=sink, env=engine_environment(device))
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(STEP_TIMEOUT_S)
        finally:
            # Too slow, or we are interrupted: let it stop what it started before we leave.
            step.terminate()
            code = step.wait()
    if report.exists():
        found = dict(json.loads(report.read_text()))
        found["passed"] = found["passed"] and code == 0
        return found
    say(log_tail(log))
    return {
        "passed": False,
        "seconds": round(time.monotonic() - started, 1),
        "checks": [{"name": f"{name}.py ended", "passed": False, "detail": f"exit code {code}"}],
    }


def describe(device: str) -> None:
    """Print what the demo runs on."""
    versions = []
    for name in ("tilewise", "vllm", "torch", "triton", "transformers"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} (no metadata)")
    say("  " + ", ".join(versions))
    where = (
        "the GPU" if device == "gpu" else f"the CPU ({os.cpu_count()} cores), Triton interpreted"
    )
    say(f"  Python {platform.python_version()} on {where}")


def find_model(cache: Path) -> tuple[Path, bool]:
    """Return the model's folder, and whether it is the model whose answers we know."""
    ready = os.environ.get("TILEWISE_DEMO_MODEL")
    if not ready:
        return convert.ensure_model(cache), True
    folder = Path(ready).resolve()
    problems = convert.problems_of(folder)
    say(f"  model: {folder} (named by TILEWISE_DEMO_MODEL)")
    if problems:
        say(f"  not the model that convert.py makes ({problems[0]}): no certain answers expected")
    return folder, not problems


def summary(steps: dict[str, dict[str, Any]], started: float) -> bool:
    """Print the verdicts of all checks; return whether all passed."""
    rows = [
        (name, check["name"], check["detail"], "PASS" if check["passed"] else "FAIL")
        for name, step in steps.items()
        for check in step["checks"]
    ]
    heading("Summary")
    show_table(f"backend {BACKEND}", ("step", "check", "seen", "verdict"), rows)
    times = ", ".join(f"{name} {step['seconds']:.0f} s" for name, step in steps.items())
    passed = all(step["passed"] for step in steps.values())
    say(f"{times}; {time.monotonic() - started:.0f} s in all")
    say("PASS: the demo ran as it should" if passed else "FAIL: see the lines above")
    return passed


def main() -> int:
    """Run the steps in order and return 0 if every check passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="model and logs")
    args = parser.parse_args()
    # Terminated or interrupted, leave through run_step's clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    cache = args.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)

    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        say(
            f"FAIL: {sys.executable} has no {', no '.join(absent)}; `make demo` without SETUP=0 "
            "installs what is needed"
        )
        return 1
    heading("1/3 What it runs on, and the model")
    device = pick_device(args.device)
    describe(device)
    try:
        model, known = find_model(cache)
    except convert.ConversionError as error:
        say(f"FAIL: {error}")
        return 1
    heading("2/3 Chats in an in-process vLLM engine")
    steps = {}
    extra = () if known else ("--any-model",)
    steps["chat"] = run_step("chat", device, cache, "--model", str(model), *extra)

    heading("3/3 vllm serve, one request, vllm bench serve, /metrics")
    expect: tuple[str, ...] = ()
    turns = steps["chat"].get("turns")
    if turns and steps["chat"].get("dtype") == "float32":
        expect = ("--expect", turns[0]["reference"])
    steps["serve"] = run_step(
        "serve", device, cache, "--model", str(model), "--work", str(cache), *expect
    )
    return 0 if summary(steps, started) else 1


if __name__ == "__main__":
    sys.exit(main())
