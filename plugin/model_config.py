"""The attention layers that a model's ``config.json`` describes, without loading the model.

This states for the common families what vLLM's model code does with their configuration. It reads
plain JSON, so that it works without vLLM, without transformers and for configurations newer than
either; what it cannot know (layers built by remote code) is left at what every Llama has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewise import support
from tilewise.errors import UnsupportedConfig

Config = Mapping[str, Any]

# Where multimodal models keep the configuration of their language model.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_ENCODERS = frozenset(
    {
        "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra",
        "modernbert", "mpnet", "nomic_bert", "roberta", "xlm-roberta",
    }
)  # fmt: skip
# Whose images see each other in both directions.
_MM_PREFIX = frozenset({"bagel", "gemma3", "molmo2", "moondream3", "paligemma"})
# Sliding window in all but every n-th layer, where the configuration does not list them.
_PATTERN = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model on one rank.

    Parameters
    ----------
    index : int
        Its number among the model's layers.
    num_q_heads, num_kv_heads : int
        Heads of this rank.
    window : int or None
        Sliding window in tokens.
    request : support.Request
        The layer as the support table sees it.
    """

    index: int
    num_q_heads: int
    num_kv_heads: int
    window: int | None
    request: support.Request


@dataclass(frozen=True)
class Model:
    """A model's attention layers, and how many of its layers are of another kind."""

    model_type: str
    dtype: str
    layers: tuple[Layer, ...]
    other_layers: int


@dataclass(frozen=True)
class Options:
    """What the server's command line adds to a configuration; names as in ``vllm serve``."""

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    tensor_parallel_size: int = 1
    device_capability: tuple[int, int] | None = None


