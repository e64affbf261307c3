"""``tilewise bench publish``: the README's result section, made from the result files."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewise.bench.cases import CASES
from tilewise.marked import not_there, page_parser, replace_between, write_or_check

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
HEADINGS = {
    "tilewise": "tilewise", "tilewise_plain": "plain Triton only",
    "tilewise_shared": "shared prefixes", "flashinfer_cascade": "FlashInfer's cascade",
    "tilewise_fp8": "fp8 products", "tilewise_fp8_plain": "fp8 products, plain Triton",
    "tilewise_p16": "pages of 16", "tilewise_p128": "pages of 128",
    "tilewise_hnd": "heads outside tokens",
    "fa3": "FLASH_ATTN (FA3)", "fa3_best": "FA3 at its best", "flashinfer": "FLASHINFER",
    "triton_attn": "TRITON_ATTN", "cudnn": "cuDNN",
}  # fmt: skip

KERNEL_NOTES = (
    "`-`: not measured in that run, or not computed by that backend; the file has the reason. "
    "`pf_fp8_*` read an fp8 cache: our kernels convert it to 16 bits unless "
    "`TILEWISE_FP8_ATTENTION` allows *fp8 products* ([tuning](tuning.md)); FA3 always takes "
    "fp8 products, and a query in fp8."
)


# What the README shows of all that.
IN_SHORT = (
    "pf_1x16k", "pf_8x2k", "pf_chunk2k_64k", "pf_ragged", "mix_63x4k_2k_8k", "dec_b8_4k",
    "dec_b64_8k", "dec_ragged64", "dec_zipf_b256", "dec_fp8_b256_4k",
)  # fmt: skip
IN_SHORT_PROVIDERS = ("tilewise", "fa3", "flashinfer", "triton_attn")


def kernel_section(
    result: dict[str, Any],
    cases: Sequence[str] | None = None,
    shown: Sequence[str] = tuple(HEADINGS),
) -> str:
    """Return a markdown table of µs for each case, all by default, and ours relative to FA3."""
    found = {(row["case"], row["provider"]): row for row in result["rows"]}
    providers = [p for p in shown if any(row["provider"] == p for row in result["rows"])]
    lines = [
        "| case | " + " | ".join(HEADINGS[p] for p in providers) + " | speed ÷ FA3 |",
        "|---|" + "---:|" * (len(providers) + 1),
    ]
    for case in CASES:
        times = [found.get((case.name, p), {}).get("median_us") for p in providers]
        ours, fa3 = (found.get((case.name, p), {}).get("median_us") for p in ("tilewise", "fa3"))
        if ours is None or (cases is not None and case.name not in cases):
            continue
        cells = ["-" if t is None else f"{t:,.1f}" if t < 100 else f"{t:,.0f}" for t in times]
        ratio = f"{fa3 / ours:.2f}x" if fa3 else "-"
        lines.append(f"| {case.name} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


def later_runs(folder: Path, whole: dict[str, Any]) -> list[str]:
    """Return a table for each ``kernels_*.json`` that is newer than the whole suite's.

    It holds some cases, with peers of its own: cards differ.
    """
    found = []
    for path in sorted(folder.glob("kernels_*.json")):
        new = json.loads(path.read_text(encoding="utf-8"))
        if new["env"]["date"] > whole["env"]["date"]:
            where = f"`bench/results/{folder.name}/{path.name}`"
            found.append(f"Measured since, on some cases. {describe(new['env'])} From {where}.")
            found.append(kernel_section(new))
    return found


def earlier_runs(folder: Path, newest: dict[str, Any]) -> list[str]:
    """Return a sentence for each older ``kernels_*.json`` that holds what the newest leaves out."""
    found = []
    runs = {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("kernels_*.json"))
    }
    begin = newest["env"]["date"]
    later = [run for run in runs.values() if run["env"]["date"] > begin]
    shown = {
        kind: {row[kind] for run in (newest, *later) for row in run["rows"]}
        for kind in ("case", "provider")
    }
    for name, old in runs.items():
        if old["env"]["date"] > begin:
            continue
        more = {kind: {row[kind] for row in old["rows"]} - known for kind, known in shown.items()}
        absent = [HEADINGS[p] for p in HEADINGS if p in more["provider"]]
        absent += [case.name for case in CASES if case.name in more["case"]]
        if absent:
            found.append(
                f"`bench/results/{folder.name}/{name}` (commit "
                f"{str(old['env']['commit'])[:10]}) has, besides earlier figures: "
                f"{', '.join(absent)}."
            )
    return found


def serve_section(result: dict[str, Any]) -> str:
    """Return a markdown table of medians for each workload and backend."""
    lines = [
        "| workload | backend | requests/s | median TTFT, ms | median TPOT, ms |",
        "|---|---|---:|---:|---:|",
    ]
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        cells.setdefault((row["workload"], row["backend"]), []).append(row)
    # Rows came as the servers took turns; readers compare the backends of a workload.
    order = list(dict.fromkeys(workload for workload, _ in cells))
    for (workload, backend), rows in sorted(
        cells.items(), key=lambda cell: order.index(cell[0][0])
    ):
        good = [row for row in rows if not row.get("error")]
        if not good:
            what = rows[0]["error"].splitlines()[0]
            lines.append(f"| {workload} | {backend} | void: {what} | - | - |")
            continue
        rate, ttft, tpot = (
            statistics.median(row[name] for row in good)
            for name in ("request_throughput", "p50_ttft_ms", "p50_tpot_ms")
        )
        few = f" ({len(good)} of {len(rows)} runs)" if len(good) < len(rows) else ""
        lines.append(f"| {workload} | {backend} | {rate:.2f}{few} | {ttft:,.0f} | {tpot:.1f} |")
    return "\n".join(lines)


def runs_text(result: dict[str, Any]) -> str:
    """Return how often each workload ran with each backend."""
    counts = Counter((row["workload"], row["backend"]) for row in result["rows"]).values()
    fewest, most = min(counts), max(counts)
    if most == 1:
        return "one run each"
    times = str(most) if fewest == most else f"{fewest} to {most}"
    void = ", void ones left out" if any(row.get("error") for row in result["rows"]) else ""
    return f"medians of {times} runs{void}"


def serve_text(what: str, result: dict[str, Any], where: str) -> list[str]:
    """Return a sentence and the table of one file of `tilewise bench serve`."""
    env = result["env"]
    head = f"{what}, {runs_text(result)}. {describe(env)} From {where}. "
    return [f"{head}Command: `{env['command']}`.", "", serve_section(result)]


def other_serve_text(result: dict[str, Any], where: str) -> list[str]:
    """Return the same for a file beside the whole run's: of shared prefixes, or an older one."""
    shared = all(row["workload"].startswith("s_prefix") for row in result["rows"])
    return serve_text("Shared prefixes" if shared else "Before, with more backends", result, where)


