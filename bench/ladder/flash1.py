"""FlashAttention (Dao et al. 2022): tiles of keys outside, of queries inside, O in memory.

The score matrix is never stored. A program takes a tile of keys and meets all tiles of queries with
it; for each of them it keeps the online softmax's ``m`` and ``l`` and the output so far,
*normalised*:

    s = scale q k^T                       one tile, on chip
    m' = max(m, max(s)),  p = exp(s - m'),  alpha = exp(m - m')
    l' = l alpha + sum(p)
    o' = (o l alpha + p v) / l'

Since the next tile of keys comes only after all queries have met this one, ``o``, ``m`` and ``l``
go to memory and come back, in fp32, for every tile of keys. And since those visits must follow each
other, one program does a whole head: a GPU of 132 SMs with 32 heads to do leaves 100 idle. Both are
what FlashAttention-2 mends.

With ``T = N / B`` tiles of keys and no mask, a head reads K and V once, Q ``T`` times, and writes
O, m and l ``T`` times and reads them ``T - 1`` times:

    bytes = H (2 * 2 N D + T 2 M D + (2 T - 1) (4 M D + 8 M))

Under a causal mask a tile of keys meets only the queries from its own first key on.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from tilewise.bench.ladder.problem import (
    HALF,
    SINGLE,
    Built,
    Bytes,
    Memory,
    Problem,
    attention_check,
    attention_inputs,
)
from tilewise.bench.ladder.softmax import online_step
from tilewise.bench.ladder.tiles import LOG2E, hide, load_rows, store_rows

BLOCK_M, BLOCK_N = 64, 128
FORMULA = "asked: H (4 N D + T 2 M D + (2 T - 1) (4 M D + 8 M)), T = N / 128"


@triton.jit
def _flash1_kernel(
    out_ptr, max_ptr, sum_ptr, q_ptr, k_ptr, v_ptr, num_queries, num_keys, scale_log2,
    stride_q_h, stride_q_m, stride_k_h, stride_k_n, stride_o_h, stride_o_m, stride_m_h,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """O = softmax(mask(scale Q K^T)) V; grid = (heads,)."""
    head = tl.program_id(0).to(tl.int64)
    q_ptr += head * stride_q_h
    k_ptr += head * stride_k_h
    v_ptr += head * stride_k_h
    out_ptr += head * stride_o_h
    max_ptr += head * stride_m_h
    sum_ptr += head * stride_m_h
    for begin in range(0, num_keys, BLOCK_N):
        keys = begin + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, keys, num_keys, stride_k_n, DIM)
        v = load_rows(v_ptr, keys, num_keys, stride_k_n, DIM)
        first = 0
        # The first tile of keys meets every query and finds nothing in memory.
        known = tl.where(begin > 0, num_queries, 0)
        if CAUSAL:
            first = tl.maximum(begin - (num_keys - num_queries), 0) // BLOCK_M * BLOCK_M
            first = tl.where(begin > 0, first, 0)
        for row in range(first, num_queries, BLOCK_M):
            rows = row + tl.arange(0, BLOCK_M)
            q = load_rows(q_ptr, rows, num_queries, stride_q_m, DIM)
            o = load_rows(out_ptr, rows, known, stride_o_m, DIM)  # [BLOCK_M, DIM], fp32
            m_i = tl.load(max_ptr + rows, mask=rows < known, other=float("-inf"))
            l_i = tl.load(sum_ptr + rows, mask=rows < known, other=0.0)
            s = tl.dot(q, tl.trans(k)) * scale_log2  # [BLOCK_M, BLOCK_N]
            s = hide(s, rows, keys, num_queries, num_keys, CAUSAL)
            p, alpha, m_i = online_step(s, m_i)
            old = l_i * alpha
            l_i = old + tl.sum(p, 1)
            total = tl.where(l_i == 0.0, 1.0, l_i)
            o = (o * old[:, None] + tl.dot(p.to(v.dtype), v)) / total[:, None]
            store_rows(out_ptr, o, rows, num_queries, stride_o_m, DIM)
            tl.store(max_ptr + rows, m_i, mask=rows < num_queries)
            tl.store(sum_ptr + rows, l_i, mask=rows < num_queries)
        # What one thread stored another may load when the next tile of keys comes.
        tl.debug_barrier()


def attention(
    out: torch.Tensor,
    maxima: torch.Tensor,
    sums: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> None:
    """FlashAttention with keys outside.

    Parameters
    ----------
    out : Tensor[heads, queries, dim], fp32
        The result, and between tiles of keys the result so far.
    maxima, sums : Tensor[1, heads, queries], fp32
        Of each row, in powers of 2; overwritten.
    q : Tensor[heads, queries, dim], fp16 or bf16
    k, v : Tensor[heads, keys, dim], of the same dtype and strides
    causal : bool
    """
    heads, num_queries, dim = q.shape
    _flash1_kernel[(heads,)](
        out, maxima, sums, q, k, v, num_queries, k.shape[1], dim**-0.5 * LOG2E,
        *q.stride()[:2], *k.stride()[:2], *out.stride()[:2], maxima.stride(1),
        DIM=dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, CAUSAL=causal, num_warps=4,
    )  # fmt: skip


def count(problem: Problem) -> Bytes:
    """Return the bytes of `attention`."""
    p = problem
    state = SINGLE * (p.dim + 2)  # of one row: o, m_i and l_i
    of_head = 2 * HALF * p.keys * p.dim
    for begin in range(0, p.keys, BLOCK_N):
        first = max(begin - p.shift, 0) // BLOCK_M * BLOCK_M if p.causal and begin else 0
        rows = max(p.queries - first, 0)
        of_head += rows * (HALF * p.dim + state * (2 if begin else 1))
    operands = HALF * p.dim * (p.queries + 2 * p.keys) + state * p.queries
    return Bytes(p.heads * of_head, p.heads * operands, p.heads * operands)


def build(problem: Problem, memory: Memory) -> Built:
    """Return the rung on random data."""
    q, k, v = attention_inputs(problem, memory)
    out = memory.new(*q.shape, dtype=torch.float32)
    maxima, sums = (
        memory.new(1, problem.heads, problem.queries, dtype=torch.float32) for _ in range(2)
    )
    call = partial(attention, out, maxima, sums, q, k, v, problem.causal)
    return Built(call, out, attention_check(problem, q, k, v, out), memory)
