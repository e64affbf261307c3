"""Multiply an accumulator by its rows' factors, or not at all where all of a warp's are 1.

Kernels that keep a stale maximum (``softmax_step`` with ``SLACK``) nearly always have factors of 1.
Neither Triton nor Gluon has a branch of a single warp, hence assembly.  It looks at two factors of
a thread only: those of its two rows in the layout of a warpgroup's matrix product, 16 rows a
warp, whose registers alternate in pairs between the rows.  The tests hold the compiler to that.
"""

import triton
import triton.language as tl


def rescale_asm(n: int) -> str:
    """PTX: ``n`` results tied to ``n`` accumulators, then ``n`` factors."""
    first = 2 * n
    products = "".join(f"mul.f32 ${i}, ${i}, ${first + i};" for i in range(n))
    return (
        "{ .reg .pred p, q; "
        f"setp.neu.f32 p, ${first}, 0f3F800000; setp.neu.or.f32 p, ${first + 2}, 0f3F800000, p; "
        "vote.sync.any.pred q, p, 0xffffffff; @!q bra.uni DONE; " + products + " DONE: }"
    )


def rescale_constraints(n: int) -> str:
    """Operands of ``rescale_asm(n)``."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


ASM_64, TIES_64 = tl.constexpr(rescale_asm(64)), tl.constexpr(rescale_constraints(64))
ASM_128, TIES_128 = tl.constexpr(rescale_asm(128)), tl.constexpr(rescale_constraints(128))


@triton.jit
def rescale_lazily(acc, alpha, PER_THREAD: tl.constexpr):
    """``acc * alpha[:, None]``; a thread holds ``PER_THREAD`` accumulators."""
    if PER_THREAD == 64:
        return tl.inline_asm_elementwise(
            ASM_64, TIES_64, [acc, alpha[:, None]], dtype=tl.float32, is_pure=True, pack=64
        )
    else:
        tl.static_assert(PER_THREAD == 128)
        return tl.inline_asm_elementwise(
            ASM_128, TIES_128, [acc, alpha[:, None]], dtype=tl.float32, is_pure=True, pack=128
        )