def describe(env: dict[str, Any]) -> str:
    """Return one sentence on where the figures come from."""
    parts = [
        f"{env['gpu']} ({env['power_limit']} limit, driver {env['driver']})",
        f"torch {env['torch']}", f"Triton {env['triton']}", f"vLLM {env['vllm']}",
        f"FlashInfer {env['flashinfer']}", f"commit {str(env['commit'])[:10]}",
    ]  # fmt: skip
    return f"{', '.join(parts)}, {str(env['date'])[:10]}."


def short_section(folder: Path) -> str:
    """Return what the README shows of the results in ``folder``."""
    kernels = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    serve = json.loads((folder / "serve.json").read_text(encoding="utf-8"))
    rates: dict[str, dict[str, list[float]]] = {}
    for row in serve["rows"]:
        if not row.get("error"):
            of_workload = rates.setdefault(row["workload"], {})
            of_workload.setdefault(row["backend"], []).append(row["request_throughput"])
    lines = [
        "Made by `tilewise bench publish`; do not edit. [All cases and peers](docs/results.md).",
        "",
        "**Kernels**, µs of one layer (median; bf16, peers at pages of 16, ours at 64). "
        f"{describe(kernels['env'])}",
        "",
        kernel_section(kernels, IN_SHORT, IN_SHORT_PROVIDERS),
        "",
        f"**`vllm bench serve`**, Llama 3.1 8B shape, requests a second, {runs_text(serve)}. "
        f"{describe(serve['env'])}",
        "",
        "| workload | TILEWISE | FLASH_ATTN | ratio |",
        "|---|---:|---:|---:|",
    ]
    for workload, of_workload in rates.items():
        ours, peer = (
            statistics.median(of_workload[name]) if name in of_workload else None
            for name in ("TILEWISE", "FLASH_ATTN")
        )
        if ours and peer:
            lines.append(f"| {workload} | {ours:.2f} | {peer:.2f} | {ours / peer:.3f} |")
    return "\n".join(lines)


def section(folder: Path) -> str:
    """Return the whole page's section for the results in ``folder``."""
    kernels = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    serve = json.loads((folder / "serve.json").read_text(encoding="utf-8"))
    others = sorted(folder.glob("serve_*.json"))
    where = f"`bench/results/{folder.name}"
    return "\n".join(
        [
            "Made by `tilewise bench publish`; do not edit.",
            "",
            f"**Kernels**, µs of one layer (median; bf16, peers at pages of 16, ours at 64). "
            f"{describe(kernels['env'])} From {where}/kernels.json`.",
            "",
            kernel_section(kernels),
            "",
            KERNEL_NOTES,
            "",
            *(line for text in later_runs(folder, kernels) for line in (text, "")),
            *(line for text in earlier_runs(folder, kernels) for line in (text, "")),
            *serve_text(
                "**`vllm bench serve`**, Llama 3.1 8B shape", serve, f"{where}/serve.json`"
            ),
            *(
                line
                for path in others
                for line in (
                    "",
                    *other_serve_text(
                        json.loads(path.read_text(encoding="utf-8")), f"{where}/{path.name}`"
                    ),
                )
            ),
        ]
    )


def replace_section(text: str, body: str) -> str:
    """Return ``text`` with what stands between the markers replaced.

    Raises
    ------
    ValueError
        When the markers are not there exactly once.
    """
    return replace_between(text, BEGIN, END, body)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite both sections; with ``--check`` only say whether they are up to date (else 1)."""
    parser = page_parser("tilewise bench publish", __doc__, "--readme", Path("README.md"))
    parser.add_argument(
        "--doc", type=Path, default=Path("docs/results.md"), metavar="FILE.md",
        help="the page with all tables, rewritten too (default: %(default)s)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if absent := not_there(args.page, args.doc, args.results):
        print(absent, file=sys.stderr)
        return 2
    code = 0
    for page, made in ((args.page, short_section), (args.doc, section)):
        text = page.read_text(encoding="utf-8")
        new = replace_section(text, made(args.results))
        code |= write_or_check(page, text, new, str(args.results), args.check, args.json)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
