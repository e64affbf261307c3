"""BERT-style encoders and Whisper through vLLM's engine, every layer ours, against Hugging Face.

Vectors of encoders are equal, and so are the tokens of Whisper, whose decoder has cross attention.
"""

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

ENCODER_JOB = Path(__file__).with_name("encoder_job.py")
WHISPER_JOB = Path(__file__).with_name("whisper_job.py")
ENGINE = {
    "attention_backend": "TILEWISE", "enforce_eager": True, "dtype": "float32",
    "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 256 << 20, "gpu_memory_utilization": 0.02,
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


def run_job(script: Path, folder: Path, job: dict, **environ: str) -> dict:
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "job.json"), str(folder / "result.json")],
        env={**os.environ, **CPU_ENGINE, **environ}, text=True, timeout=JOB_TIMEOUT, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"the job failed:\n{done.stdout[-6000:]}"
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("name", ["bert", pytest.param("modernbert", marks=pytest.mark.slow)])
def test_vectors_equal_hugging_face(name, tmp_path, device):
    model = write(name, tmp_path / "model")
    job = {"model": str(tmp_path / "model"), "engine": ENGINE, "prompts": PROMPTS}
    result = run_job(ENCODER_JOB, tmp_path, job, **(GPU_ENGINE if device.type == "cuda" else {}))
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


# -- Whisper --------------------------------------------------------------------------------------

WHISPER = {
    "vocab_size": 512, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256, "num_mel_bins": 80, "max_source_positions": 100,
    "max_target_positions": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
# Decoder prompts that take the split-KV kernel, and one that does not.
DECODER_PROMPTS = [[1, *prompt] for prompt in prompts_of([0, 3, 25, 7, 1])]
SECONDS, TOKENS = 2, 8


@torch.no_grad()
def write_whisper(folder: Path):
    """Write a Whisper that listens; return it and what makes its features of samples."""
    import transformers

    config = transformers.WhisperConfig(**WHISPER)
    model = transformers.WhisperForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "norm" in name or "encoder.embed_positions" in name:
            continue
        noise = torch.randn(weight.shape, generator=generator)
        # Output tokens are read off the embeddings: drawn wide, they would repeat the last token.
        size = 0.05 if "embed" in name else 0.1
        if weight.dim() > 1 and "embed" not in name:
            wide = 3.0 if "out_proj" in name else 1.5
            size = wide / weight[0].numel() ** 0.5
        weight.copy_(size * noise)
    model.save_pretrained(folder)
    _write_tokenizer(folder, config.vocab_size, 128)
    extractor = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=SECONDS)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    return model.eval(), extractor


@torch.no_grad()
def transcribe(model, extractor, prompt: list[int], audio: torch.Tensor) -> list[int]:
    """Greedy tokens by Hugging Face, without any cache."""
    features = extractor(audio.numpy(), sampling_rate=16000, return_tensors="pt").input_features
    heard, tokens = model.model.encoder(features), list(prompt)
    for _ in range(TOKENS):
        decoded = model(encoder_outputs=heard, decoder_input_ids=torch.tensor([tokens]))
        tokens.append(int(decoded.logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_whisper_writes_what_hugging_face_writes(tmp_path, device):
    model, extractor = write_whisper(tmp_path / "model")
    # Whistles, each from a pitch to another: noise would all sound alike.
    time = torch.arange(SECONDS * 16000) / 16000
    pitch = torch.tensor([[200, 4000], [5000, 300], [900, 900], [2500, 2600], [100, 7000]])
    audio = torch.sin(torch.pi * time * (pitch[:, :1] * 2 + pitch.diff() * time / SECONDS))
    torch.save(audio, tmp_path / "audio.pt")
    job = {
        "model": str(tmp_path / "model"), "audio": str(tmp_path / "audio.pt"),
        "prompts": DECODER_PROMPTS, "max_tokens": TOKENS,
        "engine": ENGINE | {"max_model_len": 128, "max_num_batched_tokens": 512},
    }  # fmt: skip
    environ = GPU_ENGINE if device.type == "cuda" else {}
    result = run_job(WHISPER_JOB, tmp_path, job, **environ)
    expected = [
        transcribe(model, extractor, prompt, samples)
        for prompt, samples in zip(DECODER_PROMPTS, audio, strict=True)
    ]
    assert result["tokens"] == expected
    assert len({tuple(tokens) for tokens in expected}) > 2, "one answer to everything"
    assert all(map(lambda broken, good: broken != good, result["broken"], expected))
    cross = [bases for name, bases in result["impls"].items() if "encoder_attn" in name]
    assert [bases[:2] for bases in cross] == [["CrossAttentionImpl", "TilewiseImpl"]] * 2
    assert all("TilewiseImpl" in bases for bases in result["impls"].values())
    assert result["counters"]["launches{kernel=prefill}"] > 0
    assert result["counters"]["launches{kernel=decode}"] > 0
