"""Starts engines of several ranks for tests, each in a process group of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

JOB_SCRIPT = Path(__file__).with_name("parallel_job.py")
JOB_TIMEOUT = 360

# Multicast over NVLink outlives a program that dies, on hosts that forbid it for that reason, and
# FlashInfer's all-reduce is compiled for minutes at its first use.
COLLECTIVES = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


def find_nccl() -> dict[str, str]:
    """Where NCCL is, for vLLM, which asks the loader alone and so misses a wheel's."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    found = [path for folder in folders for path in folder.glob("nccl/lib/libnccl.so.2")]
    return {"VLLM_NCCL_SO_PATH": str(found[0])} if found else {}


def run_jobs(
    jobs: dict[str, dict], folder: Path, start: str = "fork", **variables: str
) -> dict[str, dict]:
    """Run ``parallel_job.py`` on each, side by side, and return what they report.

    Each has a folder of its own below ``folder``, with an empty Triton cache (``triton``) and the
    metrics that its ranks export (``metrics``). ``start`` is how workers start: fork or spawn.
    """
    tests = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
    processes = {}
    for name, job in jobs.items():
        place = folder / name
        (place / "metrics").mkdir(parents=True)
        (place / "job.json").write_text(json.dumps(job))
        environ = {
            **COLLECTIVES,
            **find_nccl(),
            **os.environ,
            "PYTHONPATH": path,
            "HF_HUB_OFFLINE": "1",
            "TILEWISE_METRICS_DIR": str(place / "metrics"),
            "TRITON_CACHE_DIR": str(place / "triton"),
            "VLLM_CACHE_ROOT": str(place / "cache"),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": start,
            **variables,
        }
        command = [sys.executable, str(JOB_SCRIPT), str(place / "job.json"), str(place / "result")]
        with (place / "log").open("w") as log:
            processes[name] = subprocess.Popen(
                command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
    try:
        deadline = time.monotonic() + JOB_TIMEOUT
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline - time.monotonic(), 1))
    finally:
        for process in processes.values():
            # Workers of an engine that failed must not hold the GPUs.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    failed = {name: p.returncode for name, p in processes.items() if p.returncode}
    logs = [f"{name} ({code}): {_log(folder / name)}" for name, code in failed.items()]
    assert not failed, "\n\n".join(logs)
    return {name: json.loads((folder / name / "result").read_text()) for name in jobs}


def _log(place: Path) -> str:
    """The end of an engine's log, and the first error in it: that is of the rank that failed."""
    lines = (place / "log").read_text().splitlines()
    first = next((i for i, line in enumerate(lines) if "ERROR" in line or "Error:" in line), 0)
    return "\n".join([*lines[first : first + 40], "...", *lines[-20:]])
