"""What result files say: medians over runs, paired ratios with intervals, failures on their own.

A run that failed, wholly or in part, counts nowhere but in the list of failures: requests that were
refused make the others look fast.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilewise.bench.cases import CASES
from tilewise.bench.workloads import WORKLOADS

Row = dict[str, Any]

OURS_KERNEL, OURS_BACKEND = "tilewise", "TILEWISE"
# Other ways to run our own kernels: never peers.
OUR_VARIANTS = (
    "tilewise",
    "tilewise_p16",
    "tilewise_p128",
    "tilewise_plain",
    "tilewise_fp8",
    "tilewise_fp8_plain",
    "tilewise_shared",
    "TILEWISE",
    "CUSTOM",
)
CONFIDENCE = 0.95
RESAMPLES = 9999
RUNS_FOR_AN_INTERVAL = 3
# Fewer pairs say nothing for sure: the interval of n pairs is at most their range, which leaves the
# truth out with a chance of 2 ** (1 - n), 1 in 4 for three pairs and 1 in 32 for six.
RUNS_FOR_A_VERDICT = 6

# Field of a row, its name, its unit, and whether more is better.
SERVE_METRICS: dict[str, tuple[str, str, bool]] = {
    "request_throughput": ("requests", "1/s", True),
    "output_throughput": ("output tokens", "1/s", True),
    "p50_ttft_ms": ("TTFT p50", "ms", False),
    "p90_ttft_ms": ("TTFT p90", "ms", False),
    "p99_ttft_ms": ("TTFT p99", "ms", False),
    "p50_tpot_ms": ("TPOT p50", "ms", False),
    "p90_tpot_ms": ("TPOT p90", "ms", False),
    "p99_tpot_ms": ("TPOT p99", "ms", False),
}
RATIO_METRICS = ("output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of paired ratios; the interval is None where there are too few pairs."""

    ratio: float
    low: float | None
    high: float | None
    pairs: int


def paired_ratio(ours: Sequence[float], peer: Sequence[float]) -> Ratio:
    """Return the geometric mean of ``ours[i] / peer[i]`` with its bootstrap interval.

    Parameters
    ----------
    ours, peer : sequence of float
        Positive figures of the same length; entries of one index were measured in one round.

    Returns
    -------
    Ratio
        With a 95 % percentile interval (`scipy.stats.bootstrap` over the pairs, fixed seed) from
        three pairs on.

    Raises
    ------
    ValueError
        If the lengths differ, there is no pair, or a figure is not positive.
    """
    if len(ours) != len(peer) or not ours:
        raise ValueError(
            f"{len(ours)} and {len(peer)} figures; accepted: as many pairs, at least 1"
        )
    wrong = [x for x in (*ours, *peer) if not (math.isfinite(x) and x > 0)]
    if wrong:
        raise ValueError(f"a ratio of {wrong[0]}; accepted: positive numbers")
    logs = [math.log(a / b) for a, b in zip(ours, peer, strict=True)]
    mean = statistics.fmean(logs)
    low = high = None
    if len(logs) >= RUNS_FOR_AN_INTERVAL:
        low, high = _interval(logs, mean)
    return Ratio(
        math.exp(mean),
        None if low is None else math.exp(low),
        None if high is None else math.exp(high),
        len(logs),
    )


