"""R-SWA (reference sliding window attention): named when it is refused, and right elsewhere.

A generated token sees the whole prompt and a window of the tokens before it. These are two ranges
of keys, with pages missing in between, and no window that our kernels have; so the layers go to
TRITON_ATTN. vLLM 0.33 knows one such model, Unlimited-OCR, and takes a list of backends for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from agreement import Reference, compare
from test_engine import CPU_ENGINE, JOB_TIMEOUT, SMALL_ENGINE, prompts_of
from test_model_zoo import GPU_ENGINE
from tiny_model import TinyLlama

from tilewise.model_config import read_model

pytestmark = pytest.mark.vllm

WINDOW = 4
TOKENS = 24  # the window leaves a page of 16 tokens behind
ENGINE_JOB = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
if not torch.cuda.is_available():
    # The one question that TRITON_ATTN asks of CUDA itself.
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
import engine_job
engine_job.main(*sys.argv[2:])
"""


def write_model(shape: TinyLlama, folder: Path) -> Path:
    """Write a Llama that vLLM takes for a DeepSeek without latents, experts and whole attention."""
    shape.write(folder)
    config = shape.config() | {
        "architectures": ["DeepseekV2ForCausalLM"], "qk_nope_head_dim": 0, "qk_rope_head_dim": 0,
        "n_routed_experts": 2, "first_k_dense_replace": shape.num_layers, "moe_layer_freq": 1,
        "rswa_window": WINDOW,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mask_of(num_tokens: int, prompt: int, window: int, device: str) -> torch.Tensor:
    """Additive mask ``[num_tokens, num_tokens]``: the prompt, and a window of what follows it."""
    place = torch.arange(num_tokens, device=device)
    distance = place[:, None] - place[None, :]
    seen = (distance >= 0) & ((place < prompt)[None, :] | (distance < window))
    return torch.zeros(seen.shape, device=device).masked_fill(~seen, torch.finfo(torch.float32).min)


def logits_of(model, ids: list[int], prompt: int, window: int) -> torch.Tensor:
    """Logits of every position, ``[len(ids), vocabulary]``, on the CPU."""
    device = str(model.device)
    mask = mask_of(len(ids), prompt, window, device)[None, None]
    return model(torch.tensor([ids], device=device), attention_mask=mask).logits[0].cpu()


@torch.inference_mode()
def reference(folder: Path, window: int, prompts: list[list[int]], device: str) -> Reference:
    """Greedy tokens of Hugging Face's Llama, all positions anew for each, with the mask written.

    On a GPU TRITON_ATTN multiplies fp32 in TF32; there torch's error in TF32 is measured as well.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    rows, gaps, exact = [], [], []
    for prompt in prompts:
        ids, distances = list(prompt), []
        for _ in range(TOKENS):
            logits = logits_of(model, ids, len(prompt), window)
            best = logits[-1].topk(2)
            distances.append(float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
        rows.append(ids[len(prompt) :])
        gaps.append(distances)
        exact.append(logits)
    if device == "cpu":
        return Reference(rows, gaps)
    model = model.to(device)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        errors = [
            (logits_of(model, prompt + row[:-1], len(prompt), window) - wide).abs().max().item()
            for prompt, row, wide in zip(prompts, rows, exact, strict=True)
        ]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return Reference(rows, gaps, max(errors))


@pytest.mark.slow
def test_a_model_falls_back_and_its_tokens_are_right(tmp_path, device):
    # More rows where some may end in ties.
    prompts = prompts_of([5, 16, 40] if device.type == "cpu" else [*range(3, 40, 3)])
    shape = TinyLlama(hidden_size=256)
    plain, model = shape.write(tmp_path / "plain"), write_model(shape, tmp_path / "model")
    engine = {**SMALL_ENGINE, "dtype": "float32"}
    rounds = [{"prompts": prompts, "max_tokens": TOKENS}]
    job = {"model": str(model), "engine": engine, "rounds": rounds}
    (tmp_path / "job.json").write_text(json.dumps(job))
    files = [Path(__file__).parent, tmp_path / "job.json", tmp_path / "result.json"]
    on_gpu = GPU_ENGINE if device.type == "cuda" else {}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE_JOB, *map(str, files)],
        env={**os.environ, **CPU_ENGINE, **on_gpu},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=JOB_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["impls"] == ["TritonAttentionImpl"]
    (said,) = (line for line in done.stdout.splitlines() if "tilewise leaves" in line)
    assert "2 layers to TRITON_ATTN (R-SWA not supported (reference sliding window" in said
    assert result["start_counters"]["fallback_layers{reason=rswa,target=TRITON_ATTN}"] == 2
    tokens = result["rounds"][0]["tokens"]
    right = compare(reference(plain, WINDOW, prompts, device.type), tokens)
    assert right.agrees, str(right)
    if device.type == "cpu":
        assert right.num_equal == len(prompts), str(right)
    wrong = compare(reference(plain, 4096, prompts, device.type), tokens)
    assert not wrong.agrees, "tokens say nothing of the window"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a builder on CPU tensors")
def test_a_batch_of_it_is_never_planned():
    from test_builder import make_batch, make_builder

    from tilewise.errors import UnsupportedConfig

    builder, batch = make_builder(), make_batch([1, 5])
    builder.build(0, batch)
    batch.rswa_prefix_lens = torch.tensor([3, 5], dtype=torch.int32)
    with pytest.raises(UnsupportedConfig, match="rswa_prefix_lens; tilewise has no R-SWA"):
        builder.build(0, batch)


def test_vllm_takes_other_names_only_for_the_model_that_has_it():
    """Whoever names TILEWISE for Unlimited-OCR is told so by vLLM; see the support table."""
    from vllm.model_executor.models.config import UnlimitedOCRForCausalLMConfig

    named = SimpleNamespace(attention_config=SimpleNamespace(backend="TILEWISE"))
    with pytest.raises(ValueError, match=r"FLASH_ATTN.*TRITON_ATTN or FLEX_ATTENTION"):
        UnlimitedOCRForCausalLMConfig.verify_and_update_config(named)


LANGUAGE = {
    "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "unlimited-ocr", "language_config": LANGUAGE}, True),
        ({"rswa_window": 128, "language_config": LANGUAGE}, True),
        ({"language_config": LANGUAGE | {"rswa_window": 128}}, True),
        ({"model_type": "deepseek_vl_v2", "language_config": LANGUAGE}, False),
    ],
)
def test_the_doctor_reads_it_off_a_configuration(config, found):
    layers = read_model(config).layers
    assert [layer.request.use_rswa for layer in layers] == [found] * 2
