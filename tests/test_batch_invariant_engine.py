"""vLLM's batch-invariant switch on a real engine: a prompt alone and among others."""

from __future__ import annotations

import pytest
from test_engine import SMALL_ENGINE, prompts_of, run_job
from test_model_zoo import GPU_ENGINE
from tiny_model import TinyLlama

pytestmark = pytest.mark.vllm

# The longest has two pieces, and keys enough that the default mode cuts it.
PROMPTS = prompts_of([520, 3, 40])


def run(folder, device, switch: str) -> tuple[dict, list, list]:
    """The job, and what each prompt gave alone and with the others: tokens and their gaps."""
    model = TinyLlama(num_layers=1).write(folder / "model")
    # Room for all prompts in one step: a prompt's own chunks do change its bits.
    engine = {**SMALL_ENGINE, "dtype": "float32", "max_model_len": 1024}
    engine |= {"max_num_batched_tokens": 1024}
    common = {"max_tokens": 5, "fresh": True, "logprobs": True}
    rounds = [{"prompts": [prompt], **common} for prompt in PROMPTS]
    rounds.append({"prompts": PROMPTS, **common})
    job = {"model": str(model), "engine": engine, "rounds": rounds, "linear_by_row": True}
    on_gpu = GPU_ENGINE if device.type == "cuda" else {}
    result = run_job(folder, job, VLLM_BATCH_INVARIANT=switch, **on_gpu)
    pairs = [list(zip(r["tokens"], r["gaps"], strict=True)) for r in result["rounds"]]
    return result, [pair for (pair,) in pairs[:-1]], pairs[-1]


@pytest.mark.slow
def test_a_prompt_gets_the_same_bits_alone_and_among_others(tmp_path, device):
    result, alone, together = run(tmp_path, device, "1")
    assert result["backends"] == ["TilewiseBackend"]
    assert result["impls"] == ["TilewiseImpl"]
    counts = result["rounds"][-1]["counters"]
    assert counts["launches{kernel=decode}"] > 0
    assert together == alone


@pytest.mark.slow
def test_without_the_switch_it_does_not(tmp_path, device):
    """So the comparison can fail."""
    result, alone, together = run(tmp_path, device, "0")
    assert result["backends"] == ["TilewiseBackend"]
    assert together[0] != alone[0]
