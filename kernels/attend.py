"""The inner loop of prefill and decode: one query tile against a range of key tiles.

qk = q k^T;  m, p, alpha = online softmax;  l = l * alpha + sum(p);  acc = acc * alpha + p v
"""

import triton
import triton.language as tl

from tilewise.kernels.online_softmax import softmax_step
from tilewise.kernels.paged_kv import load_tile, load_tile_tma, tile_pages


@triton.jit
def attend(
    acc,
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
    seq_len,
    scale_log2,
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
):
    """Online softmax over key tiles ``lo .. hi``; rows at position ``pos`` see keys <= pos."""
    limit = tl.minimum(hi * BLOCK_N, seq_len)
    pages = tile_pages(block_table_row_ptr, lo * BLOCK_N, limit, PAGE_SIZE, BLOCK_N)
    for j in tl.range(lo, hi, num_stages=NUM_STAGES):
        start = j * BLOCK_N
        if USE_TMA:
            k = load_tile_tma(k_src, pages, kv_head, start, PAGE_SIZE, BLOCK_N, BLOCK_D)
            v = load_tile_tma(v_src, pages, kv_head, start, PAGE_SIZE, BLOCK_N, BLOCK_D)
        else:
            k = load_tile(
                k_src, pages, start, seq_len, stride_k_p, stride_k_s,
                HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, MASKED,
            )  # fmt: skip
            v = load_tile(
                v_src, pages, start, seq_len, stride_v_p, stride_v_s,
                HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, MASKED,
            )  # fmt: skip
        pages = tile_pages(block_table_row_ptr, start + BLOCK_N, limit, PAGE_SIZE, BLOCK_N)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            n = start + tl.arange(0, BLOCK_N)
            qk = tl.where(n[None, :] <= pos[:, None], qk, float("-inf"))
            if USE_TMA:
                # A copied page brings its whole tail; 0 * NaN would reach the accumulator.
                v = tl.where((n < seq_len)[:, None], v, 0.0)
        p, alpha, m_i = softmax_step(qk, m_i, scale_log2, MASKED)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m_i, l_i
