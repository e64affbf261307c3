"""Writes a tiny Llama checkpoint whose tokens depend on attention, and a local tokenizer for it.

vLLM's ``--load-format dummy`` draws weights so small that attention never changes a token, so a
test on it passes with any attention. These weights are drawn wide enough that it decides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@dataclass(frozen=True)
class TinyLlama:
    """Shape of the checkpoint; vocabulary and text limits are the same in all of them."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_layers: int = 2
    hidden_size: int = 128
    intermediate_size: int = 256
    vocab_size: int = 512
    max_len: int = 4096
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def config(self) -> dict[str, object]:
        """Contents of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }

    def write(self, folder: Path) -> Path:
        """Write configuration, weights and tokenizer into ``folder`` and return it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config(), indent=1))
        generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        (folder / "generation_config.json").write_text(json.dumps(generation))
        save_file(self._weights(), folder / "model.safetensors", metadata={"format": "pt"})
        _write_tokenizer(folder, self.vocab_size, self.max_len)
        return folder

    def _weights(self) -> dict[str, torch.Tensor]:
        """Seeded normal weights; queries, keys and the attention output are drawn wider."""
        generator = torch.Generator().manual_seed(self.seed)

        def linear(rows: int, columns: int, gain: float) -> torch.Tensor:
            weight = torch.randn(rows, columns, generator=generator)
            return (weight * (gain / columns**0.5)).to(self.dtype)

        hidden, q_size = self.hidden_size, self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        ones = torch.ones(hidden, dtype=self.dtype)
        embedding = torch.randn(self.vocab_size, hidden, generator=generator) * 0.3
        weights = {
            "model.embed_tokens.weight": embedding.to(self.dtype),
            "lm_head.weight": linear(self.vocab_size, hidden, 1.0),
            "model.norm.weight": ones.clone(),
        }
        for index in range(self.num_layers):
            layer = f"model.layers.{index}."
            weights |= {
                f"{layer}self_attn.q_proj.weight": linear(q_size, hidden, 1.5),
                f"{layer}self_attn.k_proj.weight": linear(kv_size, hidden, 1.5),
                f"{layer}self_attn.v_proj.weight": linear(kv_size, hidden, 1.5),
                f"{layer}self_attn.o_proj.weight": linear(hidden, q_size, 3.0),
                f"{layer}mlp.gate_proj.weight": linear(self.intermediate_size, hidden, 1.0),
                f"{layer}mlp.up_proj.weight": linear(self.intermediate_size, hidden, 1.0),
                f"{layer}mlp.down_proj.weight": linear(hidden, self.intermediate_size, 1.0),
                f"{layer}input_layernorm.weight": ones.clone(),
                f"{layer}post_attention_layernorm.weight": ones.clone(),
            }
        return weights


def _write_tokenizer(folder: Path, vocab_size: int, max_len: int) -> None:
    """Byte-level tokenizer: one token a byte, filler tokens so that every id has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    texts = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    texts += [f"<filler{index}>" for index in range(len(texts), vocab_size)]
    vocab = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": max_len,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
