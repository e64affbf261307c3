"""Prefill for Hopper (sm_90) in Gluon over an fp8 cache, multiplied as fp16.

Tiles, roles and maths are those of ``tilewise.kernels.hopper_prefill``, whose consumers run here
as they are, and the contract that of ``tilewise.kernels.prefill``, the plain twin.  Between copies
and consumers stand two more warps, ``_widener``, one for keys, one for values: the copy engine
fills rings of fp8 blocks, they turn each into fp16 in the ring that the consumers read, and arrive
at the barriers at which these would otherwise wait for the copy engine.

fp16 holds both formats of fp8 exactly, NaN and infinities too, and one instruction makes two
elements of it, where bf16 takes four.  So queries in bf16 become fp16 as well, each row scaled by a
power of two (``_scale_queries``), and weights have fp16's 11 bits.  Scales of keys go into the
logits, those of values into the output.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.geometry import next_power_of_2
from tilewise.kernels.hopper_parts import (
    ROWS,
    barriers,
    capped_scales,
    describe,
    partition_barrier,
)
from tilewise.kernels.hopper_roles import TILE_FIELDS, consumer, producer, read_tile
from tilewise.kernels.launch import KvCache, Launcher, Logits
from tilewise.kernels.plan import COUNTERS

STRIP = gl.constexpr(8)  # rows that are widened at a time, those of a swizzle


@gluon.jit
def _widen(words, E5M2: gl.constexpr):
    """Words of four fp8 as twice as many words of two fp16, in order."""
    if E5M2:
        low, high = gl.inline_asm_elementwise(
            """{ .reg .b16 a, b; mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e5m2x2 $0, a; cvt.rn.f16x2.e5m2x2 $1, b; }""",
            "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            """{ .reg .b16 a, b; mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""",
            "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return gl.reshape(gl.join(low, high), [words.shape[0], 2 * words.shape[1]])


@gluon.jit
def _widener(
    narrow_s, wide_s, narrow_full, narrow_empty, full, empty, tile_s, t_full, t_empty,
    GROUP_PAD: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, SLAB: gl.constexpr,
    STAGES: gl.constexpr, NARROW_STAGES: gl.constexpr, E5M2: gl.constexpr,
):  # fmt: skip
    """One warp: turn every tile's blocks of keys, or of values, into fp16 as soon as there is room.

    Both rings are strips of a column slab, in words of 32 bits; fp16 has slabs of 64 columns, fp8
    of up to 128.
    """
    # Eight columns a thread: 16 bytes, one place of the swizzle, are written.
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [1, 1], [1, 0])
    STRIPS: gl.constexpr = BLOCK_N // STRIP  # of a slab
    HALVES: gl.constexpr = SLAB // 64
    ring = 0
    done = 0
    _, _, _, seq_len, _, blocks, first_key = read_tile(tile_s, t_full, t_empty, 0, 0, GROUP_PAD, 1)
    while blocks > 0:
        for n in range(blocks - gl.minimum(first_key // BLOCK_N, blocks - 1)):
            # Rows past the sequence stay what they were: masked as keys, cleared as values.
            keys_left = seq_len - (blocks - 1 - n) * BLOCK_N
            strips = (gl.minimum(gl.maximum(keys_left, 0), BLOCK_N) + STRIP - 1) // STRIP
            narrow_stage = ring % NARROW_STAGES
            stage = ring % STAGES
            mbarrier.wait(narrow_full.index(narrow_stage), (ring // NARROW_STAGES) & 1)
            mbarrier.wait(empty.index(stage), ((ring // STAGES) & 1) ^ 1)
            for slab in gl.static_range(BLOCK_D // SLAB):
                begin = (narrow_stage * (BLOCK_D // SLAB) + slab) * STRIPS
                to = (stage * (BLOCK_D // 64) + slab * HALVES) * STRIPS
                source = narrow_s.index(begin)
                left = source.slice(0, 16, dim=1).load(layout)
                right = source.slice((HALVES - 1) * 16, 16, dim=1).load(layout)
                for strip in range(strips):
                    # The next strip is on its way while this one is written.
                    source = narrow_s.index(begin + gl.minimum(strip + 1, STRIPS - 1))
                    next_left = source.slice(0, 16, dim=1).load(layout)
                    next_right = source.slice((HALVES - 1) * 16, 16, dim=1).load(layout)
                    wide_s.index(to + strip).store(_widen(left, E5M2))
                    if HALVES == 2:
                        wide_s.index(to + STRIPS + strip).store(_widen(right, E5M2))
                    left = next_left
                    right = next_right
            fence_async_shared()
            partition_barrier()
            mbarrier.arrive(narrow_empty.index(narrow_stage))
            mbarrier.arrive(full.index(stage))
            ring += 1
        done += 1
        _, _, _, seq_len, _, blocks, first_key = read_tile(
            tile_s, t_full, t_empty, done, 0, GROUP_PAD, 1
        )


_STRIDES = ["stride_o_t8", "stride_o_h8", "stride_bt_b"]
_VARYING = ["query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"]


@gluon.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_VARYING)
def _hopper_prefill_kv8_kernel(
    out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, q_desc, k_desc, v_desc,
    query_start_loc_ptr, seq_lens_ptr, block_table_ptr, header_ptr, tile_req_ptr, tile_token_ptr,
    counter_ptr, scale_log2, cap_factor, stride_o_t8, stride_o_h8, stride_bt_b,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, GROUP_PAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, PAGE_SIZE: gl.constexpr, HAS_LSE: gl.constexpr,
    WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    NARROW_STAGES: gl.constexpr, K_SCALE_STEP: gl.constexpr, V_SCALE_STEP: gl.constexpr,
):  # fmt: skip
    """out = softmax(cap(scale * q k^T) + causal mask) v; grid = (SMs,), tiles from a counter."""
    dtype: gl.constexpr = gl.float16
    f8: gl.constexpr = k_desc.dtype
    TOKENS: gl.constexpr = ROWS // GROUP_PAD
    PAGE_ROWS: gl.constexpr = BLOCK_N if PAGE_SIZE >= BLOCK_N else PAGE_SIZE
    SLAB: gl.constexpr = 128 if BLOCK_D > 128 else BLOCK_D  # fp8 columns that the swizzle spans
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    slab_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 64], dtype)
    narrow_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, SLAB], f8)
    q_token_s = gl.allocate_shared_memory(
        q_desc.dtype, [2, TOKENS, GROUP_PAD, BLOCK_D], q_desc.layout
    )
    q_s = q_token_s._reinterpret(dtype, [2, ROWS, BLOCK_D], rows_layout)
    raw_q_s = q_token_s._reinterpret(q_desc.dtype, [2, ROWS, BLOCK_D], rows_layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], kv_layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], kv_layout)
    v_slabs_s = v_s._reinterpret(dtype, [STAGES * (BLOCK_D // 64), BLOCK_N, 64], slab_layout)
    blocks: gl.constexpr = NARROW_STAGES * (BLOCK_D // SLAB)
    pieces: gl.constexpr = blocks * (BLOCK_N // PAGE_ROWS)
    k8_s = gl.allocate_shared_memory(f8, [blocks, BLOCK_N, SLAB], narrow_layout)
    v8_s = gl.allocate_shared_memory(f8, [blocks, BLOCK_N, SLAB], narrow_layout)
    k_pages_s = k8_s._reinterpret(f8, [pieces, 1, 1, PAGE_ROWS, SLAB], k_desc.layout)
    v_pages_s = v8_s._reinterpret(f8, [pieces, 1, 1, PAGE_ROWS, SLAB], v_desc.layout)
    # The wideners see all of it as words, eight rows at a time.
    narrow_words: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STRIP, SLAB // 4], gl.int32)
    words: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STRIP, 32], gl.int32)
    strips: gl.constexpr = BLOCK_N // STRIP
    shape8: gl.constexpr = [blocks * strips, STRIP, SLAB // 4]
    shape16: gl.constexpr = [STAGES * (BLOCK_D // 64) * strips, STRIP, 32]
    k8_words_s = k8_s._reinterpret(gl.int32, shape8, narrow_words)
    v8_words_s = v8_s._reinterpret(gl.int32, shape8, narrow_words)
    k_words_s = k_s._reinterpret(gl.int32, shape16, words)
    v_words_s = v_s._reinterpret(gl.int32, shape16, words)
    E5M2: gl.constexpr = f8 == gl.float8e5
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_s = gl.allocate_shared_memory(gl.int32, [2 * TILE_FIELDS, 1], flat)
    q_full, q_empty = barriers(2, 1), barriers(2, 1)
    t_full, t_empty = barriers(2, 1), barriers(2, 4)
    k8_full, k8_empty = barriers(NARROW_STAGES, 1), barriers(NARROW_STAGES, 1)
    v8_full, v8_empty = barriers(NARROW_STAGES, 1), barriers(NARROW_STAGES, 1)
    k_full, k_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    narrow_bars = (q_full, q_empty, k8_full, k8_empty, v8_full, v8_empty, t_full, t_empty)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, t_full, t_empty)
    gl.warp_specialize(
        [
            (consumer, (
                out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, bars, raw_q_s, q_s, k_s,
                v_s, v_slabs_s, tile_s, stride_o_t8, stride_o_h8, scale_log2, cap_factor, 0,
                NUM_KV_HEADS, GROUP_SIZE, GROUP_PAD, HEAD_DIM, BLOCK_D, HAS_LSE, WINDOW, BLOCK_N,
                STAGES, K_SCALE_STEP, V_SCALE_STEP, False,
            )),
            (consumer, (
                out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, bars, raw_q_s, q_s, k_s,
                v_s, v_slabs_s, tile_s, stride_o_t8, stride_o_h8, scale_log2, cap_factor, 1,
                NUM_KV_HEADS, GROUP_SIZE, GROUP_PAD, HEAD_DIM, BLOCK_D, HAS_LSE, WINDOW, BLOCK_N,
                STAGES, K_SCALE_STEP, V_SCALE_STEP, False,
            )),
            (_widener, (
                k8_words_s, k_words_s, k8_full, k8_empty, k_full, k_empty, tile_s, t_full, t_empty,
                GROUP_PAD, BLOCK_N, BLOCK_D, SLAB, STAGES, NARROW_STAGES, E5M2,
            )),
            (_widener, (
                v8_words_s, v_words_s, v8_full, v8_empty, v_full, v_empty, tile_s, t_full, t_empty,
                GROUP_PAD, BLOCK_N, BLOCK_D, SLAB, STAGES, NARROW_STAGES, E5M2,
            )),
            (producer, (
                q_desc, k_desc, v_desc, query_start_loc_ptr, seq_lens_ptr, block_table_ptr,
                header_ptr, tile_req_ptr, tile_token_ptr, counter_ptr, stride_bt_b, narrow_bars,
                q_token_s, k_pages_s, v_pages_s, tile_s, NUM_KV_HEADS, GROUP_SIZE, GROUP_PAD,
                BLOCK_D, PAGE_SIZE, WINDOW, BLOCK_N, NARROW_STAGES, False, 1, SLAB,
            )),
        ],
        [4, 1, 1, 1],
        [232, 40, 40, 40],
    )  # fmt: skip


_launch_hopper_prefill_kv8 = Launcher(_hopper_prefill_kv8_kernel)
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def hopper_prefill_kv8_attention(
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
    window: int,
    num_programs: int,
    block_n: int,
    num_stages: int,
    narrow_stages: int,
) -> None:
    """Same contract as ``tilewise.kernels.prefill.prefill_attention`` for tiles of 128 rows.

    For fp8 caches whose scales are of tensors or heads and whose keys are not rotated.  ALiBi is
    not computed; addresses and strides must suit the copy engine (``tma_strides``, 16 bytes).

    Parameters
    ----------
    header : Tensor[5], int32
        The plan's; its last two are this kernel's counters, zero before and after every launch.
    num_programs : int
        Persistent programs: one an SM.
    block_n, num_stages : int
        Keys a block; blocks of K, and of V, as 16 bits.
    narrow_stages : int
        Blocks of K, and of V, in flight as fp8.
    """
    head_dim, page_size = q.shape[2], kv.page_size
    group_size = q.shape[1] // kv.num_kv_heads
    group_pad = next_power_of_2(group_size)
    block_d = next_power_of_2(head_dim)
    rows = (64 // group_pad, group_pad, block_d)
    page = (1, 1, min(page_size, block_n), min(block_d, 128))
    k, v = (x.view(_DTYPES[kv.format]) for x in (kv.k, kv.v))
    args = (
        out, lse, logits.sinks, kv.k_scale, kv.v_scale, describe(q, rows), describe(k, page),
        describe(v, page), query_start_loc, seq_lens, block_table, header, tile_req, tile_token,
        header[COUNTERS:], *capped_scales(logits), out.stride(0) // 8, out.stride(1) // 8,
        block_table.stride(0),
    )  # fmt: skip
    steps = kv.constants
    constants = dict(
        NUM_KV_HEADS=kv.num_kv_heads, GROUP_SIZE=group_size, GROUP_PAD=group_pad, HEAD_DIM=head_dim,
        BLOCK_D=block_d, PAGE_SIZE=page_size, HAS_LSE=lse is not None, WINDOW=window,
        BLOCK_N=block_n, STAGES=num_stages, NARROW_STAGES=narrow_stages,
        K_SCALE_STEP=steps["K_SCALE_STEP"], V_SCALE_STEP=steps["V_SCALE_STEP"],
    )  # fmt: skip
    _launch_hopper_prefill_kv8((num_programs, 1, 1), args, constants, num_warps=4, **kv.options)
