"""Dual batch overlap (DBO): vLLM's runner cuts a step in two, and layers of both alternate.

Each micro-batch has a builder of its own, both are planned before the first layer runs, and from
then on each layer of one is followed by the same layer of the other (``micro_batch_job.py``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from agreement import compare, greedy_reference
from test_engine import SMALL_ENGINE, prompts_of, run_job
from test_model_zoo import GPU_ENGINE
from tiny_model import TinyLlama

pytestmark = pytest.mark.vllm

JOB_SCRIPT = Path(__file__).with_name("micro_batch_job.py")
RUNNERS = ("v1", "v2")
PROMPTS = prompts_of([1, 17, 40, 90], shared=9) + prompts_of([150], seed=1)
TOKENS = 6
ENGINE = {
    **SMALL_ENGINE,
    "dtype": "float32",
    "ubatch_size": 2,
    "dbo_decode_token_threshold": 2,
    "dbo_prefill_token_threshold": 2,
    "all2all_backend": "deepep_low_latency",  # vLLM asks for the name, and no rank here uses it
}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64],
    },
}  # fmt: skip


def check(runner: str, tmp_path, device, **settings) -> dict:
    """Run prompts in halves; tokens are Hugging Face's, and say something of attention."""
    model = TinyLlama().write(tmp_path / "model")
    good = {"prompts": PROMPTS, "max_tokens": TOKENS, "fresh": True}
    job = {
        "model": str(model),
        "engine": ENGINE | settings,
        "rounds": [good, {**good, "fresh": False}, {**good, "sabotage": "zeros"}],
    }
    environ = GPU_ENGINE if device.type == "cuda" else {}
    environ = {**environ, "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2"))}
    result = run_job(tmp_path, job, JOB_SCRIPT, **environ)
    assert result["runner"] == runner
    assert result["impls"] == ["TilewiseImpl"]
    # Two layers of each half, in every step that Python ran and no round broke.
    assert result["handovers"] >= 40
    assert result["handovers"] % 4 == 0
    reference = greedy_reference(model, PROMPTS, TOKENS)
    right, cached, broken = (compare(reference, done["tokens"]) for done in result["rounds"])
    assert right.num_equal == len(PROMPTS), str(right)
    assert cached.num_equal == len(PROMPTS), str(cached)
    assert max(result["rounds"][1]["cached"]) >= 64
    assert not broken.agrees, str(broken)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_tokens_of_steps_in_two_micro_batches(runner, tmp_path, device):
    result = check(runner, tmp_path, device)
    assert result["replays"] == 0
    assert result["handovers"] <= 4 * result["split_steps"]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("runner", RUNNERS)
def test_tokens_of_micro_batches_in_cuda_graphs(runner, tmp_path):
    """One graph holds both halves of a decode step, and is replayed with other lengths."""
    result = check(runner, tmp_path, torch.device("cuda"), **GRAPHS)
    assert "FULL" in result["cudagraph_mode"]
    assert result["replays"] >= TOKENS - 1
