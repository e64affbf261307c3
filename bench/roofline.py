"""``tilewise bench roofline``: naive attention, our kernels and a matmul below the card's ceilings.

A kernel that does F useful operations and moves B bytes at least has the intensity F / B. It can
reach the lower of two ceilings, both measured here: the matmul rate, and the intensity times the
copy rate. They meet at the ridge point. Closed forms, with 2 bytes an element:

  matmul of n       F = 2 n^3                        B = 3 n^2 elements
  our kernels       F = 4 D Hq pairs                 B = K and V once, Q in, O out
  naive attention   F as ours                        B = 6 (tokens D Hq + Hq sum length^2) elements

D is the head size, Hq the query heads, pairs the (query, key) pairs that the causal mask lets
through; what a kernel computes above the diagonal earns it nothing, and exponentials are not
counted. The copy both reads and writes, so a kernel that almost only reads may lie a little above
the slope.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.bench import report
from tilewise.bench.cases import CASES, Case

EXIT_OK, EXIT_GATE, EXIT_USAGE = 0, 1, 2
ROOFLINE_FIELDS = ("name", "kind", "case", "flops", "bytes", "intensity", "median_us", "tflops")
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Work:
    """Useful operations and least bytes of one kernel."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


def matmul_work(size: int) -> Work:
    """Return the work of a square bf16 matmul."""
    return Work(2 * size**3, 2 * 3 * size**2)


def attention_work(case: Case) -> Work:
    """Return the work of our kernels."""
    return Work(case.flops, case.bytes_moved)


def naive_work(case: Case) -> Work:
    """Return the work of attention with the score matrix in memory."""
    from tilewise.bench.naive import naive_bytes

    return Work(case.flops, naive_bytes(case))


def roof(intensity: float, matmul_tflops: float, copy_tbps: float) -> float:
    """Return the rate in TFLOP/s that the ceilings allow at an intensity."""
    return min(matmul_tflops, intensity * copy_tbps)


