"""Which kernels a layer of a planned batch runs on, and their launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewise import counters, policy
from tilewise.buffers import Buffers
from tilewise.kernels.decode import decode_attention
from tilewise.kernels.launch import KvCache, Logits
from tilewise.kernels.prefill import prefill_attention
from tilewise.kernels.prefix_decode import prefix_decode_attention
from tilewise.kernels.soft_cap import is_served
from tilewise.plan import Plan

_DECODE = counters.cell("launches", kernel="decode")
_HOPPER_DECODE = counters.cell("launches", kernel="hopper_decode")
_PREFIX_DECODE = counters.cell("launches", kernel="prefix_decode")
_PREFILL = counters.cell("launches", kernel="prefill")
_HOPPER_PREFILL = counters.cell("launches", kernel="hopper_prefill")
_HOPPER_PREFILL_KV8 = counters.cell("launches", kernel="hopper_prefill_kv8")
_HOPPER_PREFILL_FP8 = counters.cell("launches", kernel="hopper_prefill_fp8")


@dataclass(slots=True)
class Layer:
    """One layer's tensors, checked, and what ``PagedAttention.run`` was told of it.

    Parameters
    ----------
    out : Tensor[rows, num_q_heads, head_dim]
        Quantised outputs as bytes, uint8.
    lse : Tensor[rows, num_q_heads], fp32, or None
    q : Tensor[rows, num_q_heads, head_dim]
    kv : KvCache
    use_tma : bool
        Whether the copy engine can read keys and values.
    logits : Logits
    spans : str
        ``"whole"``, ``"windowed"`` or ``"off"``.
    out_scale : Tensor[] or Tensor[1], fp32, or None
    out_format : str
        How a quantised output is written (``tilewise.kernels.fp8``); "" without ``out_scale``.
    """

    out: torch.Tensor
    lse: torch.Tensor | None
    q: torch.Tensor
    kv: KvCache
    use_tma: bool
    logits: Logits
    spans: str
    out_scale: torch.Tensor | None
    out_format: str


def launch_decode(cfg: policy.Config, buffers: Buffers, plan: Plan, layer: Layer) -> None:
    """Compute the rows of requests of 1 to 16 query tokens.

    Parameters
    ----------
    cfg : policy.Config
    buffers : Buffers
        With the lists of ``plan``.
    plan : Plan
    layer : Layer
    """
    tensors = (layer.out, layer.lse, layer.q, layer.kv)
    batch: tuple[Any, ...] = (
        plan.query_start_loc, plan.seq_lens, plan.block_table,
        buffers.header, buffers.cu_work, buffers.worker_record,
        buffers.partial_acc, buffers.partial_m, buffers.partial_l, buffers.arrivals, layer.logits,
    )  # fmt: skip
    t = cfg.decode
    wanted = plan.decodes_few or plan.side_by_side
    plain = not wanted or not _for_gluon(plan, layer)
    if cfg.hopper_decode and not plain:
        # Imported late, as the Gluon prefill is.
        from tilewise.kernels.hopper_decode import hopper_decode_attention

        hopper_decode_attention(
            *tensors, *batch, window=cfg.window, item_overhead=cfg.item_overhead,
            num_programs=cfg.num_sms, block_m=t.block_m, block_n=t.block_n,
            num_stages=cfg.hopper_decode.num_stages, pdl=cfg.pdl,
        )  # fmt: skip
        _HOPPER_DECODE.n += 1
        return
    merge_rows, merge_pieces = cfg.merge_tile
    # Of both plain decodes, and then of one.
    options: dict[str, Any] = {
        "item_overhead": cfg.item_overhead, "block_m": t.block_m, "block_n": t.block_n,
        "block_d": t.block_d, "num_warps": t.num_warps, "num_stages": t.num_stages,
        "tail_stages": t.tail_stages, "use_tma": t.use_tma and layer.use_tma,
        "merge_rows": merge_rows, "merge_pieces": merge_pieces, "pdl": cfg.pdl,
        "out_scale": layer.out_scale, "out_format": layer.out_format,
    }  # fmt: skip
    shared = buffers.shared
    if plan.shared and shared is not None and plan.block_table is not None:
        batch = (
            plan.query_start_loc, plan.seq_lens, plan.block_table, buffers.header, buffers.cu_work,
            *shared.buffers, buffers.arrivals, shared.row_arrivals, layer.logits,
        )  # fmt: skip
        options |= shared.tiles
        prefix_decode_attention(*tensors, *batch, **options)
        _PREFIX_DECODE.n += 1
        return
    options |= cfg.piece_constants
    decode_attention(
        *tensors, *batch, **options, window=cfg.window,
        causal=plan.causal if plan.mask is None else False,
        kv_starts=plan.kv_starts, mask=plan.mask,
    )  # fmt: skip
    _DECODE.n += 1


def launch_prefill(cfg: policy.Config, buffers: Buffers, plan: Plan, layer: Layer) -> None:
    """Compute the rows of all other requests: longer queries, and those in spans.

    Parameters
    ----------
    cfg : policy.Config
    buffers : Buffers
        With the lists of ``plan``.
    plan : Plan
    layer : Layer
    """
    tensors = (layer.out, layer.lse, layer.q, layer.kv)
    batch: tuple[Any, ...] = (
        plan.query_start_loc, plan.seq_lens, plan.block_table,
        buffers.header, buffers.tile_req, buffers.tile_token, layer.logits,
    )  # fmt: skip
    heeded = None if layer.spans == "off" else plan.spans
    plain = heeded is not None or not _for_gluon(plan, layer)
    programs = min(cfg.num_sms, plan.max_prefill_tiles * cfg.geometry.num_kv_heads)
    kv, tiles = layer.kv, cfg.hopper_prefill
    if tiles and not plain and not kv.format:
        # Imported late: other devices, and Triton's interpreter, need no Gluon.
        from tilewise.kernels.hopper_prefill import hopper_prefill_attention

        hopper_prefill_attention(
            *tensors, *batch, window=cfg.window, num_programs=programs,
            block_n=tiles.block_n, num_stages=tiles.num_stages, beside_decode=plan.side_by_side,
        )  # fmt: skip
        _HOPPER_PREFILL.n += 1
        return
    # Older GPUs' way to read fp8 is not the Gluon kernel's (tests take it here as well).
    converts = kv.format in ("e4m3", "e5m2")
    if tiles and not plain and converts and not kv.page_scales and not kv.rotated:
        from tilewise.kernels.hopper_prefill_kv8 import hopper_prefill_kv8_attention

        hopper_prefill_kv8_attention(
            *tensors, *batch, window=cfg.window, num_programs=programs, block_n=tiles.block_n,
            num_stages=tiles.num_stages, narrow_stages=tiles.narrow_stages,
        )  # fmt: skip
        _HOPPER_PREFILL_KV8.n += 1
        return
    fp8 = cfg.hopper_prefill_fp8 if cfg.fp8_dot == "promoted" else None
    if fp8 and not plain and not layer.logits.softcap and not kv.page_scales:
        from tilewise.kernels.hopper_prefill_fp8 import hopper_prefill_fp8_attention

        hopper_prefill_fp8_attention(
            *tensors, *batch, block_n=fp8.block_n, num_stages=fp8.num_stages, num_programs=programs
        )
        _HOPPER_PREFILL_FP8.n += 1
        return
    t = cfg.prefill
    prefill_attention(
        *tensors, *batch, max_tiles=plan.max_prefill_tiles, window=cfg.window,
        causal=plan.causal, spans=heeded, spans_in_window=layer.spans == "windowed",
        kv_starts=plan.kv_starts,
        mask=None if plan.mask is None or plan.mask.is_tree else plan.mask,
        out_scale=layer.out_scale, out_format=layer.out_format,
        block_q=cfg.prefill_block_q, block_m=t.block_m, block_n=t.block_n, block_d=t.block_d,
        num_warps=t.num_warps, num_stages=t.num_stages, tail_stages=t.tail_stages,
        use_tma=t.use_tma and layer.use_tma, lazy_rescale=t.lazy_rescale, fp8_dot=cfg.fp8_dot,
    )  # fmt: skip
    _PREFILL.n += 1


def _for_gluon(plan: Plan, layer: Layer) -> bool:
    """Whether a layer is one for the Gluon kernels: for both of a batch, or for none.

    A batch they take, logits without ALiBi and with a usual cap, an output in the queries' dtype,
    addresses that the copy engine takes.
    """
    logits = layer.logits
    usual = logits.alibi_slopes is None and is_served(logits.softcap, logits.scale)
    simple = usual and plan.why_plain is None and layer.out_scale is None
    # Outputs are stored one by one, but start-up compiles for rows of 16 bytes only.
    return layer.use_tma and simple and _aligned_rows(layer.q, layer.out)


def _aligned_rows(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can address rows: positive strides and addresses of 16 bytes."""
    return all(
        x.data_ptr() % 16 == 0
        and all(
            stride > 0 and stride * x.element_size() % 16 == 0
            for stride, length in zip(x.stride()[:-1], x.shape[:-1], strict=True)
            if length > 1
        )
        for x in tensors
    )
