"""``tilewise bench targets``: what we set out to reach, beside what the result files say.

A target is a ratio of times in one run, of whole servers one of requests a second, of what a step
costs once a time. Where a ratio would take more than memory or the matrix units can give, less is
asked: 0.95 of the floor, which is the layer's bytes at 4.4 TB/s and 4 µs, or 0.93 of the run's bf16
matmul. Our errors stand below beside FA3's, without a target.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.bench import host
from tilewise.bench.cases import CASES
from tilewise.bench.summary import serve_summary
from tilewise.bench.target_errors import errors_section
from tilewise.marked import not_there, page_parser, replace_between, write_or_check

BEGIN, END = "<!-- targets:begin -->", "<!-- targets:end -->"
BY_NAME = {case.name: case for case in CASES}
FLOOR_TBPS, FLOOR_US = 4.4, 4.0
OF_FLOOR = 0.95
MATMUL_LIMIT, OF_MATMUL = 0.96, 0.93
# The best of these is "the best peer", each at its best page size.
PEERS = ("fa3", "fa3_best", "flashinfer", "triton_attn")
NAMES = {
    "fa3": "FA3", "fa3_best": "FA3 at its best", "flashinfer": "FlashInfer", "cudnn": "cuDNN",
    "flashinfer_cascade": "FlashInfer's cascade", "peer": "the best peer", "tilewise": "ours",
}  # fmt: skip

TABLE = ("| case | wanted | found | run | |", "|---|---|---:|---|---|")
WORKLOADS = ("s_1k_128_c64", "s_16k_256_c16", "s_8k_1k_c8", "s_8k_1k_c64", "s_ragged_c32")
SERVE_PEER, SERVE_RUNS = "FLASH_ATTN", 3
SERVE_MEAN, SERVE_WORST = 1.03, 0.99
LATENCIES = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")
VERDICTS = {True: "met", False: "**missed**", None: f"less than {SERVE_RUNS} runs"}
OF_OURS = {"tilewise_fp8": " (fp8 products)", "tilewise_shared": " (common pages read once)"}
# Where a miss has entries of its own in the lab book; the page names every other.
TRIED = {
    "pf_1x16k", "pf_8x2k", "pf_d64_1x16k", "pf_cap50_1x16k", "pf_fp8_1x16k", "dec_mqa_b32_8k",
    "dec_b128_2k", "dec_b256_1k",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """One wanted ratio.

    Parameters
    ----------
    case : str
        The case that is timed.
    ratio : float
        Least speed relative to ``other``.
    other : str
        A provider; ``peer``, the best of ``PEERS``; ``matmul`` or ``copy``, the run's ceilings.
    against : str
        Case that the other is timed on; empty: the same.
    provider : str
        Which of ours.
    """

    case: str
    ratio: float
    other: str
    against: str = ""
    provider: str = "tilewise"


def _all() -> Iterator[tuple[str, Target]]:
    """Areas and targets, in the order of the page."""
    area = "prefill, head size 128"
    for case in ("pf_1x16k", "pf_8x2k", "pf_chunk2k_64k"):
        yield area, Target(case, 1.10, "fa3")
        yield area, Target(case, 1.02, "fa3_best")
        yield area, Target(case, 1.10, "flashinfer")
    for case in ("pf_1x16k", "pf_8x2k"):
        yield area, Target(case, 1.10, "cudnn")
    yield area, Target("pf_1x16k", 0.92, "matmul")
    for case in ("pf_ragged", "pf_32x512"):
        yield area, Target(case, 1.08, "fa3")
    area = "prefill, other shapes"
    yield area, Target("pf_d64_1x16k", 1.05, "fa3")
    yield area, Target("pf_d256_1x8k", 1.00, "fa3")
    yield area, Target("pf_sink_w128_1x8k", 1.10, "fa3")
    yield area, Target("pf_cap50_1x16k", 1 / 1.10, "tilewise", "pf_1x16k")
    area = "mixed batches"
    for case in ("mix_63x4k_2k_8k", "mix_128x2k_2x2k"):
        yield area, Target(case, 1.15, "fa3")
    area = "decode, 1 GB of keys and values or more"
    for case in ("dec_b64_8k", "dec_b256_4k", "dec_mha_b32_4k"):
        yield area, Target(case, 1.00, "peer")
        yield area, Target(case, 1.00, "copy")
    area = "decode"
    for case in ("dec_b32_4k", "dec_b128_2k", "dec_b256_1k", "dec_b1_128k"):
        yield area, Target(case, 1.04, "peer")
    for case, ratio in (("dec_b8_4k", 1.20), ("dec_mqa_b32_8k", 1.20), ("dec_d64_b64_4k", 1.10)):
        yield area, Target(case, ratio, "peer")
    yield area, Target("dec_b1_8k", 1.30, "peer")
    yield area, Target("dec_b1_1k", 1.30, "fa3")
    yield area, Target("dec_b1_1k", 1.10, "peer")
    yield area, Target("dec_sink_w128_b64_32k", 1.20, "peer")
    area = "decode, ragged"
    for case in ("dec_ragged64", "dec_zipf_b32", "dec_zipf_b128", "dec_zipf_b256"):
        yield area, Target(case, 1.08, "peer")
    area = "speculation"
    for batch in ("b8_32k", "b32_32k"):
        for case in (f"spec4_{batch}", f"spec8_{batch}"):
            yield area, Target(case, 1 / 1.10, "tilewise", f"dec_{batch}")
            yield area, Target(case, 1.05, "fa3")
    area = "fp8"
    yield area, Target("dec_fp8_b256_4k", 1.25, "fa3")
    yield area, Target("dec_fp8_b256_4k", 1.70, "tilewise", "dec_b256_4k")
    yield area, Target("pf_fp8_1x16k", 1.25, "tilewise", "pf_1x16k", "tilewise_fp8")
    yield area, Target("pf_fp8_1x16k", 1.00, "fa3", "", "tilewise_fp8")
    area = "shared prefixes"
    for case in ("dec_prefix_b64_32k", "dec_prefix_4x16_32k"):
        yield area, Target(case, 5.00, "tilewise", "", "tilewise_shared")
        yield area, Target(case, 0.90, "flashinfer_cascade", "", "tilewise_shared")


TARGETS: tuple[tuple[str, Target], ...] = tuple(_all())


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that something may take.

    Parameters
    ----------
    call : str
        Of a row of ``tilewise bench host``.
    most_us : float
        Largest median.
    name : str
        For the page; empty: the call.
    requests : int
        That the command was given.
    """

    call: str
    most_us: float
    name: str = ""
    requests: int = 256


