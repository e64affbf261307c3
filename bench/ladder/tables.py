"""The ladder's results as tables for a terminal and as the section of docs/ladder.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.bench import publish, report, roofline

RUNGS = (
    "kernel", "problem", "asked of memory", "least", "DRAM", "L2", "held", "peak", "time",
    "TFLOP/s", "FLOP/byte", "of the roof",
)  # fmt: skip
FIGURES = ("figure", "problem", "predicted", "measured", "how")
SWEEP = (
    "kernel", "rows", "warps", "stages", "registers", "spills", "shared memory", "programs an SM",
    "bound by", "occupancy", "time", "rate",
)  # fmt: skip
BEGIN, END = "<!-- ladder:begin -->", "<!-- ladder:end -->"
EMPTY = "Not measured yet."


def size(value: float | None) -> str:
    """Return bytes in the unit that leaves one to three digits before the point; "-" for None."""
    if value is None:
        return "-"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            digits = max(2 - len(str(int(value / factor))) + 1, 0)
            return f"{value / factor:,.{digits}f} {unit}"
    return f"{value:.0f} B"


def duration(value: float | None) -> str:
    """Return microseconds as a text; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.1f} us" if value < 1000 else f"{value / 1000:,.2f} ms"


def of_part(rows: Sequence[report.Row], part: str) -> list[report.Row]:
    """Return the rows of a part: ``rung``, ``figure`` or ``sweep``."""
    return [row for row in rows if row["part"] == part]


def rung_cells(row: report.Row, env: dict[str, Any]) -> list[str]:
    """Return a rung's cells under `RUNGS`."""
    rate = share = "-"
    if row["tflops"] is not None:
        ceiling = roofline.roof(row["intensity"], env["matmul_tflops"], env["copy_tbps"])
        rate, share = f"{row['tflops']:.3g}", f"{row['tflops'] / ceiling:.0%}"
    sizes = (row[f"{key}bytes"] for key in ("traffic_", "", "dram_", "l2_", "held_", "peak_"))
    time = row["error"] if row.get("error") else duration(row["median_us"])
    return [
        row["name"], row["case"], *map(size, sizes), time, rate, f"{row['intensity']:.3g}", share
    ]  # fmt: skip


def figure_cells(row: report.Row) -> list[str]:
    """Return a figure's cells under `FIGURES`."""

    def text(value: float | None) -> str:
        if row["unit"] == "bytes" or value is None:
            return size(value)
        return f"{value:.1%}" if row["unit"] == "of all" else f"{value:.2f}"

    measured = text(row["measured"])
    return [row["name"], row["case"], text(row["predicted"]), measured, row["how"]]


def sweep_cells(row: report.Row) -> list[str]:
    """Return a sweep's cells under `SWEEP`."""

    def text(value: object) -> str:
        return "-" if value is None else str(value)

    share = "-" if row["occupancy"] is None else f"{row['occupancy']:.0%}"
    rate = "-" if row["rate"] is None else f"{row['rate']:.3g} {row['unit']}"
    time = row["error"] if row.get("error") else duration(row["median_us"])
    plain = (text(row[key]) for key in ("rows", "warps", "stages", "registers", "spills"))
    return [
        row["name"], *plain, size(row["shared_bytes"]), text(row["programs"]), text(row["limit"]),
        share, time, rate,
    ]  # fmt: skip


def sections(
    env: dict[str, Any], rows: Sequence[report.Row]
) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Return title, head and cells of each table that has lines."""
    parts = [
        ("The rungs", RUNGS, [rung_cells(row, env) for row in of_part(rows, "rung")]),
        ("Figures", FIGURES, [figure_cells(row) for row in of_part(rows, "figure")]),
        ("Occupancy and speed", SWEEP, [sweep_cells(row) for row in of_part(rows, "sweep")]),
    ]
    return [part for part in parts if part[2]]


def terminal(env: dict[str, Any], rows: Sequence[report.Row], width: int = 200) -> str:
    """Return the tables, and the formulas of the bytes, for a terminal."""
    from rich.console import Console
    from rich.table import Table

    formulas = {row["name"].split(",")[0]: row["formula"] for row in of_part(rows, "rung")}
    parts: list[Any] = sections(env, rows)
    lines = [[name, formula] for name, formula in formulas.items()]
    parts.insert(1, ("Bytes predicted", ("kernel", "formula"), lines))
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        for title, head, cells in parts:
            table = Table(title=title, title_justify="left", box=None)
            for number, name in enumerate(head):
                table.add_column(name, justify="left" if number < 2 else "right")
            for line in cells:
                table.add_row(*line)
            console.print(table)
            console.print()
    return capture.get()


def markdown(env: dict[str, Any], rows: Sequence[report.Row], source: str) -> str:
    """Return the measured section of docs/ladder.md."""
    lines = [
        "Made by `tilewise bench ladder`; do not edit.", "",
        f"{publish.describe(env)} From `{source}`; ceilings {env['matmul_tflops']:g} TFLOP/s and "
        f"{env['copy_tbps']:g} TB/s.",
    ]  # fmt: skip
    if env.get("counters"):
        lines += ["", f"No counters of Nsight Compute: {env['counters']}."]
    for title, head, cells in sections(env, rows):
        lines += ["", f"**{title}**", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        lines += [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join(lines)
