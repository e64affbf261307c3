"""Engines of two ranks on the CPU, over gloo: tokens equal Hugging Face's.

What ``test_several_gpus`` looks at on two GPUs, as far as the interpreter gets: collectives, shards
of caches and the plug-in in every worker are real, graphs and Triton's cache are not there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from agreement import Reference, compare, greedy_reference
from parallel_engines import run_jobs
from test_engine import CPU_ENGINE, SMALL_ENGINE, prompts_of
from tiny_model import TinyLlama

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TP = {"tensor_parallel_size": 2}
DCP = {**TP, "decode_context_parallel_size": 2}
# Two ranks share what cores and NUMA nodes there are.
SHARED_HOST = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_SIM_MULTI_NUMA": "0"}
# Random prompts repeat a token often enough for some drafts.
NGRAMS = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2,
}  # fmt: skip
# KV heads, and the engine.
CASES = {
    "dcp2": (1, DCP),
    "dcp2_interleaved": (1, {**DCP, "cp_kv_cache_interleave_size": 16, "dcp_comm_backend": "a2a"}),
    "dcp2_drafts": (
        1,
        {**DCP, "cp_kv_cache_interleave_size": 8, "speculative_config": NGRAMS},
    ),
    "tp2": (2, TP),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "dp2": (2, {"data_parallel_size": 2}),
}


@dataclass
class Done:
    """What the engine returned, what Hugging Face answers, the ranks, and the engine's folder."""

    result: dict
    reference: Reference
    places: list[list[int]]
    folder: Path


# The longest does not fit a step of 64 tokens: chunks with a context, and decodes beside them.
PROMPTS, TOKENS = prompts_of([1, 17, 90], seed=4), 5


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.slow) for n in CASES],
)
def done(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    kv_heads, engine = CASES[request.param]
    # Engine and rank in it.
    second = [1, 0] if request.param == "dp2" else [0, 1]
    model = TinyLlama(num_kv_heads=kv_heads).write(folder / "model")
    job = {
        "model": str(model),
        "engine": {**SMALL_ENGINE, "dtype": "float32", **engine},
        "rounds": [
            {"prompts": PROMPTS, "max_tokens": TOKENS},
            {"prompts": PROMPTS, "max_tokens": 1, "broken": second},
        ],
    }
    environ = {**CPU_ENGINE, **SHARED_HOST}
    result = run_jobs({request.param: job}, folder, **environ)[request.param]
    reference = greedy_reference(model, PROMPTS, TOKENS)
    return Done(result, reference, [[0, 0], second], folder / request.param)


def test_tokens_equal_hugging_face(done):
    agreement = compare(done.reference, done.result["rounds"][0]["tokens"])
    assert agreement.num_equal == len(PROMPTS), str(agreement)


def test_one_broken_rank_is_noticed(done):
    pairs = zip(done.result["rounds"][1]["tokens"], done.reference.tokens, strict=True)
    wrong = [row for row, (got, right) in enumerate(pairs) if got != right[:1]]
    # Engines take turns; ranks of one engine share every prompt.
    assert wrong == ([1] if done.places[1] == [1, 0] else [0, 1, 2])


def test_the_plugin_runs_in_every_worker(done):
    ranks = sorted(done.result["ranks"], key=lambda rank: rank["place"])
    assert [rank["place"] for rank in ranks] == done.places
    for rank in ranks:
        assert rank["backends"] == ["TilewiseBackend"]
        assert rank["counters"]["launches{kernel=plan}"] > 0
        assert rank["counters"]["launches{kernel=cache_write}"] > 0
        assert rank["counters"]["self_checks{result=passed}"] == 1


def test_every_rank_has_metrics_of_its_own(done):
    """vLLM numbers the data parallel ranks of a dense model 0 all of them."""
    written = [json.loads(path.read_text()) for path in (done.folder / "metrics").glob("*.json")]
    labels = (w["labels"] for w in written)
    assert sorted([int(x["engine"]), int(x["rank"])] for x in labels) == done.places
