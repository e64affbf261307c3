"""The benchmarks without a GPU: cases, rates, result files, tables, commands, the gate."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewise.bench import (
    gpu,
    kernels,
    providers,
    publish,
    report,
    timing,
)  # fmt: skip
from tilewise.bench.cases import CASES, Case, select_cases, shrink
from tilewise.bench.inputs import SPARE_PAGES, CaseInputs, copies_for

NAMES = [
    "pf_1x16k", "pf_8x2k", "pf_32x512", "pf_chunk2k_64k", "pf_ragged", "pf_d64_1x16k",
    "pf_d256_1x8k", "pf_d96_1x16k", "pf_cap50_1x16k", "pf_sink_w128_1x8k", "pf_fp8_1x16k",
    "pf_fp8_8x2k", "mix_63x4k_2k_8k", "mix_128x2k_2x2k", "dec_b1_1k",
    "dec_b1_8k", "dec_b1_128k", "dec_b8_4k", "dec_b32_4k", "dec_b64_8k", "dec_b128_2k",
    "dec_b256_1k", "dec_b256_4k", "dec_ragged64", "dec_zipf_b32", "dec_zipf_b128",
    "dec_zipf_b256", "dec_d64_b64_4k", "dec_mqa_b32_8k", "dec_mha_b32_4k",
    "dec_sink_w128_b64_32k", "dec_fp8_b8_4k", "dec_fp8_b64_8k", "dec_fp8_b256_4k", "dec_b8_32k",
    "dec_b32_32k", "spec4_b8_32k", "spec8_b8_32k", "spec4_b32_32k", "spec8_b32_32k",
    "dec_prefix_b64_32k", "dec_prefix_4x16_32k",
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def brute_force(case: Case) -> tuple[int, int]:
    """Return unmasked pairs and keys seen, counted one by one."""
    pairs = keys = 0
    for request, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        seen = set()
        for row in range(q_len):
            last = kv_len - q_len + row
            first = 0 if case.window is None else max(0, last - case.window + 1)
            pairs += last - first + 1
            seen.update(range(first, last + 1))
        first = case.leader(request) == request
        keys += sum(first or key >= case.prefix for key in seen)
    return pairs, keys


def test_the_suite_has_exactly_the_named_cases():
    assert [case.name for case in CASES] == NAMES


@pytest.mark.parametrize("case", [shrink(case, 200, 4) for case in CASES], ids=NAMES)
def test_work_agrees_with_counting(case: Case):
    pairs, keys = brute_force(case)
    assert (case.unmasked_pairs, case.keys_read) == (pairs, keys)


def test_flops_and_bytes_by_hand():
    prefill = BY_NAME["pf_1x16k"]
    assert prefill.flops == 4 * 128 * 32 * (16384 * 16385 // 2)
    assert prefill.bytes_moved == 16384 * 128 * 2 * (2 * 8 + 2 * 32)
    chunk = BY_NAME["pf_chunk2k_64k"]
    assert chunk.unmasked_pairs == 2048 * 65536 - 2048 * 2047 // 2
    decode = BY_NAME["dec_b64_8k"]
    assert decode.flops == 4 * 128 * 32 * 64 * 8192
    assert decode.kv_bytes == 64 * 8192 * 8 * 128 * 2 * 2
    assert BY_NAME["dec_fp8_b64_8k"].kv_bytes == decode.kv_bytes // 2
    window = BY_NAME["dec_sink_w128_b64_32k"]
    assert (window.unmasked_pairs, window.keys_read) == (64 * 128, 64 * 128)
    assert BY_NAME["spec4_b8_32k"].unmasked_pairs == 8 * (4 * 32768 - 6)


def test_shapes_that_are_given_by_a_rule():
    assert BY_NAME["dec_ragged64"].kv_lens[:4] == (1, 38, 149, 334)
    assert max(BY_NAME["dec_ragged64"].kv_lens) <= 16000
    for count in (32, 128, 256):
        lens = BY_NAME[f"dec_zipf_b{count}"].kv_lens
        assert len(lens) == count
        assert all(n % 256 == 0 and 256 <= n <= 65536 for n in lens)
    mixed = BY_NAME["mix_63x4k_2k_8k"]
    assert (mixed.num_decodes, mixed.num_tokens, mixed.max_kv_len) == (63, 2048, 8192)


def test_selecting_cases():
    assert [c.name for c in select_cases(["mix_*"])] == ["mix_63x4k_2k_8k", "mix_128x2k_2x2k"]
    assert {c.kind for c in select_cases(["prefill,mixed"])} == {"prefill", "mixed"}
    assert [c.name for c in select_cases(["spec"])] == NAMES[-6:-2]
    assert [c.name for c in select_cases(["prefix"])] == NAMES[-2:]
    assert not any(c.kv_itemsize == 1 for c in select_cases(["-fp8"]))
    with pytest.raises(ValueError, match="dec_b8_4k"):
        select_cases(["dec_b8_4kk"])


def test_a_case_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        Case("bad", "decode", (2,), (1,))


@pytest.mark.parametrize("name", ["pf_1x16k", "dec_b1_1k", "dec_b8_4k", "dec_sink_w128_b64_32k"])
def test_rotation_exceeds_the_l2(name: str):
    case = BY_NAME[name]
    assert copies_for(case, 32) * case.bytes_moved > 64 << 20
    assert copies_for(case, 32) <= 32


@pytest.mark.parametrize("hnd", [False, True], ids=["nhd", "hnd"])
def test_pages_hold_the_data_and_nothing_else_is_owned(hnd: bool):
    case = Case("tiny", "decode", (1, 2), (33, 5), num_q_heads=4, num_kv_heads=2, head_dim=16)
    inputs = CaseInputs(case, "cpu", layers=2)
    cache = inputs.paged(16, hnd)
    k, v = inputs.keys_values(1)
    assert cache.page_counts == [3, 1]
    kv = cache.kv[1]
    assert kv.shape == (4 + SPARE_PAGES, 2, 16, 32)
    assert kv.stride()[1:] == ((512, 32, 1) if hnd else (32, 64, 1))
    start = 0
    for pages, kv_len in zip(providers.pages_of(cache), case.kv_lens, strict=True):
        got = kv[pages.long()].transpose(1, 2).reshape(-1, 2, 32)[:kv_len]
        assert torch.equal(got[..., :16], k[start : start + kv_len])
        assert torch.equal(got[..., 16:], v[start : start + kv_len])
        start += kv_len
    owned = set(torch.cat(list(providers.pages_of(cache))).tolist())
    unowned = [page for page in range(len(kv)) if page not in owned]
    assert len(unowned) == SPARE_PAGES
    assert bool(kv[unowned].isnan().all())
    assert bool(kv[sorted(owned)].isfinite().all())
    assert cache is inputs.paged(16, hnd)
    assert cache is not inputs.paged(16, not hnd)


class Torch(providers.Provider):
    """A provider in plain torch; `fault` spoils its result."""

    def __init__(self, fault: str = "") -> None:
        self.name = f"torch_{fault}" if fault else "torch"
        self.fault = fault

    def candidates(self, case: Case, inputs: CaseInputs) -> dict[str, providers.Candidate]:
        return {"plain": lambda: self._build(case, inputs)}

    def _build(self, case: Case, inputs: CaseInputs) -> providers.Runner:
        if self.fault == "raises":
            raise ValueError("cannot do this shape")

        starts = inputs.query_start_loc_cpu.tolist()
        keys = inputs.kv_start_loc.tolist()
        k, v = inputs.keys_values(0)
        group = case.num_q_heads // case.num_kv_heads

        def call() -> None:
            for i in range(case.num_reqs):
                rows, span = slice(*starts[i : i + 2]), slice(*keys[i : i + 2])
                q = inputs.q[0][rows].float()
                k_i, v_i = (x[span].float().repeat_interleave(group, 1) for x in (k, v))
                scores = torch.einsum("qhd,khd->hqk", q, k_i) * inputs.scale
                offset = case.kv_lens[i] - case.q_lens[i]
                if self.fault == "mask":
                    offset -= 1
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(offset + 1)
                p = scores.masked_fill(hidden, -math.inf).softmax(-1)
                out = torch.einsum("hqk,khd->qhd", p, v_i)
                last = -1 if self.fault == "unwritten" else None
                inputs.out[0][rows][:last] = out[:last].to(torch.bfloat16)

        return providers.Runner([call], lambda: "torch")


def run_suite(monkeypatch, tmp_path: Path, *faults: str) -> tuple[int, dict]:
    known = {p.name: p for p in map(Torch, faults)}
    monkeypatch.setattr(providers, "registry", lambda: known)
    out = tmp_path / "kernels.json"
    command = ["--smoke", "--rounds", "2", "--burst-ms", "0", "--cases", "pf_32x512", "dec_b8_4k"]
    code = kernels.main([*command, "--providers", ",".join(known), "--out", str(out)])
    return code, json.loads(out.read_text())


def test_a_run_writes_the_schema(monkeypatch, tmp_path: Path, capsys):
    code, result = run_suite(monkeypatch, tmp_path, "")
    assert code == kernels.EXIT_OK
    assert report.schema_errors(result, report.KERNEL_FIELDS) == []
    assert [row["case"] for row in result["rows"]] == ["pf_32x512", "dec_b8_4k"]
    assert all(row["median_us"] > 0 and row["rel_error"] < 5e-3 for row in result["rows"])
    assert {"date", "command", "commit", "torch", "triton", "vllm", "gpu"} <= set(result["env"])
    assert result["env"]["command"].startswith("tilewise bench kernels --smoke")
    assert "dec_b8_4k" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["mask", "unwritten"])
def test_a_wrong_result_fails_the_gate(monkeypatch, tmp_path: Path, fault: str):
    code, result = run_suite(monkeypatch, tmp_path, "", fault)
    assert code == kernels.EXIT_GATE
    rows = [row for row in result["rows"] if row["provider"] == f"torch_{fault}"]
    assert all(row["gate"] == "failed" and row["median_us"] is None for row in rows)
    assert all(row["median_us"] for row in result["rows"] if row["provider"] == "torch")


def test_a_provider_that_raises_is_recorded(monkeypatch, tmp_path: Path):
    code, result = run_suite(monkeypatch, tmp_path, "", "raises")
    assert code == kernels.EXIT_OK
    rows = [row for row in result["rows"] if row["provider"] == "torch_raises"]
    assert len(rows) == 2
    assert all("ValueError: cannot do this shape" in row["error"] for row in rows)


def test_a_spent_budget_leaves_rows_that_say_so(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(providers, "registry", lambda: {"torch": Torch()})
    out = tmp_path / "k.json"
    arguments = ["--smoke", "--providers", "torch", "--budget-seconds", "-1", "--out", str(out)]
    assert kernels.main(arguments) == kernels.EXIT_OK
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"] for row in rows] == NAMES
    assert all("budget" in row["error"] for row in rows)


def test_missing_peers_say_why():
    known = providers.registry()
    assert tuple(known) == kernels.PROVIDERS
    shared, cascade = known["tilewise_shared"], known["flashinfer_cascade"]
    assert shared.unsupported(BY_NAME["dec_prefix_b64_32k"]) is None
    assert shared.unsupported(BY_NAME["pf_8x2k"])
    assert cascade.unsupported(BY_NAME["dec_prefix_4x16_32k"]) is None
    assert cascade.unsupported(BY_NAME["dec_b8_4k"])
    absent = providers.Fa3()
    absent.module = "no_such_module_at_all"
    assert "no_such_module_at_all" in absent.missing()
    assert all(known["tilewise"].unsupported(case) is None for case in CASES)
    assert known["cudnn"].unsupported(BY_NAME["dec_b8_4k"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dec_prefix_b64_32k", "dec_prefix_4x16_32k"])
def test_requests_of_a_group_begin_with_the_same_pages(name, device):
    """With the keys that they would have in their own; shared or not, results are right."""
    whole = BY_NAME[name]
    case = shrink(whole, 700, 8)
    assert (case.prefix, case.num_reqs) == (640, 8)
    inputs = CaseInputs(case, str(device), 1)
    table = inputs.paged(64).block_table.tolist()
    for request, row in enumerate(table):
        assert row[:10] == table[case.leader(request)][:10]
    leaders = {case.leader(request) for request in range(case.num_reqs)}
    assert len({tuple(row[:10]) for row in table}) == len(leaders) == whole.prefix_groups
    for provider in ("tilewise", "tilewise_shared"):
        built = providers.registry()[provider].candidates(case, inputs)["page 64"]()
        inputs.poison_outputs()
        built.calls[0]()
        assert inputs.check().passed
    assert "prefix_decode" in built.path()


@pytest.mark.parametrize(
    "name",
    [
        "dec_b8_4k",
        "dec_fp8_b8_4k",
        "dec_fp8_b64_8k",
        "dec_sink_w128_b64_32k",
        "pf_d96_1x16k",
        "pf_cap50_1x16k",
        "pf_sink_w128_1x8k",
    ],
)
def test_our_own_provider_passes_the_gate(name, device):
    case = shrink(BY_NAME[name], 40, 2)
    inputs = CaseInputs(case, str(device), layers=1)
    inputs.poison_outputs()
    (build,) = providers.Tilewise().candidates(case, inputs).values()
    runner = build()
    runner.calls[0]()
    gate = inputs.check()
    assert gate.passed
    assert gate.rel_error < 8e-3  # an fp8 cache costs us no more: queries are not quantised
    assert runner.path().startswith("tilewise page 64: ")


def test_fp8_products_pass_the_gate_and_nothing_else_takes_them(device):
    provider = providers.Tilewise("tilewise_fp8", fp8_matmul=True)
    assert provider.unsupported(BY_NAME["pf_1x16k"])
    assert provider.unsupported(BY_NAME["dec_fp8_b8_4k"])
    assert provider.unsupported(BY_NAME["pf_fp8_1x16k"]) is None
    case = shrink(BY_NAME["pf_fp8_8x2k"], 100, 2)
    inputs = CaseInputs(case, str(device), layers=1)
    inputs.poison_outputs()
    (build,) = provider.candidates(case, inputs).values()
    build().calls[0]()
    gate = inputs.check()
    assert gate.passed
    assert gate.rel_error > 8e-3  # rounded queries show


@pytest.mark.gpu
def test_graph_timer_on_the_device():
    x = torch.zeros(1 << 20, device="cuda")
    timer = timing.GraphTimer([lambda: x.add_(1.0)], layers=8)
    times = timing.interleave({"a": timer}, rounds=2, burst_ms=1.0)["a"]
    assert all(time_us > 0 for time_us in times)
    assert gpu.GpuMonitor.start().summary() == {}


def test_statistics():
    summary = timing.summarize([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (summary.median_us, summary.spread_us, summary.samples) == (3.0, 2.0, 5)
    assert timing.layers_for(10.0, 32, 3) == 32
    assert timing.layers_for(29_000.0, 32, 2) == 4
    assert timing.layers_for(3_600.0, 32, 2) == 16


class Clock:
    """A timer that answers with its own name's length and logs the order of bursts."""

    layers = 4

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def burst(self, count: int) -> list[float]:
        self.log.append(self.name)
        return [float(len(self.name))] * count


