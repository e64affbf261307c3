"""The page of a result of ``tilewise bench kernels``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewise.bench import plots
from tilewise.bench.html_parts import (
    Cell,
    Page,
    Section,
    Table,
    TableRow,
    machine,
    number,
    ratio_cell,
)
from tilewise.bench.publish import HEADINGS
from tilewise.bench.summary import kernel_summary

METHOD = (
    "Every provider computes the same inputs and passes a comparison with fp64 torch before it is "
    "timed. A turn replays a CUDA graph of many launches over rotating inputs; providers take "
    "turns, each round starting with another one. Times are medians of one layer; the small figure "
    "is the rate, over the least work (unmasked pairs) or the least traffic (K and V once, Q in, "
    "O out). Hover over a time for its spread (interquartile range), samples, error and path."
)


def page(result: Mapping[str, Any]) -> Page:
    """Return the parts of the page, without the environment."""
    summary = kernel_summary(result)
    env = result["env"]
    found = Page(
        title="Attention kernels: tilewise beside its peers",
        lead=machine(env),
        summary=summary,
        warnings=_warnings(summary, env),
        cards=_cards(summary),
    )
    base = HEADINGS.get(summary["base"], summary["base"])
    figures = [
        (
            "ratios", plots.ratio_bars(summary),
            f"Speed of tilewise relative to {base} and to the fastest peer of each case.",
        ),
        (
            "rates", plots.rate_dots(summary, env, HEADINGS),
            "Rates reached; dashed: the ceilings measured on this card in the same run. The copy "
            "reads and writes; a kernel that almost only reads may pass it.",
        ),
    ]  # fmt: skip
    if any(figure is not None for _, figure, _ in figures):
        found.sections.append(Section("figures", "Ratios and rates", figures=figures))
    found.sections.append(
        Section("times", "Times, µs of one layer", text=METHOD, table=_times(summary))
    )
    found.sections.append(_missing(summary))
    return found


def _warnings(summary: dict[str, Any], env: Mapping[str, Any]) -> list[str]:
    texts = []
    if env.get("smoke"):
        texts.append(f"A smoke run: {env['smoke']}.")
    if env.get("device_lost"):
        texts.append("The GPU stopped working during this run; what follows is not complete.")
    wrong = summary["gate_failed"]
    if wrong:
        named = ", ".join(f"{row['provider']} at {row['case']}" for row in wrong)
        texts.append(f"Wrong results, therefore no times: {named}.")
    return texts


def _cards(summary: dict[str, Any]) -> list[dict[str, str]]:
    base = HEADINGS.get(summary["base"], summary["base"])
    cards = []
    for group in summary["groups"]:
        for key, peer in (("to_base", base), ("to_best", "the best peer")):
            if group[key]:
                cases = group[f"{key}_cases"]
                plural = "case" if cases == 1 else "cases"
                cards.append(
                    {
                        "value": f"{group[key]:.2f}x",
                        "text": f"{group['kind']}: speed relative to {peer}, "
                        f"geometric mean of {cases} {plural}",
                    }
                )
    return cards


def _times(summary: dict[str, Any]) -> Table:
    # A provider that computed nothing has its place in the list of what is missing.
    providers = [
        p for p in summary["providers"]
        if any(line["cells"][p]["median_us"] or line["cells"][p]["gate"]
               for line in summary["lines"])
    ]  # fmt: skip
    base = HEADINGS.get(summary["base"], summary["base"])
    ratios = any(line["to_best"] for line in summary["lines"])
    heads = ["case", *((f"speed ÷ {base}", "speed ÷ best peer") if ratios else ())]
    heads += [HEADINGS.get(p, p) for p in providers]
    rows = []
    kind = None
    for line in summary["lines"]:
        best = HEADINGS.get(line["best_peer"], line["best_peer"]) if line["best_peer"] else ""
        cells = [Cell(line["case"])]
        if ratios:
            cells += [ratio_cell(line["to_base"]), ratio_cell(line["to_best"], best)]
        cells += [_time(line["cells"][p], line["rate_unit"]) for p in providers]
        rows.append(TableRow(cells, first=kind not in (None, line["kind"])))
        kind = line["kind"]
    return Table(heads, rows)


def _time(cell: dict[str, Any], unit: str) -> Cell:
    if cell["median_us"] is None:
        text, mark = {"failed": ("wrong", "bad"), "passed": ("right", "good")}.get(
            cell["gate"], ("-", "")
        )
        return Cell(text, mark=mark, title=cell["why"])
    error = "" if cell["rel_error"] is None else f", relative error {cell['rel_error']:.1e}"
    return Cell(
        number(cell["median_us"]),
        f"{number(cell['rate'])} {unit}",
        title=f"± {number(cell['spread_us'])} µs, {cell['samples']} samples{error}; {cell['path']}",
    )


def _missing(summary: dict[str, Any]) -> Section:
    if not summary["missing"]:
        return Section("missing", "Not measured", text="Every provider was timed on every case.")
    rows = []
    for entry in summary["missing"]:
        cases = entry["cases"]
        which = "all" if cases is None else ", ".join(cases)
        cells = [
            Cell(HEADINGS.get(entry["provider"], entry["provider"])),
            Cell(entry["why"], wrap=True),
            Cell(which, wrap=True),
        ]
        rows.append(TableRow(cells))
    table = Table(["provider", "why", "cases"], rows, left=3)
    return Section("missing", "Not measured, and why", table=table)
