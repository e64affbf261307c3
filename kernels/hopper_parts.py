"""What the Gluon kernels for Hopper share: rings of shared memory, softmax steps, descriptors.

A warpgroup computes tiles of 64 query rows; a producer warp fills rings of key and value blocks.
A ring slot has two barriers: ``full`` (armed with a byte count, completed by the copy engine) and
``empty`` (one arrival per consuming warpgroup).  The n-th use of a slot waits for ``full`` with
parity ``(n // STAGES) & 1`` and, in the producer, for ``empty`` with the other one, so that the
first round passes at once.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels.launch import LOG2E, Descriptors, Logits
from tilewise.kernels.lazy_rescale import rescale_asm, rescale_constraints
from tilewise.kernels.soft_cap import SMALL, T0, T1, capped_asm, capped_constraints

# Triton 3.8 names them anew and drops the old names later.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
partition_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

ROWS = gl.constexpr(64)  # of one warpgroup


@gluon.jit
def wait_for_the_launch_before():
    """Programmatic dependent launch: what earlier kernels wrote is there from here on."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_the_next_launch_start():
    """Programmatic dependent launch: its programs may take the places of those that left."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def field(tile_s, slot, index: gl.constexpr, FIELDS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Read one scalar of a published tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    return gl.max(tile_s.index(slot * FIELDS + index).load(layout), 0)


@gluon.jit
def publish(tile_s, slot, index: gl.constexpr, value, FIELDS: gl.constexpr):
    """Write one scalar of a tile for the consumers (the producer has one warp)."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tile_s.index(slot * FIELDS + index).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def copy_block(
    desc, pages_s, full, empty, ring, page0, page1, kv_head, slot,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, PAGE_ROWS: gl.constexpr, STAGES: gl.constexpr,
    SIZE: gl.constexpr, SLAB: gl.constexpr,
):  # fmt: skip
    """Copy the ``ring``-th block of keys or values as soon as its ring slot is empty.

    Page by page and ``SLAB`` columns of ``SIZE`` bytes, those that the swizzle spans, at a time: a
    128-byte swizzled ``[BLOCK_N, BLOCK_D]`` tile is ``BLOCK_D / SLAB`` column slabs one after the
    other; rows of a page are contiguous only inside a slab.
    """
    SLABS: gl.constexpr = BLOCK_D // SLAB
    PIECES: gl.constexpr = BLOCK_N // PAGE_ROWS
    stage = ring % STAGES
    mbarrier.wait(empty.index(stage), ((ring // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BLOCK_N * BLOCK_D * SIZE)
    for slab in gl.static_range(SLABS):
        at = (stage * SLABS + slab) * PIECES
        tma_load(desc, [page0, kv_head, slot, slab * SLAB], full.index(stage), pages_s.index(at))
        if PIECES == 2:
            tma_load(
                desc, [page1, kv_head, slot, slab * SLAB], full.index(stage), pages_s.index(at + 1)
            )


@gluon.jit
def block_pages(
    block_table_row_ptr, block, first_key, seq_len,
    BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_ROWS: gl.constexpr,
):  # fmt: skip
    """Pages of a key block: one, or two of half a block.

    Pages of no visible key read as page 0: what the table says of them may be anything.
    """
    start = block * BLOCK_N
    wanted = (start < seq_len) & (start + PAGE_ROWS > first_key)
    page0 = gl.load(block_table_row_ptr + start // PAGE_SIZE, mask=wanted, other=0)
    page1 = page0
    if PAGE_ROWS < BLOCK_N:
        second = start + PAGE_ROWS
        wanted = (second < seq_len) & (start + BLOCK_N > first_key)
        page1 = gl.load(block_table_row_ptr + second // PAGE_SIZE, mask=wanted, other=0)
    return page0, page1


_ASM_32, _TIES_32 = gl.constexpr(rescale_asm(32)), gl.constexpr(rescale_constraints(32))
_ASM_64, _TIES_64 = gl.constexpr(rescale_asm(64)), gl.constexpr(rescale_constraints(64))
_ASM_128, _TIES_128 = gl.constexpr(rescale_asm(128)), gl.constexpr(rescale_constraints(128))


@gluon.jit
def rescale(acc, alpha):
    """``acc * alpha[:, None]``, skipped where every factor of the warp is 1."""
    factor = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout)), 1)
    if acc.shape[1] == 64:
        return gl.inline_asm_elementwise(
            _ASM_32, _TIES_32, [acc, factor], dtype=gl.float32, is_pure=True, pack=32
        )
    elif acc.shape[1] == 128:
        return gl.inline_asm_elementwise(
            _ASM_64, _TIES_64, [acc, factor], dtype=gl.float32, is_pure=True, pack=64
        )
    else:
        gl.static_assert(acc.shape[1] == 256)
        return gl.inline_asm_elementwise(
            _ASM_128, _TIES_128, [acc, factor], dtype=gl.float32, is_pure=True, pack=128
        )


@gluon.jit
def mask(s, first_pos, start, GROUP_PAD: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):
    """Keep keys up to each row's own position, with a window the last ones of these."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
    key = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
    pos = gl.expand_dims(first_pos + row // GROUP_PAD, 1)
    seen = gl.expand_dims(key, 0) <= pos
    if WINDOW:
        seen = seen & (gl.expand_dims(key, 0) > pos - WINDOW)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def of_rows(x):
    """A factor of each row as a column; one of the whole tile as it is."""
    if x.type.is_block():
        return gl.expand_dims(x, 1)
    else:
        return x


@gluon.jit
def soft_cap(s, cap_factor):
    """Products as ``tanh(product * scale / cap)`` where logits are capped, else as they are.

    The unit for it is right to 2**-11; logits that PyTorch caps in bf16 are rounded to 2**-9.
    """
    if cap_factor is not None:
        s = _tanh(s * of_rows(cap_factor))
    return s


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def row_sums(p, BLOCK_N: gl.constexpr):
    """A thread's own share of each row's sum: ``[64, 4]``, no shuffles until the tile's end."""
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def row_max(s, BY_BITS: gl.constexpr):
    """The largest of each row; ``BY_BITS``: where all are negative, the smallest instead.

    sm_90 finds the largest of three integers in one instruction, but of two floats only, and bits
    of floats order as the floats do, those of negative ones the other way round.  A stale maximum
    that nothing below 0 can move does not see the difference (``may_compare_bits``).
    """
    if BY_BITS:
        largest = gl.max(largest_bits(s), 1).to(gl.float32, bitcast=True)
        return gl.convert_layout(largest, gl.SliceLayout(1, s.type.layout))
    else:
        return gl.max(s, 1)


@gluon.jit
def largest_bits(s):
    """The largest, as integers, of every four of a row: ``[64, N]`` as int32 ``[64, N / 4]``.

    Element by element: what a reduction makes of all is not the chain that ptxas looks for.
    """
    a, b, c, d = _quarters(s.to(gl.int32, bitcast=True))
    return gl.maximum(gl.maximum(gl.maximum(a, b), c), d)


@gluon.jit
def _quarters(x):
    """Every fourth group of eight columns, four times: ``[64, N]`` as four of ``[64, N / 4]``."""
    SHAPE: gl.constexpr = [ROWS, x.shape[1] // 4]
    x = gl.permute(gl.reshape(x, [ROWS, x.shape[1] // 32, 2, 2, 8]), (0, 1, 4, 2, 3))
    even, odd = gl.split(x)
    a, b = gl.split(even)
    c, d = gl.split(odd)
    return gl.reshape(a, SHAPE), gl.reshape(b, SHAPE), gl.reshape(c, SHAPE), gl.reshape(d, SHAPE)


@gluon.jit
def may_compare_bits(m, yes, no):
    """``yes`` where every row's maximum is at least -8, in base 2, and bits do, else ``no``.

    A maximum is kept while no logit exceeds it by 8, so from there on no logit up to 0 moves it.
    Through a vote: unless ptxas sees that the threads of a warp agree, loop counters and what is
    computed from them take registers and instructions of every thread.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.f32 p, $1, 0fC1000000; vote.sync.all.pred p, p, 0xffffffff; "
        "selp.b32 $0, $2, $3, p; }",
        "=r,f,r,r", [gl.min(m, 0), yes, no], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def softmax(s, m, sums, scale_log2, BLOCK_N: gl.constexpr, BY_BITS: gl.constexpr = False):
    """Online softmax with a stale maximum; m starts at -1e30, so masked rows give 0, not NaN."""
    m_new = gl.maximum(m, row_max(s, BY_BITS) * scale_log2)
    m_new = gl.where(m_new - m > 8.0, m_new, m)
    p = gl.exp2(s * of_rows(scale_log2) - gl.expand_dims(m_new, 1))
    alpha = gl.exp2(m - m_new)
    share = row_sums(p, BLOCK_N)
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, share.type.layout))
    sums = sums * gl.expand_dims(factor, 1) + share
    return p, m_new, sums, alpha


_CAPPED_32, _CAPPED_TIES_32 = gl.constexpr(capped_asm(32)), gl.constexpr(capped_constraints(32))
_CAPPED_64, _CAPPED_TIES_64 = gl.constexpr(capped_asm(64)), gl.constexpr(capped_constraints(64))
_T0, _T1, _SMALL = gl.constexpr(T0), gl.constexpr(T1), gl.constexpr(SMALL)


@gluon.jit
def capped_softmax(
    s, m, sums, scale_log2, cap_factor, rows_left, GROUP_PAD: gl.constexpr,
    BLOCK_N: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """``softmax(soft_cap(s, cap_factor), ...)`` where no logit is masked.

    Rows of other requests have no say in what is chosen: bits must not depend on neighbours.

    Where weights have bf16's range and the cap is not large (``WIDE``), the largest magnitude,
    which is looked for anyway, may stand for the maximum, up to two fifths of the cap: a row's
    true maximum, at most the cap away from 0, is then 1.4 caps below at the most, or 0.6 above.
    """
    # Triton's own `abs` is an instruction, this one a modifier of the maximum's operand.
    magnitude = gl.inline_asm_elementwise(
        "abs.f32 $0, $1;", "=f,f", [s], dtype=gl.float32, is_pure=True, pack=1
    )
    largest = gl.max(magnitude, 1) * cap_factor
    row = gl.arange(0, ROWS, largest.type.layout)
    largest = gl.where(row // GROUP_PAD < rows_left, largest, 0.0)
    if WIDE:
        peak = gl.minimum(largest, _SMALL)
    else:
        peak = gl.max(s, 1) * cap_factor
    m_new = gl.maximum(m, _tanh(peak) * scale_log2)
    m_new = gl.where(m_new - m > 8.0, m_new, m)
    factor = scale_log2 * cap_factor
    cubic = gl.maximum(factor * (cap_factor * cap_factor * _T1), -1e37)  # times 0 must be 0
    rows = [
        s, -gl.expand_dims(m_new, 1), of_rows(factor * _T0), of_rows(cubic), of_rows(cap_factor),
        of_rows(scale_log2), gl.expand_dims(largest, 1),
    ]  # fmt: skip
    if BLOCK_N == 128:
        p = gl.inline_asm_elementwise(
            _CAPPED_64, _CAPPED_TIES_64, rows, dtype=gl.float32, is_pure=True, pack=64
        )
    else:
        gl.static_assert(BLOCK_N == 64)
        p = gl.inline_asm_elementwise(
            _CAPPED_32, _CAPPED_TIES_32, rows, dtype=gl.float32, is_pure=True, pack=32
        )
    p = gl.exp2(p)
    alpha = gl.exp2(m - m_new)
    share = row_sums(p, BLOCK_N)
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, share.type.layout))
    sums = sums * gl.expand_dims(factor, 1) + share
    return p, m_new, sums, alpha


@gluon.jit
def clear_rows(pages_s, stage, begin, end, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zero the rows of V outside ``begin .. end``: their weight is 0, but 0 * NaN is not.

    Both warpgroups do, each before its own product.  They write the same, so neither waits for the
    other; a block with two edges would need both in one call, or one might write back what the
    other has cleared between its load and its store.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, layout))
    for slab in gl.static_range(HEAD_DIM // 64):
        columns = pages_s.index(stage * (HEAD_DIM // 64) + slab)
        for strip in gl.static_range(BLOCK_N // 16):
            if (strip * 16 < begin) | (strip * 16 + 16 > end):
                part = columns.slice(strip * 16, 16)
                keep = (strip * 16 + row >= begin) & (strip * 16 + row < end)
                part.store(gl.where(gl.expand_dims(keep, 1), part.load(layout), 0.0))
    fence_async_shared()
    partition_barrier()


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


def capped_scales(logits: Logits) -> tuple[float, float | None]:
    """``scale_log2``, of capped products where there is a ``cap_factor`` for ``soft_cap``."""
    if logits.softcap:
        return logits.softcap * LOG2E, logits.scale / logits.softcap
    return logits.scale * LOG2E, None


def _make_descriptor(
    x: torch.Tensor, shape: list[int], strides: list[int], block: list[int]
) -> TensorDescriptor:
    elements = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16,
        torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5,
    }  # fmt: skip
    element = elements[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return TensorDescriptor(x, shape, strides, block, layout)


describe = Descriptors(_make_descriptor)
