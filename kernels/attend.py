"""The inner loop of prefill and decode: one query tile against a range of key tiles.

qk = shape(q k^T);  m, p, alpha = online softmax;  l = l * alpha + sum(p);  acc = acc * alpha + p v
"""

import triton
import triton.language as tl

from tilewise.kernels.fp8 import (
    FP8_SHIFT,
    FP8_SLACK,
    WEIGHT_SHIFT,
    decode_fp8,
    decode_pairs,
    fp8_operand,
    stored_operand,
)
from tilewise.kernels.lazy_rescale import rescale_lazily
from tilewise.kernels.logits import shape_logits
from tilewise.kernels.masks import seen
from tilewise.kernels.online_softmax import softmax_step
from tilewise.kernels.paged_kv import load_tile, load_tile_tma, tile_pages

# Triton 3.6 takes no plain values as defaults.
NO_FP8_DOT = tl.constexpr("")
NO_MASK = tl.constexpr("")
NO_ROWS = tl.constexpr(0)


@triton.jit
def window_ranges(begin, end, last_pos, full, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cut the tiles ``begin .. end`` of a window: ``(begin, inside, full)``.

    Tiles ``inside .. full`` lie between the left edge of the last row's window (``last_pos``)
    and the diagonal of the first row, so that they need no mask; the others do.  Narrow windows
    have no such tiles worth a loop of their own.
    """
    if WINDOW < 4 * BLOCK_N:
        inside = begin
        full = begin
    else:
        full = tl.minimum(tl.maximum(full, begin), end)
        inside = tl.cdiv(tl.maximum(last_pos + 1 - WINDOW, 0), BLOCK_N)
        inside = tl.minimum(tl.maximum(inside, begin), full)
    return begin, inside, full


@triton.jit
def keys_ahead(query_len, causal_ptr, req, WINDOW: tl.constexpr):
    """How many keys past its own a query sees where attention is not causal for all requests.

    All that follow, or as many as a window holds to its left. ``causal_ptr`` has a flag for each
    request, not 0 where it is causal, or is None where none is.
    """
    ahead = query_len  # its position and this reach the last key of any request
    if WINDOW:
        ahead = tl.minimum(query_len, WINDOW - 1)
    if causal_ptr is not None:
        ahead = tl.where(tl.load(causal_ptr + req) != 0, 0, ahead)
    return ahead


@triton.jit
def last_key(pos, ahead, seq_len):
    """Last key that a query at ``pos`` sees; ``ahead`` is None where attention is causal."""
    if ahead is None:
        return pos
    else:
        return tl.minimum(pos + ahead, seq_len - 1)


@triton.jit
def attend(
    acc,
    acc_odd,
    m_i,
    l_i,
    q,
    k_src,
    v_src,
    block_table_row_ptr,
    kv_head,
    lo,
    hi,
    pos,
    first,
    last,
    seq_len,
    first_key,
    scale_log2,
    cap_log2,
    slope_log2,
    stride_k_p,
    stride_k_s,
    stride_v_p,
    stride_v_s,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    V_PAIRS: tl.constexpr,
    LAZY: tl.constexpr,
    FP8_DOT: tl.constexpr = NO_FP8_DOT,
    k_scales_ptr=None,
    v_scales_ptr=None,
    SCALES_STEP: tl.constexpr = 0,
    mask_ptr=None,
    mask_row=None,
    mask_bound=None,
    MASK: tl.constexpr = NO_MASK,
    MASK_ROWS: tl.constexpr = NO_ROWS,
):
    """Online softmax over key tiles ``lo .. hi``; rows at position ``pos`` see keys <= ``last``.

    With a ``WINDOW`` they see those from ``pos - WINDOW + 1`` on, or from ``first`` where that is
    not None; none before ``first_key``.
    ``block_table_row_ptr`` is None where keys follow each other without pages (``tile_pages``).
    ``cap_log2`` and ``slope_log2`` shape the logits (``shape_logits``); each may be None.
    ``KV_FORMAT`` says how bytes of an fp8 cache are read (``tilewise.kernels.fp8``); with
    ``ROW_SCALE`` every row has a ``scale_log2`` of its own.  With ``V_PAIRS`` values come as
    uint16, two columns in one, and ``acc`` keeps the even columns, ``acc_odd`` the odd ones; it
    is unused otherwise.  ``LAZY`` counts a thread's accumulators where these are rescaled lazily
    (``tilewise.kernels.lazy_rescale``), else 0.  With a ``MASK`` a row sees of those keys only what
    it says (``tilewise.kernels.masks``); it goes with ``MASKED``.
    ``FP8_DOT`` is "" for products in ``q``'s dtype.  Otherwise ``q`` holds ``fp8_rows``, and
    weights are rounded to e4m3.  Hopper adds products of fp8 in about 14 bits: "promoted" adds
    those of one tile so, and tiles in fp32; "plain" leaves everything to the hardware.
    ``k_scales_ptr`` and ``v_scales_ptr`` are scales of this head's pages, ``SCALES_STEP`` apart;
    a page holds whole tiles then.
    """
    SHAPED: tl.constexpr = (cap_log2 is not None) or (slope_log2 is not None)
    AS_FP16: tl.constexpr = (KV_FORMAT != "") and (q.dtype == tl.float16)
    FP8_FLOOR: tl.constexpr = FP8_SHIFT - FP8_SLACK if LAZY > 0 else FP8_SHIFT
    SHIFT: tl.constexpr = FP8_FLOOR if FP8_DOT != "" else (WEIGHT_SHIFT if AS_FP16 else 0.0)
    MOST_SLACK: tl.constexpr = FP8_SLACK if FP8_DOT != "" else 8.0
    SLACK: tl.constexpr = MOST_SLACK if LAZY > 0 else 0.0
    PACK: tl.constexpr = 2 if V_PAIRS else 1
    limit = tl.minimum(hi * BLOCK_N, seq_len)
    pages = tile_pages(block_table_row_ptr, lo * BLOCK_N, limit, PAGE_SIZE, BLOCK_N)
    for j in tl.range(lo, hi, num_stages=NUM_STAGES):
        start = j * BLOCK_N
        if USE_TMA:
            k = load_tile_tma(k_src, pages, kv_head, start, PAGE_SIZE, BLOCK_N, BLOCK_D)
            v = load_tile_tma(v_src, pages, kv_head, start, PAGE_SIZE, BLOCK_N, BLOCK_D // PACK)
        else:
            k = load_tile(
                k_src, pages, start, seq_len, first_key, stride_k_p, stride_k_s,
                HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, MASKED, WINDOW,
            )  # fmt: skip
            v = load_tile(
                v_src, pages, start, seq_len, first_key, stride_v_p, stride_v_s,
                HEAD_DIM // PACK, PAGE_SIZE, BLOCK_N, BLOCK_D // PACK, MASKED, WINDOW,
            )  # fmt: skip
        tile_scale = scale_log2
        if k_scales_ptr is not None:
            tl.static_assert(PAGE_SIZE % BLOCK_N == 0)
            tile_scale *= tl.load(k_scales_ptr + pages.to(tl.int64) * SCALES_STEP)
        if v_scales_ptr is not None:
            tl.static_assert(PAGE_SIZE % BLOCK_N == 0)
            v_scale = tl.load(v_scales_ptr + pages.to(tl.int64) * SCALES_STEP)
        if FP8_DOT != "":
            k = stored_operand(k, KV_FORMAT)
        elif KV_FORMAT != "":
            k = decode_fp8(k, KV_FORMAT).to(q.dtype)
        pages = tile_pages(block_table_row_ptr, start + BLOCK_N, limit, PAGE_SIZE, BLOCK_N)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        n = start + tl.arange(0, BLOCK_N)
        if SHAPED:
            factor = tile_scale[:, None] if ROW_SCALE else tile_scale
            qk = shape_logits(qk, n, pos, factor, cap_log2, slope_log2, ALIBI_SQRT)
        if MASKED:
            visible = n[None, :] <= last[:, None]
            if WINDOW and first is None:
                visible = visible & (n[None, :] > pos[:, None] - WINDOW)
            elif WINDOW:
                visible = visible & (n[None, :] >= first[:, None])
            if MASK != "":
                visible = visible & seen(
                    mask_ptr, mask_row, mask_bound, start, seq_len, PAGE_SIZE, BLOCK_N, MASK,
                    MASK_ROWS,
                )  # fmt: skip
            qk = tl.where(visible, qk, float("-inf"))
            if USE_TMA:
                # A copied page brings its whole tail; 0 * NaN would reach the accumulator.
                owned = n < seq_len
                if WINDOW:
                    owned = owned & (n >= first_key)
                v = tl.where(owned[:, None], v, 0)
        if SHAPED:
            p, alpha, m_i = softmax_step(qk, m_i, 1.0, MASKED, False, SHIFT, SLACK)
        else:
            p, alpha, m_i = softmax_step(qk, m_i, tile_scale, MASKED, ROW_SCALE, SHIFT, SLACK)
        l_i = l_i * alpha + tl.sum(p, 1)
        if LAZY > 0:
            acc = rescale_lazily(acc, alpha, LAZY)
        else:
            acc = acc * alpha[:, None]
        if FP8_DOT != "":
            p = fp8_operand(p, KV_FORMAT)
        else:
            p = p.to(q.dtype)
        if V_PAIRS:
            acc_odd = acc_odd * alpha[:, None]
            even, odd = decode_pairs(v, KV_FORMAT)
            if v_scales_ptr is not None:
                acc += v_scale * tl.dot(p, even.to(q.dtype), input_precision=PRECISION)
                acc_odd += v_scale * tl.dot(p, odd.to(q.dtype), input_precision=PRECISION)
            else:
                acc = tl.dot(p, even.to(q.dtype), acc, input_precision=PRECISION)
                acc_odd = tl.dot(p, odd.to(q.dtype), acc_odd, input_precision=PRECISION)
        else:
            if FP8_DOT != "":
                v = stored_operand(v, KV_FORMAT)
            elif KV_FORMAT != "":
                v = decode_fp8(v, KV_FORMAT).to(q.dtype)
            if v_scales_ptr is not None:
                acc += v_scale * tl.dot(p, v, input_precision=PRECISION)
            elif FP8_DOT == "promoted":
                acc += tl.dot(p, v, input_precision=PRECISION)
            else:
                acc = tl.dot(p, v, acc, input_precision=PRECISION)
    return acc, acc_odd, m_i, l_i
