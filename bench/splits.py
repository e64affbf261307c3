"""``tilewise bench splits``: one decode kernel under three ways to cut a batch (stream-K, shown).

Fixed splits, flash-decoding's heuristic and our even stretches are three fillings of the same
plan's records (``tilewise.bench.split_rules``), read by the same kernel, so that the cut alone
differs.  For each: time, and the share of the launch in which SMs idle, from clocks that the
programs note, or without a GPU from counted units.
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tilewise import policy
from tilewise.arch import ARCHITECTURES
from tilewise.bench import options, report
from tilewise.bench.cases import Case, select_cases, shrink
from tilewise.bench.split_rules import Cut, cut, measured_idle, modelled_idle

EXIT_OK, EXIT_GATE, EXIT_USAGE = 0, 1, 2
FIELDS = (
    "case", "rule", "splits", "programs", "median_us", "spread_us", "to_even", "sm_idle",
    "modelled_idle", "rel_error", "gate",
)  # fmt: skip
PAGE_SIZE = 64
CLOCKED_LAUNCHES = 21
GRACE_SECONDS = 240.0
_CODES = "Exit codes: 0; 1 if a result failed the gate; 2 for a wrong command line or no GPU."


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of ``tilewise bench splits``."""
    parser = argparse.ArgumentParser(
        prog="tilewise bench splits", description=__doc__, epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--cases", nargs="*", default=["decode"], metavar="PATTERN",
        help="names of `tilewise bench kernels --list`, globs or groups, decodes of them (default: "
        "decode)",
    )  # fmt: skip
    parser.add_argument(
        "--fixed", nargs="+", type=int, default=[8], metavar="N",
        help="numbers of splits to compare as fixed ones (default: 8)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="result file (default: none is written)"
    )
    parser.add_argument(
        "--from", type=Path, metavar="FILE.json", dest="source",
        help="measure nothing: show this result file again (default: measure)",
    )  # fmt: skip
    parser.add_argument(
        "--model", action="store_true",
        help="run nothing: idle shares by counted units, for the GPU there is or an H200",
    )  # fmt: skip
    parser.add_argument(
        "--smoke", action="store_true",
        help="shrink every case, check results on whatever there is, and time nothing",
    )  # fmt: skip
    options.add_layers(parser, 32)
    options.add_turns(parser, 7, 40.0, "rule")
    options.add_budget(parser, 900.0, f"end the process {GRACE_SECONDS / 60:.0f} minutes after")
    options.add_record(parser)
    return parser


def configured(case: Case, device: policy.Device) -> policy.Config:
    """The plain decode kernel's tiles and workers for a case."""
    size = case.kv_itemsize
    geometry = policy.Geometry(
        case.num_q_heads, case.num_kv_heads, case.head_dim, PAGE_SIZE, 2, size
    )
    config = policy.choose(geometry, device, case.max_q_len, case.window or 0, plain=True)
    return replace(config, window=case.window or 0)


def cuts_of(case: Case, config: policy.Config, fixed: Sequence[int]) -> dict[str, Cut]:
    """Every cut of a case, by its name; ours is the last."""
    lengths = (case.q_lens, case.kv_lens)
    cuts = {f"fixed {n}": cut("fixed", *lengths, config, n) for n in fixed}
    cuts["heuristic"] = cut("heuristic", *lengths, config, 0)
    cuts["even"] = cut("even", *lengths, config, 0)
    return cuts


def make_row(case: Case, name: str, found: Cut, places: int) -> report.Row:
    """A row without times, with the idle share that counted units give."""
    row: report.Row = dict.fromkeys(FIELDS)
    row |= {"case": case.name, "rule": name, "splits": found.splits, "gate": "not run"}
    row["programs"] = sum(1 for work in found.work if work)
    row["modelled_idle"] = round(modelled_idle(found, places), 4)
    return row


