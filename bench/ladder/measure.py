"""Runs the rungs: correctness, memory, time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewise.bench import report, roofline
from tilewise.bench.ladder.problem import Built, Memory
from tilewise.bench.ladder.rungs import Rung
from tilewise.bench.timing import GraphTimer, estimate_us, interleave, layers_for, summarize

# Of fp16 results on random data; a product's rounding alone makes some 3e-4.
ERROR_LIMIT = 2e-3
RUNG_FIELDS = (
    "part", "name", "kind", "case", "flops", "bytes", "intensity", "traffic_bytes", "held_bytes",
    "peak_bytes", "dram_bytes", "l2_bytes", "median_us", "tflops", "formula", "source",
)  # fmt: skip


@dataclass
class Run:
    """How one run measures.

    Parameters
    ----------
    device : torch.device
    timed : bool
        Whether times mean anything there.
    rounds, burst_ms
        Turns of each rung, and their length.
    deadline : float
        Of `time.monotonic`, after which nothing more begins.
    monitor : object
        Samples clocks; see `tilewise.bench.gpu`.
    skipped : list of str
        What had no time left.
    """

    device: torch.device
    timed: bool
    rounds: int
    burst_ms: float
    deadline: float
    monitor: Any = None
    skipped: list[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        return self.deadline - time.monotonic()

    def timer(self, built: Built) -> GraphTimer:
        """Return a graph of the rung's launches: one of those that take milliseconds."""
        one = estimate_us(built.call, self.device)
        launches = layers_for(one, 16, 1, graph_ms=10.0) if one < 2500 else 1
        return GraphTimer([built.call], launches, self.monitor)


def run_and_weigh(rung: Rung, run: Run) -> tuple[Built, int | None]:
    """Build a rung and run it once.

    Returns
    -------
    Built, int or None
        The rung, and the bytes of device memory that it takes at most; None on the CPU.
    """
    if run.device.type != "cuda":
        built = rung.build(Memory(run.device))
        built.call()
        return built, None
    before = torch.cuda.memory_allocated()
    built = rung.build(Memory(run.device))
    # What building took for a moment is not the kernel's.
    torch.cuda.reset_peak_memory_stats()
    built.call()
    torch.cuda.synchronize()
    return built, torch.cuda.max_memory_allocated() - before


def empty_row(rung: Rung) -> report.Row:
    """Return a rung's row with what is known without running it."""
    found = rung.count()
    work = roofline.Work(rung.problem.flops, found.least)
    row: report.Row = dict.fromkeys(RUNG_FIELDS)
    return {
        **row, "part": "rung", "name": rung.name, "kind": rung.kind, "case": str(rung.problem),
        "flops": work.flops, "bytes": work.bytes, "intensity": round(work.intensity, 4),
        "traffic_bytes": found.traffic, "held_bytes": found.held, "formula": rung.formula,
        "source": rung.source,
    }  # fmt: skip


def measure(rungs: Sequence[Rung], run: Run) -> list[report.Row]:
    """Check and time all rungs, those of a kind in turns; return their rows in order."""
    rows: list[report.Row] = []
    for kind in dict.fromkeys(rung.kind for rung in rungs):
        rows += _measure_kind([rung for rung in rungs if rung.kind == kind], run)
    return rows


def _measure_kind(rungs: Sequence[Rung], run: Run) -> list[report.Row]:
    rows, alive = {}, {}
    for rung in rungs:
        row = empty_row(rung)
        rows[rung.name] = row
        built, row["peak_bytes"] = run_and_weigh(rung, run)
        error = built.error()
        # Written so that NaN fails.
        if not error <= ERROR_LIMIT:
            row["error"] = f"gate: error {error:.2e}, accepted: up to {ERROR_LIMIT:g}"
            continue
        row["rel_error"] = float(f"{error:.3e}")
        if built.path:
            row["path"] = built.path
        alive[rung.name] = built
    if run.timed and alive:
        timers = {name: run.timer(built) for name, built in alive.items()}
        for name, times in interleave(timers, run.rounds, run.burst_ms).items():
            summary, row = summarize(times), rows[name]
            work = roofline.Work(row["flops"], row["bytes"])
            row |= roofline.make_row(name, row["kind"], row["case"], work, summary.median_us)
            row |= {"spread_us": round(summary.spread_us, 3), "samples": summary.samples}
    return list(rows.values())
