"""The figures of a report: matplotlib's SVG, whose text and axes take the page's colour."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# In SVG replaced by the colour of the page's text, so that one figure suits light and dark.
INK = "#20252c"
COLOURS = {
    "tilewise": "#d9622b", "tilewise_p16": "#eda77f", "tilewise_plain": "#a8431a",
    "fa3": "#3a86c8", "fa3_best": "#7db4df", "flashinfer": "#2a9d73", "triton_attn": "#b36bb0",
    "cudnn": "#9a8c2e", "TILEWISE": "#d9622b", "CUSTOM": "#d9622b", "FLASH_ATTN": "#3a86c8",
    "FLASHINFER": "#2a9d73", "TRITON_ATTN": "#b36bb0",
}  # fmt: skip
OTHERS = ("#7f7f7f", "#5f9ea0", "#c0504d", "#4f81bd")
MARKERS = "osD^vPX*<>p"
WIDTH = 10.0  # inches; the page scales figures to its column
STYLE = {
    "font.size": 10, "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "svg.fonttype": "path", "svg.hashsalt": "tilewise",
}  # fmt: skip


def colour(name: str, known: Sequence[str] = ()) -> str:
    """Return the fixed colour of a provider or backend, or one by its place among `known`."""
    if name in COLOURS:
        return COLOURS[name]
    strangers = [n for n in known if n not in COLOURS]
    return OTHERS[strangers.index(name) % len(OTHERS) if name in strangers else 0]


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure in our style, in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def to_svg(figure: Figure, name: str) -> str:
    """Return a figure as an ``<svg>`` element for a page; `name` keeps its ids apart."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = text.replace(INK, "currentColor")
    text = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    # Scales with its column instead of having matplotlib's size in points.
    style = 'style="width:100%;height:auto"'
    return re.sub(r'<svg [^>]*?(viewBox="[^"]+")[^>]*>', rf"<svg \1 {style}>", text, count=1)


def to_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG on white."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=150, facecolor="white", metadata={"Software": None})


def _thousands(axis: Any) -> None:
    axis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))


def _grid(axes: Any, axis: str) -> None:
    axes.grid(axis=axis, color=INK, alpha=0.15, linewidth=0.8)
    axes.set_axisbelow(True)


