"""``python -m tilewise.metrics_page``: the tables of docs/metrics.md, made from the definitions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tilewise.counters import METRICS, Metric
from tilewise.marked import not_there, replace_between, write_or_check

BEGIN, END = "<!-- metrics:begin -->", "<!-- metrics:end -->"
LABELS = {
    "engine": "number of the engine (data parallel rank), on every metric",
    "rank": "number of the worker within its engine, on every metric",
    "path": "`decode`: every request of the step brings at most 16 new tokens; `prefill`: every "
    "one brings more; `mixed`: both may be there",
    "kernel": "once a step `plan`, and before it `prefix_keys` and `prefix_groups` where requests "
    "may share pages, `shard_lengths` where ranks share keys, `mask_starts` or `tree_words` where "
    "a batch has a mask; once a layer `prefill` or, in Gluon, `hopper_prefill`, over an fp8 cache "
    "`hopper_prefill_kv8` or, with fp8 products, `hopper_prefill_fp8`, `decode` or, in Gluon, "
    "`hopper_decode`, or, where requests may share pages, `prefix_decode`, and `cache_write`",
    "reason": "the feature that tilewise does not compute",
    "target": "the backend of vLLM that computes the layer",
    "mode": "`full`, `piecewise`, `none`, and `capture` while graphs are made",
    "phase": "`warmup` until the engine is ready, then `serving`",
    "cached": "`true`: found in Triton's cache on disk; `false`: compiled",
    "version": "of tilewise",
    "vllm": "version of vLLM",
    "torch": "version of PyTorch",
    "triton": "version of Triton",
    "result": "`passed` or `failed`",
}


def sample_name(metric: Metric) -> str:
    """Return the name to ask Prometheus for; a histogram's has ``_bucket`` and so on after it."""
    return metric.name + ("_total" if metric.kind == "counter" else "")


def table() -> str:
    """Return the tables in markdown: metrics, labels, buckets."""
    lines = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        text = metric.help.replace("|", "\\|")
        lines.append(f"| `{sample_name(metric)}` | {metric.kind} | {labels} | {text} |")
    used = {"engine", "rank", *(label for m in METRICS.values() for label in m.labels)}
    lines += ["", "| Label | Values |", "|---|---|"]
    lines += [f"| `{label}` | {LABELS[label]} |" for label in LABELS if label in used]
    lines += ["", "| Histogram | Upper bounds of its buckets |", "|---|---|"]
    for metric in METRICS.values():
        if metric.buckets:
            bounds = ", ".join(f"{bound:g}" for bound in metric.buckets)
            lines.append(f"| `{metric.name}` | {bounds} |")
    return "\n".join(lines)


def replace_section(text: str) -> str:
    """Return ``text`` with the tables between the markers.

    Raises
    ------
    ValueError
        When the markers are not there exactly once.
    """
    note = "Made by `python -m tilewise.metrics_page`; do not edit."
    return replace_between(text, BEGIN, END, f"{note}\n\n{table()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the tables; with ``--check`` only say whether they are up to date."""
    parser = argparse.ArgumentParser(prog="python -m tilewise.metrics_page", description=__doc__)
    parser.add_argument(
        "page", type=Path, nargs="?", default=Path("docs/metrics.md"),
        help="the page to rewrite (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    args = parser.parse_args(argv)
    if absent := not_there(args.page):
        print(absent, file=sys.stderr)
        return 2
    text = args.page.read_text(encoding="utf-8")
    new = replace_section(text)
    return write_or_check(args.page, text, new, "the definitions", args.check)


if __name__ == "__main__":
    raise SystemExit(main())
