"""The page of a result of ``tilewise bench serve``."""

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
)
from tilewise.bench.summary import (
    CONFIDENCE,
    RESAMPLES,
    RUNS_FOR_A_VERDICT,
    RUNS_FOR_AN_INTERVAL,
    SERVE_METRICS,
    serve_summary,
)

METRIC_TEXT = {name: text for name, (text, _, _) in SERVE_METRICS.items()}
TOGETHER = {True: "yes", False: "no", None: "not recorded"}
METHOD = (
    "Medians over the runs that completed every request; with several runs, the range in small "
    "figures. TTFT: from sending a request to its first token. TPOT: mean time of each further "
    "token of a request. Percentiles are over the requests of one run."
)
RATIO_METHOD = (
    f"Runs of the same number are a pair: the same prompts, one server after the other. The ratio "
    f"is the geometric mean over pairs, above 1 where ours is better; the interval is the "
    f"{CONFIDENCE:.0%} percentile bootstrap over pairs ({RESAMPLES:,} resamples) and needs "
    f"{RUNS_FOR_AN_INTERVAL} of them. Of three pairs it is about their range, which leaves the "
    f"truth out one time in four; from {RUNS_FOR_A_VERDICT} pairs on, ratios whose interval leaves "
    f"1 out are coloured. "
    f"Interleaved: both servers stood on the GPU together and were measured in turn."
)


def page(result: Mapping[str, Any]) -> Page:
    """Return the parts of the page, without the environment."""
    summary = serve_summary(result)
    found = Page(
        title="vLLM under load: " + ", ".join(summary["backends"]),
        lead=machine(result["env"]),
        summary=summary,
        warnings=_warnings(summary),
        cards=_cards(summary),
    )
    found.sections += [
        Section(
            "workloads", "Workloads",
            facts=[(w["name"], w["text"]) for w in summary["workloads"]],
        ),
        Section("figures", "Load and latency", text=METHOD, figures=_figures(summary),
                table=_medians(summary)),
        _ratios(summary),
        _failures(summary),
        Section("runs", "Every run", table=_runs(result)),
    ]  # fmt: skip
    return found


def _warnings(summary: dict[str, Any]) -> list[str]:
    count = len(summary["failures"])
    if not count:
        return []
    runs = "1 run failed and counts" if count == 1 else f"{count} runs failed and count"
    return [f"{runs} in no median, ratio or figure; see Failures."]


def _cards(summary: dict[str, Any]) -> list[dict[str, str]]:
    cards = []
    for r in summary["ratios"]:
        if r["metric"] == "output_throughput":
            interval = "" if r["low"] is None else f" [{r['low']:.3f}, {r['high']:.3f}]"
            pairs = "1 pair of runs" if r["pairs"] == 1 else f"{r['pairs']} pairs of runs"
            pairs += f", {CONFIDENCE:.0%} interval" if interval else ""
            cards.append(
                {
                    "value": f"{r['ratio']:.2f}x{interval}",
                    "text": f"output tokens/s of {r['ours']} relative to {r['peer']}, "
                    f"{r['workload']}, {pairs}",
                }
            )
    return cards


def _figures(summary: dict[str, Any]) -> list[tuple[str, Any, str]]:
    return [
        (
            "throughput", plots.throughput_curves(summary),
            "Output throughput against concurrency; bands: range over runs.",
        ),
        (
            "ttft", plots.latency_bars(summary, "ttft"),
            "Time to the first token, percentiles over requests; whiskers: range over runs.",
        ),
        (
            "tpot", plots.latency_bars(summary, "tpot"),
            "Time per further token, percentiles over requests; whiskers: range over runs.",
        ),
    ]  # fmt: skip