BOUNDS = (
    Bound(host.ON_GPU.format("decode of 256 requests"), 4.0),
    Bound(host.ON_GPU.format("decode of 16 requests"), 4.0),
    Bound(host.ON_GPU.format("prefill of 16 requests"), 4.0),
    Bound(host.BUILD, 60.0, "build() of 256 requests, on the host"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target's outcome in one run.

    Parameters
    ----------
    wanted, found : float
        Ratios, or shares of a limit where ``limit`` names one.
    limit : str
        What the target was lowered to a share of; empty where it stands.
    """

    wanted: float
    found: float
    limit: str = ""

    @property
    def met(self) -> bool:
        """Whether it was reached."""
        return self.found >= self.wanted


def judge(target: Target, result: dict[str, Any]) -> Verdict | None:
    """Return what a run says of a target; None where it measured too little."""
    times = {(row["case"], row["provider"]): row.get("median_us") for row in result["rows"]}
    ours = times.get((target.case, target.provider))
    if not ours:
        return None
    case, env = BY_NAME[target.case], result["env"]
    matmul, copy = env.get("matmul_tflops"), env.get("copy_tbps")
    if target.other == "copy":
        return Verdict(target.ratio, case.bytes_moved / ours / 1e6 / copy) if copy else None
    if target.other == "matmul":
        return Verdict(target.ratio, case.flops / ours / 1e6 / matmul) if matmul else None
    other = target.against or target.case
    names = PEERS if target.other == "peer" else (target.other,)
    found = [time for name in names if (time := times.get((other, name)))]
    if not found:
        return None
    theirs = min(found)
    if target.other != "tilewise":
        asked = theirs / target.ratio
        floor = case.bytes_moved / FLOOR_TBPS / 1e6 + FLOOR_US
        if case.kind == "decode" and asked < floor:
            return Verdict(OF_FLOOR, floor / ours, "the floor")
        bf16 = case.kv_itemsize == 2
        if matmul and bf16 and case.flops / asked / 1e6 > MATMUL_LIMIT * matmul:
            return Verdict(OF_MATMUL, case.flops / ours / 1e6 / matmul, "matmul")
    return Verdict(target.ratio, theirs / ours)


def serve_rows(result: dict[str, Any]) -> list[tuple[str, str, str, bool | None]]:
    """Return case, what is wanted, what was found and whether it is met, of whole servers.

    A latency is met if its median over runs passes the peer's by no more than the peer's own runs
    lie apart.  None instead of a verdict: some workload has run less than ``SERVE_RUNS`` times.
    """
    summary = serve_summary(result)
    found = {
        entry["workload"]: entry
        for entry in summary["ratios"]
        if entry["peer"] == SERVE_PEER and entry["metric"] == "output_throughput"
    }
    if not all(name in found for name in WORKLOADS):
        return []
    pairs = [found[name]["pairs"] for name in WORKLOADS]
    enough = min(pairs) >= SERVE_RUNS

    def verdict(is_met: bool) -> bool | None:
        return is_met if enough else None

    ratios = {name: found[name]["ratio"] for name in WORKLOADS}
    mean = statistics.geometric_mean(ratios.values())
    worst = min(ratios, key=lambda name: ratios[name])
    cells = {(cell["workload"], cell["backend"]): cell["metrics"] for cell in summary["cells"]}
    kept = 0
    for name in WORKLOADS:
        for metric in LATENCIES:
            low, middle, high = cells[name, SERVE_PEER][metric]
            kept += cells[name, summary["ours"]][metric][1] <= middle + (high - low)
    asked = len(WORKLOADS) * len(LATENCIES)
    return [
        (f"mean of {len(WORKLOADS)} workloads", f"{SERVE_MEAN:.2f} times {SERVE_PEER}",
         f"{mean:.3f}", verdict(mean >= SERVE_MEAN)),
        (f"the worst, {worst}", f"{SERVE_WORST:.2f} times {SERVE_PEER}",
         f"{ratios[worst]:.3f}", verdict(ratios[worst] >= SERVE_WORST)),
        ("median and p99 of TTFT and TPOT", f"{SERVE_PEER}'s and its own spread, or better",
         f"{kept} of {asked}", verdict(kept == asked)),
    ]  # fmt: skip


def latest(folder: Path, suite: str) -> dict[str, dict[str, Any]]:
    """Return a suite's runs by file name, from the newest on: whole runs, and those of a part."""
    paths = (*folder.glob(f"{suite}.json"), *folder.glob(f"{suite}_*.json"))
    runs = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    return dict(sorted(runs.items(), key=lambda run: run[1]["env"]["date"], reverse=True))


def _source(folder: Path, file: str, run: dict[str, Any]) -> str:
    """A run as the page names it."""
    commit = str(run["env"]["commit"])[:10]
    return f"[{Path(file).stem}](../bench/results/{folder.name}/{file}) of commit {commit}"


def wanted_text(target: Target, verdict: Verdict | None) -> str:
    """What is wanted, in words."""
    if target.other in ("matmul", "copy"):
        return f"{target.ratio:.2f} of {target.other}"
    name = NAMES[target.other]
    name += f" on {target.against}" if target.against else ""
    text = f"{target.ratio:.2f} times {name}"
    if verdict is not None and verdict.limit:
        text += f"; that passes {verdict.limit}, so {verdict.wanted:.2f} of it"
    return text


@dataclass
class Page:
    """The tables as they grow, and what their head says of them."""

    lines: list[str] = field(default_factory=list)
    verdicts: list[bool | None] = field(default_factory=list)
    not_measured: int = 0
    used: dict[str, dict[str, Any]] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)

    def area(self, name: str) -> None:
        """Begin a table."""
        self.lines += ["", f"**{name}**", "", *TABLE]

    def absent(self, case: str, wanted: str) -> None:
        """Add a row that no run has measured."""
        self.not_measured += 1
        self.lines.append(f"| {case} | {wanted} | not measured | | |")

    def row(
        self, case: str, wanted: str, found: str, met: bool | None, run: tuple[str, dict[str, Any]]
    ) -> None:
        """Add a row of a run, which is the file's name and what is in it."""
        self.verdicts.append(met)
        self.used[run[0]] = run[1]
        stem = Path(run[0]).stem
        self.lines.append(f"| {case} | {wanted} | {found} | {stem} | {VERDICTS[met]} |")

    def head(self, folder: Path) -> str:
        """How many are met, in which runs, and what was missed without having been tried for."""
        met, missed, undecided = (self.verdicts.count(value) for value in (True, False, None))
        text = f"{met} of {met + missed} met"
        text += f", {undecided} more want further runs" if undecided else ""
        text += f", {self.not_measured} not measured" if self.not_measured else ""
        text += ". Made by `tilewise bench targets`; do not edit."
        runs = [_source(folder, file, run) for file, run in self.used.items()]
        text += f" Runs: {', '.join(runs)}." if runs else ""
        rates = (run["env"].get("copy_tbps") for run in self.used.values())
        copies = [rate for rate in rates if rate]
        if copies:
            ends = dict.fromkeys(f"{rate:.2f}" for rate in (min(copies), max(copies)))
            text += f" Copies ran at {' to '.join(ends)} TB/s in these."
        if self.untried:
            text += f" Missed and not tried for: {', '.join(self.untried)}."
        return text


def add_targets(page: Page, folder: Path) -> None:
    """Add the kernels' tables: of each target the newest run that measured it."""
    runs, area = latest(folder, "kernels"), ""
    for name, target in TARGETS:
        if name != area:
            area = name
            page.area(area)
        judged = ((judge(target, run), (file, run)) for file, run in runs.items())
        verdict, run = next(((v, run) for v, run in judged if v is not None), (None, None))
        case = target.case + OF_OURS.get(target.provider, "")
        wanted = wanted_text(target, verdict)
        if verdict is None or run is None:
            page.absent(case, wanted)
            continue
        page.row(case, wanted, f"{verdict.found:.3f}", verdict.met, run)
        if not (verdict.met or target.case in TRIED or target.case in page.untried):
            page.untried.append(target.case)


def add_bounds(page: Page, folder: Path) -> None:
    """Add the table of what a step costs once: of each bound the newest run that measured it."""
    runs = latest(folder, "host")
    page.area("once a step")
    for bound in BOUNDS:
        case, wanted = bound.name or bound.call, f"at most {bound.most_us:g} µs"
        found = next(
            (
                (row["median_us"], (file, run))
                for file, run in runs.items()
                for row in run["rows"]
                if (row["call"], row["requests"]) == (bound.call, bound.requests)
            ),
            None,
        )
        if found is None:
            page.absent(case, wanted)
            continue
        median, run = found
        page.row(case, wanted, f"{median:.2f} µs", median <= bound.most_us, run)


def add_servers(page: Page, folder: Path) -> None:
    """Add the table of whole servers, if there is a run of them."""
    file = folder / "serve.json"
    if not file.exists():
        return
    serve = json.loads(file.read_text(encoding="utf-8"))
    page.area("whole servers")
    for case, wanted, reached, is_met in serve_rows(serve):
        page.row(case, wanted, reached, is_met, (file.name, serve))


def add_errors(page: Page, folder: Path) -> None:
    """Add our errors beside FA3's, of the whole suite's run; no target judges them."""
    file = folder / "kernels.json"
    if file.exists():
        run = json.loads(file.read_text(encoding="utf-8"))
        ours = {"tilewise": "", **OF_OURS}
        page.lines += errors_section(run, _source(folder, file.name, run), ours)


def section(folder: Path) -> str:
    """Return the tables of all targets, how many are met, and the errors."""
    page = Page()
    add_targets(page, folder)
    add_bounds(page, folder)
    add_servers(page, folder)
    add_errors(page, folder)
    return "\n".join([page.head(folder), *page.lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the page's section; with ``--check`` only say whether it is up to date (else 1)."""
    parser = page_parser("tilewise bench targets", __doc__, "--doc", Path("docs/targets.md"))
    args = parser.parse_args(argv)
    if absent := not_there(args.page, args.results):
        print(absent, file=sys.stderr)
        return 2
    text = args.page.read_text(encoding="utf-8")
    new = replace_between(text, BEGIN, END, section(args.results))
    return write_or_check(args.page, text, new, str(args.results), args.check, args.json)


if __name__ == "__main__":
    raise SystemExit(main())
