"""Random Hadamard rotation of queries and keys over the head dimension (incoherent processing).

A row ``x`` becomes ``H (signs * x) / sqrt(D)``, with Sylvester's Hadamard matrix ``H`` and random
signs, the same for queries and keys.  That is a rotation: products of queries with keys stay what
they were, while an outlier of one column is spread over all, so that a row quantised to few bits
loses less.  It comes after rotary embedding, which turns pairs of columns by the position.
Source: Shah et al., FlashAttention-3 (2024); Chee et al., QuIP (2023).
"""

import torch
import triton
import triton.language as tl

# The signs' seed.  Rotated keys lie in caches: another seed makes these unreadable.
SEED = tl.constexpr(0x74696C65)


@triton.jit
def rotation_signs(D: tl.constexpr):
    """``D`` signs, fp32: the lowest bits of hashed column numbers."""
    x = (tl.arange(0, D).to(tl.uint32) + SEED) * 0x9E3779B1
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = x ^ (x >> 13)
    return 1.0 - 2.0 * (x & 1).to(tl.float32)


@triton.jit
def rotate_rows(x, ROWS: tl.constexpr, D: tl.constexpr):
    """Rotate rows ``x`` [ROWS, D], fp32; ``D`` is a power of two.

    Every step of the butterfly adds and subtracts neighbours and moves the column number's lowest
    bit to its top, so that after ``log2(D)`` alike steps all columns stand where they stood.
    """
    x = x * rotation_signs(D)[None, :]
    STEPS: tl.constexpr = D.bit_length() - 1
    tl.static_assert(D == 2**STEPS, "the head dimension must be a power of two")
    for _ in tl.static_range(STEPS):
        a, b = tl.split(tl.reshape(x, [ROWS, D // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 2, 1]), [ROWS, D])
    return x * (D**-0.5)


def rotation(dim: int) -> torch.Tensor:
    """The rotation as a matrix, ``rotated = matrix @ column``.

    Parameters
    ----------
    dim : int
        Head dimension, a power of two.

    Returns
    -------
    Tensor[dim, dim], fp64
    """
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < dim:
        hadamard = torch.cat(
            [torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]
        )
    x = (torch.arange(dim) + SEED.value) * 0x9E3779B1 & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    signs = 1.0 - 2.0 * ((x ^ (x >> 13)) & 1).double()
    return hadamard * signs * dim**-0.5


def rotate(rows: torch.Tensor) -> torch.Tensor:
    """Rotate rows ``[..., head_dim]`` by plain arithmetic, for comparisons; fp64."""
    # No matrix product: vLLM replaces torch's in its batch-invariant mode.
    matrix = rotation(rows.shape[-1]).to(rows.device)
    return (rows.double()[..., None, :] * matrix).sum(-1)
