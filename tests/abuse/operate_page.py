"""Write what ``operate.py`` measured on a GPU into the docs, from its result files.

``python tests/abuse/operate_page.py`` rewrites what stands between the markers of
``docs/tuning.md`` (times of starts) and ``docs/robustness.md`` (the JIT monitor); ``--check`` only
says whether they are in step (exit code 1 if not).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewise.marked import replace_between, write_or_check

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = "bench/results/h200"
STARTS = ("cold_start.json", "cold_more.json", "cold_read_only.json")
NONE = "*Not measured yet: no result file.*"
TITLES = {
    "cold": "empty caches",
    "warm": "the same caches again",
    "at_once": "two servers at once on one empty cache",
    "read_only": "a home that cannot be written",
    "read_only_two_moved": "the same, `VLLM_CACHE_ROOT` and `FLASHINFER_WORKSPACE_BASE` elsewhere",
    "read_only_three_moved": "the same, these and `TRITON_HOME` elsewhere",
    "read_only_all_moved": "the same, every cache elsewhere",
}
SERVERS = {
    "plain": "bf16, prefix caching",
    "ngram": "speculation (n-grams, 4 tokens)",
    "fp8": "fp8 KV cache",
    "full_graphs": "`-cc.cudagraph_mode=FULL`",
    "control_plain": "bf16, prefix caching",
    "control_ngram": "speculation (n-grams, 4 tokens)",
}


def source_line(env: dict[str, Any], path: str) -> str:
    """Where figures come from: GPU, versions, date, commit and file."""
    versions = ", ".join(f"{name} {env.get(name)}" for name in ("vllm", "torch", "triton"))
    commit = str(env.get("commit") or "unknown")[:12]
    load = env.get("load_average_at_end")
    crowd = f", at the end a load of {load[0]:.0f}" if load else ""
    return (
        f"{env.get('gpu')} and {env.get('cpus')} CPU cores{crowd}, {versions}, {env['date'][:10]}, "
        f"commit {commit} ([{Path(path).name}](../{path}))."
    )


def seconds(row: dict[str, Any], name: str) -> str:
    """One cell with a time; empty where a backend says nothing of it."""
    return f"{row[name]:.1f}" if row.get(name) else ""


def start_row(row: dict[str, Any]) -> str:
    """One start as a row of the table."""
    title = TITLES[row["name"]]
    if "skipped" in row:
        return f"| {title} | {row['backend']} | not tried: {row['skipped']} | | | |"
    if "seconds" not in row:
        return f"| {title} | {row['backend']} | did not come up | | | |"
    kinds = ("our_compilation_s", "torch_compile_s", "graph_capture_s")
    cells = " | ".join(seconds(row, name) for name in kinds)
    return f"| {title} | {row['backend']} | {row['seconds']:.0f} | {cells} |"


def start_table(root: Path) -> str:
    """What starts took."""
    paths = [f"{RESULTS}/{name}" for name in STARTS if (root / RESULTS / name).exists()]
    if not paths:
        return NONE
    found = [json.loads((root / path).read_text()) for path in paths]
    rows = [row for result in found for row in result["rows"]]
    lines = [
        "| caches | backend | ready after, s | our kernels, s | torch.compile, s | graphs, s |",
        "|---|---|---|---|---|---|",
        *map(start_row, rows),
    ]
    problems = [f"- **failed**: {text}" for result in found for text in result["problems"]]
    sources = [f"- {source_line(r['env'], p)}" for r, p in zip(found, paths, strict=True)]
    return "\n".join([*lines, "", *sources, *problems])


def compiled(row: dict[str, Any]) -> str:
    """What was compiled while a server served, by whose kernels."""
    parts = []
    for name, whose in (("compiled_ours", "ours"), ("compiled_others", "vLLM's")):
        if row[name]:
            parts.append(f"{whose}: {', '.join(f'`{kernel}`' for kernel in row[name])}")
    if parts:
        return "; ".join(parts)
    return "nothing" if not row["problems"] else f"**failed**: {row['problems'][0][:200]}"


def jit_table(root: Path) -> str:
    """What the JIT monitor saw."""
    path = f"{RESULTS}/jit_monitor.json"
    if not (root / path).exists():
        return NONE
    found = json.loads((root / path).read_text())
    lines = [
        "| backend | server | monitor | requests | prompt lengths | largest batch | compiled while serving |",  # noqa: E501
        "|---|---|---|---|---|---|---|",
    ]
    order = list(SERVERS)
    for row in sorted(found["rows"], key=lambda r: (order.index(r["server"]), r["mode"])):
        cells = [row["backend"], SERVERS[row["server"]], row["mode"], "", "", ""]
        if row.get("requests"):
            lengths = f"{row['shortest']} to {row['longest']}"
            cells[3:] = [str(row["requests"]), lengths, str(row["largest_batch"])]
        lines.append(f"| {' | '.join([*cells, compiled(row)])} |")
    return "\n".join([*lines, "", source_line(found["env"], path)])


REGIONS: list[tuple[str, str, Callable[[Path], str]]] = [
    ("docs/tuning.md", "cold-start", start_table),
    ("docs/robustness.md", "jit-monitor", jit_table),
]


def main() -> int:
    """Rewrite the pages or check them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    asked = parser.parse_args()
    code = 0
    for name, marker, render in REGIONS:
        path = ROOT / name
        text = path.read_text()
        made = replace_between(
            text, f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->", render(ROOT)
        )
        code |= write_or_check(path, text, made, f"{RESULTS} ({marker})", asked.check)
    return code


if __name__ == "__main__":
    sys.exit(main())
