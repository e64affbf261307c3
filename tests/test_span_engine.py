"""An engine whose prompts hold bidirectional spans, tokens against Hugging Face with such a mask.

A text model of Gemma 3's shape with vLLM's word for its multimodal kind: the runner is told of
spans as if they were images. So selection, graphs, plans and layers are those of the real model.
"""

from __future__ import annotations

import json

import pytest
import tiny_zoo
import torch
from agreement import Reference, compare
from test_engine import SMALL_ENGINE, prompts_of, run_job
from test_model_zoo import GPU_ENGINE

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# None is longer than the window, which vLLM's runner sees to.
SPANS = [(3, 20), (21, 44), (50, 59)]
PROMPTS = prompts_of([60, 75, 130])
TOKENS = 6


@torch.inference_mode()
def reference(folder, spans) -> Reference:
    """Greedy tokens, all positions anew for each, with masks written out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    rows, gaps = [], []
    for prompt in PROMPTS:
        ids, row, distances = list(prompt), [], []
        for _ in range(TOKENS):
            place = torch.arange(len(ids))
            distance = place[:, None] - place[None, :]
            together = torch.zeros_like(distance, dtype=torch.bool)
            for first, last in spans:
                inside = (first <= place) & (place <= last)
                together |= inside[:, None] & inside[None, :]
            seen = {
                "full_attention": (distance >= 0) | together,
                "sliding_attention": ((distance >= 0) & (distance < tiny_zoo.WINDOW)) | together,
            }
            lowest = torch.finfo(torch.float32).min
            masks = {
                kind: torch.zeros(mask.shape).masked_fill(~mask, lowest)[None, None]
                for kind, mask in seen.items()
            }
            logits = model(torch.tensor([ids]), attention_mask=masks, use_cache=False).logits
            best = logits[0, -1].topk(2)
            row.append(int(best.indices[0]))
            distances.append(float(best.values[0] - best.values[1]))
            ids.append(row[-1])
        rows.append(row)
        gaps.append(distances)
    return Reference(rows, gaps)


def test_tokens_depend_on_spans_as_in_the_reference(tmp_path, device):
    model = tiny_zoo.write("gemma3", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"is_mm_prefix_lm": True}))
    good = {"prompts": PROMPTS, "max_tokens": TOKENS, "fresh": True}
    engine = {
        **SMALL_ENGINE, "dtype": "float32", "max_num_batched_tokens": 512,
    }  # fmt: skip
    job = {"model": str(model), "spans": SPANS, "engine": engine, "rounds": [good]}
    environ = GPU_ENGINE if device.type == "cuda" else {}
    result = run_job(tmp_path, job, VLLM_USE_V2_MODEL_RUNNER="0", **environ)
    assert result["impls"] == ["TilewiseImpl"]
    assert result["runner"] == "v1"
    # One for each kind of layer, with spans and without them.
    assert result["start_counters"]["self_checks{result=passed}"] == 2
    right = compare(reference(model, SPANS), result["rounds"][0]["tokens"])
    assert right.num_equal == len(PROMPTS), str(right)
    causal = compare(reference(model, []), result["rounds"][0]["tokens"])
    assert not causal.agrees, "tokens say nothing of spans"
