"""The command ``tilewise``: finds the subcommand and hands the rest of the line to its module.

Nothing else is imported before the subcommand is known, so that ``tilewise --help`` is quick and
needs none of the extras.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

import tilewise

# Module with `main(argv) -> int` and a line for --help, by subcommand.
_BENCHES = {
    "fp8-accuracy": ("tilewise.bench.fp8_accuracy", "measure the error of fp8 attention"),
    "kernels": ("tilewise.bench.kernels", "time the kernels beside vLLM's other backends"),
    "host": ("tilewise.bench.host", "time what a call costs on the host"),
    "ladder": ("tilewise.bench.ladder.command", "climb from naive attention to our kernels"),
    "publish": (
        "tilewise.bench.publish",
        "write the tables of README and docs/results.md (developers)",
    ),
    "report": ("tilewise.bench.html", "write an HTML page about a result of kernels or serve"),
    "resources": (
        "tilewise.bench.resources",
        "compile the kernels and say what they take of an SM; no GPU needed",
    ),
    "roofline": ("tilewise.bench.roofline", "plot our kernels below the card's measured ceilings"),
    "serve": ("tilewise.bench.serve", "run `vllm bench serve` against a server of each backend"),
    "targets": (
        "tilewise.bench.targets",
        "write the page of targets from the result files (developers)",
    ),
    "splits": (
        "tilewise.bench.splits",
        "cut decodes in three ways, same kernel: time and idle SMs",
    ),
}
_TUNE = ("tilewise.bench.tune", "measure tiles of the plain kernels into a table (developers)")
_DOCTOR = ("tilewise.integration.doctor", "say what would run here, and what is wrong")
_EXTRA = "pip install 'tilewise[bench]'"


def _parser() -> argparse.ArgumentParser:
    about = "Paged attention for vLLM, in Triton."
    parser = argparse.ArgumentParser(prog="tilewise", description=about)
    parser.add_argument("--version", action="version", version=f"tilewise {tilewise.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help=_DOCTOR[1], add_help=False)
    commands.add_parser("tune", help=f"{_TUNE[1]} (needs {_EXTRA})", add_help=False)
    bench = commands.add_parser("bench", help=f"benchmarks (needs {_EXTRA})")
    suites = bench.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name, (_, text) in _BENCHES.items():
        # The suite's own parser answers --help and everything after it.
        suites.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Parameters
    ----------
    argv : Sequence[str], optional
        Words of the command line after ``tilewise``; those of this process by default.

    Returns
    -------
    int
        Exit status: the subcommand's own, 2 if it could not be started, or that of SIGPIPE if
        whoever read the output (`head`, a pager) has left.
    """
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would try to flush once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _run(argv: Sequence[str] | None) -> int:
    args, rest = _parser().parse_known_args(argv)
    if args.command == "doctor":
        try:
            doctor = importlib.import_module(_DOCTOR[0])
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.startswith("tilewise"):
                raise
            print(
                f"tilewise doctor: {error.name} is not there; accepted: an environment with vLLM, "
                "which brings it", file=sys.stderr,
            )  # fmt: skip
            return 1
        return int(doctor.main(rest))
    name = "tune" if args.command == "tune" else f"bench {args.suite}"
    module_name = _TUNE[0] if args.command == "tune" else _BENCHES[args.suite][0]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("tilewise"):
            raise
        print(f"tilewise {name} needs {error.name}: {_EXTRA}", file=sys.stderr)
        return 2
    return int(module.main(rest))


if __name__ == "__main__":
    raise SystemExit(main())
