"""Prefill for Hopper (sm_90) in Gluon with fp8 operands, over an e4m3 cache; head size 128.

The maths are those of ``tilewise.kernels.prefill`` with ``FP8_DOT="promoted"``, its plain twin;
tiles, rings and roles those of ``tilewise.kernels.hopper_prefill``, with two differences.

* The matrix units read 8-bit operands along their inner dimension only, and for P V that is the
  key: values have to be transposed.  A partition of four warps does it (``transposer``), from the
  ring that the copy engine fills into a ring that the consumers read: 8x8 matrices of 16 bits, two
  columns each, are read transposed, and a byte permutation puts the keys of a column side by side.
* A thread's weights, as they come out of Q K^T, are those of keys ``2c, 2c + 1, 8 + 2c, 9 + 2c`` of
  every 16, where the next product wants four neighbours, ``4c .. 4c + 4``.  Instead of exchanging
  weights the transposer writes keys in that order: key ``8 j + 2 c + b`` of 16 goes to place
  ``4 c + 2 j + b``.

The consumers take turns: while one's products occupy the matrix units, the other takes
exponentials.  Without an order both wait for the units, and then both take exponentials.

Queries come as 16 bits; each consumer rotates them, if keys are rotated, and rounds them to e4m3
in its prologue.  Products of one key block are added by the tensor cores, whose accumulator keeps
some 14 bits, and blocks in fp32.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.geometry import next_power_of_2
from tilewise.kernels.hopper_fp8_parts import round_queries, transposer, weights
from tilewise.kernels.hopper_fp8_softmax import (
    SHIFT,
    SLACK,
    across,
    add_weights,
    by_threads,
    in_columns,
    of_rows,
    of_threads,
    stale_max,
    thread_max,
)
from tilewise.kernels.hopper_parts import (
    ROWS,
    barriers,
    describe,
    mask,
    may_compare_bits,
    row_sums,
)
from tilewise.kernels.hopper_roles import TILE_FIELDS, end_tile, producer, read_tile
from tilewise.kernels.launch import LOG2E, KvCache, Launcher, Logits
from tilewise.kernels.plan import COUNTERS

# Queries come to 2**8 at most once their row's power of two is taken out, keys to 448.
_LARGEST_PRODUCT = gl.constexpr(128 * 256.0 * 448.0)
# Blocks at the diagonal; those below it, if every row is quick (``_may_be_quick``); and if not.
_MASKED, _QUICK, _MIXED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def _softmax(s, m, sums, scale_log2, PART: gl.constexpr):
    """Online softmax whose weights use the range of e4m3; ``scale_log2`` has one a row."""
    largest = thread_max(s, m, PART == _QUICK) * scale_log2 - SHIFT
    m_new = stale_max(m, largest)
    s4 = by_threads(s)
    p = s4 * across(scale_log2, s4) - across(m_new, s4)
    if PART != _MASKED:
        fused = gl.fma(s4, _like(s4, scale_log2), _like(s4, -m_new))
        if PART == _QUICK:
            p = fused
        else:
            # Row by row: bits must not depend on which loop the neighbours allow.
            p = gl.where(_like(s4, _is_bounded(scale_log2)), fused, p)
    p = in_columns(gl.exp2(p), s)
    sums, alpha = add_weights(p, m, m_new, sums)
    return p, m_new, sums, alpha


@gluon.jit
def _now(p8):
    """The same operands, as a value that LLVM neither takes apart nor moves.

    Pairs of weights are then put together by the conversion itself.  It was meant to have weights
    ready before the wait for one's turn, but ptxas still converts them after it (lab book 87).
    """
    return gl.inline_asm_elementwise(
        "// $0", "=r,0", [p8], dtype=gl.float8e4nv, is_pure=False, pack=4
    )


@gluon.jit
def _like(x, rows):
    return gl.broadcast(across(rows, x), x)[0]


@gluon.jit
def _is_bounded(scale_log2):
    return scale_log2 * _LARGEST_PRODUCT < 1048576.0


@gluon.jit
def _may_be_quick(m, scale_log2, yes, no):
    """``yes`` where maxima may be found among bits, and logits may miss theirs by a rounding.

    A logit as one fused operation and the maximum as a rounded product differ by 2**-24 of the
    logit: 2**-4 at most where logits stay below 2**20.  Weights of 2**(SHIFT + SLACK), the largest
    otherwise, have a factor of 1.75 left before e4m3 saturates.
    """
    # A logit of 0 does not move a maximum of -8, the least that is compared by bits.
    gl.static_assert(8.0 - SHIFT <= SLACK)
    m = gl.where(_is_bounded(scale_log2), m, -1e30)
    return may_compare_bits(gl.min(m, 1), yes, no)


@gluon.jit
def _wait_for_turn(turns, GROUP: gl.constexpr, round):
    """The first warpgroup starts the products of block ``round``, then the second.

    ``turns[GROUP]`` gets one arrival a block, from the other one.  Each arrival follows a turn of
    one's own, which followed the other's last arrival, so nobody is ever two arrivals ahead.  No
    warp misses a phase either: Gluon has a partition's warps meet before one of them arrives.
    """
    mbarrier.wait(turns.index(GROUP), (round & 1) ^ (1 - GROUP))


@gluon.jit
def _promote(acc, alpha, products):
    """``acc * alpha[:, None] + products``, in one operation each."""
    acc4 = by_threads(acc)
    return in_columns(gl.fma(acc4, _like(acc4, alpha), by_threads(products)), acc)


@gluon.jit
def _consumer(
    out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, bars, turned, turns, q_s, q8_s, k_s,
    vt_s, tile_s, stride_o_t8, stride_o_h8, scale_log2, GROUP: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, GROUP_PAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, STEPS: gl.constexpr,
    HAS_LSE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    K_SCALE_STEP: gl.constexpr, V_SCALE_STEP: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """Warpgroup ``GROUP`` of two: rows ``64 * GROUP .. 64 * GROUP + 64`` of every tile."""
    q_full, q_empty, k_full, k_empty, _, _, t_full, t_empty = bars
    vt_full, vt_empty = turned
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=4)
    q = q_s.index(GROUP)
    q8 = q8_s.index(GROUP)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    no_sums = row_sums(zero, BLOCK_N)
    m_layout: gl.constexpr = no_sums.type.layout
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero_o = gl.zeros([ROWS, HEAD_DIM], gl.float32, o_layout)
    ring = 0
    done = 0
    row_token, rows_left, first_pos, _, kv_head, blocks, _ = read_tile(
        tile_s, t_full, t_empty, 0, GROUP, GROUP_PAD
    )
    while blocks > 0:
        mbarrier.wait(q_full.index(GROUP), done & 1)
        factor = round_queries(q, q8, HEAD_DIM, STEPS, ROTATED)
        mbarrier.arrive(q_empty.index(GROUP))  # rounded, they lie elsewhere
        scale = of_threads(factor, m_layout) * scale_log2
        if k_scale_ptr is not None:
            scale *= gl.load(k_scale_ptr + kv_head * K_SCALE_STEP)
        stage = ring % STAGES
        mbarrier.wait(k_full.index(stage), (ring // STAGES) & 1)
        s = warpgroup_mma(q8, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage))
        # Block n is blocks - 1 - n; those from ``whole`` on lie below the diagonal.
        whole = gl.maximum(blocks - gl.maximum(first_pos + 1, 0) // BLOCK_N, 1)
        whole = gl.minimum(whole, blocks - 1)

        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, o_layout)
        m = gl.full([ROWS, 4], -1e30, gl.float32, m_layout)
        sums = no_sums
        # While one warpgroup takes exponentials, the other's products keep the matrix units busy.
        for part in gl.static_range(3):
            if part == _MASKED:
                begin = 0
                end = whole
            elif part == _QUICK:
                begin = whole
                end = _may_be_quick(m, scale, blocks - 1, whole)
            else:
                begin = end
                end = blocks - 1
            for n in range(begin, end):
                v_stage = ring % STAGES
                if part == _MASKED:
                    start = (blocks - 1 - n) * BLOCK_N
                    s = mask(s, first_pos, start, GROUP_PAD, BLOCK_N, 0)
                p, m, sums, alpha = _softmax(s, m, sums, scale, part)
                p8 = _now(weights(p, BLOCK_N, p_layout))
                _wait_for_turn(turns, GROUP, ring)
                mbarrier.wait(vt_full.index(v_stage), (ring // STAGES) & 1)
                pending = warpgroup_mma(
                    p8, vt_s.index(v_stage).permute((1, 0)), zero_o, use_acc=False, is_async=True
                )
                ring += 1
                stage = ring % STAGES
                mbarrier.wait(k_full.index(stage), (ring // STAGES) & 1)
                logits = warpgroup_mma(
                    q8, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                products = warpgroup_mma_wait(1, deps=[pending])
                mbarrier.arrive(vt_empty.index(v_stage))
                mbarrier.arrive(turns.index(1 - GROUP))
                acc = _promote(acc, alpha, products)
                s = warpgroup_mma_wait(0, deps=[logits])
                mbarrier.arrive(k_empty.index(stage))
        s = mask(s, first_pos, 0, GROUP_PAD, BLOCK_N, 0)
        p, m, sums, alpha = _softmax(s, m, sums, scale, _MASKED)
        p8 = weights(p, BLOCK_N, p_layout)
        v_stage = ring % STAGES
        _wait_for_turn(turns, GROUP, ring)
        mbarrier.wait(vt_full.index(v_stage), (ring // STAGES) & 1)
        pending = warpgroup_mma(
            p8, vt_s.index(v_stage).permute((1, 0)), zero_o, use_acc=False, is_async=True
        )
        products = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(turns.index(1 - GROUP))
        acc = _promote(acc, alpha, products)
        mbarrier.arrive(vt_empty.index(v_stage))
        ring += 1

        end_tile(
            out_ptr, lse_ptr, sinks_ptr, v_scale_ptr, acc, of_rows(m, rows_layout), sums, row_token,
            rows_left, kv_head, stride_o_t8, stride_o_h8, NUM_KV_HEADS, GROUP_SIZE, GROUP_PAD,
            HEAD_DIM, HEAD_DIM, HAS_LSE, V_SCALE_STEP,
        )  # fmt: skip
        done += 1
        row_token, rows_left, first_pos, _, kv_head, blocks, _ = read_tile(
            tile_s, t_full, t_empty, done, GROUP, GROUP_PAD
        )


_STRIDES = ["stride_o_t8", "stride_o_h8", "stride_bt_b"]
_VARYING = ["query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"]


@gluon.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_VARYING)
def _hopper_prefill_fp8_kernel(
    out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, q_desc, k_desc, v_desc,
    query_start_loc_ptr, seq_lens_ptr, block_table_ptr, header_ptr, tile_req_ptr, tile_token_ptr,
    counter_ptr, scale_log2, stride_o_t8, stride_o_h8, stride_bt_b,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, GROUP_PAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, STEPS: gl.constexpr, PAGE_SIZE: gl.constexpr, HAS_LSE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, K_SCALE_STEP: gl.constexpr,
    V_SCALE_STEP: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """out = softmax(scale * q k^T + causal mask) v; grid = (SMs,), tiles from a counter."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    f8: gl.constexpr = gl.float8e4nv
    TOKENS: gl.constexpr = ROWS // GROUP_PAD
    PAGE_ROWS: gl.constexpr = BLOCK_N if PAGE_SIZE >= BLOCK_N else PAGE_SIZE
    gl.static_assert(HEAD_DIM == 128)  # a row is what the swizzle spans
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    q8_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], f8)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], f8)
    vt_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEAD_DIM, BLOCK_N], f8)
    pairs_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [BLOCK_N, HEAD_DIM // 2], gl.int16
    )
    vt_pairs_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [HEAD_DIM, BLOCK_N // 2], gl.int16
    )
    q_token_s = gl.allocate_shared_memory(dtype, [2, TOKENS, GROUP_PAD, HEAD_DIM], q_desc.layout)
    q_s = q_token_s._reinterpret(dtype, [2, ROWS, HEAD_DIM], rows_layout)
    q8_s = gl.allocate_shared_memory(f8, [2, ROWS, HEAD_DIM], q8_layout)
    k_s = gl.allocate_shared_memory(f8, [STAGES, BLOCK_N, HEAD_DIM], kv_layout)
    v_s = gl.allocate_shared_memory(f8, [STAGES, BLOCK_N, HEAD_DIM], kv_layout)
    vt_s = gl.allocate_shared_memory(f8, [STAGES, HEAD_DIM, BLOCK_N], vt_layout)
    pieces: gl.constexpr = STAGES * (BLOCK_N // PAGE_ROWS)
    k_pages_s = k_s._reinterpret(f8, [pieces, 1, 1, PAGE_ROWS, HEAD_DIM], k_desc.layout)
    v_pages_s = v_s._reinterpret(f8, [pieces, 1, 1, PAGE_ROWS, HEAD_DIM], v_desc.layout)
    v_pairs_s = v_s._reinterpret(gl.int16, [STAGES, BLOCK_N, HEAD_DIM // 2], pairs_layout)
    vt_pairs_s = vt_s._reinterpret(gl.int16, [STAGES, HEAD_DIM, BLOCK_N // 2], vt_pairs_layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_s = gl.allocate_shared_memory(gl.int32, [2 * TILE_FIELDS, 1], flat)
    bars = (
        barriers(2, 1), barriers(2, 1), barriers(STAGES, 1), barriers(STAGES, 2),
        barriers(STAGES, 1), barriers(STAGES, 1), barriers(2, 1), barriers(2, 3),
    )  # fmt: skip
    turned = (barriers(STAGES, 1), barriers(STAGES, 2))
    turns = barriers(2, 1)
    gl.warp_specialize(
        [
            (_consumer, (
                out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, bars, turned, turns, q_s,
                q8_s, k_s, vt_s, tile_s, stride_o_t8, stride_o_h8, scale_log2, 0,
                NUM_KV_HEADS, GROUP_SIZE, GROUP_PAD, HEAD_DIM, STEPS, HAS_LSE, BLOCK_N, STAGES,
                K_SCALE_STEP, V_SCALE_STEP, ROTATED,
            )),
            (_consumer, (
                out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, bars, turned, turns, q_s,
                q8_s, k_s, vt_s, tile_s, stride_o_t8, stride_o_h8, scale_log2, 1,
                NUM_KV_HEADS, GROUP_SIZE, GROUP_PAD, HEAD_DIM, STEPS, HAS_LSE, BLOCK_N, STAGES,
                K_SCALE_STEP, V_SCALE_STEP, ROTATED,
            )),
            (transposer, (
                bars, turned, v_pairs_s, vt_pairs_s, tile_s, GROUP_PAD, HEAD_DIM, BLOCK_N, STAGES,
            )),
            (producer, (
                q_desc, k_desc, v_desc, query_start_loc_ptr, seq_lens_ptr, block_table_ptr,
                header_ptr, tile_req_ptr, tile_token_ptr, counter_ptr, stride_bt_b,
                bars, q_token_s, k_pages_s, v_pages_s, tile_s, NUM_KV_HEADS,
                GROUP_SIZE, GROUP_PAD, HEAD_DIM, PAGE_SIZE, 0, BLOCK_N, STAGES, False, 1, HEAD_DIM,
            )),
        ],
        [4, 4, 1],
        [224, 40, 24],
    )  # fmt: skip


_launch_hopper_prefill_fp8 = Launcher(_hopper_prefill_fp8_kernel)


def hopper_prefill_fp8_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    kv: KvCache,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    header: torch.Tensor,
    tile_req: torch.Tensor,
    tile_token: torch.Tensor,
    logits: Logits,
    *,
    num_programs: int,
    block_n: int,
    num_stages: int,
) -> None:
    """Same contract as ``tilewise.kernels.prefill.prefill_attention`` with ``fp8_dot="promoted"``.

    For tiles of 128 rows, an e4m3 cache and head_dim 128.  Windows, soft caps, ALiBi and scales of
    pages are not computed; addresses and strides must suit the copy engine (``tma_strides``).

    Parameters
    ----------
    header : Tensor[5], int32
        The plan's; its last two are this kernel's counters, zero before and after every launch.
    num_programs : int
        Persistent programs: one an SM.
    block_n, num_stages : int
        Keys a block; blocks of K, of V and of turned V in flight.
    """
    head_dim, page_size = q.shape[2], kv.page_size
    group_size = q.shape[1] // kv.num_kv_heads
    group_pad = next_power_of_2(group_size)
    rows = (64 // group_pad, group_pad, head_dim)
    page = (1, 1, min(page_size, block_n), head_dim)
    k, v = (x.view(torch.float8_e4m3fn) for x in (kv.k, kv.v))
    args = (
        out, lse, logits.sinks, kv.k_scale, kv.v_scale, describe(q, rows),
        describe(k, page), describe(v, page), query_start_loc, seq_lens, block_table,
        header, tile_req, tile_token, header[COUNTERS:], logits.scale * LOG2E,
        out.stride(0) // 8, out.stride(1) // 8, block_table.stride(0),
    )  # fmt: skip
    steps = kv.constants
    constants = dict(
        NUM_KV_HEADS=kv.num_kv_heads, GROUP_SIZE=group_size, GROUP_PAD=group_pad, HEAD_DIM=head_dim,
        STEPS=head_dim.bit_length() - 1, PAGE_SIZE=page_size, HAS_LSE=lse is not None,
        BLOCK_N=block_n, STAGES=num_stages, K_SCALE_STEP=steps["K_SCALE_STEP"],
        V_SCALE_STEP=steps["V_SCALE_STEP"], ROTATED=kv.rotated,
    )  # fmt: skip
    _launch_hopper_prefill_fp8((num_programs, 1, 1), args, constants, num_warps=4, **kv.options)
