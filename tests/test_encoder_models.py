"""BERT-style encoders through vLLM's engine: every layer ours, vectors equal to Hugging Face's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_engine import CPU_ENGINE, JOB_TIMEOUT, prompts_of
from test_model_zoo import GPU_ENGINE
from tiny_model import _write_tokenizer

pytestmark = pytest.mark.vllm

JOB_SCRIPT = Path(__file__).with_name("encoder_job.py")
ENGINE = {
    "attention_backend": "TILEWISE", "enforce_eager": True, "dtype": "float32",
    "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256,
    "gpu_memory_utilization": 0.2,
}  # fmt: skip
COMMON = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "bert": ("BertConfig", COMMON | {"num_hidden_layers": 2}, [None, None]),
    # One layer in three sees all keys, the others those within 8 tokens.
    "modernbert": (
        "ModernBertConfig",
        COMMON | {
            "num_hidden_layers": 4, "local_attention": 16, "cls_token_id": 1, "sep_token_id": 2,
        },
        [None, 9, 9, None],
    ),
}  # fmt: skip
# Short ones take the split-KV kernel; not all fit one step.
PROMPTS = prompts_of([1, 5, 16, 17, 40, 150, 3, 90])


@torch.no_grad()
def write(name: str, folder: Path):
    """Write a checkpoint whose attention is no small thing, and return the model."""
    import transformers

    config, settings, _ = MODELS[name]
    config = getattr(transformers, config)(**settings)
    model = transformers.AutoModel.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    for parameter, weight in model.named_parameters():
        if weight.dim() == 2 and "norm" not in parameter.lower():
            size = 1.0 if "embed" in parameter else 1.5 / weight.shape[1] ** 0.5
            weight.copy_(size * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    _write_tokenizer(folder, config.vocab_size, 256)
    return model.eval()


def run_job(folder: Path, job: dict, **environ: str) -> dict:
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(JOB_SCRIPT), str(folder / "job.json"), str(folder / "result.json")],
        env={**os.environ, **CPU_ENGINE, **environ}, text=True, timeout=JOB_TIMEOUT, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"encoder job failed:\n{done.stdout[-6000:]}"
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_vectors_equal_hugging_face(name, tmp_path, device):
    model = write(name, tmp_path / "model")
    job = {"model": str(tmp_path / "model"), "engine": ENGINE, "prompts": PROMPTS}
    result = run_job(tmp_path, job, **(GPU_ENGINE if device.type == "cuda" else {}))
    assert result["impls"] == ["TilewiseImpl"]
    assert result["windows"] == MODELS[name][2]
    counts = result["counters"]
    assert counts["launches{kernel=prefill}"] > 0
    assert counts["launches{kernel=decode}"] > 0
    assert counts.get("launches{kernel=cache_write}", 0) == 0
    assert not any(name.startswith("fallback_layers") for name in counts)
    # A GPU's fp32 products of other layers may be TF32.
    allowed = 1e-4 if device.type == "cpu" else 2e-2
    for prompt, vectors, spoilt in zip(PROMPTS, result["vectors"], result["broken"], strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).last_hidden_state[0]
        assert (torch.tensor(vectors) - expected).abs().max() < allowed
        assert (torch.tensor(spoilt) - expected).abs().max() > 0.2
