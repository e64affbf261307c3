"""Occupancy against speed: one kernel under many numbers of warps and stages.

Occupancy is the share of an SM's warp slots that a kernel fills; registers and shared memory bound
it. More warps hide latency, which is how GPUs are usually explained. Volkov (2010) showed that
independent work within a thread hides it as well, and that a thread with more registers may so be
faster at a lower occupancy. FlashAttention-2 keeps its accumulators in registers and its keys in
shared memory, copied some tiles ahead (``stages``), and a norm has neither, so the two are swept
side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from tilewise.bench import report
from tilewise.bench.ladder import flash2, rmsnorm
from tilewise.bench.ladder.measure import ERROR_LIMIT, Run
from tilewise.bench.ladder.problem import Built, Memory
from tilewise.bench.ladder.rungs import Sizes
from tilewise.bench.resources import LIMITS, occupancy
from tilewise.bench.timing import interleave, summarize

SWEEP_FIELDS = (
    "part", "name", "case", "rows", "warps", "stages", "registers", "spills", "shared_bytes",
    "programs", "limit", "occupancy", "median_us", "rate", "unit",
)  # fmt: skip
# Rows of a query tile, warps, stages. Two warps cannot hold 128 rows: nearly all of it spills.
FLASH2 = [
    (rows, warps, stages)
    for rows, warps in ((128, 4), (128, 8), (64, 4), (128, 16))
    for stages in (2, 3, 1)
]
RMSNORM = (1, 2, 4, 8, 16)


def measure(sizes: Sizes, run: Run) -> list[report.Row]:
    """Time both kernels in every shape; return a row for each, with an error where one fails."""
    major, minor = torch.cuda.get_device_capability(run.device)
    arch = 10 * major + minor
    attention, norm = sizes.full, sizes.rmsnorm
    walks = []
    for rows, warps, stages in FLASH2:
        tiles = flash2.Tiles(rows, num_warps=warps, num_stages=stages)
        row = _row("FlashAttention-2", attention, rows, warps, stages, "TFLOP/s")
        walks.append((row, partial(flash2.build, attention, tiles=tiles)))
    norms = []
    for warps in RMSNORM:
        row = _row("RMSNorm + residual", norm, 1, warps, None, "TB/s")
        norms.append((row, partial(rmsnorm.build, norm, num_warps=warps)))
    return [
        *_sweep(walks, attention.flops, arch, run),
        *_sweep(norms, rmsnorm.count(norm).least, arch, run),
    ]


def _row(
    name: str, problem: object, rows: int, warps: int, stages: int | None, unit: str
) -> report.Row:
    row: report.Row = dict.fromkeys(SWEEP_FIELDS)
    return {
        **row, "part": "sweep", "name": name, "case": str(problem), "rows": rows, "warps": warps,
        "stages": stages, "unit": unit,
    }  # fmt: skip


def _sweep(
    choices: Sequence[tuple[report.Row, Callable[[Memory], Built]]], work: int, arch: int, run: Run
) -> list[report.Row]:
    """Compile, check and time all shapes of a kernel, taking turns."""
    timers, alive = {}, []
    for number, (row, build) in enumerate(choices):
        if run.left < 0:
            row["error"] = "not measured: the budget was spent"
            run.skipped.append(
                f"sweep: {row['name']}, {row['warps']} warps, {row['stages']} stages"
            )
            continue
        built = build(Memory(run.device))
        try:
            compiled = built.call()
        except OutOfResources as too_much:
            row["error"] = str(too_much)
            continue
        row |= footprint(compiled, row["warps"], arch)
        error = built.error()
        if not error <= ERROR_LIMIT:
            row["error"] = f"gate: error {error:.2e}, accepted: up to {ERROR_LIMIT:g}"
            continue
        timers[str(number)] = run.timer(built)
        alive.append(built)  # a graph keeps addresses, not tensors
    times = interleave(timers, run.rounds, run.burst_ms) if timers else {}
    for key, found in times.items():
        median_us = summarize(found).median_us
        rate = round(work / median_us / 1e6, 3)
        choices[int(key)][0].update(median_us=round(median_us, 3), rate=rate)
    return [row for row, _ in choices]


def footprint(compiled: Any, warps: int, arch: int) -> report.Row:
    """Return what a compiled kernel takes, and how many of its programs share an SM of `arch`.

    An architecture whose limits are not known gets no occupancy.
    """
    registers, shared = compiled.n_regs, compiled.metadata.shared
    row = {"registers": registers, "spills": compiled.n_spills, "shared_bytes": shared}
    if arch not in LIMITS:
        return row
    programs, limit = occupancy(arch, 32 * warps, registers, shared)
    share = programs * warps / LIMITS[arch].warps
    return row | {"programs": programs, "limit": limit, "occupancy": round(share, 4)}
