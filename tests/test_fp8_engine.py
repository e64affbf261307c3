"""fp8 caches in vLLM: what the layer and the builder make of it, and an engine's tokens.

The reference is Hugging Face's model with its keys and values rounded to fp8: they are rounded
where they are read, which comes to the same as rounding them where they are written.
"""

import pytest
import torch

pytest.importorskip("vllm")

from agreement import compare, greedy_reference
from test_engine import SMALL_ENGINE, prompts_of, run_job
from tiny_model import TinyLlama

pytestmark = pytest.mark.vllm

TOKENS = 8
PROMPTS = prompts_of([1, 3, 17, 90, 130], seed=11)
DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def round_cache(monkeypatch, dtype):
    """Make Hugging Face's Llama attend to keys and values rounded to ``dtype``."""
    from transformers.models.llama import modeling_llama

    eager = modeling_llama.eager_attention_forward

    def forward(module, query, key, value, *args, **kwargs):
        key, value = (x.to(dtype).to(x.dtype) for x in (key, value))
        return eager(module, query, key, value, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", forward)


@pytest.mark.parametrize("kv_cache_dtype", DTYPES)
def test_tokens_equal_hugging_face_over_a_rounded_cache(kv_cache_dtype, tmp_path, monkeypatch):
    """And differ from those over the model's own cache, or the test would show nothing."""
    model = TinyLlama(num_heads=6, num_kv_heads=2, hidden_size=96, seed=4).write(tmp_path / "model")
    rounds = [{"prompts": PROMPTS, "max_tokens": TOKENS}]
    job = {
        "model": str(model),
        "engine": {**SMALL_ENGINE, "dtype": "float32", "kv_cache_dtype": kv_cache_dtype},
        "rounds": rounds,
    }
    result = run_job(tmp_path, job)
    assert result["backends"] == ["TilewiseBackend"]
    assert result["start_counters"]["self_checks{result=passed}"] == 1
    tokens = result["rounds"][0]["tokens"]
    assert compare(greedy_reference(model, PROMPTS, TOKENS), tokens).num_equal < len(PROMPTS)
    round_cache(monkeypatch, DTYPES[kv_cache_dtype])
    agreement = compare(greedy_reference(model, PROMPTS, TOKENS), tokens)
    assert agreement.num_equal == len(PROMPTS), str(agreement)
