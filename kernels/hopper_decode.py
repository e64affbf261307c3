"""Split-KV decode for Hopper (sm_90) in Gluon: one copying warp runs ahead of one warpgroup.

The plan, the cuts, the partial results and the order of merging are those of
``tilewise.kernels.decode``, its plain twin.  What differs is who waits: ``producer`` (one warp)
walks the program's stretch of key tiles by itself and keeps a few copies on their way, over the
ends of items as well, so that neither an item's start nor its merge leaves the memory idle.  (More
of them were slower: bench/NOTES.md.)  ``consumer`` (four warps) computes the logits of one tile
while it weighs the values of the tile before; of its 64 rows an item fills ``BLOCK_M``, for tensor
cores have time to spare here.

Programs are persistent, one an SM.  With programmatic dependent launch the next kernel's programs
take over an SM as soon as this one's leaves it.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
)

from tilewise.kernels.hopper_decode_roles import ITEM_FIELDS, consumer, producer
from tilewise.kernels.hopper_parts import (
    ROWS,
    barriers,
    capped_scales,
    describe,
    let_the_next_launch_start,
    wait_for_the_launch_before,
)
from tilewise.kernels.launch import KvCache, Launcher, Logits

_VARYING = ["query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"]


@gluon.jit(do_not_specialize=["stride_bt_b"], do_not_specialize_on_alignment=_VARYING)
def _hopper_decode_kernel(
    out_ptr, lse_ptr, sinks_ptr, q_desc, k_desc, v_desc, query_start_loc_ptr, seq_lens_ptr,
    block_table_ptr, header_ptr, cu_work_ptr, worker_record_ptr, partial_acc_ptr, partial_m_ptr,
    partial_l_ptr, arrivals_ptr, scale_log2, cap_factor, stride_o_t, stride_o_h, stride_bt_b,
    NUM_WORKERS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, ITEM_OVERHEAD: gl.constexpr,
    HAS_LSE: gl.constexpr,
    WINDOW: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr, SOME: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out = softmax(scale * q k^T + causal mask) v for short queries; grid = (SMs,)."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    SLABS: gl.constexpr = HEAD_DIM // 64
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    slab_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 64], dtype)
    q_s = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], rows_layout)
    boxes: gl.constexpr = 2 * SLABS * (ROWS // BLOCK_M)
    q_token_s = q_s._reinterpret(
        dtype, [boxes, BLOCK_M // GROUP_SIZE, GROUP_SIZE, 64], q_desc.layout
    )
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], kv_layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], kv_layout)
    k_pages_s = k_s._reinterpret(dtype, [STAGES * SLABS, 1, 1, BLOCK_N, 64], k_desc.layout)
    v_pages_s = v_s._reinterpret(dtype, [STAGES * SLABS, 1, 1, BLOCK_N, 64], v_desc.layout)
    v_slabs_s = v_s._reinterpret(dtype, [STAGES * SLABS, BLOCK_N, 64], slab_layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    item_s = gl.allocate_shared_memory(gl.int32, [2 * ITEM_FIELDS, 1], flat)
    bars = (
        barriers(2, 1), barriers(2, 1), barriers(STAGES, 1), barriers(STAGES, 1),
        barriers(STAGES, 1), barriers(STAGES, 1),
    )  # fmt: skip
    if BLOCK_M < ROWS:
        # Rows that no copy fills: they only have to be numbers that slow nothing down.
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        for slot in gl.static_range(2):
            q_s.index(slot).store(gl.zeros([ROWS, HEAD_DIM], dtype, layout))
        fence_async_shared()
    if PDL:
        wait_for_the_launch_before()
        # No place of this launch's own programs is taken by this: all of them are here already.
        let_the_next_launch_start()
    gl.warp_specialize(
        [
            (consumer, (
                out_ptr, lse_ptr, sinks_ptr, partial_acc_ptr, partial_m_ptr, partial_l_ptr,
                arrivals_ptr, header_ptr, bars, q_s, k_s, v_s, v_slabs_s, item_s, stride_o_t,
                stride_o_h, scale_log2, cap_factor, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, HAS_LSE,
                WINDOW, BLOCK_M, BLOCK_N, STAGES, PIECES, SOME,
            )),
            (producer, (
                q_desc, k_desc, v_desc, query_start_loc_ptr, seq_lens_ptr, block_table_ptr,
                cu_work_ptr, worker_record_ptr, stride_bt_b, bars, q_token_s,
                k_pages_s, v_pages_s, item_s, NUM_WORKERS, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM,
                PAGE_SIZE,
                ITEM_OVERHEAD, WINDOW, BLOCK_M, BLOCK_N, STAGES,
            )),
        ],
        [1],
        [64],
    )  # fmt: skip


_launch_hopper_decode = Launcher(_hopper_decode_kernel)


def merge_tile(head_dim: int, group_size: int, block_m: int) -> tuple[int, int]:
    """Rows that are merged at a time, and pieces of each: at most 128 values of a thread."""
    fewest = 512 // head_dim  # a row for each of four warps, or two
    rows = max(fewest, min(block_m, 32) if block_m > 16 else group_size)
    values = 16384 if block_m < 64 else 8192
    return rows, min(values // (rows * head_dim), 16)


def hopper_decode_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    kv: KvCache,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    header: torch.Tensor,
    cu_work: torch.Tensor,
    worker_record: torch.Tensor,
    partial_acc: torch.Tensor,
    partial_m: torch.Tensor,
    partial_l: torch.Tensor,
    arrivals: torch.Tensor,
    logits: Logits,
    *,
    window: int,
    item_overhead: int,
    num_programs: int,
    block_m: int,
    block_n: int,
    num_stages: int,
    pdl: bool,
) -> None:
    """Same contract as ``tilewise.kernels.decode.decode_attention``, of which it takes a part.

    Causal attention with a scale, a soft cap, a window and sinks, over whole pages of a cache in
    the queries' dtype; the query heads of a KV head are a power of two, at most ``block_m``.
    Addresses and strides must suit the copy engine (``tma_strides``, 16 bytes).

    Parameters
    ----------
    num_programs : int
        Persistent programs: one an SM.  A plan for more workers leaves some of them several.
    block_m : int
        Rows of an item, 16 to 64, as the plan has them.
    block_n, num_stages : int
        Keys a tile, a divisor of the page size; tiles of K, and of V, in flight.
    pdl : bool
        Start while the launch before this one ends.
    """
    head_dim, page_size = q.shape[2], kv.page_size
    group_size = q.shape[1] // kv.num_kv_heads
    page = (1, 1, block_n, 64)
    some, pieces = merge_tile(head_dim, group_size, block_m)
    args = (
        out, lse, logits.sinks, describe(q, (block_m // group_size, group_size, 64)),
        describe(kv.k, page), describe(kv.v, page), query_start_loc, seq_lens, block_table, header,
        cu_work, worker_record, partial_acc, partial_m, partial_l, arrivals,
        *capped_scales(logits), out.stride(0), out.stride(1), block_table.stride(0),
    )  # fmt: skip
    constants = dict(
        NUM_WORKERS=arrivals.shape[0], NUM_KV_HEADS=kv.num_kv_heads, GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size, ITEM_OVERHEAD=item_overhead, HAS_LSE=lse is not None, WINDOW=window,
        BLOCK_M=block_m, BLOCK_N=block_n, STAGES=num_stages, PIECES=pieces, SOME=some, PDL=pdl,
    )  # fmt: skip
    options = {"launch_pdl": True} if pdl else {}
    _launch_hopper_decode((num_programs, 1, 1), args, constants, num_warps=4, **options)
