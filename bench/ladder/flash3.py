"""FlashAttention-3 (Shah et al. 2024): the same mathematics, with nothing waiting.

FlashAttention-2's bytes are few and its operations the fewest; what is left is that copies, matrix
products and exponentials take turns. On Hopper all three can happen at once:

* one warp does nothing but order copies of K and V from the copy engine (TMA), a few tiles ahead;
* two groups of four warps compute, 64 rows each: while one's tensor cores multiply, the other
  computes exponentials;
* within a group, the product of the next tile of keys with q runs while this tile's weights are
  turned into output.

That cannot be said in plain Triton, where the compiler places warps and copies. So this rung is the
product itself, called as a user calls it (`tilewise.PagedAttention`, one request, pages of 64): its
Gluon kernel (`tilewise.kernels.hopper_prefill`) on sm_90, its plain prefill elsewhere. The bytes
are those of ``flash2`` for its tiles, causal:

    bytes = H (4 M D + sum over tiles of 128 queries: 4 D (keys up to the tile's last))
"""

from __future__ import annotations

import math
from functools import partial

import torch

from tilewise import counters, policy
from tilewise.attention import PagedAttention
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
from tilewise.device import describe, resolve

PAGE_SIZE = 64
FORMULA = "asked: H (4 M D + sum over tiles of 128 queries: 4 D (keys up to the tile's last))"


def _config(problem: Problem, device: str | torch.device) -> policy.Config:
    """Return what the policy chooses for the layer."""
    geometry = policy.Geometry(problem.heads, problem.heads, problem.dim, PAGE_SIZE, HALF)
    return policy.choose(geometry, describe(resolve(device)))


def count(problem: Problem, device: str | torch.device) -> Bytes:
    """Return the bytes of the product's prefill; ``held`` without its plan's buffers."""
    p, config = problem, _config(problem, device)
    block_n = (config.hopper_prefill or config.prefill).block_n
    rows = HALF * p.heads * p.dim * 2 * p.queries
    # The copy engine brings whole tiles.
    whole = config.prefill.use_tma or config.hopper_prefill is not None
    walked = p.walked_keys(config.prefill_block_q, block_n, whole)
    keys = HALF * p.heads * p.dim * 2 * walked
    return Bytes(rows + keys, p.io_bytes, p.io_bytes)


def _paged(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return K and V as pages [pages, heads, page, 2 dim], with NaN behind the end."""
    heads, keys, dim = k.shape
    rows = cdiv(keys, PAGE_SIZE) * PAGE_SIZE
    cache = torch.full((rows, heads, 2 * dim), math.nan, dtype=k.dtype, device=k.device)
    cache[:keys, :, :dim], cache[:keys, :, dim:] = k.transpose(0, 1), v.transpose(0, 1)
    return cache.view(-1, PAGE_SIZE, heads, 2 * dim).transpose(1, 2)


def build(problem: Problem, memory: Memory) -> Built:
    """Return the rung on random data.

    Raises
    ------
    ValueError
        If the problem is not causal: decoders are, and the Gluon kernel takes nothing else.
    """
    if not problem.causal:
        raise ValueError(f"{problem}; accepted by the product's prefill here: causal")
    heads_q, heads_k, heads_v = attention_inputs(problem, Memory(memory.device))
    cache = _paged(heads_k, heads_v)
    q = memory.new(problem.queries, problem.heads, problem.dim)
    q.copy_(heads_q.transpose(0, 1))
    out = memory.new(*q.shape)
    attn = PagedAttention(
        problem.heads, problem.heads, problem.dim, page_size=PAGE_SIZE, dtype=q.dtype,
        max_num_reqs=1, max_num_tokens=problem.queries, device=memory.device,
    )  # fmt: skip
    start, length, pages = (
        torch.tensor(ids, dtype=torch.int32, device=memory.device)
        for ids in ([0, problem.queries], [problem.keys], [list(range(cache.shape[0]))])
    )
    attn.plan(
        start, length, pages, num_tokens=problem.queries, max_query_len=problem.queries,
        has_decode=problem.queries <= policy.DECODE_MAX_QUERY_LEN,
    )  # fmt: skip
    before = counters.snapshot()
    call = partial(attn.run, q, cache, out=out)
    call()
    ran = [
        name.partition("=")[2].rstrip("}")
        for name, launches in counters.snapshot().items()
        if name.startswith("launches") and launches > before.get(name, 0)
    ]
    out.fill_(math.nan)

    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        # Drawn again: what is kept would count as memory of the kernel.
        inputs = attention_inputs(problem, Memory(memory.device))
        return attention_check(problem, *inputs, out.transpose(0, 1))()

    return Built(call, out, expected, memory, path="+".join(ran))