class CutRunner:
    """The decode kernel over one cut of a case, with buffers of its own.

    Parameters
    ----------
    case : Case
    inputs : CaseInputs
    attn : PagedAttention
        Of the plain kernels, with the batch planned.
    found : Cut
    """

    def __init__(self, case: Case, inputs: Any, attn: Any, found: Cut) -> None:
        import torch

        self.inputs, self.attn = inputs, attn
        self.cache = inputs.paged(PAGE_SIZE)
        tiles, device = attn.config.decode, inputs.device
        # As in serving, the grid does not depend on the batch where stretches are even.
        programs = max(len(found.records), attn.config.num_workers if found.shared is None else 0)
        records = [*found.records, *[(0,) * 8] * (programs - len(found.records))]
        ints = {"dtype": torch.int32, "device": device}
        self.records = torch.tensor(records, **ints)
        self.header = torch.tensor([0, len(found.records), found.cu_work[-1], 0, 0], **ints)
        self.cu_work = torch.tensor(found.cu_work, **ints)
        self.cuts = None if found.shared is None else torch.tensor(found.shared, **ints)
        self.arrivals = torch.zeros(programs, **ints)
        rows = (2 * programs, tiles.block_m)
        singles = {"dtype": torch.float32, "device": device}
        self.partial = (
            torch.empty((*rows, tiles.block_d), **singles),
            torch.empty(rows, **singles),
            torch.empty(rows, **singles),
        )
        scaled = case.kv_itemsize == 1
        self.one = torch.ones((), device=device) if scaled else None

    def __call__(self, copy: int, clocks: Any = None) -> None:
        """Enqueue one layer over a copy of the inputs."""
        from tilewise.kernels.decode import decode_attention
        from tilewise.kernels.launch import Logits

        inputs, attn, cfg = self.inputs, self.attn, self.attn.config
        q, out, tiles = inputs.q[copy], inputs.out[copy], cfg.decode
        kv, use_tma = attn._binding.bind(
            attn._plan, q, self.cache.kv[copy], out, self.one, self.one
        )
        merge_rows, merge_pieces = cfg.merge_tile
        decode_attention(
            out, None, q, kv, inputs.query_start_loc, inputs.seq_lens, self.cache.block_table,
            self.header, self.cu_work, self.records, *self.partial, self.arrivals,
            Logits(inputs.scale, sinks=inputs.sinks), window=cfg.window, causal=True,
            item_overhead=cfg.item_overhead, block_m=tiles.block_m, block_n=tiles.block_n,
            block_d=tiles.block_d, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            tail_stages=tiles.tail_stages, use_tma=tiles.use_tma and use_tma,
            merge_rows=merge_rows, merge_pieces=merge_pieces, pdl=cfg.pdl, cuts=self.cuts,
            clocks=clocks,
        )  # fmt: skip

    def idle(self, num_sms: int) -> tuple[float, int]:
        """Median share of launches in which SMs idle, and the step of the clock in nanoseconds."""
        import torch

        shares, step = [], 0
        for launch in range(CLOCKED_LAUNCHES):
            clocks = torch.zeros(len(self.records), 3, dtype=torch.int64, device="cuda")
            self(launch % self.inputs.copies, clocks)
            shares.append(measured_idle(clocks.tolist(), num_sms))
            times = clocks[:, :2][clocks[:, 1] > 0].flatten().unique()  # ascending
            if len(times) > 1:
                least = int((times[1:] - times[:-1]).min())
                step = min(step, least) if step else least
        return statistics.median(shares[1:]), step  # the first one compiles


def run_case(case: Case, args: argparse.Namespace, monitor: Any) -> list[report.Row]:
    """Check every cut of a case, time those that are right in turns, then look at their clocks."""
    import torch

    from tilewise.attention import PagedAttention
    from tilewise.bench.inputs import CaseInputs
    from tilewise.bench.timing import GraphTimer, estimate_us, interleave, layers_for, summarize
    from tilewise.device import describe

    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = CaseInputs(case, device, args.layers)
    config = configured(case, describe(torch.device(inputs.device)))
    attn = PagedAttention(
        case.num_q_heads, case.num_kv_heads, case.head_dim, page_size=PAGE_SIZE,
        dtype=torch.bfloat16, max_num_reqs=case.num_reqs, max_num_tokens=case.num_tokens,
        device=device, window=case.window, kv_dtype=inputs.kv_dtype, config=config,
    )  # fmt: skip
    table = inputs.paged(PAGE_SIZE).block_table
    attn.plan(
        inputs.query_start_loc, inputs.seq_lens, table, num_tokens=case.num_tokens,
        max_query_len=case.max_q_len,
    )  # fmt: skip
    rows, runners, timers = {}, {}, {}
    for name, found in cuts_of(case, config, args.fixed).items():
        row = rows[name] = make_row(case, name, found, config.num_workers)
        runner = CutRunner(case, inputs, attn, found)
        inputs.poison_outputs()
        for _ in range(2):  # a second time, to see that counters are as they were
            runner(0)
        gate = inputs.check()
        row["gate"] = "passed" if gate.passed else "failed"
        row["rel_error"] = float(f"{gate.rel_error:.3e}") if gate.passed else None
        if not gate.passed:
            row["error"] = f"gate: {gate.reason}"
        elif device == "cuda" and not args.smoke:
            calls = [partial(runner, copy) for copy in range(inputs.copies)]
            one = estimate_us(calls[0], inputs.device)
            runners[name] = runner
            timers[name] = GraphTimer(calls, layers_for(one, args.layers, inputs.copies), monitor)
    times = interleave(timers, args.rounds, args.burst_ms) if timers else {}
    for name, found_times in times.items():
        summary = summarize(found_times)
        rows[name]["median_us"] = round(summary.median_us, 3)
        rows[name]["spread_us"] = round(summary.spread_us, 3)
        idle, step = runners[name].idle(config.num_sms)
        rows[name] |= {"sm_idle": round(idle, 4), "clock_step_ns": step}
    _compare(rows)
    return list(rows.values())


