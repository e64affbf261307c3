"""``tilewise tune``: measure tiles of the plain kernels on this GPU, and keep the best in a table.

For developers, in a checkout: the table is ``plugin/tuned.json``, and every user gets what it says.
Each kind of layer is measured over several batches.  All candidates that fit are first timed once;
the fastest few and the rule's tiles are then timed in turns, and a tile replaces the rule's only if
it is clearly faster over all batches and slower in none.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewise import tuned
from tilewise.arch import ARCHITECTURES
from tilewise.bench import options, report
from tilewise.bench.cases import shrink
from tilewise.bench.tune_candidates import Subject, candidates, gain, is_better, subjects
from tilewise.errors import UnsupportedConfig
from tilewise.geometry import Device, Tiles

EXIT_OK, EXIT_GATE, EXIT_USAGE = 0, 1, 2
FIELDS = ("subject", "case", "tiles", "median_us", "spread_us", "gain", "taken", "gate")
_CODES = (
    "Exit codes: 0; 1 if a candidate gave wrong results (it is not taken); 2 for a wrong command "
    "line or no GPU."
)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of ``tilewise tune``."""
    parser = argparse.ArgumentParser(
        prog="tilewise tune", description=__doc__, epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    for name, kind, default, metavar, text in (
        ("kernels", str, tuned.KERNELS, "NAME", f"of {', '.join(tuned.KERNELS)}"),
        ("head-dims", int, (64, 128, 256), "D", "elements of a head"),
        ("page-sizes", int, (64, 16), "TOKENS", "tokens of a page"),
        ("kv-dtypes", str, ("bf16",), "DTYPE", "of the cache: bf16, fp8_e4m3"),
    ):
        parser.add_argument(
            f"--{name}", nargs="+", type=kind, default=list(default), metavar=metavar,
            help=f"{text} (default: {' '.join(map(str, default))})",
        )  # fmt: skip
    parser.add_argument(
        "--table", type=Path, default=tuned.PATH, metavar="FILE.json",
        help="table to change (default: the one of this checkout)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json",
        help="result file with all times (default: none is written)",
    )  # fmt: skip
    parser.add_argument(
        "--finalists", type=int, default=4, metavar="N",
        help="tiles timed in turns, beside the rule's (default: %(default)s)",
    )  # fmt: skip
    options.add_turns(parser, 5, 20.0, "finalist")
    options.add_layers(parser, 16)
    options.add_budget(parser, 3600.0, "begin no further kind of layer after")
    parser.add_argument(
        "--dry-run", action="store_true", help="measure and show, but leave the table alone"
    )
    parser.add_argument(
        "--list", action="store_true", help="show kinds of layers and candidates; run nothing"
    )
    parser.add_argument(
        "--smoke", action="store_true",
        help="shrink every batch and try two candidates on whatever there is; writes no table",
    )  # fmt: skip
    options.add_record(parser, "print the result as JSON")
    return parser


def chosen_of(tiles: Tiles) -> dict[str, Any]:
    """What of a tile a measurement chooses."""
    return {name: getattr(tiles, name) for name in tuned.CHOSEN}


class Bench:
    """Times tiles of one kind of layer over its batches.

    Parameters
    ----------
    subject : Subject
    device : Device
        The GPU, or what the interpreter stands for.
    args : argparse.Namespace
        Of the command line.
    """

    def __init__(self, subject: Subject, device: Device, args: argparse.Namespace) -> None:
        import torch

        from tilewise.bench.inputs import CaseInputs

        self.subject, self.device, self.args = subject, device, args
        where = "cuda" if torch.cuda.is_available() else "cpu"
        cases = subject.cases()
        if args.smoke:
            cases = [shrink(case, 100, 2) for case in cases]
        self.inputs = {case.name: CaseInputs(case, where, args.layers) for case in cases}

    def calls(self, tiles: Tiles, name: str) -> list[Callable[[], object]]:
        """For each copy of a batch's inputs a callable that enqueues one layer."""
        from tilewise.bench.providers import Tilewise

        table = tuned.NONE.with_tiles(self.device.arch, self.subject.kind(self.device), tiles)
        config = self.subject.config(self.device, table)
        given = chosen_of(self.subject.tiles(config))
        if given != chosen_of(tiles):
            raise UnsupportedConfig(f"{given} would be launched, not {chosen_of(tiles)}")
        inputs = self.inputs[name]
        provider = Tilewise("tune", self.subject.page_size, config=config)
        (build,) = provider.candidates(inputs.case, inputs).values()
        return build().calls

    def check(self, tiles: Tiles) -> tuple[dict[str, float], str]:
        """Times of one call in microseconds by batch, and what was wrong, "" if nothing was."""
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError

        from tilewise.bench.timing import estimate_us

        times = {}
        for name, inputs in self.inputs.items():
            try:
                call = self.calls(tiles, name)[0]
                inputs.poison_outputs()
                call()
            except (CompilationError, OutOfResources, PTXASError) as error:
                return {}, f"does not compile: {type(error).__name__}"
            gate = inputs.check()
            if not gate.passed:
                return {}, f"gate: {gate.reason}"
            times[name] = estimate_us(call, inputs.device)
        return times, ""

    def compare(self, finalists: Sequence[Tiles]) -> list[dict[str, Any]]:
        """Median and spread of each by batch, timed in turns."""
        from tilewise.bench.timing import (
            GraphTimer,
            HostTimer,
            Timer,
            estimate_us,
            interleave,
            layers_for,
            summarize,
        )

        found: list[dict[str, Any]] = [{} for _ in finalists]
        for name, inputs in self.inputs.items():
            timers: dict[str, Timer] = {}
            for number, tiles in enumerate(finalists):
                calls = self.calls(tiles, name)
                one = estimate_us(calls[0], inputs.device)
                layers = layers_for(one, self.args.layers, inputs.copies)
                on_gpu = inputs.device.type == "cuda"
                timers[str(number)] = GraphTimer(calls, layers) if on_gpu else HostTimer(calls, 1)
            if self.args.smoke:
                times = {i: timer.burst(1) for i, timer in timers.items()}
            else:
                times = interleave(timers, self.args.rounds, self.args.burst_ms)
            for i, values in times.items():
                found[int(i)][name] = summarize(values)
        return found


def tune(subject: Subject, device: Device, args: argparse.Namespace) -> list[report.Row]:
    """Rows of a subject's finalists, the rule's first; the one to take says so."""
    bench = Bench(subject, device, args)
    tried = candidates(subject, device)
    first: list[tuple[float, Tiles]] = []
    rows: list[report.Row] = []
    rule_times: dict[str, float] = {}
    for tiles in tried[: 2 if args.smoke else None]:
        times, wrong = bench.check(tiles)
        if not rule_times:
            if wrong:
                raise UnsupportedConfig(f"{subject.name}: the rule's own tiles: {wrong}")
            rule_times = times
        if wrong:
            rows.append(
                _row(
                    subject, tiles, gate="failed" if wrong.startswith("gate") else "-", error=wrong
                )
            )
        else:
            first.append((gain(rule_times, times), tiles))
    order = sorted(first[1:], key=lambda pair: -pair[0])[: args.finalists]
    finalists = [tried[0], *(tiles for _, tiles in order)]
    found = bench.compare(finalists)
    medians = [{name: s.median_us for name, s in x.items()} for x in found]
    gains = [gain(medians[0], x) for x in medians]
    good = [i for i in range(1, len(finalists)) if is_better(medians[0], medians[i])]
    taken = max(good, key=lambda i: gains[i], default=0)
    made = []
    for i, (tiles, by_case) in enumerate(zip(finalists, found, strict=True)):
        for name, summary in by_case.items():
            row = _row(subject, tiles, case=name, gate="passed", gain=round(gains[i], 4))
            row |= {"median_us": round(summary.median_us, 3)}
            row |= {"spread_us": round(summary.spread_us, 3), "taken": i == taken}
            made.append(row)
    return made + rows


def _row(subject: Subject, tiles: Tiles, **values: object) -> report.Row:
    row: report.Row = dict.fromkeys(FIELDS)
    row |= {"subject": subject.name, "tiles": chosen_of(tiles)}
    return row | values


def changed(
    table: tuned.Table, subject: Subject, device: Device, rows: Sequence[report.Row]
) -> tuned.Table:
    """The table with a subject's best tiles, or with none of it where the rule's are best."""
    rule = candidates(subject, device)[0]
    taken = next(row["tiles"] for row in rows if row["taken"])
    tiles = None if taken == chosen_of(rule) else Tiles(block_d=rule.block_d, **taken)
    return table.with_tiles(device.arch, subject.kind(device), tiles)


def table_text(rows: Sequence[report.Row]) -> str:
    """A line for each tile that was timed, best first within a kind of layer."""
    lines = [f"{'kind of layer':42} {'rows x keys':>12} {'warps':>5} {'stages':>7} {'gain':>6}"]
    seen = set()
    for row in sorted(rows, key=lambda r: (r["subject"], -(r["gain"] or 0))):
        tiles = row["tiles"]
        key = (row["subject"], str(tiles))
        if key in seen or row.get("error"):
            continue
        seen.add(key)
        shape = f"{tiles['block_m']} x {tiles['block_n']}"
        stages = f"{tiles['num_stages']}/{tiles['tail_stages']}"
        taken = "taken" if row["taken"] else ""
        lines.append(
            f"{row['subject']:42} {shape:>12} {tiles['num_warps']:>5} {stages:>7} "
            f"{row['gain']:>5.3f}x {taken}".rstrip()
        )
    failed = sum(1 for row in rows if row["gate"] == "failed")
    left = sum(1 for row in rows if row.get("error")) - failed
    lines.append(f"{left} candidates do not compile here; {failed} gave wrong results.")
    return "\n".join(lines)


def _list(chosen: Sequence[Subject], device: Device) -> None:
    for subject in chosen:
        tiles = candidates(subject, device)
        print(f"{subject.name}: {len(tiles)} tiles, by the rule {asdict(tiles[0])}")


def _measure(
    chosen: Sequence[Subject], device: Device, args: argparse.Namespace, env: dict[str, Any]
) -> list[report.Row]:
    """Tune every subject; table and result file are written after each."""
    table = tuned.load(args.table)
    rows: list[report.Row] = []
    deadline = time.monotonic() + args.budget_seconds
    for number, subject in enumerate(chosen, 1):
        if time.monotonic() > deadline:
            print(f"out of time before {subject.name}; run again for the rest", file=sys.stderr)
            break
        print(f"[{number}/{len(chosen)}] {subject.name}", file=sys.stderr, flush=True)
        found = tune(subject, device, args)
        rows += found
        if args.out is not None:
            report.write_result(args.out, env, rows)
        if not (args.dry_run or args.smoke):
            names = ("gpu", "torch", "triton", "commit", "date")
            about = {name: env[name] for name in names if name in env}
            table = changed(table, subject, device, found).with_measurement(device.arch, about)
            args.table.write_text(table.text())
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the table.

    Returns
    -------
    int
        0; 1 if a candidate gave wrong results; 2 for a wrong command line or no GPU.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    try:
        chosen = subjects(args.kernels, args.head_dims, args.page_sizes, args.kv_dtypes)
        if args.smoke:
            os.environ.setdefault("TRITON_INTERPRET", "1")
            args.layers = 1
        from tilewise.device import describe, resolve

        env = report.describe_environment(["tilewise", "tune", *argv], args.commit)
        env |= report.describe_gpu()
        no_gpu = env["gpu"] is None
        if args.list and no_gpu and not args.smoke:
            print("no CUDA device: tiles for compute capability 9.0")
            _list(chosen, ARCHITECTURES[90])
            return EXIT_OK
        if no_gpu and not args.smoke:
            raise ValueError("no CUDA device to measure; --smoke and --list need none")
        device = describe(resolve("cpu" if no_gpu else "cuda"))
        if args.list:
            _list(chosen, device)
            return EXIT_OK
        rows = _measure(chosen, device, args, env)
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    print(report.result_text(env, rows) if args.json else table_text(rows))
    return EXIT_GATE if any(row["gate"] == "failed" for row in rows) else EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
