"""Which GPU tests show each native feature, and whether they passed: ``gpu_cells.py FILE ...``.

A FILE is JUnit's, or what ``pytest -v`` printed: a run that was cut leaves no other.

``ROWS`` has every native row of the support table, ``OTHERS`` what is promised besides. A cell is
shown when each of its tests has a case that passed and none that failed. Of a case that is in
several files the last one counts. Exit status: 0 if every cell is shown, else 1.

``gpu_cells.py --readme`` writes the list into ``tests/README.md``; ``test_gpu_cells`` keeps both
in step with the tests.
"""

from __future__ import annotations

import argparse
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from tilewise import support
from tilewise.marked import replace_between, write_or_check

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- gpu-cells:begin -->", "<!-- gpu-cells:end -->"

LONG = "test_features_gpu.py::test_matches_reference"
DRAFTS = "test_features_gpu.py::test_verification_matches_reference"
KERNELS = "test_kernels.py::test_matches_reference"
ZOO = "test_model_zoo.py::test_tokens_equal_hugging_face"
ENGINE = "test_gpu_engine.py::test_tokens_agree_with_flash_attn"
RANKS = "test_several_gpus.py::test_tokens_agree_with_one_gpu"
WORKERS = "test_several_gpus.py::test_the_plugin_runs_in_every_worker"
VLLM = "test_vllm_features_gpu.py"
DRAFTERS = f"{VLLM}::test_drafters_draft_right_and_change_no_token"
ENCODERS = "test_encoder_models.py::test_vectors_equal_hugging_face"

