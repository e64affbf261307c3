"""Tiny checkpoints of real architectures, written by Hugging Face from its own configurations.

Each keeps what its family asks of attention (window, soft cap, sinks, ALiBi, odd head sizes) and is
small in everything else.  As in ``tiny_model``, weights are drawn wide enough that attention
decides the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_model import _write_tokenizer

COMMON = {
    "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# What modern decoders call the same thing.
DECODER = COMMON | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 256,
}  # fmt: skip
WINDOW = 24


@dataclass(frozen=True)
class Shape:
    """One family: the configuration class of Hugging Face and what to tell it.

    ``layers`` are those that attend; ``windows`` what they must be planned for, None for all keys.
    """

    config: str
    settings: dict
    windows: tuple[int | None, ...]
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    shared: int = 0  # layers that write no keys of their own
    block_size: int | None = None  # of the engine's options
    page_size: int = 64  # what comes of it, in layers with the largest keys
    page_sizes: tuple[int, ...] = ()  # of each layer, where they differ
    has_prefix_cache: bool = True  # unless vLLM switches it off for the family
    # Gemma multiplies embeddings by a root of their size and reads tokens off them again: drawn
    # wide, they would repeat the last token whatever attention does.
    embedding: float = 0.3

    @property
    def has_features(self) -> bool:
        """Whether plain causal attention would compute something else."""
        return bool(any(self.windows) or self.soft_cap or self.sinks or self.alibi)


def kinds(*letters: str) -> list[str]:
    """Layer types by their first letters: "s" slides, "f" sees all."""
    return [{"s": "sliding_attention", "f": "full_attention"}[x] for x in letters]


ZOO = {
    "llama3": Shape("LlamaConfig", DECODER | {"rope_parameters": LLAMA3_ROPE}, (None, None)),
    "mistral": Shape(
        "MistralConfig", DECODER | {"sliding_window": WINDOW}, (WINDOW, WINDOW)
    ),
    "qwen3": Shape("Qwen3Config", DECODER | {"head_dim": 64}, (None, None)),
    # D 96, queries, keys and values in one projection
    "phi3": Shape(
        "Phi3Config",
        DECODER | {"hidden_size": 384, "original_max_position_embeddings": 2048},
        (None, None),
    ),
    "gemma2": Shape(
        "Gemma2Config",
        DECODER | {
            "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": WINDOW,
            "layer_types": kinds("s", "f"), "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 30.0,
        },
        (WINDOW, None), soft_cap=20.0, embedding=0.05,
    ),
    "gemma3": Shape(
        "Gemma3TextConfig",
        DECODER | {
            "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": WINDOW,
            "num_hidden_layers": 6, "layer_types": kinds("s", "s", "s", "s", "s", "f"),
        },
        (*[WINDOW] * 5, None), embedding=0.05,
    ),
    # Heads of two sizes, those of layers that see all twice the window's.
    "gemma4": Shape(
        "Gemma4TextConfig",
        DECODER | {
            "head_dim": 256, "global_head_dim": 512, "sliding_window": WINDOW,
            "layer_types": kinds("s", "f"), "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 512,
        },
        (WINDOW, None), embedding=0.05, page_sizes=(128, 64),
    ),
    # The last two layers read what the first of their kind wrote.
    "gemma4_shared": Shape(
        "Gemma4TextConfig",
        DECODER | {
            "head_dim": 256, "global_head_dim": 512, "sliding_window": WINDOW,
            "num_hidden_layers": 4, "layer_types": kinds("s", "f", "s", "f"),
            "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 512,
        },
        (WINDOW, None, WINDOW, None), embedding=0.05, page_sizes=(128, 64, 128, 64), shared=2,
    ),
    "gpt_oss": Shape(
        "GptOssConfig",
        DECODER | {
            "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 1,
            "sliding_window": WINDOW, "layer_types": kinds("s", "f"),
            "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": YARN_ROPE,
        },
        (WINDOW, None), sinks=True,
    ),
    # Attention local to chunks, and a layer that sees all without rotation; no experts here.
    "llama4": Shape(
        "Llama4TextConfig",
        DECODER | {
            "head_dim": 64, "intermediate_size_mlp": 256, "attention_chunk_size": 32,
            "no_rope_layers": [1, 1, 0], "num_hidden_layers": 3, "moe_layers": [],
            "interleave_moe_layer_step": 8, "num_local_experts": 4,
        },
        (None, None, None), block_size=16, page_size=16,
    ),
    # States beside attention: one pool of pages for both, whose size no power of two divides.
    "granite_hybrid": Shape(
        "GraniteMoeHybridConfig",
        DECODER | {
            "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 256,
            "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_n_groups": 1,
            "mamba_chunk_size": 64, "position_embedding_type": "rope",
        },
        (None,), block_size=16, page_size=144, has_prefix_cache=False,
    ),
    "bloom": Shape("BloomConfig", COMMON | {"hidden_size": 128, "n_layer": 2, "n_head": 4},
                   (None, None), alibi=True),
}  # fmt: skip


def _gain(name: str) -> float:
    """How wide a matrix is drawn, in units of what keeps a vector's size."""
    if any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value", "v_proj")):
        return 1.5
    if "o_proj" in name or "self_attention.dense" in name:
        return 3.0
    return 1.0


@torch.no_grad()
def _draw(model: torch.nn.Module, embedding: float, generator: torch.Generator) -> None:
    """Wide weights; norms stay as they are, sinks weigh about as much as a key."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "sinks" in name:
            weight.copy_(noise)
        elif "norm" in name or "layernorm" in name:
            continue
        elif "embed" in name:
            weight.copy_(embedding * noise)
        elif weight.dim() == 1 or "bias" in name:
            weight.copy_(0.1 * noise)
        else:
            # Experts are stored [experts, in, out], everything else [out, in].
            fan_in = weight.shape[1]
            weight.copy_(noise * (_gain(name) / fan_in**0.5))


def write(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint ``name`` of ``ZOO`` in fp32 into ``folder`` and return it."""
    import transformers

    shape = ZOO[name]
    config = getattr(transformers, shape.config)(**shape.settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(model, shape.embedding, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    _write_tokenizer(folder, config.vocab_size, 2048)
    return folder