def _compare(rows: dict[str, report.Row]) -> None:
    ours = rows["even"]["median_us"]
    for row in rows.values():
        if ours and row["median_us"]:
            row["to_even"] = round(row["median_us"] / ours, 4)


def model_case(case: Case, device: policy.Device, fixed: Sequence[int]) -> list[report.Row]:
    """Rows of a case of which nothing runs."""
    config = configured(case, device)
    cuts = cuts_of(case, config, fixed)
    return [make_row(case, name, found, config.num_workers) for name, found in cuts.items()]


def table_text(rows: Sequence[report.Row]) -> str:
    """A line for each case and rule; idle shares say where they are from."""
    lines = [
        f"{'case':22} {'rule':10} {'splits':>6} {'programs':>8} {'time':>12} {'to even':>8} "
        f"{'SMs idle':>9} {'by units':>9}"
    ]
    for row in rows:
        us, ratio, idle = row["median_us"], row["to_even"], row["sm_idle"]
        time = row.get("error", row["gate"]) if us is None else f"{us:.1f} us"
        lines.append(
            f"{row['case']:22} {row['rule']:10} {row['splits'] or '-':>6} {row['programs']:8} "
            f"{time:>12} {'-' if ratio is None else f'{ratio:.2f}x':>8} "
            f"{'-' if idle is None else f'{idle:.1%}':>9} {row['modelled_idle']:9.1%}"
        )
    lines.append("SMs idle: by the programs' clocks, from the first start to the last end.")
    lines.append("By units: places for programs that idle if a key tile takes the same everywhere.")
    return "\n".join(lines)


def _measure(args: argparse.Namespace, argv: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """Environment and rows.

    Raises
    ------
    ValueError
        For cases that are no decodes, splits that are none, or where there is no GPU.
    """
    cases = select_cases(args.cases)
    others = [case.name for case in cases if case.kind != "decode"]
    if others:
        raise ValueError(f"{', '.join(others)}: no decode; accepted: cases of decodes alone")
    for splits in args.fixed:
        if not 1 <= splits <= 128:
            raise ValueError(f"--fixed {splits}; accepted: 1 to 128")
    if args.smoke and not args.model:
        from tilewise.bench.kernels import _without_gpu

        _without_gpu(argparse.Namespace(providers=""))
    env = report.describe_environment(["tilewise", "bench", "splits", *argv], args.commit)
    env |= report.describe_gpu()
    if args.model:
        device = ARCHITECTURES[90]
        if env["gpu"] is not None:
            from tilewise.device import describe, resolve

            device = describe(resolve("cuda"))
        env["model"] = f"nothing ran; {device.num_sms} SMs of sm_{device.arch}"
        return env, [row for case in cases for row in model_case(case, device, args.fixed)]
    if args.smoke:
        env["smoke"] = "cases were shrunk, and nothing was timed"
        cases = [shrink(case, 300, 3) for case in cases]
        args.layers = 1
    elif env["gpu"] is None:
        raise ValueError("no CUDA device to measure; --model and --smoke need none")
    else:
        # A kernel that hangs cannot be caught: end the process.
        limit = args.budget_seconds + GRACE_SECONDS
        faulthandler.dump_traceback_later(limit, exit=True, file=2)
    return env, _run_all(cases, args, env)


def _run_all(cases: Sequence[Case], args: argparse.Namespace, env: dict[str, Any]) -> list[Any]:
    """Rows of all cases; what is there is on disk after each."""
    from tilewise.bench.gpu import GpuMonitor

    monitor = GpuMonitor.start() if env["gpu"] is not None else None
    rows: list[report.Row] = []
    for number, case in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {case.name}", file=sys.stderr, flush=True)
        rows += run_case(case, args, monitor)
        if monitor is not None:
            env["clocks"] = monitor.summary()
        if args.out is not None:
            report.write_result(args.out, env, rows)
    faulthandler.cancel_dump_traceback_later()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or read a result, and show it.

    Returns
    -------
    int
        0; 1 if a result failed the correctness gate; 2 for a wrong command line or no GPU.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    try:
        if args.source is not None:
            from tilewise.bench.roofline import load

            env, rows = load(args.source, FIELDS, wanted=(), suite="splits")
        else:
            env, rows = _measure(args, argv)
            if args.out is not None:
                report.write_result(args.out, env, rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    print(report.result_text(env, rows) if args.json else table_text(rows))
    return EXIT_GATE if any(row["gate"] == "failed" for row in rows) else EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
