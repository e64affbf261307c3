"""A vLLM engine on the CPU whose decodes read the pages once that they begin with."""

from __future__ import annotations

import pytest
import torch
from agreement import compare, greedy_reference
from test_engine import SMALL_ENGINE, prompts_of, run_job
from tiny_model import TinyLlama

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="an engine on the CPU"),
]

TOKENS = 6
PROMPTS = prompts_of([1, 30, 17, 60], shared=400) + prompts_of([5, 90], seed=1)


@pytest.mark.slow
def test_prompts_with_a_prefix_share_it_and_keep_their_tokens(tmp_path):
    """In chunks, with prefix caching, beside prompts that share nothing; then from the cache."""
    model = TinyLlama(num_heads=4, num_kv_heads=1, head_dim=32).write(tmp_path / "model")
    job = {
        "model": str(model),
        "engine": {**SMALL_ENGINE, "dtype": "float32", "max_num_batched_tokens": 256},
        "watch_groups": True,
        "rounds": [{"prompts": PROMPTS, "max_tokens": TOKENS}] * 2,
    }
    result = run_job(tmp_path, job, TILEWISE_SHARED_PREFIXES="1")
    assert result["groups"] == 1
    reference = greedy_reference(model, PROMPTS, TOKENS)
    for done in result["rounds"]:
        assert done["counters"]["launches{kernel=prefix_decode}"] > 0
        agreement = compare(reference, done["tokens"])
        assert agreement.num_equal == len(PROMPTS), str(agreement)
    assert min(result["rounds"][1]["cached"][:4]) >= 384
