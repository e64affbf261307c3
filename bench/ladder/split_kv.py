"""Split-KV, or flash-decoding (Dao, Haziza, Massa, Sizov 2023): the keys are shared out too.

A decoding request has one query a head. FlashAttention-2 gives it one program a head: eight heads
occupy eight SMs, and each reads its keys alone. Here S programs share the keys of a head, each
doing FlashAttention-2 over its own range, and leave

    (m_i, l_i, acc_i)        i = 1 … S, acc_i unnormalised, fp32

Partial softmaxes join as pieces of a row do (``softmax``): with m = max m_i and w_i = exp(m_i - m)

    o = sum(w_i acc_i) / sum(w_i l_i)

in a second launch. K and V are still read once, so a split costs only its partial result, written
and read back; what it buys is that all SMs read at the same time. For up to 16 queries a head:

    bytes = H (2 * 2 N D + S 2 M D + 2 * 4 S M (D + 2) + 2 M D + 4 M)
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from tilewise.bench.ladder.flash2 import walk
from tilewise.bench.ladder.problem import (
    HALF,
    SINGLE,
    Built,
    Bytes,
    Memory,
    Problem,
    attention_check,
    attention_inputs,
    cdiv,
)
from tilewise.bench.ladder.tiles import LOG2E, load_rows, store_rows
from tilewise.kernels.online_softmax import softmax_finish

BLOCK_M, BLOCK_N = 16, 128
FORMULA = "asked: H (4 N D + S 2 M D + 8 S M (D + 2) + 2 M D + 4 M)"


@triton.jit
def _split_kernel(
    acc_ptr, max_ptr, sum_ptr, q_ptr, k_ptr, v_ptr, num_queries, num_keys, keys_per_split,
    scale_log2, stride_q_h, stride_q_m, stride_k_h, stride_k_n,
    stride_a_h, stride_a_s, stride_a_m, stride_m_h, stride_m_s,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Partial (m, l, acc) of one range of keys; grid = (splits, heads)."""
    split = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + head * stride_q_h, rows, num_queries, stride_q_m, DIM)
    k_ptr += head * stride_k_h
    v_ptr += head * stride_k_h
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    begin = tl.program_id(0) * keys_per_split
    end = tl.minimum(begin + keys_per_split, num_keys)
    full = num_keys
    if CAUSAL:
        full = tl.maximum(num_keys - num_queries + 1, 0)
    full = tl.maximum(tl.minimum(full // BLOCK_N * BLOCK_N, end), begin)
    acc, m_i, l_i = walk(
        acc, m_i, l_i, q, k_ptr, v_ptr, rows, begin, full, num_queries, num_keys, scale_log2,
        stride_k_n, DIM, BLOCK_N, CAUSAL, False, 3,
    )  # fmt: skip
    acc, m_i, l_i = walk(
        acc, m_i, l_i, q, k_ptr, v_ptr, rows, full, end, num_queries, num_keys, scale_log2,
        stride_k_n, DIM, BLOCK_N, CAUSAL, True, 3,
    )  # fmt: skip
    store_rows(
        acc_ptr + head * stride_a_h + split * stride_a_s, acc, rows, num_queries, stride_a_m, DIM
    )
    place = head * stride_m_h + split * stride_m_s + rows
    tl.store(max_ptr + place, m_i, mask=rows < num_queries)
    tl.store(sum_ptr + place, l_i, mask=rows < num_queries)


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, acc_ptr, max_ptr, sum_ptr, num_splits,
    stride_o_h, stride_o_m, stride_l_h, stride_a_h, stride_a_s, stride_a_m, stride_m_h, stride_m_s,
    DIM: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One row from its partial results; grid = (queries, heads)."""
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    splits = tl.arange(0, BLOCK_S)
    place = head * stride_m_h + splits * stride_m_s + row
    m_s = tl.load(max_ptr + place, mask=splits < num_splits, other=float("-inf"))
    l_s = tl.load(sum_ptr + place, mask=splits < num_splits, other=0.0)
    acc_s = load_rows(
        acc_ptr + head * stride_a_h + row * stride_a_m, splits, num_splits, stride_a_s, DIM
    )  # [BLOCK_S, DIM]
    m_i = tl.max(m_s[None, :], 1)  # [1]
    w_s = tl.exp2(m_s - tl.where(m_i == float("-inf"), 0.0, m_i))  # [BLOCK_S]
    acc = tl.sum(acc_s * w_s[:, None], 0)[None, :]  # [1, DIM]
    out, lse = softmax_finish(acc, m_i, tl.sum((l_s * w_s)[None, :], 1))
    one = tl.zeros([1], tl.int32)
    store_rows(out_ptr + head * stride_o_h + row * stride_o_m, out, one, 1, stride_o_m, DIM)
    tl.store(lse_ptr + head * stride_l_h + row + one, lse)


def attention(
    out: torch.Tensor,
    lse: torch.Tensor,
    acc: torch.Tensor,
    maxima: torch.Tensor,
    sums: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> None:
    """Attention of few queries over keys that several programs share.

    Parameters
    ----------
    out, q : Tensor[heads, queries, dim], fp16 or bf16
        At most 16 queries.
    lse : Tensor[1, heads, queries], fp32
        As of ``flash2``.
    acc : Tensor[heads, splits, queries, dim], fp32
        Partial sums; overwritten.
    maxima, sums : Tensor[heads, splits, queries], fp32
        Of each split, in powers of 2; overwritten.
    k, v : Tensor[heads, keys, dim], of the queries' dtype, of the same strides
    causal : bool
    """
    heads, num_queries, dim = q.shape
    num_keys, splits = k.shape[1], acc.shape[1]
    keys_per_split = cdiv(cdiv(num_keys, BLOCK_N), splits) * BLOCK_N
    scratch = (*acc.stride()[:3], *maxima.stride()[:2])
    _split_kernel[(splits, heads)](
        acc, maxima, sums, q, k, v, num_queries, num_keys, keys_per_split, dim**-0.5 * LOG2E,
        *q.stride()[:2], *k.stride()[:2], *scratch,
        DIM=dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, CAUSAL=causal, num_warps=4,
    )  # fmt: skip
    _merge_kernel[(num_queries, heads)](
        out, lse, acc, maxima, sums, splits, *out.stride()[:2], lse.stride(1), *scratch,
        DIM=dim, BLOCK_S=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip


def count(problem: Problem, splits: int) -> Bytes:
    """Return the bytes of `attention`."""
    p = problem
    row = HALF * p.dim
    partials = SINGLE * splits * p.queries * (p.dim + 2)
    once = 2 * p.keys * row + p.queries * (2 * row + SINGLE)
    traffic = once + (splits - 1) * p.queries * row + 2 * partials
    least, held = once + 2 * partials, once + partials
    return Bytes(p.heads * traffic, p.heads * least, p.heads * held)


def build(problem: Problem, memory: Memory, splits: int) -> Built:
    """Return the rung on random data.

    Raises
    ------
    ValueError
        For more than 16 queries, or no split.
    """
    if problem.queries > BLOCK_M:
        raise ValueError(f"queries={problem.queries}; accepted by split-KV: up to {BLOCK_M}")
    if splits < 1:
        raise ValueError(f"splits={splits}; accepted: 1 or more")
    q, k, v = attention_inputs(problem, memory)
    single = torch.float32
    out = memory.new(*q.shape)
    lse = memory.new(1, *q.shape[:2], dtype=single)
    acc = memory.new(problem.heads, splits, problem.queries, problem.dim, dtype=single)
    maxima, sums = (
        memory.new(problem.heads, splits, problem.queries, dtype=single) for _ in range(2)
    )
    call = partial(attention, out, lse, acc, maxima, sums, q, k, v, problem.causal)
    return Built(call, out, attention_check(problem, q, k, v, out), memory, extra={"lse": lse})
