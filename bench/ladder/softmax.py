"""Softmax of a matrix's rows, in three passes, in two, and in one.

For a row ``s`` the safe softmax is ``y = exp(s - m) / l`` with ``m = max(s)``, ``l = sum(exp(s -
m))``.

*Three passes.* ``m`` needs the whole row, ``l`` needs ``m``, ``y`` needs both: the row is read
three times and written once, 4 elements of traffic an element.

*Two passes: the online softmax* (Milakov & Gimelshein 2018). Read the row once and keep both. With
the maximum ``m`` and sum ``l`` of what came before, a new piece ``x`` of the row gives

    m' = max(m, max(x))
    l' = l * exp(m - m') + sum(exp(x - m'))

since ``sum(exp(s - m')) = exp(m - m') * sum(exp(s - m))``: a sum relative to an old maximum is
turned into one relative to the new by one factor. ``m`` and ``l`` together now take one pass,
writing ``y`` takes another: 3 elements of traffic. The pair ``(m, l)`` forms a monoid: pieces may
be combined in any grouping, which is what ``split_kv`` does later.

*One pass.* A row that fits into the registers of a program is read once: 2 elements. Attention goes
there for rows of any length: it does not want ``y`` but ``sum(y v)``, and its sum can be rescaled
by the same factor as ``l`` (``flash1``). So nobody ever needs the second pass.

Powers are of 2, which the hardware has: ``exp(x) = 2 ** (x log2(e))``.

    asked = 2 R N (passes + 1)        for R rows of N elements of 2 bytes
    least = 4 R N                     once in and once out, if L2 keeps a row for its passes
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from tilewise.bench.ladder.problem import HALF, Built, Bytes, Matrix, Memory
from tilewise.bench.ladder.tiles import LOG2E

# Longer rows than this do not fit into a program's registers.
LONGEST_ON_CHIP = 16384
CHUNK = 2048
FORMULA = "asked: 2 R N (passes + 1)"


@triton.jit
def online_step(s, m_i):
    """Meet a tile of scores ``s`` [rows, n] (in powers of 2) with the maxima ``m`` [rows] so far.

    Returns ``(p, alpha, m_new)``: weights ``2 ** (s - m_new)``, the factor for all sums so far, and
    the new maxima. A row that has seen no key keeps -inf; its pivot is 0, since -inf - -inf is NaN.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1))
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    return tl.exp2(s - pivot[:, None]), tl.exp2(m_i - pivot), m_new


@triton.jit
def _load_chunk(s_ptr, begin, columns, scale_log2, BLOCK_N: tl.constexpr):
    """Elements ``begin …`` of a row, [1, BLOCK_N], in powers of 2; -inf behind its end."""
    n = begin + tl.arange(0, BLOCK_N)
    s = tl.load(s_ptr + n, mask=n < columns, other=float("-inf")).to(tl.float32)
    return (s * scale_log2)[None, :]


@triton.jit
def _store_chunk(y_ptr, y, begin, columns, BLOCK_N: tl.constexpr):
    n = begin + tl.arange(0, BLOCK_N)
    y = tl.reshape(y, [BLOCK_N])
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < columns)


@triton.jit
def _softmax_kernel(
    y_ptr, s_ptr, columns, scale_log2, stride_y_b, stride_y_r, stride_s_b, stride_s_r,
    PASSES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = softmax(s) of one row; grid = (rows, matrices). ``y`` may be ``s``."""
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    s_ptr += matrix * stride_s_b + row * stride_s_r
    y_ptr += matrix * stride_y_b + row * stride_y_r
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    if PASSES == 3:
        for begin in range(0, columns, BLOCK_N):
            s = _load_chunk(s_ptr, begin, columns, scale_log2, BLOCK_N)
            m_i = tl.maximum(m_i, tl.max(s, 1))
        for begin in range(0, columns, BLOCK_N):
            s = _load_chunk(s_ptr, begin, columns, scale_log2, BLOCK_N)
            p, _, m_i = online_step(s, m_i)  # the maximum is final: every factor would be 1
            l_i += tl.sum(p, 1)
    elif PASSES == 2:
        for begin in range(0, columns, BLOCK_N):
            s = _load_chunk(s_ptr, begin, columns, scale_log2, BLOCK_N)
            p, alpha, m_i = online_step(s, m_i)
            l_i = l_i * alpha + tl.sum(p, 1)
    if PASSES == 1:
        s = _load_chunk(s_ptr, 0, columns, scale_log2, BLOCK_N)
        p, _, m_i = online_step(s, m_i)
        l_i = tl.sum(p, 1)
        y = p / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        _store_chunk(y_ptr, y, 0, columns, BLOCK_N)
    else:
        for begin in range(0, columns, BLOCK_N):
            s = _load_chunk(s_ptr, begin, columns, scale_log2, BLOCK_N)
            p, _, _ = online_step(s, m_i)
            y = p / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
            _store_chunk(y_ptr, y, begin, columns, BLOCK_N)


def softmax(
    y: torch.Tensor, s: torch.Tensor, passes: int, scale_log2: float, chunk: int = CHUNK
) -> None:
    """Write ``2 ** (s scale_log2)`` over its row's sum into ``y``.

    Parameters
    ----------
    y, s : Tensor[matrices, rows, columns], fp16 or bf16
        May be the same.
    passes : int
        3, 2 or 1.
    scale_log2 : float
        Positive; log2(e) gives the usual softmax.
    chunk : int
        Elements that are read at a time, a power of two; a single pass reads the row at once.

    Raises
    ------
    ValueError
        For other passes, or a row too long for one pass.
    """
    matrices, rows, columns = s.shape
    if passes not in (1, 2, 3):
        raise ValueError(f"passes={passes}; accepted: 1, 2, 3")
    if passes == 1 and columns > LONGEST_ON_CHIP:
        raise ValueError(
            f"passes=1 for rows of {columns}; accepted: rows of up to {LONGEST_ON_CHIP}"
        )
    block = triton.next_power_of_2(columns) if passes == 1 else chunk
    _softmax_kernel[(rows, matrices)](
        y, s, columns, scale_log2, *y.stride()[:2], *s.stride()[:2],
        PASSES=passes, BLOCK_N=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip


def passes_for(columns: int) -> int:
    """Return the fewest passes over a row of this length."""
    return 1 if columns <= LONGEST_ON_CHIP else 2


def count(matrix: Matrix, passes: int) -> Bytes:
    """Return the bytes of `softmax`."""
    once = 2 * HALF * matrix.elements
    return Bytes(HALF * matrix.elements * (passes + 1), once, once)


def build(matrix: Matrix, memory: Memory, passes: int, chunk: int = CHUNK) -> Built:
    """Return the rung on random data."""
    s, y = memory.randn(1, matrix.rows, matrix.columns), memory.new(1, matrix.rows, matrix.columns)
    call = partial(softmax, y, s, passes, LOG2E, chunk)
    return Built(call, y, _check(matrix, s, y), memory)


def _check(
    matrix: Matrix, s: torch.Tensor, y: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    rows = sorted({0, matrix.rows // 2, matrix.rows - 1})
    return lambda: (y[0, rows], torch.softmax(s[0, rows].float(), -1))
