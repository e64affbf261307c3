"""The figures that people quote about FlashAttention, from our formulas and from our kernels.

*The score matrix.* Of one head with N queries and keys, fp16: ``2 N N`` bytes, 8.6 GB at 65536.
Without it Q, K, V, O and a log-sum-exp a row are held: ``2 * 4 N D + 4 N``, 34 MB at D = 64.

*The traffic ratio.* Four visits of that matrix, ``4 * 2 N N``, against K and V once for every tile
of B queries, ``(N / B) * 2 * 2 N D``: 2 B / D, which is 4 for B = 128 and D = 64. Q and O, which
both move, make it a little less at finite N. This counts the matrix where it must go, at DRAM, and
K and V where they are asked for, beyond the SM. Counted beyond the SMs alike, the products' own
tiles make the naive way worse; counted at DRAM alike, with K and V read again from L2, it is worse
by far.

*Skipped tiles.* With T = N / B tiles of B queries and of b = N / T' keys, a causal walk visits
``sum over i of ceil((i + 1) B / b)`` of T T' tiles: a little more than half.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tilewise.bench.ladder import flash2, naive
from tilewise.bench.ladder.measure import ERROR_LIMIT, Run, run_and_weigh
from tilewise.bench.ladder.problem import Problem
from tilewise.bench.ladder.rungs import Rung, Sizes

Figure = dict[str, Any]
FIGURE_FIELDS = ("part", "name", "case", "predicted", "measured", "unit", "how")


def figure(
    name: str, case: object, predicted: float, measured: float | None, unit: str, how: str
) -> Figure:
    """Return one figure: what the formula says, what was measured and how."""
    return {
        "part": "figure", "name": name, "case": str(case), "predicted": predicted,
        "measured": measured, "unit": unit, "how": how,
    }  # fmt: skip


def traffic_ratio(problem: Problem) -> float:
    """Return the least bytes of the score matrix's way over those FlashAttention-2 asks for."""
    return naive.count(problem).least / flash2.count(problem).traffic


def skipped_share(problem: Problem, tiles: flash2.Tiles) -> float:
    """Return the share of key tiles that a walk under the mask skips."""
    sizes = (tiles.block_m, tiles.block_n)
    return 1 - problem.visited_tiles(*sizes) / problem.all_tiles(*sizes)


def measure(sizes: Sizes, run: Run, rows: list[dict[str, Any]]) -> list[Figure]:
    """Return all figures; `rows` are those of the rungs, with counters where there are any.

    Raises
    ------
    ValueError
        If a kernel's result is wrong at the size that memory is measured at.
    """
    return [*_memory(sizes.long, run), *_traffic(sizes.full, rows), _skipped(sizes.causal, run)]


def _memory(problem: Problem, run: Run) -> list[Figure]:
    matrix, held = problem.score_bytes, flash2.count(problem).held
    peaks: dict[str, int | None] = {}
    for name, module in (("naive", naive), ("flash2", flash2)):
        count, build = partial(module.count, problem), partial(module.build, problem)
        rung = Rung(name, "memory", problem, module.FORMULA, "", count, build)
        built, peaks[name] = run_and_weigh(rung, run)
        error = built.error()
        if not error <= ERROR_LIMIT:
            raise ValueError(f"{name} at {problem}: error {error:.2e}, accepted: {ERROR_LIMIT:g}")
        del built
    how = "torch.cuda.max_memory_allocated"
    more = None
    if peaks["naive"] is not None and peaks["flash2"] is not None:
        more = peaks["naive"] - peaks["flash2"]
    return [
        figure(
            "score matrix", problem, matrix, more, "bytes", f"{how}, naive less FlashAttention-2"
        ),
        figure("held by FlashAttention-2", problem, held, peaks["flash2"], "bytes", how),
        figure("held by naive", problem, naive.count(problem).held, peaks["naive"], "bytes", how),
    ]


def _traffic(problem: Problem, rows: list[dict[str, Any]]) -> list[Figure]:
    """Return naive's bytes over FlashAttention-2's, at three places of the memory system."""
    found = {row["name"]: row for row in rows}
    first, second = found["naive"], found["FlashAttention-2"]

    def counted(of_first: str, of_second: str) -> float | None:
        known = first.get(of_first) and second.get(of_second)
        return round(first[of_first] / second[of_second], 3) if known else None

    levels = {
        "traffic ratio, 2 B / D": (traffic_ratio(problem), "dram_bytes", "l2_bytes"),
        "traffic ratio beyond the SMs": (
            first["traffic_bytes"] / second["traffic_bytes"], "l2_bytes", "l2_bytes"
        ),
        "traffic ratio at DRAM": (first["bytes"] / second["bytes"], "dram_bytes", "dram_bytes"),
    }  # fmt: skip
    names = {"dram_bytes": "DRAM", "l2_bytes": "L2"}
    return [
        figure(
            name, problem, round(ratio, 3), counted(one, other), "times",
            f"naive {names[one]} / FlashAttention-2 {names[other]}, Nsight Compute",
        )
        for name, (ratio, one, other) in levels.items()
    ]  # fmt: skip


def _skipped(problem: Problem, run: Run) -> Figure:
    tiles = flash2.Tiles()
    visited = flash2.counted_visits(problem, run.device, tiles)
    share = 1 - visited / problem.all_tiles(tiles.block_m, tiles.block_n)
    return figure(
        "tiles skipped under the causal mask", problem, round(skipped_share(problem, tiles), 4),
        round(share, 4), "of all", "counted by the kernel's programs",
    )  # fmt: skip
