"""When vLLM hands a layer its KV cache: every kernel it needs is compiled, and checked once.

That moment comes after weights and metadata builders exist, before anything is served, and never
within the capture of a CUDA graph. What depends on a layer's geometry only is done for one layer of
each.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tilewise import counters
from tilewise.errors import SelfCheckFailed, UnsupportedConfig
from tilewise.integration import self_check, triton_cache, warm_encoder
from tilewise.integration.impl import TilewiseImpl
from tilewise.integration.self_check_inputs import (
    batches_of,
    has_spans,
    make_sequence,
    make_spans,
)
from tilewise.integration.spans import is_clamped
from tilewise.kernels.soft_cap import is_served, wide_cap
from tilewise.settings import load_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from tilewise.attention import PagedAttention
    from tilewise.integration.builder import TilewiseMetadataBuilder

# Below the logger that vLLM configures, so that our lines look like its own.
logger = logging.getLogger("vllm.tilewise")

_compiled: set[tuple[Any, ...]] = set()
_checked: set[tuple[Any, ...]] = set()

# Triton compiles a kernel apart for strides that are multiples of this.
_DIVISOR = 16


def watch(builder: TilewiseMetadataBuilder, layers: Mapping[str, Any]) -> None:
    """Prepare each of these layers when its cache is bound; encoders, which have none, at once.

    Parameters
    ----------
    builder : TilewiseMetadataBuilder
        Theirs.
    layers : Mapping[str, AttentionLayerBase]
        Layers by name; those of other implementations are left alone.
    """
    for layer in layers.values():
        if not isinstance(getattr(layer, "impl", None), TilewiseImpl):
            continue
        if layer.impl.is_encoder:
            prepare_encoder(builder, layer)
        else:
            layer.bind_kv_cache = _Binding(builder, layer)


def causal_kinds(kv_cache_spec: Any, vllm_config: VllmConfig, is_cross: bool) -> tuple[Any, ...]:
    """What batches may say of their queries, of ``True``, ``False`` and ``"tensor"`` (in part).

    Parameters
    ----------
    kv_cache_spec : KVCacheSpec
        Of the group; that of prefix language models says that nothing is causal.
    vllm_config : VllmConfig
    is_cross : bool
        Whether the group's layers are cross attention.
    """
    if is_cross:
        return (False,)
    if getattr(kv_cache_spec, "non_causal", False):
        return (False,)
    config = getattr(vllm_config, "attention_config", None)
    asked = getattr(config, "use_non_causal", False)
    # Drafters of these methods have layers that see all of a draft; their builders may be given
    # the target's configuration.
    method = getattr(vllm_config.speculative_config, "method", None)
    return (True, False, "tensor") if asked or method in ("dflash", "dspark") else (True,)


class _Binding:
    """A layer's ``bind_kv_cache``, once: as the layer's class has it, then ``prepare``."""

    original: Callable[[torch.Tensor], None]

    def __init__(self, builder: TilewiseMetadataBuilder, layer: Any) -> None:
        bind = layer.bind_kv_cache
        # A builder made for an estimate of memory was here before, and is not used again.
        self.original = bind.original if isinstance(bind, _Binding) else bind
        self.builder, self.layer = builder, layer

    def __call__(self, kv_cache: torch.Tensor) -> None:
        del self.layer.bind_kv_cache
        self.original(kv_cache)
        prepare(self.builder, self.layer, kv_cache)


def prepare(builder: TilewiseMetadataBuilder, layer: Any, kv_cache: torch.Tensor) -> None:
    """Compile the kernels of a layer and check them, unless that was done for one like it.

    Parameters
    ----------
    builder : TilewiseMetadataBuilder
        The layer's.
    layer : torch.nn.Module
        The layer.
    kv_cache : Tensor[num_pages, num_kv_heads, page_size, 2 * head_size]
        Its cache.

    Raises
    ------
    SelfCheckFailed
        If a kernel computes something else than plain PyTorch.
    """
    attn, impl = builder.attn, layer.impl
    cuda = _is_cuda(attn)
    if kv_cache.shape[0] == 0 or (cuda and torch.cuda.is_current_stream_capturing()):
        return
    if kv_cache.dtype != (attn.dtype if impl.kv_dtype is None else torch.uint8):
        raise UnsupportedConfig(
            f"the KV cache is of {kv_cache.dtype}; tilewise was built for {attn.kv_dtype}"
        )
    kind = _kind(builder, layer, kv_cache)
    builder.is_warm = True
    with torch.inference_mode(), counters.paused():
        if cuda and kind not in _compiled:
            with triton_cache.kept():
                warm_up(builder, layer, kv_cache)
            _compiled.add(kind)
        # The real cache has more pages than one made for an estimate of memory.
        geometry = (*kind, kv_cache.shape[0])
        if geometry in _checked or not load_settings(os.environ).self_check:
            return
        _checked.add(geometry)
        started = time.perf_counter()
        try:
            self_check.check(impl, layer, attn, kv_cache, **_alone(builder))
        except SelfCheckFailed:
            counters.add("self_checks", always=True, result="failed")
            raise
    counters.add("self_checks", result="passed")
    logger.info(
        "tilewise's prefill, decode and cache write agree with PyTorch on the KV cache (%.2f s)",
        time.perf_counter() - started,
    )


def prepare_encoder(builder: TilewiseMetadataBuilder, layer: Any) -> None:
    """Compile the kernels of a layer without a cache, unless that was done for one like it.

    Parameters
    ----------
    builder : TilewiseMetadataBuilder
        The layer's.
    layer : torch.nn.Module
        The layer.
    """
    impl = layer.impl
    attn = next((x for x in builder.every_attn if x.window == impl.window), builder.attn)
    kind = (
        attn.device, attn.dtype, attn.config, attn.max_num_reqs, builder.quantises_output,
        *_cap(attn, impl), _pointer(impl.sinks),
    )  # fmt: skip
    builder.is_warm = True
    if not _is_cuda(attn) or kind in _compiled:
        return
    with torch.inference_mode(), counters.paused(), triton_cache.kept():
        warm_up_encoder(builder, layer, attn)
    _compiled.add(kind)


def _is_cuda(attn: PagedAttention) -> bool:
    """Whether kernels are compiled at all."""
    return attn.device.type == "cuda"


def _alone(builder: TilewiseMetadataBuilder) -> dict[str, Any]:
    """Keyword arguments of the self-check under decode context parallelism; else none.

    Ranks prepare their layers whenever they come to it, so nothing is exchanged here.
    """
    return {} if builder.sharded is None else {"sharded": builder.sharded.alone()}


def _kind(builder: TilewiseMetadataBuilder, layer: Any, kv_cache: torch.Tensor) -> tuple[Any, ...]:
    """Whatever of a layer its kernels or their launches depend on."""
    attn, impl = builder.attn, layer.impl
    scales: tuple[Any, ...] = ()
    if impl.kv_dtype is not None:
        scales = tuple((*_pointer(x), x.numel()) for x in (layer._k_scale, layer._v_scale))
    return (
        attn.device, attn.dtype, attn.config, attn.max_num_reqs, kv_cache.dtype, impl.kv_dtype,
        tuple(kv_cache.shape[1:]), kv_cache.stride(), _pointer(kv_cache),
        has_spans(impl, layer), is_clamped(layer), builder.quantises_output,
        builder.causal_kinds,
        *_cap(attn, impl), _pointer(impl.sinks), _pointer(impl.alibi_slopes), impl.alibi_sqrt,
        scales, impl.rotated_keys,
    )  # fmt: skip


def _cap(attn: PagedAttention, impl: Any) -> tuple[bool, ...]:
    """What kernels are chosen and compiled for of a layer's cap, whose value they are given."""
    softcap = impl.soft_cap or 0.0
    return bool(softcap), wide_cap(softcap, attn.dtype), is_served(softcap, impl.scale)


