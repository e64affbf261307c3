"""The roofline plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from tilewise.bench.plots import INK, MARKERS, STYLE, new_figure

COLOURS = {"matmul": "#7f7f7f", "naive": "#b36bb0", "prefill": "#d9622b", "decode": "#3a86c8"}
MARGIN = 3.0  # factor of empty room around the points


def limits(env: dict[str, Any], rows: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """Return the least and greatest intensity and rate that the plot shows."""
    matmul, copy = env["matmul_tflops"], env["copy_tbps"]
    found = [row for row in rows if not row.get("error")]
    xs = [row["intensity"] for row in found] + [matmul / copy]
    ys = [row["tflops"] for row in found] + [matmul]
    return min(xs) / MARGIN, max(xs) * MARGIN, min(ys) / MARGIN, max(ys) * MARGIN


def roofline(env: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Figure:
    """Return rate against intensity, both logarithmic, below the measured ceilings.

    Parameters
    ----------
    env : dict
        With ``matmul_tflops`` and ``copy_tbps``.
    rows : sequence of dict
        Of `roofline.make_row`; those with an ``error`` are left out.
    """
    with matplotlib.rc_context(STYLE):
        figure = new_figure(9.0, 6.8)
        axes = figure.subplots()
        draw_ceilings(axes, env, rows)
        matmul, copy = env["matmul_tflops"], env["copy_tbps"]
        for number, row in enumerate(r for r in rows if not r.get("error")):
            _point(axes, number, row, min(matmul, row["intensity"] * copy))
        gpu = env.get("gpu") or "GPU unknown"
        axes.set_title(
            f"Roofline, {gpu}, torch {env.get('torch')}, {str(env.get('date'))[:10]}", fontsize=10
        )
        figure.legend(loc="outside lower center", ncols=1, fontsize=9)
    return figure


def draw_ceilings(axes: Any, env: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Draw slope, ridge and roof with room for the points of `rows`, and name the axes."""
    matmul, copy = env["matmul_tflops"], env["copy_tbps"]
    ridge = matmul / copy
    left, right, low, high = limits(env, rows)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    axes.plot([left, ridge, right], [left * copy, matmul, matmul], color=INK, linewidth=1.6)
    axes.plot([ridge, ridge], [low, matmul], ":", color=INK, linewidth=1)
    axes.annotate(
        f"ridge {ridge:.0f} FLOP/byte", (ridge, low), xytext=(6, 8),
        textcoords="offset points", fontsize=9,
    )  # fmt: skip
    axes.annotate(
        f"matmul {matmul:g} TFLOP/s", (right, matmul), xytext=(-6, 6),
        textcoords="offset points", fontsize=9, ha="right",
    )  # fmt: skip
    middle = (left * min(ridge, right)) ** 0.5
    axes.annotate(
        f"copy {copy:g} TB/s", (middle, middle * copy), xytext=(-8, 8),
        textcoords="offset points", fontsize=9, ha="right",
    )  # fmt: skip
    axes.set_xlabel("arithmetic intensity: useful FLOP per byte moved")
    axes.set_ylabel("useful TFLOP/s")
    axes.grid(color=INK, alpha=0.15, linewidth=0.8)


def _point(axes: Any, number: int, row: dict[str, Any], ceiling: float) -> None:
    x, y = row["intensity"], row["tflops"]
    shade = COLOURS.get(row["kind"], "#7f7f7f")
    axes.plot([x, x], [y, ceiling], color=shade, linewidth=1, alpha=0.6)
    axes.plot(
        x, y, MARKERS[number % len(MARKERS)], color=shade, markersize=9, linestyle="none",
        label=f"{row['name']} ({row['case']}): {x:,.1f} FLOP/byte, {y:,.0f} TFLOP/s, "
        f"{y / ceiling:.0%} of the roof",
    )  # fmt: skip
    # Below the roof, where nothing else is.
    axes.annotate(
        row["name"], (x, y), xytext=(10, -4), textcoords="offset points", fontsize=9, va="top",
        color=shade,
    )  # fmt: skip
