"""FlashAttention-2 (Dao 2023): queries outside, keys inside, one division at the end.

Turn FlashAttention's loops round. A program owns a tile of queries and walks all keys; ``m``, ``l``
and the output stay in its registers, and nothing but Q, K and V is read and nothing but O written.
Programs need nothing from each other, so every tile of queries of every head can have an SM. And
the sum is kept *unnormalised*:

    acc' = acc alpha + p v              alpha = exp(m - m')
    o = acc / l                         once, after the last key

which saves a multiplication and a division of the accumulators for every tile of keys, work for
units some fifteen times slower than the tensor cores. Per row it writes ``lse = m + log(l)``:
all that is needed to compute weights again, or to join this result with one over other keys
(``split_kv``).

Under a causal mask a tile of queries ends its walk at its last row's own key, and only tiles that
the diagonal or the end crosses are masked.

Each of the ``M / B`` tiles of queries reads all of K and V, B = 128; without a mask

    bytes = H (2 * 2 M D + 4 M + (M / B) 2 * 2 N D)

Set M = N and compare with the score matrix's four visits of ``naive``: (4 * 2 N N) / (2 * 2 N N D /
B) = 2 B / D, four for D = 64 and B = 128. A larger tile of queries moves less; registers bound it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

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
    cdiv,
)
from tilewise.bench.ladder.softmax import online_step
from tilewise.bench.ladder.tiles import LOG2E, hide, load_rows, store_rows
from tilewise.kernels.online_softmax import softmax_finish

FORMULA = "asked: H (4 M D + 4 M + (M / B) 4 N D), B = 128; causal: keys up to the tile's last"


@dataclass(frozen=True)
class Tiles:
    """Rows of a query tile and of a key tile; warps; tiles of keys in flight."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def walk(
    acc, m_i, l_i, q, k_ptr, v_ptr, rows, begin, end, num_queries, num_keys, scale_log2, stride_k_n,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Meet queries ``q`` with the keys ``begin … end``; ``begin`` is a multiple of BLOCK_N."""
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, keys, num_keys, stride_k_n, DIM)
        s = tl.dot(q, tl.trans(k)) * scale_log2  # [BLOCK_M, BLOCK_N]
        if MASKED:
            s = hide(s, rows, keys, num_queries, num_keys, CAUSAL)
        p, alpha, m_i = online_step(s, m_i)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = load_rows(v_ptr, keys, num_keys, stride_k_n, DIM)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_i, l_i


@triton.jit
def _flash2_kernel(
    out_ptr, lse_ptr, visits_ptr, q_ptr, k_ptr, v_ptr, num_queries, num_keys, scale_log2,
    stride_q_h, stride_q_m, stride_k_h, stride_k_n, stride_l_h,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """O = softmax(mask(scale Q K^T)) V; grid = (query tiles, heads).

    ``visits_ptr`` is None, or gets the number of key tiles that the program visited.
    """
    # The last tiles have the longest walks: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + head * stride_q_h, rows, num_queries, stride_q_m, DIM)
    k_ptr += head * stride_k_h
    v_ptr += head * stride_k_h
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    # Every row sees the keys before `full`, none those from `end` on.
    end = num_keys
    full = num_keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        shift = num_keys - num_queries
        end = tl.minimum(tl.maximum((tile + 1) * BLOCK_M + shift, 0), num_keys)
        full = tl.minimum(tl.maximum(tile * BLOCK_M + shift + 1, 0), num_keys) // BLOCK_N * BLOCK_N
    acc, m_i, l_i = walk(
        acc, m_i, l_i, q, k_ptr, v_ptr, rows, 0, full, num_queries, num_keys, scale_log2,
        stride_k_n, DIM, BLOCK_N, CAUSAL, False, STAGES,
    )  # fmt: skip
    acc, m_i, l_i = walk(
        acc, m_i, l_i, q, k_ptr, v_ptr, rows, full, end, num_queries, num_keys, scale_log2,
        stride_k_n, DIM, BLOCK_N, CAUSAL, True, STAGES,
    )  # fmt: skip
    out, lse = softmax_finish(acc, m_i, l_i)
    store_rows(out_ptr + head * stride_q_h, out, rows, num_queries, stride_q_m, DIM)
    tl.store(lse_ptr + head * stride_l_h + rows, lse, mask=rows < num_queries)
    if visits_ptr is not None:
        place = head * tl.num_programs(0) + tile
        tl.store(visits_ptr + place, tl.cdiv(full, BLOCK_N) + tl.cdiv(end - full, BLOCK_N))


def attention(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    tiles: Tiles,
    visits: torch.Tensor | None = None,
) -> Any:
    """FlashAttention-2; returns what Triton compiled.

    Parameters
    ----------
    out, q : Tensor[heads, queries, dim], fp16 or bf16, of the same strides
    lse : Tensor[1, heads, queries], fp32
        Natural log-sum-exp of each row; -inf for one that sees no key.
    k, v : Tensor[heads, keys, dim], of the same dtype, of the same strides
    causal : bool
    tiles : Tiles
    visits : Tensor[heads, query tiles], int32, optional
        Number of key tiles that each program visited.
    """
    heads, num_queries, dim = q.shape
    return _flash2_kernel[(cdiv(num_queries, tiles.block_m), heads)](
        out, lse, visits, q, k, v, num_queries, k.shape[1], dim**-0.5 * LOG2E,
        *q.stride()[:2], *k.stride()[:2], lse.stride(1),
        DIM=dim, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, CAUSAL=causal,
        STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip


def count(problem: Problem, tiles: Tiles = Tiles()) -> Bytes:
    """Return the bytes of `attention`."""
    p = problem
    lse = SINGLE * p.heads * p.queries
    rows = HALF * p.heads * p.dim * 2 * p.queries
    keys = HALF * p.heads * p.dim * 2 * p.walked_keys(tiles.block_m, tiles.block_n)
    return Bytes(rows + keys + lse, p.io_bytes + lse, p.io_bytes + lse)


def build(problem: Problem, memory: Memory, tiles: Tiles = Tiles()) -> Built:
    """Return the rung on random data."""
    q, k, v = attention_inputs(problem, memory)
    out = memory.new(*q.shape)
    lse = memory.new(1, problem.heads, problem.queries, dtype=torch.float32)
    call = partial(attention, out, lse, q, k, v, problem.causal, tiles)
    return Built(call, out, attention_check(problem, q, k, v, out), memory, extra={"lse": lse})


def counted_visits(problem: Problem, device: str | torch.device, tiles: Tiles) -> int:
    """Run once and return the number of key tiles that the programs say they visited."""
    memory = Memory(device)
    q, k, v = attention_inputs(problem, memory)
    out, lse = memory.new(*q.shape), memory.new(1, *q.shape[:2], dtype=torch.float32)
    shape = (problem.heads, cdiv(problem.queries, tiles.block_m))
    visits = torch.zeros(shape, dtype=torch.int32, device=device)
    attention(out, lse, q, k, v, problem.causal, tiles, visits)
    return int(visits.sum())