def make_row(name: str, kind: str, case: str, work: Work, median_us: float) -> report.Row:
    """Return a result row: `kind` is ``matmul``, ``naive``, ``prefill`` or ``decode``."""
    return {
        "name": name, "kind": kind, "case": case, "flops": work.flops, "bytes": work.bytes,
        "intensity": round(work.intensity, 4), "median_us": round(median_us, 3),
        "tflops": round(work.flops / median_us / 1e6, 3),
        "tbps": round(work.bytes / median_us / 1e6, 4),
    }  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of ``tilewise bench roofline``."""
    codes = (
        "Exit codes: 0; 1 if a result failed the correctness gate; 2 for a wrong command line or "
        "no GPU."
    )
    parser = report.result_parser("roofline", str(__doc__), codes, "roofline.json", 20.0, 5)
    parser.add_argument(
        "--prefill", default="pf_8x2k", metavar="CASE",
        help="whole prompts of one length: a name of `tilewise bench kernels --list` (default: "
        "%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--decode", default="dec_b64_8k", metavar="CASE",
        help="decodes: a name of the same list (default: %(default)s)",
    )  # fmt: skip
    return parser


def pick_cases(prefill: str, decode: str) -> tuple[Case, Case]:
    """Return the two cases.

    Raises
    ------
    ValueError
        For a name that is not there, or a case of another kind.
    """
    known = {case.name: case for case in CASES}
    for option, name, kind in (("--prefill", prefill, "prefill"), ("--decode", decode, "decode")):
        if name not in known or known[name].kind != kind:
            accepted = ", ".join(case.name for case in CASES if case.kind == kind)
            raise ValueError(f"{option} {name!r}; accepted: {accepted}")
    first = known[prefill]
    if first.q_lens != first.kv_lens or len(set(first.q_lens)) > 1:
        raise ValueError(f"--prefill {prefill!r}; accepted: whole prompts of one length")
    return first, known[decode]


def measure(args: argparse.Namespace, argv: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """Measure ceilings and kernels on the current GPU.

    Returns
    -------
    dict, list of dict
        The environment with the ceilings, and a row for each kernel; a row whose result is wrong
        has an ``error`` and no time.
    """
    from tilewise.bench.gpu import GpuMonitor, ceilings
    from tilewise.bench.naive import Naive
    from tilewise.bench.providers import Tilewise

    prefill, decode = pick_cases(args.prefill, args.decode)
    command = ["tilewise", "bench", "roofline", *argv]
    env = report.describe_environment(command, args.commit) | report.describe_gpu() | ceilings()
    monitor = GpuMonitor.start()
    work = matmul_work(MATMUL_SIZE)
    matmul_us = work.flops / env["matmul_tflops"] / 1e6
    rows = [make_row("matmul", "matmul", f"n = {MATMUL_SIZE}", work, matmul_us)]
    ours = Tilewise("tilewise")
    rows += _measure_case(
        prefill,
        {
            "naive attention": (Naive(), "naive", naive_work(prefill)),
            "our prefill": (ours, "prefill", attention_work(prefill)),
        },
        args,
        monitor,
    )
    rows += _measure_case(
        decode, {"our decode": (ours, "decode", attention_work(decode))}, args, monitor
    )
    env["clocks"] = monitor.summary()
    return env, rows


def _measure_case(case: Case, entries: Any, args: argparse.Namespace, monitor: Any) -> list[Any]:
    """Check and time kernels on the same inputs, taking turns."""
    from tilewise.bench.inputs import CaseInputs
    from tilewise.bench.timing import GraphTimer, estimate_us, interleave, layers_for, summarize

    inputs = CaseInputs(case, "cuda", layers=32)
    timers, rows = {}, []
    for name, (provider, kind, work) in entries.items():
        why = provider.unsupported(case)
        assert why is None, why  # pick_cases has looked
        (build,) = provider.candidates(case, inputs).values()
        inputs.poison_outputs()
        runner = build()
        runner.calls[0]()
        gate = inputs.check()
        if not gate.passed:
            row = dict.fromkeys(ROOFLINE_FIELDS)
            rows.append({**row, "name": name, "kind": kind, "case": case.name,
                         "intensity": work.intensity, "error": f"gate: {gate.reason}"})  # fmt: skip
            continue
        one = estimate_us(runner.calls[0], inputs.device)
        timers[name] = GraphTimer(runner.calls, layers_for(one, 32, inputs.copies), monitor)
    times = interleave(timers, args.rounds, args.burst_ms) if timers else {}
    for name, found in times.items():
        _, kind, work = entries[name]
        rows.append(make_row(name, kind, case.name, work, summarize(found).median_us))
    return rows


def load(
    path: Path,
    fields: Sequence[str] = ROOFLINE_FIELDS,
    wanted: Sequence[str] = ("matmul_tflops", "copy_tbps"),
    suite: str = "roofline",
) -> tuple[dict[str, Any], list[Any]]:
    """Read a result file: of this command, or of another that names its fields.

    Parameters
    ----------
    path : Path
    fields : sequence of str
        What every row must have.
    wanted : sequence of str
        What the environment must have, and not empty.
    suite : str
        Word after ``tilewise bench``, for messages.

    Raises
    ------
    ValueError
        If it is no such result.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    faults = ["no object"] if not isinstance(result, dict) else []
    faults = faults or report.schema_errors(result, fields)
    if not faults:
        faults = [f"no {key!r} in its env" for key in wanted if not result["env"].get(key)]
    if faults:
        raise ValueError(f"{path} is no result of `tilewise bench {suite}`: {faults[0]}")
    return result["env"], result["rows"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or read a result, and plot it.

    Returns
    -------
    int
        0; 1 if a result failed the correctness gate; 2 for a wrong command line or no GPU.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    try:
        if args.source is not None:
            env, rows = load(args.source)
        else:
            pick_cases(args.prefill, args.decode)
            import torch

            if not torch.cuda.is_available():
                raise ValueError("no CUDA device to measure; --from FILE.json plots a result again")
            env, rows = measure(args, argv)
            report.write_result(args.out, env, rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    if args.json:
        print(report.result_text(env, rows))
    else:
        print_table(env, rows)
    report.plot_result(args, lambda: draw(env, rows))
    wrong = [row for row in rows if row.get("error")]
    for row in wrong:
        print(f"{row['name']}: {row['error']}", file=sys.stderr)
    return EXIT_GATE if wrong else EXIT_OK


def draw(env: dict[str, Any], rows: Sequence[report.Row]) -> Any:
    """Return the plot."""
    from tilewise.bench.roofline_plot import roofline

    return roofline(env, rows)


def print_table(env: dict[str, Any], rows: Sequence[report.Row]) -> None:
    """Print ceilings, ridge point and a line for each kernel."""
    matmul, copy = env["matmul_tflops"], env["copy_tbps"]
    print(f"matmul {matmul:g} TFLOP/s, copy {copy:g} TB/s, ridge {matmul / copy:.0f} FLOP/byte")
    for row in rows:
        if row.get("error"):
            continue
        share = row["tflops"] / roof(row["intensity"], matmul, copy)
        print(
            f"{row['name']:16} {row['case']:14} {row['intensity']:8.1f} FLOP/byte "
            f"{row['tflops']:7.1f} TFLOP/s {row['median_us']:10.1f} us {share:5.0%} of the roof"
        )


if __name__ == "__main__":
    raise SystemExit(main())
