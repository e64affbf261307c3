"""Online softmax of the Gluon prefill with fp8 products, as each thread has it.

A warpgroup's product ``[64, N]`` lies in its threads so that four of them share a row, pairs of
columns in turn.  Maxima and sums are kept as ``[64, 4]``, one of each row's for every thread, and
products are seen as ``[64, N / 8, 4, 2]``.  Sums of a row meet when a tile ends.  Maxima have to
meet in between, or weights of a row would not fit together; but a stale maximum is kept as long as
no logit exceeds it by much, and a warp can tell that by a vote.  Only where one does, its threads
trade maxima: a shuffle waits behind the other warpgroup's exponentials, which the same unit queues
(lab book 82).  The kernel for 16 bits waits for its products instead, and the branch costs it more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.hopper_parts import ROWS, largest_bits, row_sums

# As tilewise.kernels.fp8 has them, for kernels that keep a stale maximum.
SHIFT, SLACK = gl.constexpr(6.0), gl.constexpr(2.0)


@gluon.jit
def by_threads(x):
    """``[64, N]`` as ``[64, N / 8, 4, 2]``; nothing moves."""
    return gl.reshape(x, [ROWS, x.shape[1] // 8, 4, 2])


@gluon.jit
def in_columns(x, like):
    """What ``by_threads`` made of ``like``, or what was computed from it, as ``like`` was."""
    return gl.convert_layout(gl.reshape(x, like.shape), like.type.layout)


@gluon.jit
def across(x, like):
    """``[64, 4]`` to go with ``like`` ``[64, N / 8, 4, 2]``."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout)))
    return gl.expand_dims(gl.expand_dims(x, 1), 3)


@gluon.jit
def of_threads(x, layout: gl.constexpr):
    """A row's number ``[64]`` for each of its threads: ``[64, 4]``."""
    x = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout)), 1)
    return x + gl.zeros([ROWS, 4], x.dtype, layout)


@gluon.jit
def of_rows(x, layout: gl.constexpr):
    """``[64, 4]``, the same for all threads of a row, as ``[64]``."""
    return gl.convert_layout(gl.max(x, 1), layout)


@gluon.jit
def thread_max(s, like, BY_BITS: gl.constexpr):
    """The largest that each thread has of each row, as ``like`` ``[64, 4]``.

    ``BY_BITS``: where all of a thread's are negative, the smallest instead; ``row_max`` says why.
    """
    if BY_BITS:
        s = largest_bits(s)
    largest = gl.max(gl.max(by_threads(s), 3), 1)
    if BY_BITS:
        largest = largest.to(gl.float32, bitcast=True)
    return gl.convert_layout(largest, like.type.layout)


# Two rows' largest among the four threads that share them, if one of the warp's is needed.
_TRADE = gl.constexpr(
    "{ .reg .pred p, q; .reg .f32 x, y; sub.f32 x, $0, $4; sub.f32 y, $1, $5; "
    "setp.gt.f32 p, x, $6; setp.gt.or.f32 p, y, $7, p; "
    "vote.sync.any.pred q, p, 0xffffffff; @!q bra.uni DONE; "
    + "".join(
        f"shfl.sync.bfly.b32 x, $0, {lane}, 0x1f, 0xffffffff; "
        f"shfl.sync.bfly.b32 y, $1, {lane}, 0x1f, 0xffffffff; "
        "max.f32 $0, $0, x; max.f32 $1, $1, y; "
        for lane in (1, 2)
    )
    + "DONE: }"
)


@gluon.jit
def _trade(largest, m):
    """Each row's largest where one of the warp's exceeds ``m`` by the slack, else what it was.

    A thread's two registers are those of its two rows; the threads of a row are neighbours.
    """
    return gl.inline_asm_elementwise(
        _TRADE, "=f,=f,0,1,f,f,f,f", [largest, m, SLACK], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def stale_max(m, largest):
    """The maximum to go on with, given the threads' largest logits in powers of two."""
    m_new = gl.maximum(m, _trade(largest, m))
    return gl.where(m_new - m > SLACK, m_new, m)


@gluon.jit
def add_weights(p, m, m_new, sums):
    """Sums to which those of ``p`` are added, and the factor of what came before."""
    alpha = gl.exp2(m - m_new)
    return sums * alpha + row_sums(p, p.shape[1]), alpha