def _interval(values: Sequence[float], mean: float) -> tuple[float, float]:
    if max(values) - min(values) < 1e-12:
        return mean, mean  # the bootstrap of a constant is that constant, and scipy warns of it
    import numpy as np
    from scipy.stats import bootstrap

    found = bootstrap(
        (np.asarray(values),),
        np.mean,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def kind_of(result: Mapping[str, Any]) -> str:
    """Return ``kernels``, ``serve`` or ``roofline``.

    Raises
    ------
    ValueError
        If the content is that of no result file of ours.
    """
    if not isinstance(result, Mapping) or "env" not in result or "rows" not in result:
        raise ValueError("no result file: accepted is JSON with the keys 'env' and 'rows'")
    rows = result["rows"]
    if not rows:
        raise ValueError("the result file has no rows")
    for key, kind in (("intensity", "roofline"), ("provider", "kernels"), ("workload", "serve")):
        if all(key in row for row in rows):
            return kind
    raise ValueError(
        f"rows with the keys {', '.join(rows[0])}; accepted: those of `tilewise bench kernels` "
        "and `serve`; roofline, ladder and splits show theirs with --from"
    )


def first_line(text: str) -> str:
    """Return the first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _in_order(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def workload_text(name: str, rows: Iterable[Row] = ()) -> str:
    """Return a workload in words, from its rows or from the list of known ones."""
    shape = workload_shape(name, rows)
    if shape is None:
        return name
    return (
        f"{shape['input_len']:,} tokens in, {shape['output_len']:,} out"
        f"{', lengths ±' + format(shape['range_ratio'], '.0%') if shape['range_ratio'] else ''}; "
        f"{shape['num_prompts']:,} requests, {shape['concurrency']} at a time"
    )


def workload_shape(name: str, rows: Iterable[Row] = ()) -> dict[str, Any] | None:
    """Return lengths, requests and concurrency of a workload; None if nobody knows."""
    for row in rows:
        if row["workload"] == name and row.get("shape"):
            return dict(row["shape"])
    return asdict(WORKLOADS[name]) if name in WORKLOADS else None


def serve_summary(result: Mapping[str, Any], ours: str = OURS_BACKEND) -> dict[str, Any]:
    """Return medians over runs, ratios to each peer, throughput by concurrency, and failures."""
    rows: list[Row] = list(result["rows"])
    good = [row for row in rows if not row.get("error")]
    workloads = _in_order(row["workload"] for row in rows)
    backends = _in_order(row["backend"] for row in rows)
    cells = []
    for workload in workloads:
        for backend in backends:
            mine = _of(good, workload, backend)
            asked = len(_of(rows, workload, backend))
            if asked:
                cells.append(_cell(workload, backend, mine, asked))
    ratios = [
        entry
        for workload in workloads
        for peer in backends
        if peer not in OUR_VARIANTS and ours in backends
        for entry in _ratios(good, workload, ours, peer)
    ]
    return {
        "kind": "serve",
        "ours": ours,
        "workloads": [{"name": w, "text": workload_text(w, rows)} for w in workloads],
        "backends": backends,
        "cells": cells,
        "ratios": ratios,
        "curves": _curves(good, rows),
        "failures": [_failure(row) for row in rows if row.get("error")],
    }


def _of(rows: Iterable[Row], workload: str, backend: str) -> list[Row]:
    return [r for r in rows if r["workload"] == workload and r["backend"] == backend]


def _cell(workload: str, backend: str, rows: Sequence[Row], asked: int) -> dict[str, Any]:
    metrics = {}
    for name in SERVE_METRICS:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            metrics[name] = [min(values), statistics.median(values), max(values)]
    return {
        "workload": workload, "backend": backend, "runs": len(rows), "asked": asked,
        "metrics": metrics,
    }  # fmt: skip


def _ratios(good: Sequence[Row], workload: str, ours: str, peer: str) -> list[dict[str, Any]]:
    """Return one entry a metric; above 1 always speaks for ours."""
    mine = {row["run"]: row for row in _of(good, workload, ours)}
    other = {row["run"]: row for row in _of(good, workload, peer)}
    shared = sorted(mine.keys() & other.keys())
    found = []
    for metric in RATIO_METRICS:
        pairs = [(mine[run].get(metric), other[run].get(metric)) for run in shared]
        pairs = [(a, b) for a, b in pairs if a and b]
        if not pairs:
            continue
        a, b = zip(*pairs, strict=True)
        more = SERVE_METRICS[metric][2]
        ratio = paired_ratio(a, b) if more else paired_ratio(b, a)
        together = _together([(mine[run], other[run]) for run in shared])
        found.append(
            {
                "workload": workload, "ours": ours, "peer": peer, "metric": metric,
                "interleaved": together, **asdict(ratio),
            }
        )  # fmt: skip
    return found


def _together(pairs: Iterable[tuple[Row, Row]]) -> bool | None:
    """Whether pairs come from servers that stood side by side; None where rows do not say."""
    groups = [(a.get("group"), b.get("group")) for a, b in pairs]
    if any(None in pair for pair in groups):
        return None
    return all(a == b for a, b in groups)


def _curves(good: Sequence[Row], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return output throughput by concurrency for lengths that were measured at several."""
    points: dict[tuple[Any, ...], dict[str, dict[int, list[float]]]] = {}
    for row in good:
        shape = workload_shape(row["workload"], rows)
        if shape is None or row.get("output_throughput") is None:
            continue
        key = (shape["input_len"], shape["output_len"], shape["range_ratio"])
        line = points.setdefault(key, {}).setdefault(row["backend"], {})
        line.setdefault(shape["concurrency"], []).append(row["output_throughput"])
    curves = []
    for (input_len, output_len, spread), by_backend in points.items():
        if len({c for values in by_backend.values() for c in values}) < 2:
            continue
        title = f"{input_len:,} tokens in, {output_len:,} out"
        title += f" ±{spread:.0%}" if spread else ""
        lines = {
            backend: [[c, min(v), statistics.median(v), max(v)] for c, v in sorted(values.items())]
            for backend, values in by_backend.items()
        }
        curves.append({"title": title, "lines": lines})
    return curves


def _failure(row: Row) -> dict[str, Any]:
    text = str(row["error"])
    return {
        "workload": row["workload"], "backend": row["backend"], "run": row["run"],
        "what": first_line(text), "detail": text if "\n" in text.strip() else "",
    }  # fmt: skip


def kernel_summary(result: Mapping[str, Any], base: str = "fa3") -> dict[str, Any]:
    """Return the table of cases and providers, ratios to `base` and the best peer, what lacks."""
    rows: list[Row] = list(result["rows"])
    found = {(row["case"], row["provider"]): row for row in rows}
    providers = _in_order(row["provider"] for row in rows)
    peers = [p for p in providers if p not in OUR_VARIANTS]
    known = {case.name: case for case in CASES}
    lines = []
    places = {name: i for i, name in enumerate(known)}
    names = _in_order(row["case"] for row in rows)
    for name in sorted(names, key=lambda n: places.get(n, len(places))):
        case = known.get(name)
        times = {p: found.get((name, p), {}).get("median_us") for p in providers}
        ours = times.get(OURS_KERNEL)
        rivals = {p: t for p, t in times.items() if p in peers and t}
        best = min(rivals, key=lambda p: rivals[p]) if rivals else None
        kind = case.kind if case else "unknown"
        lines.append(
            {
                "case": name,
                "kind": kind,
                "rate_unit": "TB/s" if kind == "decode" else "TFLOP/s",
                "cells": {p: _kernel_cell(found.get((name, p)), kind) for p in providers},
                "to_base": rivals[base] / ours if ours and base in rivals else None,
                "best_peer": best,
                "to_best": rivals[best] / ours if ours and best else None,
            }
        )
    return {
        "kind": "kernels",
        "base": base,
        "providers": providers,
        "peers": peers,
        "lines": lines,
        "groups": _geometric_means(lines),
        "missing": _missing(result, rows),
        "gate_failed": [
            {"case": row["case"], "provider": row["provider"], "what": row.get("error") or ""}
            for row in rows
            if row.get("gate") == "failed"
        ],
    }


def _kernel_cell(row: Row | None, kind: str) -> dict[str, Any]:
    if row is None or row.get("median_us") is None:
        why = "not run" if row is None else str(row.get("error") or "not timed")
        return {"median_us": None, "why": first_line(why), "gate": (row or {}).get("gate")}
    rate = row["tbps"] if kind == "decode" else row["tflops"]
    return {
        "median_us": row["median_us"], "spread_us": row["spread_us"], "rate": rate,
        "samples": row.get("samples"), "path": row.get("path"), "rel_error": row.get("rel_error"),
        "gate": row.get("gate"),
    }  # fmt: skip


def _geometric_means(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each kind of case the geometric means of the ratios."""
    groups = []
    for kind in _in_order(line["kind"] for line in lines):
        entry: dict[str, Any] = {"kind": kind}
        for key in ("to_base", "to_best"):
            values = [line[key] for line in lines if line["kind"] == kind and line[key]]
            entry[key] = statistics.geometric_mean(values) if values else None
            entry[f"{key}_cases"] = len(values)
        groups.append(entry)
    return groups


def _missing(result: Mapping[str, Any], rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return peers that were not there, and what was not measured, by reason."""
    absent = [
        {"provider": name, "why": why, "cases": None}
        for name, why in result["env"].get("missing", {}).items()
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    gone = {entry["provider"] for entry in absent}
    for row in rows:
        checked_only = row.get("gate") == "passed"
        if row.get("median_us") is None and row["provider"] not in gone and not checked_only:
            why = first_line(str(row.get("error") or "not timed"))
            reasons.setdefault((row["provider"], why), []).append(row["case"])
    return absent + [
        {"provider": provider, "why": why, "cases": cases}
        for (provider, why), cases in reasons.items()
    ]