def test_interleaving_starts_each_round_with_another_provider():
    log: list[str] = []
    times = timing.interleave({n: Clock(n, log) for n in ("a", "bb", "ccc")}, 3, 0.0)
    assert log[3:] == ["a", "bb", "ccc", "bb", "ccc", "a", "ccc", "a", "bb"]
    assert times == {"a": [1.0] * 6, "bb": [2.0] * 6, "ccc": [3.0] * 6}


def test_table_shows_rates_and_ratios():
    decode, prefill = BY_NAME["dec_b64_8k"], BY_NAME["pf_1x16k"]
    rows = [
        report.timed_row(decode, "tilewise", 500.0, 1.0, 2e-3, "p"),
        report.timed_row(decode, "fa3", 490.0, 1.0, 2e-3, "p"),
        report.timed_row(prefill, "tilewise", 4000.0, 1.0, 2e-3, "p"),
        report.failed_row(prefill, "fa3", "no"),
        report.failed_row(prefill, "cudnn", "wrong", gate="failed"),
    ]
    table = report.kernel_table(rows)
    assert re.search(r"dec_b64_8k +500\.0 us 4\.30 TB 0\.98x +490\.0 us", table)
    assert re.search(r"pf_1x16k +4000\.0 us 550 TF +- +failed", table)