def ratio_bars(summary: dict[str, Any]) -> Figure | None:
    """Return bars of our speed relative to the base and to the best peer, a line a case."""
    lines = [line for line in summary["lines"] if line["to_base"] or line["to_best"]]
    if not lines:
        return None
    with matplotlib.rc_context(STYLE):
        figure = new_figure(WIDTH, 1.1 + 0.36 * len(lines))
        axes = figure.subplots()
        base = summary["base"].upper()
        right = 1.12 * max(max(line["to_base"] or 0, line["to_best"] or 0, 1) for line in lines)
        for offset, key, label, shade in (
            (-0.19, "to_base", f"to {base}", colour("tilewise")),
            (0.19, "to_best", "to the best peer of the case", colour("tilewise_p16")),
        ):
            values = [line[key] or 0.0 for line in lines]
            places = [i + offset for i in range(len(lines))]
            axes.barh(places, values, height=0.36, color=shade, label=label)
            for value, place in zip(values, places, strict=True):
                if value:
                    # Right of the line at 1 where it would run through the figure.
                    x = 1.0 if 1 - 0.042 * right < value < 1 else value
                    axes.annotate(
                        f"{value:.2f}", (x, place), xytext=(3, 0), textcoords="offset points",
                        fontsize=8, va="center",
                    )  # fmt: skip
        axes.axvline(1.0, color=INK, linewidth=1.2)
        axes.set_yticks(range(len(lines)), [line["case"] for line in lines])
        axes.invert_yaxis()
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.set_xlim(0, right)
        axes.set_xlabel("speed of tilewise relative to the peer (right of 1: tilewise is faster)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
        _grid(axes, "x")
    return figure


def rate_dots(summary: dict[str, Any], env: dict[str, Any], names: dict[str, str]) -> Figure | None:
    """Return the rates of all providers with the card's ceilings; prefill and decode apart.

    Parameters
    ----------
    summary : dict
        Of `summary.kernel_summary`.
    env : dict
        With ``matmul_tflops`` and ``copy_tbps``, if they were measured.
    names : dict[str, str]
        Text of providers that are called otherwise than their name.
    """
    panels = []
    for unit, ceiling, what in (
        ("TFLOP/s", env.get("matmul_tflops"), "bf16 matmul"),
        ("TB/s", env.get("copy_tbps"), "copy"),
    ):
        lines = [line for line in summary["lines"] if line["rate_unit"] == unit]
        lines = [line for line in lines if any(_rate(c) for c in line["cells"].values())]
        if lines:
            panels.append((unit, ceiling, what, lines))
    if not panels:
        return None
    with matplotlib.rc_context(STYLE):
        figure = new_figure(WIDTH, 1.5 + 0.3 * sum(len(panel[3]) for panel in panels))
        ratios = [len(panel[3]) + 1 for panel in panels]
        for axes, panel in zip(
            figure.subplots(len(panels), 1, squeeze=False, height_ratios=ratios)[:, 0],
            panels,
            strict=True,
        ):
            _rate_panel(axes, summary["providers"], names, *panel)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        for axes in figure.axes[1:]:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                if label not in labels:
                    handles.append(handle)
                    labels.append(label)
        figure.legend(handles, labels, loc="outside upper center", ncols=5)
    return figure


def _rate(cell: dict[str, Any]) -> float | None:
    return cell.get("rate") if cell.get("median_us") else None


def _rate_panel(
    axes: Any,
    providers: Sequence[str],
    names: dict[str, str],
    unit: str,
    ceiling: float | None,
    what: str,
    lines: Sequence[dict[str, Any]],
) -> None:
    for number, provider in enumerate(providers):
        points = [(_rate(line["cells"][provider]), i) for i, line in enumerate(lines)]
        points = [(rate, i) for rate, i in points if rate]
        if points:
            axes.plot(
                *zip(*points, strict=True), MARKERS[number % len(MARKERS)],
                label=names.get(provider, provider), color=colour(provider, providers),
                markersize=6, alpha=0.9, linestyle="none",
                zorder=3 if provider == "tilewise" else 2,  # nobody's mark lies on ours
            )  # fmt: skip
    if ceiling:
        axes.axvline(ceiling, color=INK, linestyle="--", linewidth=1.2)
        axes.text(
            ceiling, 1.0, f"{what} {ceiling:g} {unit}", transform=axes.get_xaxis_transform(),
            ha="right", va="bottom", fontsize=8,
        )  # fmt: skip
    axes.set_yticks(range(len(lines)), [line["case"] for line in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel(unit)
    _grid(axes, "both")


def latency_bars(summary: dict[str, Any], which: str) -> Figure | None:
    """Return bars of TTFT or TPOT percentiles for each workload and backend, ranges as whiskers.

    Parameters
    ----------
    summary : dict
        Of `summary.serve_summary`.
    which : str
        ``ttft`` or ``tpot``.
    """
    names = [f"p{p}_{which}_ms" for p in (50, 90, 99)]
    workloads = [w["name"] for w in summary["workloads"]]
    cells = {(c["workload"], c["backend"]): c["metrics"] for c in summary["cells"]}
    names = [n for n in names if any(n in metrics for metrics in cells.values())]
    workloads = [w for w in workloads if any(n in cells.get((w, b), {}) for n in names
                                             for b in summary["backends"])]  # fmt: skip
    if not workloads:
        return None
    with matplotlib.rc_context(STYLE):
        figure = new_figure(WIDTH, 0.9 + 2.3 * -(-len(workloads) // 2))
        columns = min(2, len(workloads))
        grid = figure.subplots(-(-len(workloads) // columns), columns, squeeze=False).ravel()
        for axes, workload in zip(grid, workloads, strict=False):
            _latency_panel(axes, summary["backends"], cells, workload, names)
            axes.set_title(workload, fontsize=10)
        for axes in grid[len(workloads) :]:
            axes.set_visible(False)
        for axes in grid[: len(workloads) : columns]:
            axes.set_ylabel(f"{which.upper()}, ms")
        figure.set_layout_engine("constrained", hspace=0.08)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=5)
    return figure


def _latency_panel(
    axes: Any, backends: Sequence[str], cells: Any, workload: str, names: Sequence[str]
) -> None:
    width = 0.8 / len(backends)
    for number, backend in enumerate(backends):
        metrics = cells.get((workload, backend), {})
        found = [(i, metrics[n]) for i, n in enumerate(names) if n in metrics]
        places = [i + (number - (len(backends) - 1) / 2) * width for i, _ in found]
        middle = [m for _, (_, m, _) in found]
        errors = [[m - low for _, (low, m, _) in found], [high - m for _, (_, m, high) in found]]
        axes.bar(
            places, middle, width=0.92 * width, color=colour(backend, backends), label=backend,
            yerr=errors if any(map(any, errors)) else None, ecolor=INK, capsize=2,
        )  # fmt: skip
    axes.set_xticks(range(len(names)), [name.split("_")[0] for name in names])
    _thousands(axes.yaxis)
    _grid(axes, "y")


def throughput_curves(summary: dict[str, Any]) -> Figure | None:
    """Return output throughput against concurrency; None where only one was measured."""
    curves = summary["curves"]
    if not curves:
        return None
    with matplotlib.rc_context(STYLE):
        columns = min(2, len(curves))
        rows = -(-len(curves) // columns)
        figure = new_figure(WIDTH, 0.7 + 3.0 * rows)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, curve in zip(grid, curves, strict=False):
            for number, (backend, points) in enumerate(curve["lines"].items()):
                x, low, middle, high = zip(*points, strict=True)
                shade = colour(backend, summary["backends"])
                marker = MARKERS[number % len(MARKERS)]
                axes.plot(x, middle, marker + "-", color=shade, label=backend)
                axes.fill_between(x, low, high, color=shade, alpha=0.2, linewidth=0)
            axes.set_xscale("log", base=2)
            ticks = sorted({p[0] for points in curve["lines"].values() for p in points})
            axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
            axes.xaxis.set_minor_formatter(NullFormatter())
            _thousands(axes.yaxis)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("requests at a time")
            axes.set_title(curve["title"], fontsize=10)
            _grid(axes, "both")
        for axes in grid[len(curves) :]:
            axes.set_visible(False)
        for axes in grid[: len(curves) : columns]:
            axes.set_ylabel("output tokens/s")
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=5)
    return figure


def ratio_intervals(summary: dict[str, Any], names: dict[str, str]) -> Figure | None:
    """Return the paired ratios with their intervals, a line for each workload, peer and metric.

    Parameters
    ----------
    summary : dict
        Of `summary.serve_summary`.
    names : dict[str, str]
        Text of each metric.
    """
    ratios = summary["ratios"]
    if not ratios:
        return None
    peers = list(dict.fromkeys(r["peer"] for r in ratios))
    places = list(dict.fromkeys((r["workload"], r["metric"]) for r in ratios))
    with matplotlib.rc_context(STYLE):
        figure = new_figure(WIDTH, 1.2 + 0.36 * len(places))
        axes = figure.subplots()
        step = 0.6 / max(len(peers), 1)
        for number, peer in enumerate(peers):
            for r in (r for r in ratios if r["peer"] == peer):
                place = places.index((r["workload"], r["metric"]))
                y = place + (number - (len(peers) - 1) / 2) * step
                shade = colour(peer, peers)
                if r["low"] is not None:
                    axes.plot([r["low"], r["high"]], [y, y], color=shade, linewidth=2, alpha=0.7)
                axes.plot(r["ratio"], y, MARKERS[number % len(MARKERS)], color=shade)
            axes.plot([], [], MARKERS[number % len(MARKERS)] + "-", color=colour(peer, peers),
                      label=f"to {peer}")  # fmt: skip
        axes.axvline(1.0, color=INK, linewidth=1.2)
        ends = [r[key] for r in ratios for key in ("low", "ratio", "high") if r[key]]
        if max(ends) > 3 * min(ends):
            # Or one outlier presses all others together; twice and half are equally far then.
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(base=2))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks(range(len(places)), [f"{w}  {names[m]}" for w, m in places])
        axes.set_ylim(len(places) - 0.4, -0.6)
        axes.set_xlabel(f"{summary['ours']} relative to the peer (right of 1: better)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
        _grid(axes, "x")
    return figure


def save_all(figures: Iterable[tuple[str, Figure]], folder: Path) -> list[Path]:
    """Write figures as PNG files into a folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures:
        paths.append(folder / f"{name}.png")
        to_png(figure, paths[-1])
    return paths
