"""Operands of the Gluon prefill with fp8 products: values turned, queries and weights rounded.

``tilewise.kernels.hopper_prefill_fp8`` says why.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.kernels.hadamard import SEED
from tilewise.kernels.hopper_parts import ROWS, partition_barrier
from tilewise.kernels.hopper_roles import read_tile

_SIGN_SEED = gl.constexpr(SEED.value)


@gluon.jit
def _transpose_part(
    v_part, vt_part, first_row, keys_left, BLOCK_D: gl.constexpr, MASKED: gl.constexpr
):
    """64 keys of ``v_part`` [64, D / 2] into ``vt_part`` [D, 32], both of 16 bits a pair.

    If ``MASKED``, rows at or past ``keys_left`` become 0: their weight is 0, but 0 * NaN is not.
    """
    # Key bits: 1 and 8 in a register's halves and its neighbour, 2 and 4 across lanes, as an 8x8
    # matrix read transposed leaves them.
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0], [0, 8], [0, 16], [0, 32]],
        lane_bases=[[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
    pairs = v_part.load(layout)
    if MASKED:
        row = first_row + gl.arange(0, 64, gl.SliceLayout(1, layout))
        pairs = gl.where(gl.expand_dims(row < keys_left, 1), pairs, 0)
    # Two registers hold (column 0, column 1) of keys 2c, 2c + 1 and of 8 + 2c, 9 + 2c; then one
    # holds column 0 of the four, the other column 1.
    pairs = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=&r,=&r,r,r", [pairs],
        dtype=gl.int16, is_pure=True, pack=4,
    )  # fmt: skip
    # [16 keys, column of two, c, b, pair of columns] -> [D, places / 2]
    wide = gl.reshape(pairs, [4, 2, 4, 2, BLOCK_D // 2])
    turned = gl.reshape(gl.permute(wide, (4, 1, 0, 2, 3)), [BLOCK_D, 32])
    vt_part.store(turned)


@gluon.jit
def _transpose(
    v_s, vt_s, keys_left, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, MASKED: gl.constexpr
):
    for part in gl.static_range(BLOCK_N // 64):
        _transpose_part(
            v_s.slice(part * 64, 64), vt_s.slice(part * 32, 32, dim=1), part * 64, keys_left,
            BLOCK_D, MASKED,
        )  # fmt: skip


@gluon.jit
def transposer(
    bars, turned, v_pairs_s, vt_pairs_s, tile_s, GROUP_PAD: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Turn every block of values for the consumers."""
    _, _, _, _, v_full, v_empty, t_full, t_empty = bars
    vt_full, vt_empty = turned
    ring = 0
    done = 0
    _, _, _, seq_len, _, blocks, _ = read_tile(tile_s, t_full, t_empty, 0, 0, GROUP_PAD)
    while blocks > 0:
        for n in range(blocks):
            stage = ring % STAGES
            parity = (ring // STAGES) & 1
            keys_left = seq_len - (blocks - 1 - n) * BLOCK_N
            mbarrier.wait(v_full.index(stage), parity)
            mbarrier.wait(vt_empty.index(stage), parity ^ 1)
            # Only a sequence's last block has rows to zero, and that takes half the instructions.
            if keys_left < BLOCK_N:
                _transpose(
                    v_pairs_s.index(stage), vt_pairs_s.index(stage), keys_left, HEAD_DIM, BLOCK_N,
                    True,
                )  # fmt: skip
            else:
                _transpose(
                    v_pairs_s.index(stage), vt_pairs_s.index(stage), keys_left, HEAD_DIM, BLOCK_N,
                    False,
                )  # fmt: skip
            fence_async_shared()
            partition_barrier()
            mbarrier.arrive(v_empty.index(stage))
            mbarrier.arrive(vt_full.index(stage))
            ring += 1
        done += 1
        _, _, _, seq_len, _, blocks, _ = read_tile(tile_s, t_full, t_empty, done, 0, GROUP_PAD)


@gluon.jit
def _rotate(x, D: gl.constexpr, STEPS: gl.constexpr):
    """As ``tilewise.kernels.hadamard.rotate_rows``; a thread must hold whole rows."""
    column = gl.arange(0, D, gl.SliceLayout(0, x.type.layout)).to(gl.uint32)
    bits = (column + _SIGN_SEED) * 0x9E3779B1
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = bits ^ (bits >> 13)
    x = x * gl.expand_dims(1.0 - 2.0 * (bits & 1).to(gl.float32), 0)
    layout: gl.constexpr = x.type.layout
    for _ in gl.static_range(STEPS):
        a, b = gl.split(gl.reshape(x, [ROWS, D // 2, 2]))
        x = gl.reshape(gl.permute(gl.join(a + b, a - b), (0, 2, 1)), [ROWS, D])
        x = gl.convert_layout(x, layout)
    return x * (D**-0.5)


@gluon.jit
def round_queries(q_s, q8_s, HEAD_DIM: gl.constexpr, STEPS: gl.constexpr, ROTATED: gl.constexpr):
    """Round 64 rows of 16 bits to e4m3 in ``q8_s``; return each row's factor, a power of two."""
    # A thread must hold whole rows to rotate them; else eight share a row, without conflicts.
    layout: gl.constexpr = (
        gl.BlockedLayout([1, HEAD_DIM], [32, 1], [4, 1], [1, 0])
        if ROTATED
        else gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    )
    wide = q_s.load(layout).to(gl.float32)
    if ROTATED:
        wide = _rotate(wide, HEAD_DIM, STEPS)
        # Rounded as the plain kernel does.
        wide = wide.to(q_s.dtype).to(gl.float32)
    largest = gl.max(gl.maximum(wide, -wide), 1)
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) & 0xFF
    exponent = gl.minimum(gl.maximum(exponent, 127 - 64), 253)
    inverse = ((254 + 7 - exponent) << 23).to(gl.float32, bitcast=True)
    factor = ((exponent - 7) << 23).to(gl.float32, bitcast=True)
    q8_s.store((wide * gl.expand_dims(inverse, 1)).to(gl.float8e4nv))
    fence_async_shared()
    partition_barrier()
    return factor


@gluon.jit
def weights(p, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Weights as e4m3 operand, keys in the transposer's order: nothing leaves its thread."""
    p8 = gl.reshape(p.to(gl.float8e4nv), [ROWS, BLOCK_N // 16, 2, 4, 2])
    p8 = gl.reshape(gl.permute(p8, (0, 1, 3, 2, 4)), [ROWS, BLOCK_N])
    return gl.convert_layout(p8, layout)
