"""Tiles of matrices, as every rung loads, masks and stores them."""

import math

import triton
import triton.language as tl

LOG2E = math.log2(math.e)


@triton.jit
def load_rows(ptr, rows, count, stride_row, DIM: tl.constexpr):
    """Tile [rows, DIM] of a matrix of ``count`` rows; rows behind its end are 0 and not read."""
    columns = tl.arange(0, DIM)
    at = rows[:, None] * stride_row + columns[None, :]
    return tl.load(ptr + at, mask=(rows < count)[:, None], other=0.0)


@triton.jit
def store_rows(ptr, tile, rows, count, stride_row, DIM: tl.constexpr):
    """Write a tile [rows, DIM], but for rows behind the end."""
    columns = tl.arange(0, DIM)
    at = rows[:, None] * stride_row + columns[None, :]
    tl.store(ptr + at, tile.to(ptr.dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def hide(s, rows, keys, num_queries, num_keys, CAUSAL: tl.constexpr):
    """Put -inf where a key is behind the end or, with ``CAUSAL``, behind the query's own."""
    visible = keys[None, :] < num_keys
    if CAUSAL:
        visible = visible & (keys[None, :] <= rows[:, None] + (num_keys - num_queries))
    return tl.where(visible, s, float("-inf"))
