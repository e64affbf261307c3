"""Soft-capped logits at the price of two products each, where they are small beside the cap.

``cap * tanh(x / cap)`` takes a product and a hyperbolic tangent of every logit, from the unit that
its power of two needs as well and that has an eighth of the others' rate.  Up to 0.4 it is
``x * (T0 + T1 * x**2)`` as precisely as that unit gives it (2**-11).  So a warp whose logits all
stay below two fifths of the cap takes the polynomial, into which the factors before and after are
multiplied once; others take the unit.  Neither Triton nor Gluon has a branch of a single warp,
hence assembly, as in ``tilewise.kernels.lazy_rescale``.
"""

import torch

# Minimax on [0, 0.4] for the relative error, 4e-4.
T0, T1 = 0.99960169, -0.31317227
SMALL, SMALL_PTX = 0.4, "0f3ECCCCCD"
LARGEST_CAP = 2048.0


def capped_asm(n: int) -> str:
    """PTX: exponents of ``n`` weights from products.

    Results are tied to the products.  Then come, n times each: minus the maximum, the polynomial's
    two factors, the factors before and after the tangent, the row's largest argument of it.
    """
    shift, t0, t1, before, after, largest = (n * (2 + i) for i in range(6))
    fast = "".join(
        f"mul.f32 t, ${i}, ${i}; fma.rn.f32 t, t, ${t1 + i}, ${t0 + i}; "
        f"fma.rn.f32 ${i}, ${i}, t, ${shift + i}; "
        for i in range(n)
    )
    slow = "".join(
        f"mul.f32 t, ${i}, ${before + i}; tanh.approx.f32 t, t; "
        f"fma.rn.f32 ${i}, t, ${after + i}, ${shift + i}; "
        for i in range(n)
    )
    # A thread's registers alternate in pairs between its two rows; rows that are no numbers have
    # no say.
    return (
        "{ .reg .pred p, q; .reg .f32 t; "
        f"setp.gt.f32 p, ${largest}, {SMALL_PTX}; "
        f"setp.gt.or.f32 p, ${largest + 2}, {SMALL_PTX}, p; "
        "vote.sync.any.pred q, p, 0xffffffff; @q bra.uni SLOW; " + fast + "bra.uni DONE; "
        "SLOW: " + slow + "DONE: }"
    )


def capped_constraints(n: int) -> str:
    """Operands of ``capped_asm(n)``."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * (6 * n))


def is_served(softcap: float, scale: float) -> bool:
    """Whether the polynomial may stand for the tangent; logits without a cap have neither.

    Its error in powers of two, 1e-3 of the cap at the most, must leave fp16 room for weights, and
    its factors, of the third power of ``scale / softcap``, must be normal numbers.
    """
    return not softcap or (softcap <= LARGEST_CAP and 1e-11 <= scale / softcap <= 1e9)


def wide_cap(softcap: float, dtype: torch.dtype) -> bool:
    """Whether the largest magnitude may stand for the maximum, with weights of that dtype.

    bf16 has fp32's range, of which 1.4 caps in powers of two then leave 26 to small values.
    """
    return dtype == torch.bfloat16 and 0 < softcap <= 50.0