# Tests by row of the support table: `file::test`, or `file::test[pattern]` for some of its cases.
# Those of kernels run prefill and decode against fp32; those of engines compare tokens.
ROWS: dict[str, tuple[str, ...]] = {
    "head_size": (
        KERNELS, f"{LONG}[d*]", "test_wide_heads.py::test_matches_reference", f"{LONG}[gemma_4*]",
        "test_field_failures_shapes.py::test_h6_head_sizes_between_powers_of_two",
        f"{ZOO}[phi3]", f"{ZOO}[gemma4]",
    ),
    "dtype": (KERNELS, "test_cuda_graph.py::test_matches_reference", ENGINE, f"{ZOO}[qwen3]"),
    "kv_same": (KERNELS, "test_cache_write.py::test_rows_land_in_their_slots_and_nowhere_else",
                ENGINE),
    "group_size": (
        f"{LONG}[ratio_*]", "test_field_failures_shapes.py::test_h2_any_ratio_of_heads",
        "test_field_failures_shapes.py::test_h5_each_group_reads_its_own_keys",
    ),
    "block_size": (
        f"{LONG}[pages_of_*]", "test_field_failures_shapes.py::test_h11_pages_of_hybrid_models",
        f"{ZOO}[granite_hybrid]",
    ),
    "capability": (KERNELS,),
    "speculative": (
        DRAFTS, "test_cuda_graph.py::test_spec_decode_graph",
        "test_field_failures_shapes.py::test_h3_verification_of_a_ratio_that_is_no_power_of_two",
        DRAFTERS,
    ),
    "adaptive": ("test_cuda_graph.py::test_spec_decode_graph",),
    "output_quant": (
        "test_output_quant.py::test_bytes_are_those_of_the_unquantised_output",
        "test_output_quant.py::test_matches_reference",
        f"{VLLM}::test_weights_quantised_online_agree_with_flash_attn[fp8_fused]",
    ),
    "connector": (f"{VLLM}::test_pages_come_back_from_the_cpu",),
    "shared_kv": (f"{ZOO}[gemma4_shared]",),
    "sliding_window": (
        "test_features.py::test_f_window_matches_reference",
        "test_features.py::test_c5_splits_divide_the_window", f"{LONG}[window_*]",
        f"{ZOO}[mistral]", f"{ZOO}[gemma3]",
    ),
    "sinks": (
        "test_features.py::test_g4_sinks_match_reference", f"{LONG}[gpt_oss*]",
        f"{DRAFTS}[gpt_oss_window]", f"{ZOO}[gpt_oss]",
    ),
    "soft_cap": (
        "test_features.py::test_g2_soft_cap_matches_reference",
        "test_features.py::test_soft_cap_saturates", f"{LONG}[gemma_2*]", f"{ZOO}[gemma2]",
    ),
    "alibi": (
        "test_features.py::test_g6_alibi_matches_reference[*linear*]", f"{LONG}[alibi]",
        f"{DRAFTS}[alibi]", f"{ZOO}[bloom]",
    ),
    "alibi_sqrt": (
        "test_features.py::test_g6_alibi_matches_reference[*sqrt*]", f"{LONG}[alibi_sqrt]",
    ),
    "chunked_local": (
        "test_chunked_local.py::test_chunks_match_reference",
        "test_chunked_local.py::test_any_batch_fits_and_matches", f"{ZOO}[llama4]",
    ),
    "mm_prefix": (
        "test_spans.py::test_queries_see_their_span", "test_spans.py::test_f_spans_meet_windows",
        f"{LONG}[*images*]", "test_image_engine.py::test_tokens_equal_hugging_face",
        "test_span_engine.py::test_tokens_depend_on_spans_as_in_the_reference",
    ),
    "non_causal": (
        "test_attention_types.py::test_every_query_sees_every_key",
        "test_attention_types.py::test_flags_say_it_for_each_request",
        f"{LONG}[bidirectional*]", f"{LONG}[flags]",
    ),
    "attn_type": (
        "test_attention_types.py::test_j_keys_without_a_cache",
        "test_attention_types.py::test_j_cross_attention", ENCODERS,
        "test_encoder_models.py::test_whisper_writes_what_hugging_face_writes",
    ),
    "per_head_scales": ("test_fp8_gpu.py::test_matches_reference[*kv_scaleshead*]",),
    "kv_fp8": (
        "test_fp8.py::test_matches_reference[*e4m3fn*]",
        "test_fp8_gpu.py::test_matches_reference[*e4m3fn*]",
        "test_fp8_gpu.py::test_graphs_replay_with_other_scales",
        "test_fp8_engine.py::test_fp16_tokens_agree_on_the_gpu",
    ),
    "kv_fp8_e5m2": (
        "test_fp8.py::test_matches_reference[*e5m2*]",
        "test_fp8_gpu.py::test_matches_reference[*e5m2*]",
    ),
    "batch_invariant": (
        "test_batch_invariant.py::test_bits_are_a_requests_own",
        "test_batch_invariant.py::test_g_bits_of_long_requests",
        "test_batch_invariant.py::test_g_a_graph_replays_the_bits",
        "test_batch_invariant_engine.py::test_a_prompt_gets_the_same_bits_alone_and_among_others",
    ),
    "dcp": (
        "test_context_parallel.py::test_ranks_together_see_every_key_once", f"{RANKS}[dcp2]",
        f"{RANKS}[dcp2_mixed_graphs]", f"{RANKS}[dcp2_interleaved]",
    ),
}  # fmt: skip

