"""What the layers of one KV-cache group have in common, and the objects that serve them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from tilewise import prefix_rule
from tilewise.attention import PagedAttention
from tilewise.device import describe
from tilewise.errors import UnsupportedConfig, UnsupportedFp8
from tilewise.integration.impl import TilewiseImpl
from tilewise.settings import load_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.tilewise")


def most_requests(num_reqs: int, num_tokens: int, chunk: int | None) -> int:
    """Bound on the requests of a batch, as it arrives at the kernels.

    Parameters
    ----------
    num_reqs, num_tokens : int
        Bounds on what is scheduled.
    chunk : int, optional
        Tokens of a chunk where attention is local to chunks: vLLM cuts a request at every multiple,
        and each part with a query token, or an empty request, is a request of its own.
    """
    if chunk is None:
        return num_reqs
    return min(2 * num_reqs + num_tokens // chunk, num_reqs + num_tokens)


def group_impls(layer_names: list[str], vllm_config: VllmConfig) -> dict[str, TilewiseImpl]:
    """Those layers of a group that are ours."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
    impls = {name: getattr(layer, "impl", None) for name, layer in layers.items()}
    return {name: impl for name, impl in impls.items() if isinstance(impl, TilewiseImpl)}


def is_encoder(kv_cache_spec: Any, impls: dict[str, TilewiseImpl]) -> bool:
    """Whether a group's layers read their batch's own keys; none of them may read a cache."""
    kinds = {name: impl.is_encoder for name, impl in impls.items()}
    if len(set(kinds.values())) > 1:
        raise UnsupportedConfig(
            f"layers of one KV-cache group with a cache and without ({kinds}; True: without); "
            "tilewise plans for one kind a group"
        )
    return next(iter(kinds.values()), isinstance(kv_cache_spec, EncoderOnlyAttentionSpec))


def group_dtypes(
    kv_cache_spec: Any, impls: dict[str, TilewiseImpl], vllm_config: VllmConfig, encoder: bool
) -> tuple[torch.dtype, torch.dtype | None]:
    """Dtype of queries, and of the cache where it is fp8; its spec says uint8 for any fp8."""
    if encoder:
        return vllm_config.model_config.dtype, None  # the spec's is that of a cache nobody has
    kv_dtypes = {name: impl.kv_dtype for name, impl in impls.items()}
    if len(set(kv_dtypes.values())) > 1:
        raise UnsupportedConfig(
            f"layers of one KV-cache group have caches of different dtypes ({kv_dtypes}; None is "
            "the model's); tilewise plans for one a group"
        )
    kv_dtype = next(iter(kv_dtypes.values()), None)
    return (kv_cache_spec.dtype if kv_dtype is None else vllm_config.model_config.dtype), kv_dtype


def refuse_mixed_rotation(layer_names: list[str], vllm_config: VllmConfig) -> None:
    """Raise where a layer reads another's cache and one of the two does not rotate keys.

    So does a drafter's layer of another backend: it would read rotated keys as they lie.
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    rotates = {
        name: bool(getattr(getattr(layer, "impl", None), "rotated_keys", False))
        for name, layer in layers.items()
    }
    for reader, layer in layers.items():
        owner = getattr(layer, "kv_sharing_target_layer_name", None)
        ours = owner in rotates and not {reader, owner}.isdisjoint(layer_names)
        if ours and rotates[reader] != rotates[owner]:
            rotating, other = (reader, owner) if rotates[reader] else (owner, reader)
            raise UnsupportedConfig(
                f"{reader} reads the KV cache of {owner}; TILEWISE_FP8_ATTENTION=rotated rotates "
                f"keys in {rotating}, and {other} takes them as they are (accepted: both layers "
                "with tilewise, or off or fp8)"
            )


def group_windows(
    kv_cache_spec: Any, impls: dict[str, TilewiseImpl], several: bool
) -> list[int | None]:
    """Sliding windows of a group's layers, in their order; None stands for none.

    The layers say it themselves: where vLLM merges specs, a group's spec may name a window that
    only some of them have. Encoders of all windows are one group, as they share no cache.
    """
    windows = {name: impl.window for name, impl in impls.items()}
    if len(set(windows.values())) > 1 and not several:
        raise UnsupportedConfig(
            f"layers of one KV-cache group have different sliding windows ({windows}); "
            "tilewise plans one window a group"
        )
    if windows:
        return list(dict.fromkeys(windows.values()))
    return [getattr(kv_cache_spec, "sliding_window", None)]


def make_attention(
    layer_names: list[str],
    heads: tuple[int, int, int],
    windows: list[int | None],
    options: Mapping[str, Any],
    *,
    encoder: bool,
    cross: bool,
    ranks: int,
    caches_prefixes: bool,
) -> list[PagedAttention]:
    """Make what will serve a group's layers, one object for each of their windows.

    Says in the log which of ``TILEWISE_FP8_ATTENTION`` and ``TILEWISE_SHARED_PREFIXES`` has been
    asked for and has no effect.

    Parameters
    ----------
    layer_names : list of str
    heads : (int, int, int)
        Query heads, KV heads, head size.
    windows : list of int or None
        From ``group_windows``.
    options : mapping
        Other arguments of ``PagedAttention``.
    encoder, cross : bool
        Whether the layers read their batch's own keys; those of another sequence.
    ranks : int
        By how many the keys are shared.
    caches_prefixes : bool
        Whether vLLM's prefix cache is on: without it no two requests have a page in common.

    Raises
    ------
    UnsupportedConfig
        For layers that are not computed, with the setting that made them so.
    """
    asked = load_settings(os.environ)
    try:
        made = [PagedAttention(*heads, window=window, **options) for window in windows]
    except UnsupportedFp8 as error:
        raise UnsupportedFp8(
            f"TILEWISE_FP8_ATTENTION={asked.fp8_attention} with {layer_names[0]}: {error} (off "
            "computes such layers)"
        ) from error
    if asked.fp8_attention != "off" and not options["fp8_matmul"]:
        logger.info(
            "TILEWISE_FP8_ATTENTION has no effect on %d layers: %s (accepted: an e4m3 cache)",
            len(layer_names),
            "no cache" if encoder else f"a cache of {made[0].kv_dtype}",
        )
    if asked.shared_prefixes == "off":
        return made
    why = _why_not_share(made[0], encoder, cross, ranks, caches_prefixes)
    if why is None:
        sharing = "always" if asked.shared_prefixes == "always" else True
        return [PagedAttention(*heads, shared_prefixes=sharing, **options)]
    logger.info("TILEWISE_SHARED_PREFIXES has no effect on %d layers: %s", len(layer_names), why)
    return made


def _why_not_share(
    attn: PagedAttention, encoder: bool, cross: bool, ranks: int, caches_prefixes: bool
) -> str | None:
    """Why decodes do not read the pages once that they begin with; None where they may."""
    if encoder:
        return "their keys lie in no cache"
    if cross:
        return "cross attention is not causal"
    if not caches_prefixes:
        return "vLLM's prefix cache is off (accepted: on, --enable-prefix-caching)"
    if ranks > 1:
        return f"their keys are shared by {ranks} ranks"
    if attn.rotated_keys:
        return "their keys are rotated (TILEWISE_FP8_ATTENTION)"
    return prefix_rule.why_not_share(attn.config, describe(attn.device))