def _medians(summary: dict[str, Any]) -> Table:
    names = [n for n in SERVE_METRICS if any(n in c["metrics"] for c in summary["cells"])]
    heads = ["workload", "backend", "runs"]
    heads += [f"{SERVE_METRICS[n][0]}, {SERVE_METRICS[n][1]}" for n in names]
    rows = []
    last = None
    for cell in summary["cells"]:
        few = cell["runs"] < cell["asked"]
        cells = [Cell(cell["workload"]), Cell(cell["backend"])]
        cells.append(Cell(f"{cell['runs']} of {cell['asked']}", mark="bad" if few else ""))
        for name in names:
            low, middle, high = cell["metrics"].get(name, [None] * 3)
            spread = "" if low is None or low == high else f"{number(low)} … {number(high)}"
            cells.append(Cell(number(middle), spread))
        rows.append(TableRow(cells, first=last not in (None, cell["workload"])))
        last = cell["workload"]
    return Table(heads, rows, left=2)


def _ratios(summary: dict[str, Any]) -> Section:
    if not summary["ratios"]:
        text = f"None: it takes a completed run of {summary['ours']} and of a peer."
        return Section("ratios", "Paired ratios", text=text)
    rows = []
    last = None
    for r in summary["ratios"]:
        interval = "-" if r["low"] is None else f"{r['low']:.3f} … {r['high']:.3f}"
        cells = [
            Cell(r["workload"]), Cell(r["peer"]), Cell(METRIC_TEXT[r["metric"]]),
            Cell(TOGETHER[r["interleaved"]]), Cell(f"{r['ratio']:.2f}x", mark=_verdict(r)),
            Cell(interval),
            Cell(str(r["pairs"])),
        ]  # fmt: skip
        key = (r["workload"], r["peer"])
        rows.append(TableRow(cells, first=last not in (None, key)))
        last = key
    heads = [
        "workload", f"{summary['ours']} against", "metric", "interleaved", "ratio",
        f"{CONFIDENCE:.0%} interval", "pairs",
    ]  # fmt: skip
    figure = plots.ratio_intervals(summary, METRIC_TEXT)
    bars = any(r["low"] is not None for r in summary["ratios"])
    caption = f"{summary['ours']} relative to each peer; " + (
        f"bars: {CONFIDENCE:.0%} intervals." if bars else "too few pairs for intervals."
    )
    return Section(
        "ratios", "Paired ratios", text=RATIO_METHOD, figures=[("ratios", figure, caption)],
        table=Table(heads, rows, left=4),
    )  # fmt: skip


def _verdict(r: dict[str, Any]) -> str:
    """Return a colour only where the interval of enough pairs leaves 1 out."""
    if r["pairs"] < RUNS_FOR_A_VERDICT or r["low"] <= 1 <= r["high"]:
        return ""
    return "good" if r["low"] > 1 else "bad"


def _failures(summary: dict[str, Any]) -> Section:
    if not summary["failures"]:
        return Section("failures", "Failures", text="None: every run completed every request.")
    rows = [
        TableRow([Cell(f["workload"]), Cell(f["backend"]), Cell(str(f["run"])),
                  Cell(f["what"], wrap=True)])
        for f in summary["failures"]
    ]  # fmt: skip
    details = [
        {"title": f"log of {f['backend']}, {f['workload']}, run {f['run']}", "text": f["detail"]}
        for f in summary["failures"]
        if f["detail"]
    ]
    text = "What these runs measured is listed under Every run and used nowhere else."
    table = Table(["workload", "backend", "run", "what happened"], rows, left=4)
    return Section("failures", "Failures", text=text, table=table, details=details)


def _runs(result: Mapping[str, Any]) -> Table:
    names = [n for n in SERVE_METRICS if any(row.get(n) is not None for row in result["rows"])]
    heads = ["workload", "backend", "run", "completed", "failed"]
    heads += [f"{SERVE_METRICS[n][0]}, {SERVE_METRICS[n][1]}" for n in names]
    rows = []
    for row in result["rows"]:
        mark = "bad" if row.get("error") else ""
        done, lost = row.get("completed"), row.get("failed")
        cells = [Cell(row["workload"]), Cell(row["backend"], mark=mark), Cell(str(row["run"]))]
        cells += [
            Cell("-" if done is None else str(done)),
            Cell("-" if lost is None else str(lost)),
        ]
        cells += [Cell(number(row.get(name))) for name in names]
        rows.append(TableRow(cells))
    return Table(heads, rows, left=2)
