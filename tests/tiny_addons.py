"""What is put on top of a tiny Llama: a LoRA adapter, an EAGLE drafter, an MTP module."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_model import TinyLlama


def write_lora(shape: TinyLlama, folder: Path, rank: int = 8, seed: int = 1) -> Path:
    """Write an adapter of queries, keys, values and the attention output, wide enough to decide.

    Parameters
    ----------
    shape : TinyLlama
        The model it is for.
    folder : Path
        Where; made if needed, and returned.
    rank : int
        Rows of ``A``.
    seed : int
        Of its weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    hidden, q_size = shape.hidden_size, shape.num_heads * shape.head_dim
    kv_size = shape.num_kv_heads * shape.head_dim
    sizes = {
        "q_proj": (hidden, q_size),
        "k_proj": (hidden, kv_size),
        "v_proj": (hidden, kv_size),
        "o_proj": (q_size, hidden),
    }
    weights = {}
    for layer in range(shape.num_layers):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, rank, generator=generator) / rank**0.5
            weights[f"{prefix}.lora_A.weight"] = a.to(shape.dtype)
            weights[f"{prefix}.lora_B.weight"] = b.to(shape.dtype)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(sizes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge_lora(shape: TinyLlama, adapter: Path, folder: Path) -> Path:
    """Write the same model with an adapter's products added to its weights, as a reference."""
    from safetensors.torch import load_file

    shape.write(folder)
    weights = load_file(folder / "model.safetensors")
    update = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in update if name.endswith(".lora_A.weight")]:
        stem = name.removesuffix(".lora_A.weight")
        target = stem.removeprefix("base_model.model.") + ".weight"
        product = update[f"{stem}.lora_B.weight"].float() @ update[name].float()
        weights[target] = (weights[target].float() + product).to(shape.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_eagle(shape: TinyLlama, model: Path, folder: Path) -> Path:
    """Write a drafter in EAGLE's form that drafts what its target says, all but right.

    EAGLE's drafter sees the text without its first token, and is given the target's hidden states,
    which this one ignores. Its layer is the only one of the target, whose embeddings are given
    unit mean square here, as EAGLE's first layer has no norm: what it drafts is what the target
    would say to a text without its first token. So drafts are accepted as long as the drafter's
    attention is right, and the target's embedding and output layer, which vLLM shares with it,
    serve it as they are.

    Parameters
    ----------
    shape : TinyLlama
        Of the target; of one layer.
    model : Path
        The target's folder, written before; its embeddings are rewritten.
    folder : Path
        Where; returned.
    """
    from safetensors.torch import load_file

    if shape.num_layers != 1:
        raise ValueError(f"a target of {shape.num_layers} layers; accepted: 1")
    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].float()
    embedding *= embedding.square().mean(dim=-1, keepdim=True).rsqrt()
    weights["model.embed_tokens.weight"] = embedding.to(shape.dtype)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    shape.write(folder)
    kept = {
        name.removeprefix("model."): tensor
        for name, tensor in weights.items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    hidden = shape.hidden_size
    kept["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1).to(
        shape.dtype
    )
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_mtp(shape: TinyLlama, folder: Path, reference: Path) -> Path:
    """Write a MiMo checkpoint, whose module for multi-token prediction drafts what it says itself.

    MiMo is Qwen 2 with modules (MTP) that are given the target's hidden states and the embeddings
    of the text without its first token. This one ignores the former, and its block is the target's
    only layer, so that it drafts what the target would say to such a text; the embeddings have unit
    mean square, which leaves them as they are in the module's norm. vLLM blanks the first of them.

    Parameters
    ----------
    shape : TinyLlama
        Of the target; of one layer, and heads that fill its hidden size.
    folder : Path
        Where; made if needed, and returned.
    reference : Path
        Where the target alone is written, as a Qwen 2 that Hugging Face knows.
    """
    from safetensors.torch import load_file

    if shape.num_layers != 1 or shape.num_heads * shape.head_dim != shape.hidden_size:
        raise ValueError(f"{shape}; accepted: one layer, num_heads * head_dim = hidden_size")
    shape.write(reference)
    weights = load_file(reference / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].float()
    embedding *= embedding.square().mean(dim=-1, keepdim=True).rsqrt()
    weights["model.embed_tokens.weight"] = embedding.to(shape.dtype)
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = weights[f"model.layers.0.self_attn.{name}.weight"].shape[0]
        weights[f"model.layers.0.self_attn.{name}.bias"] = torch.zeros(rows, dtype=shape.dtype)
    config = {**shape.config(), "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (reference / "config.json").write_text(json.dumps(config))
    save_file(weights, reference / "model.safetensors", metadata={"format": "pt"})

    shape.write(folder)
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, module = shape.hidden_size, "model.mtp_layers.0."
    ones = torch.ones(hidden, dtype=shape.dtype)
    kept = {
        name.replace("model.layers.0.", module): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith("model.layers.0.")
    }
    kept |= {f"{module}{name}.weight": ones.clone() for name in (
        "token_layernorm", "hidden_layernorm", "final_layernorm",
    )}  # fmt: skip
    kept[f"{module}input_proj.weight"] = torch.cat(
        [torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1
    ).to(shape.dtype)
    save_file({**weights, **kept}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
