"""Engines of two ranks on the CPU, over gloo: tokens equal Hugging Face's.

What ``test_several_gpus`` looks at on two GPUs, as far as the interpreter gets: collectives, shards
of caches and the plug-in in every worker are real, graphs and Triton's cache are not there.
"""

from __future__ import annotations

import pytest
from agreement import compare, greedy_reference
from parallel_engines import run_jobs
from test_engine import CPU_ENGINE, SMALL_ENGINE, prompts_of
from tiny_model import TinyLlama

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TP = {"tensor_parallel_size": 2}
DCP = {**TP, "decode_context_parallel_size": 2}
# KV heads, and the engine.
CASES = {
    "dcp2": (1, DCP),
    "dcp2_interleaved": (1, {**DCP, "cp_kv_cache_interleave_size": 16, "dcp_comm_backend": "a2a"}),
    "tp2": (2, TP),
    "pp2": (2, {"pipeline_parallel_size": 2}),
}
# The longest does not fit a step of 64 tokens: chunks with a context, and decodes beside them.
PROMPTS, TOKENS = prompts_of([1, 17, 90], seed=4), 5


@pytest.fixture(
    scope="module",
    params=[n if n == "dcp2" else pytest.param(n, marks=pytest.mark.slow) for n in CASES],
)
def done(request, tmp_path_factory):
    """What the engine returned, and what Hugging Face answers."""
    folder = tmp_path_factory.mktemp(request.param)
    kv_heads, engine = CASES[request.param]
    model = TinyLlama(num_kv_heads=kv_heads).write(folder / "model")
    job = {
        "model": str(model),
        "engine": {**SMALL_ENGINE, "dtype": "float32", **engine},
        "rounds": [
            {"prompts": PROMPTS, "max_tokens": TOKENS},
            {"prompts": PROMPTS, "max_tokens": 1, "broken": [0, 1]},
        ],
    }
    # Two ranks share what cores there are.
    environ = {**CPU_ENGINE, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    result = run_jobs({request.param: job}, folder, **environ)[request.param]
    return result, greedy_reference(model, PROMPTS, TOKENS)


def test_tokens_equal_hugging_face(done):
    result, reference = done
    agreement = compare(reference, result["rounds"][0]["tokens"])
    assert agreement.num_equal == len(PROMPTS), str(agreement)


def test_one_broken_rank_is_noticed(done):
    result, reference = done
    first = [row[:1] for row in reference.tokens]
    assert all(
        got != right for got, right in zip(result["rounds"][1]["tokens"], first, strict=True)
    )


def test_the_plugin_runs_in_every_worker(done):
    ranks = sorted(done[0]["ranks"], key=lambda rank: rank["place"])
    assert [rank["place"] for rank in ranks] == [[0, 0], [0, 1]]
    for rank in ranks:
        assert rank["backends"] == ["TilewiseBackend"]
        assert rank["counters"]["launches{kernel=plan}"] > 0
        assert rank["counters"]["launches{kernel=cache_write}"] > 0
        assert rank["counters"]["self_checks{result=passed}"] == 1