def _pointer(x: torch.Tensor | None) -> tuple[Any, ...]:
    """What Triton tells apart of a tensor's address; nothing of none."""
    return () if x is None else (x.dtype, x.data_ptr() % _DIVISOR == 0)


def row_pads(head_size: int) -> tuple[int, ...]:
    """Paddings that give rows of queries, keys and values every divisibility they can have.

    Rows are whole heads, of one tensor or of a wider one that holds queries, keys and values. Where
    a head is a multiple of 16 elements, so is every row; else the number of heads decides, and
    PyTorch's idea of the stride of a single row.
    """
    return (0,) if head_size % _DIVISOR == 0 else (0, _DIVISOR // 2)


def warm_up(builder: TilewiseMetadataBuilder, layer: Any, kv_cache: torch.Tensor) -> None:
    """Launch every kernel of a layer in every specialisation that a server can meet.

    Launching, rather than compiling alone, also loads them and fills what remembers launches.
    """
    attn, impl = builder.attn, layer.impl
    started = time.perf_counter()
    pads = row_pads(impl.head_size)
    by_pad = {pad: make_sequence(impl, layer, attn, kv_cache, pad) for pad in pads}
    first = by_pad[0]
    alone = _alone(builder)
    with self_check.Borrowed(kv_cache, first.pages):
        for key_pad in pads:
            for value_pad in pads:
                key, value = by_pad[key_pad].key, by_pad[value_pad].value
                self_check.write(impl, layer, kv_cache, replace(first, key=key, value=value))
        # New keys and values are read beside the cache where ranks share it.
        several = itertools.product(pads, pads) if alone else [(0, 0)]
        for pad, new_pads in itertools.product(pads, several):
            for batch, told in batches_of(first, attn, alone.get("sharded")):
                for variant in _variants(builder, layer, batch):
                    self_check.attend(
                        impl, layer, attn, kv_cache, first, batch, pad, new_pads=new_pads,
                        **told, **variant, **alone,
                    )  # fmt: skip
    _say_compiled(attn, started)


def _variants(
    builder: TilewiseMetadataBuilder, layer: Any, batch: list[tuple[int, int]]
) -> list[dict[str, Any]]:
    """What may be asked of one batch in ways that kernels are compiled apart for."""
    device = builder.attn.device
    if builder.sharded is not None:
        # Prompts that are new to all ranks, and others.
        return [{"has_context": has_context} for has_context in (True, False)]
    spans: list[torch.Tensor | None] = [None]
    if has_spans(layer.impl, layer):
        spans.append(make_spans(batch, device))
    return [
        {"causal": causal, "output_scale": scale, "spans": span}
        for causal in builder.causal_kinds
        for scale in _output_scales(builder, layer, device)
        for span in (spans if causal is True else [None])
    ]


def _output_scales(
    builder: TilewiseMetadataBuilder, layer: Any, device: torch.device
) -> list[torch.Tensor | None]:
    """None, and a scale of quantised outputs where the layer may be asked for one."""
    if not (builder.quantises_output and layer.impl.may_quantise_output()):
        return [None]
    return [None, torch.ones(1, dtype=torch.float32, device=device)]


def warm_up_encoder(builder: TilewiseMetadataBuilder, layer: Any, attn: PagedAttention) -> None:
    """Launch every kernel of a layer without a cache in every specialisation."""
    started = time.perf_counter()
    pads = row_pads(layer.impl.head_size)
    for several in warm_encoder.row_batches(attn):
        for query_pad, key_pad, value_pad in itertools.product(pads, repeat=3):
            for scale in _output_scales(builder, layer, attn.device):
                warm_encoder.attend_to_rows(
                    layer.impl, layer, attn, several, (query_pad, key_pad, value_pad), scale
                )
    _say_compiled(attn, started)


def _say_compiled(attn: PagedAttention, started: float) -> None:
    if attn.device.type == "cuda":
        torch.cuda.synchronize(attn.device)
    logger.info("tilewise's kernels are compiled (%.1f s)", time.perf_counter() - started)
