"""Result files and tables of the benchmarks: environment, JSON, text."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewise.bench import options
from tilewise.bench.cases import CASES, Case

Row = dict[str, Any]

KERNEL_FIELDS = (
    "case", "provider", "median_us", "spread_us", "tflops", "tbps", "rel_error", "path"
)  # fmt: skip
SERVE_FIELDS = (
    "workload", "backend", "run", "request_throughput", "output_throughput",
    "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms",
)  # fmt: skip
PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "vllm": "vllm",
    "flashinfer": "flashinfer-python",
    "tilewise": "tilewise",
}


def result_parser(
    suite: str, about: str, codes: str, out: str, burst_ms: float, rounds: int
) -> argparse.ArgumentParser:
    """Return the command line of a suite that writes one result file and one plot.

    Parameters
    ----------
    suite : str
        Word after ``tilewise bench``.
    about, codes : str
        Text for ``--help``: what it does, and its exit codes.
    out, burst_ms, rounds
        Defaults of the options of these names.
    """
    parser = argparse.ArgumentParser(
        prog=f"tilewise bench {suite}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=codes,
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", default=Path(out),
        help=f"result file; the plot lies beside it as PNG (default: {out})",
    )  # fmt: skip
    parser.add_argument(
        "--from", type=Path, metavar="FILE.json", dest="source",
        help="measure nothing: show and plot this result file again (default: measure)",
    )  # fmt: skip
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png",
        help="where the plot goes (default: beside --out or --from)",
    )  # fmt: skip
    options.add_turns(parser, rounds, burst_ms)
    options.add_record(parser)
    return parser


def plot_result(args: argparse.Namespace, draw: Callable[[], Any]) -> None:
    """Write the PNG that a line of `result_parser` asks for, if there is what draws it.

    Parameters
    ----------
    args : argparse.Namespace
        Its ``plot``, ``source`` and ``out``; nothing is drawn where all are None.
    draw : callable
        Imports what it needs and returns the figure.
    """
    beside = args.source or args.out
    if args.plot is None and beside is None:
        return
    path = args.plot or beside.with_suffix(".png")
    try:
        from tilewise.bench.plots import to_png

        figure = draw()
    except ModuleNotFoundError as error:
        if args.source is not None or error.name != "matplotlib":
            raise
        # What was measured is on disk, and a machine with a GPU may lack what plots.
        print("no plot: it needs matplotlib; --from plots the file elsewhere", file=sys.stderr)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    to_png(figure, path)
    print(f"plot: {path}", file=sys.stderr)


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def project_commit(given: str | None = None) -> str | None:
    """Return the commit named by the caller, else that of the checkout this file lies in."""
    if given:
        return given
    root = Path(__file__).resolve().parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip() or None


def describe_environment(argv: Sequence[str], commit: str | None) -> dict[str, Any]:
    """Return what every result file says about its run, except what a GPU has to be asked for."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.isoformat(timespec="seconds"),
        "command": shlex.join(argv),
        "commit": project_commit(commit),
        "python": platform.python_version(),
        **{key: version_of(distribution) for key, distribution in PACKAGES.items()},
    }


def describe_gpu() -> dict[str, Any]:
    """Return name, driver, power limit and CUDA version of the GPU, without using it.

    A CUDA context of this process would take memory from a server that is measured.
    """
    import torch

    from tilewise.bench.gpu import query_smi

    if not torch.cuda.is_available():
        return {"gpu": None}
    answer = query_smi("name,driver_version,power.limit") or "unknown,unknown,unknown"
    name, driver, limit = (part.strip() for part in answer.split(","))
    return {"gpu": name, "driver": driver, "power_limit": limit, "cuda": torch.version.cuda}


def result_text(env: Mapping[str, Any], rows: Iterable[Row]) -> str:
    """Return ``{"env": ..., "rows": ...}`` as JSON."""
    return json.dumps({"env": env, "rows": list(rows)}, indent=1, default=str)


def write_result(path: Path, env: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Write a result file, replacing an older one in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(result_text(env, rows) + "\n", encoding="utf-8")
    os.replace(draft, path)


def write_pages(path: Path) -> None:
    """Write the HTML page and the markdown tables of a result file beside it.

    The result is what a run was for: where a library for pages is missing, that is said and no
    failure.
    """
    try:
        from tilewise.bench.html import write_report

        pages = write_report(path, json.loads(path.read_text(encoding="utf-8")))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tilewise"):
            raise
        print(f"no report: it needs {error.name} (pip install 'tilewise[bench]')", file=sys.stderr)
        return
    print("report: " + ", ".join(map(str, pages)), flush=True)


def timed_row(
    case: Case, provider: str, median_us: float, spread_us: float, rel_error: float, path: str
) -> Row:
    """Return a result row, with the rates that follow from the median."""
    return {
        "case": case.name,
        "provider": provider,
        "median_us": round(median_us, 3),
        "spread_us": round(spread_us, 3),
        "tflops": round(case.flops / median_us / 1e6, 2),
        "tbps": round(case.bytes_moved / median_us / 1e6, 4),
        "rel_error": float(f"{rel_error:.3e}"),
        "path": path,
    }


def failed_row(case: Case, provider: str, error: str, **extra: object) -> Row:
    """Return a row without times that says why."""
    empty: Row = dict.fromkeys(KERNEL_FIELDS)
    return {**empty, "case": case.name, "provider": provider, "error": error, **extra}


def schema_errors(result: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    """Return what is wrong with a result file, as one line for each fault."""
    faults = [f"no {key!r}" for key in ("env", "rows") if key not in result]
    for index, row in enumerate(result.get("rows", ())):
        faults += [f"row {index}: no {name!r}" for name in fields if name not in row]
        numbers = {k: v for k, v in row.items() if isinstance(v, float)}
        faults += [f"row {index}: {k} is {v}" for k, v in numbers.items() if not math.isfinite(v)]
    return faults


def _cell(row: Row, case: Case | None, base_us: float | None) -> str:
    if row.get("median_us") is None:
        return str(row["gate"]) if row.get("gate") in ("passed", "failed") else "-"
    compute = case is not None and case.kind != "decode"
    rate = f"{row['tflops']:.0f} TF" if compute else f"{row['tbps']:.2f} TB"
    ratio = f" {base_us / row['median_us']:.2f}x" if base_us else ""
    return f"{row['median_us']:.1f} us {rate}{ratio}"


def kernel_table(rows: Sequence[Row], base: str = "fa3", width: int = 200) -> str:
    """Return a table of one line for each case: median, rate and speed relative to `base`."""
    from rich.console import Console
    from rich.table import Table

    cases = {case.name: case for case in CASES}
    names = list(dict.fromkeys(row["case"] for row in rows))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    table = Table(title=f"median of one layer; x = speed relative to {base}", box=None)
    table.add_column("case", no_wrap=True)
    for provider in providers:
        table.add_column(provider, justify="right", no_wrap=True)
    found = {(row["case"], row["provider"]): row for row in rows}
    for name in names:
        reference = found.get((name, base), {}).get("median_us")
        cells = [
            _cell(found[name, provider], cases.get(name), reference)
            if (name, provider) in found
            else ""
            for provider in providers
        ]
        table.add_row(name, *cells)
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def serve_table(rows: Sequence[Row], width: int = 160) -> str:
    """Return a table of one line for each workload, backend and run."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for name in SERVE_FIELDS:
        table.add_column(name, no_wrap=True)
    for row in rows:
        cells = [
            f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name])
            for name in SERVE_FIELDS
        ]
        table.add_row(*cells)
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