def read_model(config: Config, options: Options | None = None) -> Model:
    """Return the attention layers of a model.

    Parameters
    ----------
    config : Mapping[str, Any]
        Contents of ``config.json``.
    options : Options, optional

    Raises
    ------
    UnsupportedConfig
        If the configuration describes no attention layers, or heads that the ranks cannot share.
    """
    options = options or Options()
    text = _text_config(config)
    number = _first(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if not isinstance(number, int) or number < 1:
        raise UnsupportedConfig(
            "config.json has no num_hidden_layers; accepted: the configuration of a language model"
        )
    kinds = [_kind(text, index) for index in range(number)]
    dtype = _dtype(config, text, options.dtype)
    layers = tuple(
        _layer(config, text, index, kind, dtype, options)
        for index, kind in enumerate(kinds)
        if kind is not None
    )
    return Model(str(config.get("model_type", "")), dtype, layers, number - len(layers))


def _text_config(config: Config) -> Config:
    for name in _NESTED:
        if isinstance(config.get(name), Mapping):
            return _text_config(config[name])
    return config


def _first(config: Config, *names: str) -> Any:
    """The first of these entries that is there and not null."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _at(value: Any, index: int) -> Any:
    """A layer's entry where models list one for each layer, else the model's."""
    return value[index] if isinstance(value, list) and index < len(value) else value


def _dtype(config: Config, text: Config, asked: str) -> str:
    if asked not in ("auto", "half"):
        return asked
    found = _first(text, "dtype", "torch_dtype") or _first(config, "dtype", "torch_dtype")
    name = str(found or "float32").removeprefix("torch.")
    if asked == "half":
        return "float16"
    # vLLM serves checkpoints in float32 at half the size unless told otherwise.
    return "bfloat16" if name == "float32" else name


def _kind(text: Config, index: int) -> str | None:
    """``full``, ``sliding`` or ``chunked``; None for a layer without attention."""
    if text.get("model_type") in ("mamba", "mamba2", "falcon_mamba", "rwkv"):
        return None
    named = _at(_first(text, "layer_types", "layers_block_type"), index)
    if isinstance(named, str):
        return _named_kind(named, text)
    letters = text.get("hybrid_override_pattern")
    if isinstance(letters, str) and index < len(letters):
        return "full" if letters[index] == "*" else None
    period = text.get("attn_layer_period")
    if period and index % period != text.get("attn_layer_offset", 0):
        return None
    if text.get("attention_chunk_size") and _uses_rope(text, index):
        return "chunked"
    return "sliding" if _window(text) and _slides(text, index) else "full"


def _named_kind(name: str, text: Config) -> str | None:
    if "sliding" in name:
        return "sliding"
    if "chunked" in name:
        return "chunked"
    if "linear" in name or not ("attention" in name or name in ("hybrid", "full")):
        return None
    return "full"


def _uses_rope(text: Config, index: int) -> bool:
    """Llama 4: layers without positions attend to everything, the others to their chunk."""
    listed = text.get("no_rope_layers")
    if listed:
        return bool(_at(listed, index))
    return (index + 1) % int(text.get("no_rope_layer_interval") or 4) != 0


def _window(text: Config) -> int | None:
    if text.get("use_sliding_window") is False:
        return None
    window = _first(text, "sliding_window", "sliding_window_size")
    return window if isinstance(window, int) and window > 0 else None


def _slides(text: Config, index: int) -> bool:
    """Whether a layer slides, in a model with a window whose layers are not listed."""
    pattern = text.get("sliding_window_pattern") or _PATTERN.get(str(text.get("model_type")))
    if isinstance(pattern, str):  # EXAONE: one letter a layer, repeated
        return pattern[index % len(pattern)] == "L"
    if pattern:
        return (index + 1) % int(pattern) != 0
    if text.get("use_sliding_window") and text.get("max_window_layers") is not None:
        return index >= int(text["max_window_layers"])
    return True


def _heads(text: Config, index: int, ranks: int) -> tuple[int, int]:
    """Query and KV heads of one rank."""
    names = ("num_attention_heads", "n_head", "n_heads", "num_query_heads")
    q = _at(_first(text, *names), index)
    if not isinstance(q, int) or q < 1:
        raise UnsupportedConfig(
            "config.json has no num_attention_heads, and transformers, which knows the defaults of "
            "many models, has none either or is not installed"
        )
    if q % ranks:
        raise UnsupportedConfig(
            f"{q} query heads cannot be shared by {ranks} ranks; accepted: a "
            "--tensor-parallel-size that divides the heads"
        )
    kv = _at(_kv_heads(text), index) or q
    return q // ranks, max(1, int(kv) // ranks)


def _kv_heads(text: Config) -> Any:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1  # Falcon, StarCoder
    nested = text.get("attn_config")
    if isinstance(nested, Mapping) and nested.get("kv_n_heads"):
        return nested["kv_n_heads"]  # MPT, DBRX
    names = ("n_head_kv", "num_kv_heads", "num_key_value_heads")
    return _first(text, *names, "multi_query_group_num", "num_attention_groups")


def _head_size(text: Config, index: int) -> int:
    size = _at(_first(text, "head_dim", "hidden_size_per_head", "attention_head_dim"), index)
    if isinstance(size, int) and size > 0:
        return size
    hidden = _first(text, "hidden_size", "n_embd", "d_model", "model_dim")
    heads = _at(_first(text, "num_attention_heads", "n_head", "n_heads", "num_query_heads"), index)
    if not isinstance(hidden, int) or not heads:
        raise UnsupportedConfig("config.json has neither head_dim nor hidden_size")
    return hidden // int(heads)


def _alibi(text: Config) -> bool:
    kind = text.get("model_type")
    nested = text.get("attn_config")
    return (
        kind == "bloom"
        or bool(text.get("alibi"))  # Falcon
        or (isinstance(nested, Mapping) and bool(nested.get("alibi")))  # MPT
        or text.get("position_embedding_type") == "alibi"  # Jais
        or (kind == "baichuan" and text.get("hidden_size") != 4096)
    )


def _rswa(config: Config, text: Config) -> bool:
    """Reference sliding window attention, which Unlimited-OCR has without saying so."""
    named = any(level.get("rswa_window") is not None for level in (config, text))
    return named or config.get("model_type") == "unlimited-ocr"


def _shares_kv(text: Config, index: int) -> bool:
    """Gemma 3n and its like: the last layers read the cache of earlier ones."""
    shared = int(text.get("num_kv_shared_layers") or 0)
    return shared > 0 and index >= int(text["num_hidden_layers"]) - shared


def _layer(
    config: Config, text: Config, index: int, kind: str, dtype: str, options: Options
) -> Layer:
    if text.get("kv_lora_rank") is not None:
        return _mla_layer(text, index, dtype, options)
    q, kv = _heads(text, index, options.tensor_parallel_size)
    head_size = _head_size(text, index)
    if kind == "full" and text.get("global_head_dim"):  # Gemma 4
        head_size = int(text["global_head_dim"])
        whole = _first(text, "num_global_key_value_heads", "num_key_value_heads")
        kv = max(1, int(whole or kv) // options.tensor_parallel_size)
    window = _window(text) if kind == "sliding" else None
    model_type = str(text.get("model_type"))
    encoder = config.get("model_type") in _ENCODERS
    sinks = model_type == "gpt_oss" or bool(
        text.get(f"add_{'swa' if window else 'full'}_attention_sink_bias")
    )
    request = support.Request(
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        block_size=options.block_size,
        device_capability=options.device_capability,
        has_sink=sinks,
        use_mm_prefix=config.get("model_type") in _MM_PREFIX,
        attn_type="encoder_only" if encoder else "decoder",
        has_sliding_window=window is not None,
        use_rswa=_rswa(config, text),
        alibi=_alibi(text),
        soft_cap=_first(text, "attn_logit_softcapping", "attn_logit_softcap") or None,
        layer_kind="ChunkedLocalAttention" if kind == "chunked" else "Attention",
        group_size=q // kv,
        shares_kv=_shares_kv(text, index),
    )
    return Layer(index, q, kv, window, request)


def _mla_layer(text: Config, index: int, dtype: str, options: Options) -> Layer:
    """DeepSeek's layers decode as one KV head of compressed keys."""
    q, _ = _heads(text, index, options.tensor_parallel_size)
    request = support.Request(
        head_size=int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0),
        dtype=dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        block_size=options.block_size,
        device_capability=options.device_capability,
        use_mla=True,
        use_sparse=text.get("index_topk") is not None,
        group_size=q,
    )
    return Layer(index, q, 1, None, request)
