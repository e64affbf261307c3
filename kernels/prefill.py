"""FlashAttention-2 prefill: variable-length queries over the paged cache, or over their own keys.

One program owns ``BLOCK_M`` query rows of one KV head, ``BLOCK_Q`` consecutive tokens (at most
``BLOCK_M // GROUP_SIZE``) times the ``GROUP_SIZE`` query heads that share it, and walks that
request's keys once.  Tiles that none of its rows sees are never visited: above a causal mask's
diagonal, outside a window, past the last key; only tiles that touch one of these are masked.
Source: Dao, FlashAttention-2 (2023); packed GQA as in FA3.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from tilewise.kernels.attend import attend, keys_ahead, last_key, window_ranges
from tilewise.kernels.fp8 import encode_fp8, fp8_rows, fp16_rows
from tilewise.kernels.hadamard import rotate_rows
from tilewise.kernels.launch import BATCH_ARGUMENTS, KvCache, Launcher, Logits, kv_arguments
from tilewise.kernels.masks import (
    KeyMask,
    mask_arguments,
    mask_constants,
    mask_rows,
    whole_tiles,
)
from tilewise.kernels.online_softmax import LOG2E, add_sink, softmax_finish
from tilewise.kernels.spans import own_span

_VARYING = ["num_spans", "stride_bt_b"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=BATCH_ARGUMENTS)
def _prefill_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_src,
    v_src,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    header_ptr,
    tile_req_ptr,
    tile_token_ptr,
    scale_log2,
    cap_log2,
    sinks_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_scale_ptr,
    causal_ptr,
    kv_start_ptr,
    mask_ptr,
    mask_start_ptr,
    spans_ptr,
    num_spans,
    stride_o_t,
    stride_o_h,
    stride_q_t,
    stride_q_h,
    stride_k_p,
    stride_k_h,
    stride_k_s,
    stride_v_p,
    stride_v_h,
    stride_v_s,
    stride_bt_b,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPANS_IN_WINDOW: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    K_SCALE_STEP: tl.constexpr,
    V_SCALE_STEP: tl.constexpr,
    ROTATED: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    LAZY: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    FP8_DOT: tl.constexpr,
):
    """out = softmax(shape(q k^T) + mask) v; grid = (prefill tiles, KV heads).

    Without ``CAUSAL`` rows see keys past their own too, but for requests whose flag at
    ``causal_ptr`` is set, if there are flags.  ``block_table_ptr`` is None where a request's keys
    are rows, those of its queries or, with a ``kv_start_ptr``, from there on.  That of a batch with
    a ``block_table_ptr`` says where each request's ids start in it.  ``spans_ptr`` is None where no
    spans are bidirectional; they go with ``CAUSAL`` only.  With ``SPANS_IN_WINDOW`` a window hides
    what lies left of it in a span too.

    With an ``out_scale_ptr`` the output is bytes of fp8, ``out / out_scale`` in ``OUT_FORMAT``.

    A ``MASK`` stands for the causal one (``tilewise.kernels.masks``); with ``CAUSAL`` off.

    ``WINDOW`` is 0 for none; ``cap_log2``, ``sinks_ptr``, ``slopes_ptr`` and the scales of an fp8
    cache are None for none.  Scales lie ``…_SCALE_STEP`` apart from head to head; -1 says
    that every page has one of each head.  With ``FP8_DOT`` products are of fp8
    operands (``attend``).  ``ROTATED`` turns queries as the cache's keys are.
    """
    slot = tl.program_id(0)
    kv_head = tl.program_id(1)
    if slot >= tl.load(header_ptr):
        return
    req = tl.load(tile_req_ptr + slot).to(tl.int64)
    first_token = tl.load(tile_token_ptr + slot)
    query_start = tl.load(query_start_loc_ptr + req)
    query_len = tl.load(query_start_loc_ptr + req + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + req)
    context_len = seq_len - query_len

    rows = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    token = first_token + rows // GROUP_SIZE
    row_ok = (rows < BLOCK_Q * GROUP_SIZE) & (token < query_len)
    pos = context_len + token  # a row's own key, if its keys are its queries'
    ahead = None
    if not CAUSAL:
        ahead = keys_ahead(query_len, causal_ptr, req, WINDOW)
    last = last_key(pos, ahead, seq_len)
    first = None
    if spans_ptr is not None:
        span_first, span_last = own_span(spans_ptr, req, num_spans, pos)
        last = tl.minimum(span_last, seq_len - 1)
        if WINDOW and not SPANS_IN_WINDOW:
            first = tl.minimum(span_first, pos - WINDOW + 1)

    # One 64-bit base a tile and 32-bit offsets inside it: fewer registers than 64-bit rows.
    tile_token = (query_start + first_token).to(tl.int64)
    tile_head = kv_head.to(tl.int64) * GROUP_SIZE
    io_mask = row_ok[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_rows = rows // GROUP_SIZE * stride_q_t + rows % GROUP_SIZE * stride_q_h
    q_tile_ptr = q_ptr + tile_token * stride_q_t + tile_head * stride_q_h
    q = tl.load(q_tile_ptr + (q_rows[:, None] + offs_d[None, :]), mask=io_mask, other=0.0)

    BF16_ROWS: tl.constexpr = (KV_FORMAT != "") and (q.dtype == tl.bfloat16)
    ROW_SCALE: tl.constexpr = BF16_ROWS or (FP8_DOT != "")
    k_scales_ptr = None
    v_scales_ptr = None
    if K_SCALE_STEP < 0:
        if k_scale_ptr is not None:
            k_scales_ptr = k_scale_ptr + kv_head
        if v_scale_ptr is not None:
            v_scales_ptr = v_scale_ptr + kv_head
    elif k_scale_ptr is not None:
        scale_log2 *= tl.load(k_scale_ptr + kv_head * K_SCALE_STEP)
    if ROTATED:
        q = rotate_rows(q.to(tl.float32), BLOCK_M, HEAD_DIM).to(q.dtype)
    if FP8_DOT != "":
        q, q_scale = fp8_rows(q, KV_FORMAT)
        scale_log2 *= q_scale
    elif ROW_SCALE:
        q, q_scale = fp16_rows(q)
        scale_log2 *= q_scale

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Keys below `full` tiles are visible to every row; keys from `end` on to none.
    first_pos = context_len + first_token
    full = tl.maximum(last_key(first_pos, ahead, seq_len) + 1, 0) // BLOCK_N
    end_pos = first_pos + BLOCK_Q
    if ahead is not None:
        end_pos += ahead
    end = tl.cdiv(tl.maximum(tl.minimum(end_pos, seq_len), 0), BLOCK_N)
    tile_first = first_pos
    if spans_ptr is not None:
        # What rows see does not go back from a row to the next: the first and the last row decide.
        # From scalars, since reductions over rows cost registers in the loops.
        tile_first, tile_last = own_span(spans_ptr, req, num_spans, first_pos)
        full = tl.maximum(tl.minimum(tile_last, seq_len - 1) + 1, 0) // BLOCK_N
        end_pos = context_len + tl.minimum(first_token + BLOCK_Q, query_len) - 1
        _, end_pos = own_span(spans_ptr, req, num_spans, end_pos)
        end = tl.cdiv(tl.maximum(tl.minimum(end_pos, seq_len - 1) + 1, 0), BLOCK_N)
    full = whole_tiles(full, context_len, MASK, BLOCK_N)
    mask_row, mask_bound = mask_rows(
        mask_ptr, mask_start_ptr, req, query_start, token, query_len, seq_len, PAGE_SIZE, MASK
    )
    kv_start = query_start
    if kv_start_ptr is not None:
        kv_start = tl.load(kv_start_ptr + req)
    block_table_row_ptr = None
    if block_table_ptr is not None:
        if kv_start_ptr is None:
            block_table_row_ptr = block_table_ptr + req * stride_bt_b
        else:
            block_table_row_ptr = block_table_ptr + kv_start.to(tl.int64)
    if USE_TMA:
        k_head = k_src
        v_head = v_src
    else:
        k_head = k_src + kv_head.to(tl.int64) * stride_k_h
        v_head = v_src + kv_head.to(tl.int64) * stride_v_h
    if block_table_ptr is None:
        k_head += kv_start.to(tl.int64) * stride_k_s
        v_head += kv_start.to(tl.int64) * stride_v_s
    slope_log2 = None
    if slopes_ptr is not None:
        row_slope_ptr = slopes_ptr + tile_head + rows % GROUP_SIZE
        slope_log2 = tl.load(row_slope_ptr).to(tl.float32) * LOG2E
    begin = 0
    first_key = 0
    if WINDOW and first is None:
        first_key = tl.maximum(first_pos + 1 - WINDOW, 0)
        begin, inside, full = window_ranges(
            first_key // BLOCK_N, end, first_pos + BLOCK_Q - 1, full, WINDOW, BLOCK_N
        )
        acc, _, m_i, l_i = attend(
            acc, 0.0, m_i, l_i, q, k_head, v_head, block_table_row_ptr, kv_head, begin, inside,
            pos, first, last, seq_len, first_key, scale_log2, cap_log2, slope_log2,
            stride_k_p, stride_k_s, stride_v_p, stride_v_s,
            HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, USE_TMA, PRECISION, True, TAIL_STAGES,
            WINDOW, ALIBI_SQRT, KV_FORMAT, ROW_SCALE, False, LAZY,
            FP8_DOT, k_scales_ptr, v_scales_ptr, NUM_KV_HEADS,
        )  # fmt: skip
        begin = inside
    if first is None:
        acc, _, m_i, l_i = attend(
            acc, 0.0, m_i, l_i, q, k_head, v_head, block_table_row_ptr, kv_head, begin, full,
            pos, first, last, seq_len, first_key, scale_log2, cap_log2, slope_log2,
            stride_k_p, stride_k_s, stride_v_p, stride_v_s,
            HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, USE_TMA, PRECISION, False, NUM_STAGES,
            WINDOW, ALIBI_SQRT, KV_FORMAT, ROW_SCALE, False, LAZY,
            FP8_DOT, k_scales_ptr, v_scales_ptr, NUM_KV_HEADS,
        )  # fmt: skip
    else:
        # One loop, with masks: three would carry both bounds of every row through.
        first_key = tl.maximum(tl.minimum(tile_first, first_pos + 1 - WINDOW), 0)
        full = first_key // BLOCK_N
    LAST_STAGES: tl.constexpr = TAIL_STAGES if first is None else NUM_STAGES
    acc, _, m_i, l_i = attend(
        acc, 0.0, m_i, l_i, q, k_head, v_head, block_table_row_ptr, kv_head, full, end,
        pos, first, last, seq_len, first_key, scale_log2, cap_log2, slope_log2,
        stride_k_p, stride_k_s, stride_v_p, stride_v_s,
        HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, USE_TMA, PRECISION, True, LAST_STAGES,
        WINDOW, ALIBI_SQRT, KV_FORMAT, ROW_SCALE, False, LAZY,
        FP8_DOT, k_scales_ptr, v_scales_ptr, NUM_KV_HEADS,
        mask_ptr, mask_row, mask_bound, MASK, MASK_ROWS,
    )  # fmt: skip

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + tile_head + rows % GROUP_SIZE)
        acc, m_i, l_i = add_sink(acc, m_i, l_i, sink)
    out, lse = softmax_finish(acc, m_i, l_i)
    if v_scale_ptr is not None and V_SCALE_STEP >= 0:
        out *= tl.load(v_scale_ptr + kv_head * V_SCALE_STEP)
    if out_scale_ptr is not None:
        out = encode_fp8(tl.div_rn(out, tl.load(out_scale_ptr)), OUT_FORMAT)
    o_rows = rows // GROUP_SIZE * stride_o_t + rows % GROUP_SIZE * stride_o_h
    o_tile_ptr = out_ptr + tile_token * stride_o_t + tile_head * stride_o_h
    o_ptrs = o_tile_ptr + (o_rows[:, None] + offs_d[None, :])
    tl.store(o_ptrs, out.to(out_ptr.dtype.element_ty), mask=io_mask)
    if HAS_LSE:
        NUM_Q_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
        lse_tile_ptr = lse_ptr + tile_token * NUM_Q_HEADS + tile_head
        lse_rows = rows // GROUP_SIZE * NUM_Q_HEADS + rows % GROUP_SIZE
        tl.store(lse_tile_ptr + lse_rows, lse, mask=row_ok)


_launch_prefill = Launcher(_prefill_kernel)


def prefill_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    kv: KvCache,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor | None,
    header: torch.Tensor,
    tile_req: torch.Tensor,
    tile_token: torch.Tensor,
    logits: Logits,
    *,
    window: int,
    causal: bool | torch.Tensor,
    spans: torch.Tensor | None = None,
    spans_in_window: bool = False,
    kv_starts: torch.Tensor | None = None,
    mask: KeyMask | None = None,
    out_scale: torch.Tensor | None = None,
    out_format: str = "",
    max_tiles: int,
    block_q: int,
    block_m: int,
    block_n: int,
    block_d: int,
    num_warps: int,
    num_stages: int,
    tail_stages: int,
    use_tma: bool,
    lazy_rescale: bool,
    fp8_dot: str = "",
) -> None:
    """Attend for every query tile of the plan and write ``out`` (and ``lse``) in place.

    Parameters
    ----------
    out, q : Tensor[num_tokens, num_q_heads, head_dim]
        Only rows that the plan gives to prefill are written.
    lse : Tensor[num_tokens, num_q_heads], fp32, contiguous, or None
        Natural-log sum of exponentials, with the sink's; -inf for rows without any.
    kv : KvCache
        Views of the keys and values: pages, or the batch's own rows.
    query_start_loc, seq_lens, block_table : Tensor, int32
        The batch, as vLLM passes it; ``seq_lens`` counts context and new tokens.  Without a
        ``block_table`` a request's keys are the rows of its queries, or from ``kv_starts`` on.
    header, tile_req, tile_token : Tensor, int32
        The plan's tile count and, for each tile, its request and first token.
    logits : Logits
        What is done to products before the softmax.
    window : int
        Keys a query may see, itself included; 0 for all.  Where attention is not causal it sees
        as many to its right.
    causal : bool or Tensor[num_reqs], int32
        Whether queries see no key past their own; a tensor says so for each request.
    spans : Tensor[num_reqs, num_spans, 2], int32, contiguous, or None
        First and last position of spans whose queries see all of their span, where attention is
        causal otherwise (``tilewise.kernels.spans``).  The plan must have been made for them.
    spans_in_window : bool
        Whether a window hides keys of a span as well.
    kv_starts : Tensor[num_reqs + 1], int32, or None
        First row of each request's keys; with a ``block_table`` its first entry in that, one row.
    mask : KeyMask or None
        What queries see instead of what ``causal`` says, which must be False then; not a tree.
    out_scale : Tensor[] or Tensor[1], fp32, or None
        With one, ``out`` is uint8 and holds ``out / out_scale`` in fp8.
    out_format : str
        How that is rounded (``tilewise.kernels.fp8``).
    max_tiles : int
        Grid bound; programs past ``header[0]`` return at once.
    fp8_dot : str
        "" for products in the queries' dtype; "promoted" for products of fp8 operands that are
        added in fp32 after every tile of keys, "plain" for those that are not.  The cache must be
        e4m3.
    """
    num_q_heads, head_dim = q.shape[1], q.shape[2]
    if fp8_dot and kv.format == "e4m3":
        # In its own dtype, so that nothing stands between the copies and the products.
        kv = replace(kv, k=kv.k.view(torch.float8_e4m3fn), v=kv.v.view(torch.float8_e4m3fn))
    flags = causal if isinstance(causal, torch.Tensor) else None
    if mask is not None:
        tail_stages = num_stages  # every tile is masked: no other loop is left to pipeline
    k_src, v_src, strides = kv_arguments(kv, block_n, block_d, use_tma)
    args = (
        out, lse, q, k_src, v_src, query_start_loc, seq_lens, block_table,
        header, tile_req, tile_token,
        *logits.arguments, kv.k_scale, kv.v_scale, out_scale, flags,
        kv_starts, *mask_arguments(mask), spans, None if spans is None else spans.shape[1],
        out.stride(0), out.stride(1), q.stride(0), q.stride(1), *strides,
        0 if block_table is None else block_table.stride(0),
    )  # fmt: skip
    constants = dict(
        NUM_KV_HEADS=kv.num_kv_heads, GROUP_SIZE=num_q_heads // kv.num_kv_heads,
        HEAD_DIM=head_dim, PAGE_SIZE=kv.page_size, HAS_LSE=lse is not None, USE_TMA=use_tma,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_Q=block_q, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        NUM_STAGES=num_stages, TAIL_STAGES=tail_stages, WINDOW=window, CAUSAL=causal is True,
        SPANS_IN_WINDOW=spans is not None and spans_in_window,
        ALIBI_SQRT=logits.alibi_sqrt, **kv.constants, OUT_FORMAT=out_format,
        LAZY=block_m * block_d // (num_warps * 32) if lazy_rescale else 0,
        **mask_constants(mask), FP8_DOT=fp8_dot,
    )  # fmt: skip
    grid = (max_tiles, kv.num_kv_heads, 1)
    _launch_prefill(grid, args, constants, num_warps=num_warps, **kv.options)