def test_schema_faults_are_named():
    result = {"rows": [{"case": "x", "median_us": math.nan}]}
    faults = report.schema_errors(result, report.KERNEL_FIELDS)
    assert "no 'env'" in faults
    assert "row 0: no 'provider'" in faults
    assert "row 0: median_us is nan" in faults


def test_help_exits_with_zero(capsys):
    with pytest.raises(SystemExit) as stop:
        kernels.main(["--help"])
    assert stop.value.code == 0
    assert "--out" in capsys.readouterr().out


def test_usage_errors(capsys):
    assert kernels.main(["--cases", "nothing_like_it"]) == kernels.EXIT_USAGE
    assert kernels.main(["--providers", "fa9"]) == kernels.EXIT_USAGE
    capsys.readouterr()
    assert kernels.main(["--list"]) == kernels.EXIT_OK
    assert all(name in capsys.readouterr().out for name in NAMES[:1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_timing_needs_a_gpu(capsys):
    assert kernels.main(["--cases", "dec_b8_4k"]) == kernels.EXIT_USAGE
    assert "--smoke" in capsys.readouterr().err


def test_the_readme_shows_the_published_results():
    """The tables in the README are those of the result files, to the last digit."""
    root = Path(__file__).resolve().parent.parent
    pages = ["--readme", str(root / "README.md"), "--doc", str(root / "docs/results.md")]
    options = ["--results", str(root / "bench/results/h200"), *pages]
    assert publish.main([*options, "--check"]) == 0


def test_publishing_replaces_only_what_stands_between_the_markers(tmp_path):
    results = Path(__file__).resolve().parent.parent / "bench/results/h200"
    readme, page = tmp_path / "README.md", tmp_path / "results.md"
    for file in (readme, page):
        file.write_text(f"head\n{publish.BEGIN}\nold\n{publish.END}\ntail\n")
    options = ["--results", str(results), "--readme", str(readme), "--doc", str(page)]
    assert publish.main([*options, "--check"]) == 1
    assert publish.main(options) == 0
    for file in (readme, page):
        text = file.read_text()
        assert text.startswith("head\n")
        assert text.endswith("\ntail\n")
        assert "old" not in text
        assert "| dec_b64_8k |" in text
    assert [f"| {name} |" in readme.read_text() for name in publish.IN_SHORT].count(False) == 0
    assert publish.main([*options, "--check"]) == 0
    page.write_text(page.read_text().replace("dec_b1_1k", "dec_b1_2k"))
    assert publish.main([*options, "--check"]) == 1
    page.write_text("no markers")
    with pytest.raises(ValueError, match="once each"):
        publish.main(options)


SMOKED = [
    "dec_b8_4k",
    "dec_fp8_b8_4k",
    "dec_sink_w128_b64_32k",
    "pf_d96_1x16k",
    "pf_cap50_1x16k",
    "pf_sink_w128_1x8k",
]


def test_smoke_needs_no_gpu_and_checks_results():
    """The command itself, in a plain environment: it turns the interpreter on by itself."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tilewise.cli", "bench", "kernels", "--smoke"]
    done = subprocess.run(
        [*command, "--cases", *SMOKED], env=env, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = [line.split() for line in done.stdout.splitlines() if "]" not in line]
    rows = [row for row in table if row and row[0] in SMOKED]
    assert {row[0] for row in rows} == set(SMOKED)
    if not torch.cuda.is_available():
        assert all(row[1:] == ["passed", "passed"] for row in rows)
