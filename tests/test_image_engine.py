"""Gemma 3 with real pictures in its prompts through the engine, tokens against Hugging Face.

Encoder, projection and placeholders are vLLM's; the spans that pictures make in a prompt, in which
tokens see each other both ways, reach our layers by its metadata.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_image_model
import torch
from agreement import Reference, compare
from test_engine import SMALL_ENGINE, prompts_of, run_job
from test_model_zoo import GPU_ENGINE
from tiny_image_model import END, SOFT, START

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOKENS = 6


def with_pictures(text: list[int], places: list[int]) -> list[int]:
    """A prompt with a picture after so many tokens of text each."""
    for place in sorted(places, reverse=True):
        text = [*text[:place], START, *text[place:]]
    return text


TEXTS = prompts_of([30, 75, 20, 40])
PROMPTS = [
    with_pictures(text, places)
    for text, places in zip(TEXTS, [[5], [3, 50], [], [40]], strict=True)
]
COUNTS = [prompt.count(START) for prompt in PROMPTS]


@torch.inference_mode()
def reference(folder: Path, prompts, pictures, causal: bool = False) -> Reference:
    """Greedy tokens of Hugging Face, all positions anew for each; or as if pictures were text."""
    from transformers import Gemma3ForConditionalGeneration

    model, found = Gemma3ForConditionalGeneration.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    model = model.float().eval()
    rows, gaps = [], []
    for prompt, files in zip(prompts, pictures, strict=True):
        ids, row, distances = list(prompt), [], []
        values = torch.stack([tiny_image_model.pixels(f) for f in files]) if files else None
        for _ in range(TOKENS):
            given = torch.tensor([ids])
            kinds = None if causal else (given == SOFT).long()
            logits = model(given, pixel_values=values, token_type_ids=kinds, use_cache=False).logits
            best = logits[0, -1].topk(2)
            row.append(int(best.indices[0]))
            distances.append(float(best.values[0] - best.values[1]))
            ids.append(row[-1])
        rows.append(row)
        gaps.append(distances)
    return Reference(rows, gaps)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_tokens_equal_hugging_face(runner, tmp_path, device):
    model = tiny_image_model.write(tmp_path / "model")
    files = iter(tiny_image_model.draw(tmp_path, sum(COUNTS)))
    pictures = [[str(next(files)) for _ in range(count)] for count in COUNTS]
    good = {"prompts": PROMPTS, "images": pictures, "max_tokens": TOKENS, "fresh": True}
    engine = {
        **SMALL_ENGINE, "dtype": "float32", "max_num_batched_tokens": 512,
        "mm_encoder_attn_backend": "TORCH_SDPA",
    }  # fmt: skip
    job = {"model": str(model), "engine": engine, "rounds": [good, {**good, "fresh": False}]}
    # The encoder's convolutions would be TF32.
    environ = {**GPU_ENGINE, "NVIDIA_TF32_OVERRIDE": "0"} if device.type == "cuda" else {}
    result = run_job(tmp_path, job, VLLM_USE_V2_MODEL_RUNNER=str(int(runner == "v2")), **environ)
    assert result["runner"] == runner
    assert result["impls"] == ["TilewiseImpl"]
    # Two kinds of layers, with spans and without them.
    assert result["start_counters"]["self_checks{result=passed}"] == 2
    done, cached = result["rounds"]
    for prompt, count in zip(done["prompts"], COUNTS, strict=True):
        assert prompt.count(SOFT) == tiny_image_model.IMAGE_TOKENS * count
        assert prompt.count(END) == count
    right = reference(model, done["prompts"], pictures)
    agreement = compare(right, done["tokens"])
    assert agreement.num_equal == len(PROMPTS), str(agreement)
    again = compare(right, cached["tokens"])
    assert again.num_equal == len(PROMPTS), str(again)
    assert max(cached["cached"]) >= 64
    causal = compare(reference(model, done["prompts"], pictures, causal=True), done["tokens"])
    assert not causal.agrees, "tokens say nothing of spans"
    swapped = [pictures[3], pictures[1][::-1], [], pictures[0]]
    others = compare(reference(model, done["prompts"], swapped), done["tokens"])
    assert not others.agrees, "tokens say nothing of pictures"
