"""``tilewise bench ladder``: from naive attention to our kernels, an idea at a time.

Each rung is a short kernel under bench/ladder/ with its mathematics. For each the command says what
bytes the formulas predict, what Nsight Compute counts (where ``ncu`` is there and allowed; "-"
elsewhere), what memory it takes at its peak, its time, and its place below the measured roof; then
the figures that people quote about FlashAttention, and occupancy against speed. docs/ladder.md is
the chapter that goes with it.

Counters and the sweep get what is left of --budget-seconds. A second run on a machine has nothing
left to compile, and more time for them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewise.bench import options, report, roofline
from tilewise.marked import replace_between, write_or_check

OUT = Path("ladder.json")

EXIT_OK, EXIT_GATE, EXIT_USAGE = 0, 1, 2
SUITE = "ladder"


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of ``tilewise bench ladder``."""
    codes = (
        "Exit codes: 0; 1 if a result failed the correctness gate, or with --check if the page is "
        "stale; 2 for a wrong command line or no GPU."
    )
    parser = report.result_parser(SUITE, str(__doc__), codes, str(OUT), 10.0, 3)
    parser.set_defaults(out=None)  # a smoke run keeps its result only where it is told to
    parser.add_argument(
        "--doc", type=Path, metavar="FILE.md",
        help="write the measured section of this page, docs/ladder.md (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true", help="with --doc: change nothing; exit 1 if it is stale"
    )
    parser.add_argument(
        "--smoke", action="store_true",
        help="small problems on whatever there is: results are checked, nothing is timed",
    )  # fmt: skip
    parser.add_argument(
        "--no-counters", action="store_true", help="do not start Nsight Compute (ncu)"
    )
    parser.add_argument("--no-sweep", action="store_true", help="leave out occupancy against speed")
    options.add_budget(parser, 50.0, "begin no counters and no part of the sweep after")
    return parser


def measure(args: argparse.Namespace, argv: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """Climb the ladder on the device there is.

    Returns
    -------
    dict, list of dict
        The environment, with the ceilings on a GPU, and rows of three parts: ``rung``, ``figure``
        and ``sweep``. A row whose result is wrong has an ``error`` and no time.
    """
    begin = time.monotonic()
    import torch

    from tilewise.bench.gpu import GpuMonitor, ceilings
    from tilewise.bench.ladder import figures, sweep
    from tilewise.bench.ladder import measure as rung_measure
    from tilewise.bench.ladder.rungs import MEASURED, SMOKE, rungs
    from tilewise.device import resolve

    command = ["tilewise", "bench", SUITE, *argv]
    env = report.describe_environment(command, args.commit) | report.describe_gpu()
    device = resolve("cuda" if torch.cuda.is_available() else "cpu")
    timed = not args.smoke
    if args.smoke:
        env["smoke"] = "problems were shrunk; nothing was timed"
    else:
        env |= ceilings()
    monitor = GpuMonitor.start() if timed else GpuMonitor()
    run = rung_measure.Run(
        device, timed, args.rounds, args.burst_ms, begin + args.budget_seconds, monitor
    )
    sizes = SMOKE if args.smoke else MEASURED
    ladder = rungs(sizes, device)
    rows = rung_measure.measure(ladder, run)
    # Counters last of what takes long: they may not be allowed, and nothing may run beside them.
    swept = sweep.measure(sizes, run) if timed and not args.no_sweep else []
    if timed:
        env["counters"] = _count(rows, run, args.no_counters)
    rows += [*figures.measure(sizes, run, rows), *swept]
    env |= {
        "clocks": monitor.summary(), "skipped": run.skipped,
        "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip
    return env, rows


def _count(rows: list[report.Row], run: Any, skip: bool) -> str | None:
    """Put the counters into the rungs' rows; return why there are none, or None."""
    from tilewise.bench.ladder import counters

    if skip:
        return "not asked for"
    if run.left < 1:
        return "the budget was spent"
    found, why = counters.measure(len(rows), run.left)
    for row, counted in zip(rows, found, strict=False):
        row.update(counted)
    return why


def load(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Read a result file.

    Raises
    ------
    ValueError
        If it is no result of this command.
    """
    from tilewise.bench.ladder.figures import FIGURE_FIELDS
    from tilewise.bench.ladder.measure import RUNG_FIELDS
    from tilewise.bench.ladder.sweep import SWEEP_FIELDS

    fields = {"rung": RUNG_FIELDS, "figure": FIGURE_FIELDS, "sweep": SWEEP_FIELDS}
    env, rows = roofline.load(path, ("part", "name"), (), SUITE)
    for index, row in enumerate(rows):
        missing = [name for name in fields.get(row["part"], ()) if name not in row]
        if row["part"] not in fields or missing:
            what = f"no {missing[0]!r}" if missing else f"part {row['part']!r}"
            raise ValueError(
                f"{path} is no result of `tilewise bench {SUITE}`: row {index}: {what}"
            )
    if any(row.get("tflops") for row in rows) and not env.get("matmul_tflops"):
        raise ValueError(f"{path} is no result of `tilewise bench {SUITE}`: no ceilings in its env")
    return env, rows


def _without_gpu() -> None:
    """Let Triton's interpreter stand for a GPU; to be called before anything imports Triton."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _find(args: argparse.Namespace, argv: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """Measure, or read a result."""
    if args.check and args.doc is None:
        raise ValueError("--check without --doc; accepted: --doc FILE.md --check")
    if args.source is not None:
        return load(args.source)
    if args.smoke:
        _without_gpu()
    else:
        import torch

        if not torch.cuda.is_available():
            raise ValueError(
                "no CUDA device to measure; --smoke checks results without one, --from FILE.json "
                "shows a result again"
            )
    env, rows = measure(args, argv)
    if args.out is not None:
        report.write_result(args.out, env, rows)
    return env, rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or read a result; print, plot, and write the page's section.

    Returns
    -------
    int
        0; 1 if a result failed the correctness gate, or a page that was checked is stale; 2 for a
        wrong command line or no GPU.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    if args.out is None and not args.smoke:
        args.out = OUT
    try:
        env, rows = _find(args, argv)
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    from tilewise.bench.ladder import tables

    print(report.result_text(env, rows) if args.json else tables.terminal(env, rows))
    if args.source is None or not args.check:
        report.plot_result(args, lambda: draw(env, rows))
    code = EXIT_OK
    for row in rows:
        if str(row.get("error", "")).startswith("gate"):
            print(f"{row['name']}: {row['error']}", file=sys.stderr)
            code = EXIT_GATE
    if args.doc is not None:
        try:
            stale = write_doc(args.doc, args.source or args.out, env, rows, args.check)
        except (OSError, ValueError) as error:
            print(f"{args.doc}: {error}", file=sys.stderr)
            return EXIT_USAGE
        code = max(code, stale)
    return code


def draw(env: dict[str, Any], rows: Sequence[report.Row]) -> Any:
    """Return the plot."""
    from tilewise.bench.ladder.plot import ladder

    return ladder(env, rows)


def write_doc(
    page: Path, source: Path, env: dict[str, Any], rows: Sequence[report.Row], check: bool
) -> int:
    """Write the measured section of a page, or only say whether it is up to date."""
    from tilewise.bench.ladder import tables

    if not env.get("matmul_tflops"):
        raise ValueError(f"{source} has no times for a page; accepted: a result from a GPU")
    old = page.read_text(encoding="utf-8")
    body = tables.markdown(env, rows, source.as_posix())
    new = replace_between(old, tables.BEGIN, tables.END, body)
    return write_or_check(page, old, new, str(source), check)


if __name__ == "__main__":
    raise SystemExit(main())
