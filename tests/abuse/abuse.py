"""Abuse a server and see that it bears it: ``python tests/abuse/abuse.py --out RESULT.json``.

On a machine without a GPU the kernels run in Triton's interpreter: the same cases, fewer requests.
Prints a line a case and writes one JSON file; the exit code is 1 when anything was not as it
should be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# The checkout itself must not be there: its folder `kernels` would hide another package.
sys.path[:] = [
    str(HERE),
    str(HERE.parent),
    *(p for p in sys.path if Path(p or ".").resolve() != ROOT),
]

import torch  # noqa: E402
from abuse_cases import CASES, Setup  # noqa: E402
from abuse_traffic import Limits  # noqa: E402
from tiny_model import TinyLlama  # noqa: E402

CPU_REQUESTS, GPU_REQUESTS = 500, 10_000


def make_setup(folder: Path, gpu: bool, num_requests: int | None) -> Setup:
    """Write the model, and choose sizes for the machine."""
    if not gpu:
        model = TinyLlama().write(folder / "model")
        arguments = [
            "--dtype",
            "float32",
            "--enforce-eager",
            "--max-num-seqs",
            "8",
            "--max-num-batched-tokens",
            "64",
            "--kv-cache-memory-bytes",
            str(16 << 20),
        ]
        limits = Limits(max_len=256, max_tokens=10, concurrency=12, timeout=180)
    else:
        shape = TinyLlama(
            32, 8, 128, num_layers=4, hidden_size=1024, intermediate_size=2048, dtype=torch.bfloat16
        )
        model = shape.write(folder / "model")
        arguments = [
            "--dtype",
            "bfloat16",
            "--max-num-seqs",
            "256",
            "--max-num-batched-tokens",
            "8192",
            "--kv-cache-memory-bytes",
            str(8 << 30),
            "--gpu-memory-utilization",
            "0.2",
        ]
        limits = Limits(max_len=4096, max_tokens=64, concurrency=200, timeout=120)
    return Setup(
        model=model, folder=folder, gpu=gpu, dtype=torch.bfloat16 if gpu else torch.float32,
        arguments=["--attention-backend", "TILEWISE", "--max-model-len", str(limits.max_len),
                   *arguments],
        limits=limits, num_requests=num_requests or (GPU_REQUESTS if gpu else CPU_REQUESTS),
        sample=400 if gpu else 100, compared_tokens=4 if gpu else limits.max_tokens,
        start_timeout=300 if gpu else 240,
    )  # fmt: skip


def describe(setup: Setup) -> dict[str, Any]:
    """What was abused, and where."""
    import triton
    import vllm

    import tilewise

    return {
        "device": torch.cuda.get_device_name() if setup.gpu else "CPU, Triton's interpreter",
        "versions": {
            "tilewise": tilewise.__version__, "vllm": vllm.__version__,
            "torch": torch.__version__, "triton": triton.__version__,
        },
        "arguments": setup.arguments,
        "limits": vars(setup.limits),
    }  # fmt: skip


def earlier_cases(out: Path, described: dict[str, Any]) -> dict[str, Any]:
    """Cases of an earlier run with the same setup that stand in the file; they are kept."""
    if not out.exists():
        return {}
    found = json.loads(out.read_text())
    same = all(found.get(name) == value for name, value in described.items())
    return dict(found["cases"]) if same else {}


def main() -> int:
    """Run the chosen cases; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="default: all, %(default)s")
    parser.add_argument("--requests", type=int, help=f"of the case load; default: {CPU_REQUESTS}, "
                        f"or {GPU_REQUESTS} on a GPU")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--folder", type=Path, help="for the model and logs; default: temporary")
    asked = parser.parse_args()
    chosen = asked.cases.split(",")
    if unknown := sorted(set(chosen) - CASES.keys()):
        parser.error(f"unknown cases {', '.join(unknown)}; known are {', '.join(CASES)}")
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="tilewise-abuse-"))
    setup = make_setup(folder, torch.cuda.is_available(), asked.requests)
    result = {**describe(setup), "cases": earlier_cases(asked.out, describe(setup))}
    failed = False
    for name in chosen:
        started = time.monotonic()
        print(f"{name} …", flush=True)
        case = CASES[name](setup)
        case["case_seconds"] = round(time.monotonic() - started, 1)
        failed |= bool(case["problems"])
        result["cases"][name] = case
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {'failed' if case['problems'] else 'fine'}, {case['case_seconds']} s")
        for problem in case["problems"]:
            print(f"  {problem}")
    print(f"logs are in {folder}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
