"""Attention with the score matrix in memory: three launches, each a pass over it.

    S = mask(scale Q K^T)       written once
    P = softmax(S)              read and written, in place
    O = P V                     read

For M queries and N keys of size D in each of H heads, 2 bytes an element, memory sees the matrix
four times and each operand of each launch once:

    bytes = 2 H (4 M N + 2 (M + N) D)

and the matrix has to be held: ``2 H M N`` bytes beside Q, K, V and O. Nothing is skipped under a
mask: the scores behind it are computed, written as -inf and read like all others.

Rows longer than a program's registers take a pass more in the middle (``softmax``): 5 M N. Beyond
the SMs the two products also read their tiles again: each of the N / B tiles of keys reads all of
Q, each of the M / B tiles of queries all of K, and later of V.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from tilewise.bench.ladder import softmax
from tilewise.bench.ladder.problem import (
    HALF,
    Built,
    Bytes,
    Memory,
    Problem,
    attention_check,
    attention_inputs,
    cdiv,
)
from tilewise.bench.ladder.tiles import LOG2E, hide, load_rows, store_rows

BLOCK_M, BLOCK_N = 128, 128
FORMULA = "least: 2 H (4 M N + 2 (M + N) D)"


@triton.jit
def _scores_kernel(
    s_ptr, q_ptr, k_ptr, num_queries, num_keys, scale_log2,
    stride_q_h, stride_q_m, stride_k_h, stride_k_n, stride_s_h, stride_s_m,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """S = mask(scale Q K^T), in powers of 2; grid = (key tiles, query tiles, heads)."""
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(2).to(tl.int64)
    q = load_rows(q_ptr + head * stride_q_h, rows, num_queries, stride_q_m, DIM)
    k = load_rows(k_ptr + head * stride_k_h, keys, num_keys, stride_k_n, DIM)
    s = tl.dot(q, tl.trans(k)) * scale_log2  # [BLOCK_M, BLOCK_N]
    s = hide(s, rows, keys, num_queries, num_keys, CAUSAL)
    at = rows.to(tl.int64)[:, None] * stride_s_m + keys[None, :]
    inside = (rows < num_queries)[:, None] & (keys < num_keys)[None, :]
    tl.store(s_ptr + head * stride_s_h + at, s.to(s_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weigh_kernel(
    out_ptr, p_ptr, v_ptr, num_queries, num_keys,
    stride_p_h, stride_p_m, stride_v_h, stride_v_n, stride_o_h, stride_o_m,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """O = P V; grid = (query tiles, heads)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    p_rows_ptr = p_ptr + head * stride_p_h + rows.to(tl.int64)[:, None] * stride_p_m
    v_ptr += head * stride_v_h
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for begin in range(0, num_keys, BLOCK_N):
        keys = begin + tl.arange(0, BLOCK_N)
        inside = (rows < num_queries)[:, None] & (keys < num_keys)[None, :]
        p = tl.load(p_rows_ptr + keys[None, :], mask=inside, other=0.0)  # [BLOCK_M, BLOCK_N]
        v = load_rows(v_ptr, keys, num_keys, stride_v_n, DIM)
        acc = tl.dot(p, v, acc)
    store_rows(out_ptr + head * stride_o_h, acc, rows, num_queries, stride_o_m, DIM)


def attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: torch.Tensor,
    causal: bool,
) -> None:
    """Attention in three launches.

    Parameters
    ----------
    out, q : Tensor[heads, queries, dim], fp16 or bf16
    k, v : Tensor[heads, keys, dim], of the same dtype
    scores : Tensor[heads, queries, keys], of the same dtype
        Overwritten.
    causal : bool
    """
    heads, num_queries, dim = q.shape
    num_keys = k.shape[1]
    tiles_m, tiles_n = cdiv(num_queries, BLOCK_M), cdiv(num_keys, BLOCK_N)
    blocks = {"DIM": dim, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": 8}
    _scores_kernel[(tiles_n, tiles_m, heads)](
        scores, q, k, num_queries, num_keys, dim**-0.5 * LOG2E,
        *q.stride()[:2], *k.stride()[:2], *scores.stride()[:2], CAUSAL=causal, **blocks,
    )  # fmt: skip
    # The scores are in powers of 2 already.
    softmax.softmax(scores, scores, softmax.passes_for(num_keys), 1.0)
    _weigh_kernel[(tiles_m, heads)](
        out, scores, v, num_queries, num_keys,
        *scores.stride()[:2], *v.stride()[:2], *out.stride()[:2], **blocks,
    )  # fmt: skip


def count(problem: Problem) -> Bytes:
    """Return the bytes of `attention`."""
    p = problem
    passes = softmax.passes_for(p.keys)
    rows, keys = HALF * p.heads * p.dim * p.queries, HALF * p.heads * p.dim * p.keys
    matrix = p.score_bytes * (3 + passes)
    tiles_m, tiles_n = cdiv(p.queries, BLOCK_M), cdiv(p.keys, BLOCK_N)
    again = rows * (tiles_n + 1) + keys * 2 * tiles_m
    return Bytes(matrix + again, matrix + p.io_bytes, p.io_bytes + p.score_bytes)


def build(problem: Problem, memory: Memory) -> Built:
    """Return the rung on random data."""
    q, k, v = attention_inputs(problem, memory)
    scores = memory.new(problem.heads, problem.queries, problem.keys)
    out = memory.new(*q.shape)
    call = partial(attention, out, q, k, v, scores, problem.causal)
    return Built(call, out, attention_check(problem, q, k, v, out), memory)
