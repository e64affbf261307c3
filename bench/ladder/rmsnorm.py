"""Residual addition and RMSNorm in one kernel: the neighbour that tiling does not help.

Between two attention layers of a model, with ``w`` of one element a column:

    r' = r + x,    y = w r' / sqrt(mean(r' ** 2) + eps)

Some five operations an element that is read twice and written twice: 5 / 8 operations a byte, a
hundred times left of the ridge point. There is nothing to reuse, so all that counts is to move each
byte once. As two kernels r' would be written by the first and read by the second: 5 visits of a
matrix instead of 4, and 1.25 times the time. That is all that fusion means here.

    bytes = 2 (4 R C + C)           R rows of C columns of 2 bytes
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from tilewise.bench.ladder.problem import HALF, Built, Bytes, Matrix, Memory

EPSILON = 1e-6
FORMULA = "least: 2 (4 R C + C)"


@triton.jit
def _rmsnorm_kernel(
    y_ptr, residual_ptr, x_ptr, w_ptr, columns, epsilon, stride_r, BLOCK_C: tl.constexpr
):
    """r += x, y = w r / sqrt(mean(r^2) + epsilon) of one row; grid = (rows,)."""
    c = tl.arange(0, BLOCK_C)
    at = tl.program_id(0).to(tl.int64) * stride_r + c
    x = tl.load(x_ptr + at, mask=c < columns, other=0.0).to(tl.float32)
    r = x + tl.load(residual_ptr + at, mask=c < columns, other=0.0).to(tl.float32)
    # What the next layer adds to is the rounded sum, so that is what is normalised.
    r = r.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + at, r, mask=c < columns)
    r = r.to(tl.float32)
    w = tl.load(w_ptr + c, mask=c < columns, other=0.0).to(tl.float32)
    y = w * r * tl.rsqrt(tl.sum(r * r, 0) / columns + epsilon)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=c < columns)


def rmsnorm(
    y: torch.Tensor,
    residual: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    num_warps: int = 8,
) -> Any:
    """Add to the residual and normalise; returns what Triton compiled.

    Parameters
    ----------
    y, x : Tensor[rows, columns], fp16 or bf16
    residual : Tensor[rows, columns], of the same dtype and strides
        Updated in place.
    w : Tensor[1, columns], of the same dtype
    num_warps : int
        Of a row's program.
    """
    rows, columns = x.shape
    return _rmsnorm_kernel[(rows,)](
        y, residual, x, w, columns, EPSILON, x.stride(0),
        BLOCK_C=triton.next_power_of_2(columns), num_warps=num_warps,
    )  # fmt: skip


def count(matrix: Matrix) -> Bytes:
    """Return the bytes of `rmsnorm`."""
    visits, weights = 4 * HALF * matrix.elements, HALF * matrix.columns
    held = 3 * HALF * matrix.elements + weights
    return Bytes(visits + weights * matrix.rows, visits + weights, held)


def unfused_bytes(matrix: Matrix) -> int:
    """Return the least bytes of addition and norm as two kernels."""
    return 5 * HALF * matrix.elements + HALF * matrix.columns


def build(matrix: Matrix, memory: Memory, num_warps: int = 8) -> Built:
    """Return the rung on random data."""
    x, residual = (memory.randn(matrix.rows, matrix.columns) for _ in range(2))
    y, w = memory.new(matrix.rows, matrix.columns), memory.randn(1, matrix.columns)

    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        # The residual is what a first call left of it, however often it was called since.
        rows = sorted({0, matrix.rows // 2, matrix.rows - 1})
        r = residual[rows].float()
        want = w.float() * r * torch.rsqrt(r.square().mean(-1, keepdim=True) + EPSILON)
        return y[rows], want

    call = partial(rmsnorm, y, residual, x, w, num_warps)
    return Built(call, y, expected, memory, extra={"residual": residual, "x": x})
