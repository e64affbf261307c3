"""Real architectures of vLLM's model zoo through its engine: every layer ours, tokens equal.

Llama 3, Qwen 3 (norms of queries and keys), Phi 3 (heads of 96), Gemma 2 (window, soft cap),
Gemma 3 (five windows to one), Gemma 4 (heads of 256 and 512; caches shared between layers), gpt-oss
(sinks, window), Llama 4 (chunked local attention), Granite 4 (Mamba 2 beside attention, pages of
144 tokens) and BLOOM (ALiBi), small but for what attention sees.
"""

from __future__ import annotations

import os

import pytest
import tiny_zoo
from agreement import compare, greedy_reference
from test_engine import SMALL_ENGINE, prompts_of, run_job

pytestmark = pytest.mark.vllm

# Instead of what `run_job` sets for the CPU.
GPU_ENGINE = {
    "TILEWISE_CPU_PLATFORM": "0",
    "TRITON_INTERPRET": "0",
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
IN_EVERY_RUN = ("qwen3", "gemma2")
TOKENS = 6
# One token, beyond a window, and several chunks of 64.
PROMPTS = prompts_of([1, 20, 120], shared=9) + prompts_of([40], seed=1)


def models():
    """Every model, most of them slow."""
    for name in tiny_zoo.ZOO:
        marks = [] if name in IN_EVERY_RUN else [pytest.mark.slow]
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", models())
def test_tokens_equal_hugging_face(name, tmp_path, device):
    model = tiny_zoo.write(name, tmp_path / "model")
    good = {"prompts": PROMPTS, "max_tokens": TOKENS, "fresh": True}
    shape = tiny_zoo.ZOO[name]
    # Equal tokens say something of what they depend on: the model's feature, or else attention.
    sabotage = "plain" if shape.has_features else "zeros"
    job = {
        "model": str(model),
        "engine": {
            **SMALL_ENGINE,
            "dtype": "float32",
            "block_size": shape.block_size,
        },
        "rounds": [good, {**good, "fresh": False}, {**good, "sabotage": sabotage}],
    }
    result = run_job(tmp_path, job, **(GPU_ENGINE if device.type == "cuda" else {}))
    assert result["impls"] == ["TilewiseImpl"]
    assert [layer["window"] for layer in result["layers"]] == list(shape.windows)
    page_sizes = shape.page_sizes or (shape.page_size,) * len(shape.windows)
    assert [layer["page_size"] for layer in result["layers"]] == list(page_sizes)
    for layer in result["layers"]:
        assert layer["soft_cap"] == shape.soft_cap
        assert layer["sinks"] is shape.sinks
        assert layer["alibi"] is shape.alibi
    assert sum(layer["shares_kv"] for layer in result["layers"]) == shape.shared
    counts = result["rounds"][0]["counters"]
    assert counts["launches{kernel=prefill}"] > 0
    assert counts["launches{kernel=decode}"] > 0
    reference = greedy_reference(model, PROMPTS, TOKENS)
    right, cached, broken = (compare(reference, done["tokens"]) for done in result["rounds"])
    assert right.num_equal == len(PROMPTS), str(right)
    assert cached.num_equal == len(PROMPTS), str(cached)
    if shape.has_prefix_cache:
        assert max(result["rounds"][1]["cached"]) >= shape.page_size
    assert not broken.agrees, f"{sabotage}: {broken}"
