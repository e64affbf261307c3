"""The ladder as a picture: the rungs below the roof, their bytes, occupancy against speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from tilewise.bench.ladder.tables import of_part
from tilewise.bench.plots import INK, MARKERS, STYLE, new_figure
from tilewise.bench.roofline_plot import draw_ceilings

COLOURS = {
    "softmax": "#7f7f7f", "full": "#b36bb0", "causal": "#d9622b", "one query": "#3a86c8",
    "rmsnorm": "#2a9d73",
}  # fmt: skip
BYTES = (
    ("held_bytes", "held, predicted", "|", 9), ("bytes", "least, predicted", "<", 9),
    ("traffic_bytes", "asked of memory, predicted", ">", 9),
    ("dram_bytes", "DRAM, counted", "o", 4), ("l2_bytes", "L2, counted", "s", 4),
)  # fmt: skip


def ladder(env: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Figure:
    """Return the figure: the bytes of every rung, and what was timed.

    Parameters
    ----------
    env : dict
        With ``matmul_tflops`` and ``copy_tbps`` where rows have times.
    rows : sequence of dict
        Of `tilewise bench ladder`; those with an ``error`` are left out.
    """
    good = [row for row in rows if not row.get("error")]
    rungs = of_part(good, "rung")
    timed = [row for row in rungs if row["tflops"] is not None]
    sweep = [row for row in of_part(good, "sweep") if row["occupancy"] is not None]
    heights = {"bytes": 1 + 0.32 * len(rungs)}
    heights |= {"roof": 7.0} if timed else {}
    heights |= {"sweep": 3.6} if sweep else {}
    with matplotlib.rc_context(STYLE):
        figure = new_figure(10.0, sum(heights.values()))
        grid = figure.add_gridspec(len(heights), 2, height_ratios=list(heights.values()))
        place = list(heights).index
        _bytes(figure.add_subplot(grid[place("bytes"), :]), rungs)
        if timed:
            _roof(figure.add_subplot(grid[place("roof"), :]), env, timed)
        names = list(dict.fromkeys(row["name"] for row in sweep))
        for column, name in enumerate(names[:2]):
            axes = figure.add_subplot(grid[place("sweep"), column])
            _sweep(axes, name, [row for row in sweep if row["name"] == name])
        gpu = env.get("gpu") or "no GPU"
        figure.suptitle(f"The ladder, {gpu}, {str(env.get('date'))[:10]}", fontsize=11)
    return figure


def _bytes(axes: Any, rungs: Sequence[dict[str, Any]]) -> None:
    """Draw predicted and counted bytes, a line a rung."""
    places = range(len(rungs))
    for key, label, marker, size in BYTES:
        points = [(row[key], y) for row, y in zip(rungs, places, strict=True) if row[key]]
        if points:
            shade = INK if key in ("dram_bytes", "l2_bytes") else "#d9622b"
            axes.plot(*zip(*points, strict=True), marker, color=shade, label=label, markersize=size)
    axes.set_xscale("log")
    axes.set_yticks(list(places), [row["name"] for row in rungs])
    axes.invert_yaxis()
    axes.set_xlabel("bytes")
    axes.grid(color=INK, alpha=0.15, linewidth=0.8)
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=5)


def _roof(axes: Any, env: dict[str, Any], rungs: Sequence[dict[str, Any]]) -> None:
    """Draw useful rate against intensity by the least bytes."""
    draw_ceilings(axes, env, rungs)
    for number, row in enumerate(rungs):
        axes.plot(
            row["intensity"], row["tflops"], MARKERS[number % len(MARKERS)],
            color=COLOURS[row["kind"]], markersize=8, linestyle="none",
            label=f"{row['name']}: {row['tflops']:,.3g} TFLOP/s",
        )  # fmt: skip
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.45, -0.11), ncols=3)


def _sweep(axes: Any, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draw rate against occupancy, a point for each shape of a kernel."""
    shapes = sorted({(row["rows"], row["warps"]) for row in rows})
    seen: Counter[float] = Counter()
    for shape, marker in zip(shapes, "vosD^PX*", strict=False):
        alike = [row for row in rows if (row["rows"], row["warps"]) == shape]
        axes.plot(
            [100 * row["occupancy"] for row in alike], [row["rate"] for row in alike],
            marker, linestyle="none", markersize=7,
            label=f"{shape[1]} warp{'s' * (shape[1] > 1)}"
            + (f", {shape[0]} rows" if shape[0] > 1 else ""),
        )  # fmt: skip
        # Shapes of one occupancy lie above each other: right of one, left of the next.
        side = -1 if seen[alike[0]["occupancy"]] % 2 else 1
        seen[alike[0]["occupancy"]] += 1
        for row in alike:
            if row["stages"] is not None:
                axes.annotate(
                    f"{row['stages']}", (100 * row["occupancy"], row["rate"]),
                    xytext=(6 * side, 0), textcoords="offset points", fontsize=7, va="center",
                    ha="left" if side > 0 else "right",
                )  # fmt: skip
    axes.set_xlim(0, 105)
    axes.set_ylim(0, 1.15 * max(row["rate"] for row in rows))
    axes.set_xlabel("occupancy, % of an SM's warps")
    axes.set_ylabel(rows[0]["unit"])
    staged = any(row["stages"] is not None for row in rows)
    axes.set_title(f"{name}{' (at the points: stages)' if staged else ''}", fontsize=9)
    axes.grid(color=INK, alpha=0.15, linewidth=0.8)
    axes.legend(fontsize=7)