# What has no row there.
OTHERS: dict[str, tuple[str, ...]] = {
    "prefill in Gluon on Hopper, and its plain twin": (
        "test_hopper.py::test_matches_reference",
        "test_hopper.py::test_the_plain_twin_agrees_on_the_same_plan",
        "test_hopper.py::test_what_it_cannot_take_goes_to_the_plain_twin",
    ),
    "decode in Gluon on Hopper, and its plain twin": (
        "test_hopper_decode.py::test_matches_reference",
        "test_hopper_decode.py::test_the_plain_twin_agrees_on_the_same_plan",
        "test_hopper_decode.py::test_what_it_does_not_take_goes_to_the_plain_twin",
        "test_hopper_decode.py::test_prefill_and_decode_side_by_side",
    ),
    "any layout of the cache, any strides": (
        KERNELS, "test_kernels.py::test_separate_key_and_value_caches",
        "test_kernels.py::test_query_and_output_strides_are_honoured",
        "test_field_failures_shapes.py::test_i5_keys_and_values_with_strides_of_their_own",
    ),
    "log-sum-exp, base e": (
        "test_field_failures_batches.py::test_c9_lse_is_natural_and_merges",
        "test_field_failures_batches.py::test_c10_lse_counts_keys_in_base_e",
    ),
    "fp8 caches without fp8 instructions (before sm_89)": (
        "test_fp8_bytes.py::test_every_byte_decodes_as_in_torch",
        "test_fp8_gpu.py::test_instruction_and_arithmetic_give_the_same_bits",
    ),
    "CUDA graphs of decodes, of verification and of any mixture": (
        "test_cuda_graph.py::test_decode_graph_serves_every_length",
        "test_cuda_graph.py::test_mixed_graph_serves_any_mixture",
        "test_cuda_graph.py::test_spec_decode_graph",
        "test_cuda_graph.py::test_around_a_page_and_mixed_without_a_sync",
        "test_gpu_engine.py::test_our_backend_ran_under_its_graphs",
    ),
    "lengths that the host has wrong (rejected drafts, optimistic lengths)": (
        "test_attention.py::test_lengths_that_changed_since_the_plan_harm_only_their_step",
        "test_kernels.py::test_lengths_that_changed_since_the_plan_end_no_walk_and_leave_no_tensor",
        "test_cuda_graph.py::test_spec_decode_graph",
    ),
    "fallback of a model and of single layers": (
        "test_rswa.py::test_a_model_falls_back_and_its_tokens_are_right",
        "test_fallback_engine.py::test_tokens_of_a_model_whose_alternate_layers_fall_back",
        "test_fallback_engine.py::test_two_backends_share_the_cuda_graphs",
    ),
    "tensor parallel 2": (f"{RANKS}[tp2]", f"{WORKERS}[tp2]"),
    "pipeline parallel 2": (f"{RANKS}[pp2]", f"{WORKERS}[pp2]"),
    "data parallel 2": (f"{RANKS}[dp2]", f"{WORKERS}[dp2]"),
    "ranks that share a cache of compiled kernels": (
        "test_several_gpus.py::test_ranks_share_a_triton_cache_without_harm",
    ),
    "sleep and wake": (
        f"{VLLM}::test_an_engine_that_slept_goes_on", f"{VLLM}::test_slopes_survive_sleep",
    ),
    "EAGLE, MTP and draft models in graphs": (
        f"{DRAFTERS}[eagle*]", f"{DRAFTERS}[mtp*]", f"{DRAFTERS}[draft_model*]",
        f"{VLLM}::test_a_graph_plans_its_draft_steps",
    ),
    "LoRA": (f"{VLLM}::test_lora_adapters_are_attended_with",),
    "quantised weights": (f"{VLLM}::test_weights_quantised_online_agree_with_flash_attn[fp8]",),
    "dual batch overlap": (
        "test_micro_batches.py::test_tokens_of_steps_in_two_micro_batches",
        "test_micro_batches.py::test_tokens_of_micro_batches_in_cuda_graphs",
    ),
    "vLLM's cache of compiled models": (
        f"{VLLM}::test_an_upgrade_never_runs_its_predecessors_graphs",
    ),
    "nothing compiles while serving": (
        "test_compile_stalls.py::test_nothing_compiles_while_serving",
    ),
    "every model of the zoo": (ZOO,),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A feature and the tests that show it, each ``(file, test, pattern)``."""

    label: str
    tests: tuple[tuple[str, str, str], ...]


def parse(reference: str) -> tuple[str, str, str]:
    """``file::test[pattern]`` in its parts; the pattern is ``*`` where none is named."""
    file, _, name = reference.partition("::")
    name, bracket, pattern = name.partition("[")
    return file, name, pattern.removesuffix("]") if bracket else "*"


def cells() -> list[Cell]:
    """Every cell, those of the support table first and in its order."""
    labels = {row.key: row.label for row in support.TABLE}
    named = [(labels[key], tests) for key, tests in ROWS.items()]
    return [Cell(label, tuple(map(parse, tests))) for label, tests in [*named, *OTHERS.items()]]


def matches(test: tuple[str, str, str], case: tuple[str, str]) -> bool:
    """Whether a case, ``(file::test, id)``, is one of a cell's test."""
    file, name, pattern = test
    return case[0] == f"{file}::{name}" and fnmatchcase(case[1], pattern)


@dataclass
class Outcome:
    """How the cases of one test ended."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: int = 0

    @property
    def shown(self) -> bool:
        """One case passed at least, and none failed."""
        return self.passed > 0 and not self.failed

    def __str__(self) -> str:
        counts = {"passed": self.passed, "failed": len(self.failed), "skipped": self.skipped}
        said = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
        return (said or "not run") + (f": {', '.join(self.failed)}" if self.failed else "")


# Lines of `pytest -v`, alone and of several processes.
_CASE = r"tests/(?P<case>\S+\.py::\w+(?:\[.*\])?)"
_STATE = r"(?P<state>PASSED|FAILED|ERROR|SKIPPED)"
VERBOSE = (re.compile(rf"{_CASE} {_STATE}\b"), re.compile(rf"\] {_STATE} {_CASE}"))
STATES = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}


def read(paths: Iterable[Path]) -> dict[tuple[str, str], str]:
    """State of every case: ``{(file::test, id): passed, failed or skipped}``."""
    found: dict[tuple[str, str], str] = {}
    for path in paths:
        found |= read_junit(path) if path.suffix == ".xml" else read_verbose(path)
    return found


def read_verbose(path: Path) -> dict[tuple[str, str], str]:
    """As ``read``, from what ``pytest -v`` printed."""
    found: dict[tuple[str, str], str] = {}
    for line in path.read_text(errors="replace").splitlines():
        match = next(filter(None, (pattern.search(line) for pattern in VERBOSE)), None)
        if match:
            name, _, parameters = match["case"].partition("[")
            found[name, parameters.removesuffix("]")] = STATES[match["state"]]
    return found


def read_junit(path: Path) -> dict[tuple[str, str], str]:
    """As ``read``, from one JUnit file."""
    found: dict[tuple[str, str], str] = {}
    for case in ET.parse(path).iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2]
        name, _, parameters = case.get("name", "").partition("[")
        state = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            state = "failed"
        elif case.find("skipped") is not None:
            state = "skipped"
        found[f"{module}.py::{name}", parameters.removesuffix("]")] = state
    return found


def outcome(test: tuple[str, str, str], states: Mapping[tuple[str, str], str]) -> Outcome:
    """What became of one test of a cell."""
    made = Outcome()
    for case, state in states.items():
        if not matches(test, case):
            continue
        if state == "failed":
            made.failed.append(case[1] or "it")
        elif state == "passed":
            made.passed += 1
        else:
            made.skipped += 1
    return made


def text_of(test: tuple[str, str, str]) -> str:
    """A test as it is written in a table."""
    file, name, pattern = test
    return f"{file}::{name}" + ("" if pattern == "*" else f"[{pattern}]")


def report(states: Mapping[tuple[str, str], str]) -> tuple[list[str], bool]:
    """Lines for every cell, and whether all are shown."""
    lines, whole = [], True
    for cell in cells():
        outcomes = [(test, outcome(test, states)) for test in cell.tests]
        shown = all(made.shown for _, made in outcomes)
        whole = whole and shown
        lines.append(f"{'shown    ' if shown else 'NOT SHOWN'} {cell.label}")
        lines += [f"            {text_of(test)}: {made}" for test, made in outcomes]
    return lines, whole


def section() -> str:
    """The list for ``tests/README.md``."""
    lines = ["Made by `python3 tests/gpu_cells.py --readme`; do not edit.", ""]
    lines += ["| Native | GPU tests |", "|---|---|"]
    for cell in cells():
        tests = "<br>".join(f"`{text_of(test)}`" for test in cell.tests)
        lines.append(f"| {cell.label} | {tests} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's head."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "junit", nargs="*", type=Path, help="JUnit files, or logs, of GPU hosts; oldest first"
    )
    parser.add_argument("--readme", action="store_true", help="write the list into tests/README.md")
    parser.add_argument("--check", action="store_true", help="with --readme: change nothing")
    args = parser.parse_args(argv)
    if args.readme:
        old = README.read_text(encoding="utf-8")
        new = replace_between(old, BEGIN, END, section())
        return write_or_check(README, old, new, "tests/gpu_cells.py", args.check)
    if not args.junit:
        parser.error("no file; accepted: one or more, or --readme")
    states = read(args.junit)
    lines, whole = report(states)
    print("\n".join(lines))
    return int(not whole)


if __name__ == "__main__":
    raise SystemExit(main())
