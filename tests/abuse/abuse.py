"""Abuse a server and see that it bears it: ``python tests/abuse/abuse.py --out RESULT.json``.

On a machine without a GPU the kernels run in Triton's interpreter: the same cases, fewer requests.
Prints a line a case and writes one JSON file; the exit code is 1 when anything was not as it
should be. ``--merge`` puts files of several runs with the same setup together.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
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
from abuse_run import Clocks, describe_run, end_on_sigterm, write  # noqa: E402
from abuse_traffic import Limits  # noqa: E402
from tiny_model import TinyLlama  # noqa: E402

CPU_REQUESTS, GPU_REQUESTS = 500, 10_000


def make_setup(folder: Path, gpu: bool, asked: argparse.Namespace) -> Setup:
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
            str(4 << 30),
            "--gpu-memory-utilization",
            "0.05",
        ]
        limits = Limits(max_len=4096, max_tokens=64, concurrency=200, timeout=120)
    return Setup(
        model=model, folder=folder, gpu=gpu, dtype=torch.bfloat16 if gpu else torch.float32,
        arguments=["--attention-backend", "TILEWISE", "--max-model-len", str(limits.max_len),
                   *arguments],
        limits=limits, num_requests=asked.requests or (GPU_REQUESTS if gpu else CPU_REQUESTS),
        load_seconds=asked.load_seconds, alone=not asked.shared_gpu,
        sample=400 if gpu else 100, compared_tokens=4 if gpu else limits.max_tokens,
        start_timeout=300 if gpu else 240,
    )  # fmt: skip


def describe(setup: Setup) -> dict[str, Any]:
    """What was abused, and where; runs that differ in it are not put into one file."""
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


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two results are of one setup."""
    return all(one.get(n) == other.get(n) for n in ("device", "versions", "arguments", "limits"))


def commit_of(result: dict[str, Any]) -> str | None:
    """The commit of a result; None of one that does not say."""
    return result.get("env", {}).get("commit")


def earlier_cases(out: Path, described: dict[str, Any]) -> dict[str, Any]:
    """Cases of an earlier run of the same setup and commit that stand in the file; they stay."""
    if not out.exists():
        return {}
    found = json.loads(out.read_text())
    same = is_same(found, described) and commit_of(found) == commit_of(described)
    return dict(found["cases"]) if same else {}


def merge(sources: list[Path], out: Path) -> int:
    """Put the cases of several files into one, each with its commit; the exit code.

    Of a case that several files have, that of the last one counts.

    Raises
    ------
    SystemExit
        When they are not of one setup.
    """
    found = [json.loads(path.read_text()) for path in sources]
    cases: dict[str, Any] = {}
    for path, result in zip(sources, found, strict=True):
        if not is_same(result, found[0]):
            raise SystemExit(f"{path} is of another setup than {sources[0]}")
        for name, case in result["cases"].items():
            cases[name] = {**case, "run": {"commit": commit_of(result), **case.get("run", {})}}
    ordered = {name: cases[name] for name in CASES if name in cases}
    write(out, {**found[-1], "cases": ordered})
    return int(any(case["problems"] for case in ordered.values()))


def run_case(name: str, setup: Setup) -> dict[str, Any]:
    """Run one case; one that cannot go on has failed, and the next ones have their turn."""
    try:
        return CASES[name](setup)
    except (RuntimeError, OSError, LookupError, subprocess.SubprocessError) as error:
        traceback.print_exc()
        return {"problems": [f"{type(error).__name__}: {error}"[-2000:]]}


def main() -> int:
    """Run the chosen cases; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="default: all, %(default)s")
    parser.add_argument("--requests", type=int, help=f"of the case load; default: {CPU_REQUESTS}, "
                        f"or {GPU_REQUESTS} on a GPU")  # fmt: skip
    parser.add_argument("--load-seconds", type=float, default=float("inf"), metavar="S",
                        help="the load ends after the tenth in which this is over")  # fmt: skip
    parser.add_argument("--shared-gpu", action="store_true",
                        help="others use the GPU too: its memory is not all ours")  # fmt: skip
    parser.add_argument("--commit", help="commit to record, where the checkout has no git folder")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="RESULT",
                        help="run nothing: put these files' cases into --out")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--folder", type=Path, help="for the model and logs; default: temporary")
    asked = parser.parse_args()
    if asked.merge:
        return merge(asked.merge, asked.out)
    chosen = asked.cases.split(",")
    if unknown := sorted(set(chosen) - CASES.keys()):
        parser.error(f"unknown cases {', '.join(unknown)}; known are {', '.join(CASES)}")
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="tilewise-abuse-"))
    end_on_sigterm()
    setup = make_setup(folder, torch.cuda.is_available(), asked)
    described = {"env": describe_run("tests/abuse/abuse.py", asked.commit), **describe(setup)}
    result = {**described, "cases": earlier_cases(asked.out, described)}
    failed = False
    for name in chosen:
        started = time.monotonic()
        print(f"{name} …", flush=True)
        with Clocks() as clocks:
            case = run_case(name, setup)
        env = describe_run("tests/abuse/abuse.py", asked.commit)
        case["run"] = {
            "commit": env["commit"], "date": env["date"], "command": env["command"],
            "clocks": clocks.summary(),
        }  # fmt: skip
        case["case_seconds"] = round(time.monotonic() - started, 1)
        failed |= bool(case["problems"])
        result["cases"][name] = case
        write(asked.out, result)
        print(f"{name}: {'failed' if case['problems'] else 'fine'}, {case['case_seconds']} s",
              flush=True)  # fmt: skip
        for problem in case["problems"]:
            print(f"  {problem}")
    print(f"logs are in {folder}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
