"""Prefill for Hopper (sm_90) in Gluon: one copying warp feeds two computing warpgroups.

The maths, the tile list and the packing of a KV head's query heads into rows are those of
``tilewise.kernels.prefill``, its plain twin; a tile has 128 rows here, 64 for each warpgroup.
Groups of query heads are padded to a power of two: the copies bring the next group's heads along,
whose rows are computed for nothing and not stored.  So are heads, by columns that lie outside of
what the copies' descriptors describe, and therefore read as zeros.  Two roles
(``tilewise.kernels.hopper_roles``) share a program:

* ``producer`` (one warp) takes tile numbers from an atomic counter, heaviest tiles first, and
  brings Q, then K and V from the last key block to the first, with bulk tensor copies into rings
  of shared memory.  A ring slot has two barriers: ``full`` (armed with a byte count, completed by
  the copy engine) and ``empty`` (one arrival per warpgroup).  The n-th use of a slot waits for
  ``full`` with parity ``(n // STAGES) & 1`` and, in the producer, for ``empty`` with the other one,
  so that the first round passes at once.
* ``consumer`` (four warps, twice) computes S = Q K^T of block j + 1 while P V of block j runs
  (FlashAttention-3, Shah et al., 2024).  Its running maximum is kept stale while no weight
  exceeds 2**8; the accumulator is rescaled only when some row of the warp needs it (the exact
  result does not depend on that, since one division at the end normalises).  Rows leave from
  registers: the memory of their queries takes the next tile's meanwhile, and there is no other
  beside three blocks of keys and values.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.geometry import next_power_of_2
from tilewise.kernels.hopper_parts import ROWS, barriers, capped_scales, describe
from tilewise.kernels.hopper_roles import TILE_FIELDS, consumer, producer
from tilewise.kernels.launch import KvCache, Launcher, Logits
from tilewise.kernels.plan import COUNTERS
from tilewise.kernels.soft_cap import wide_cap

_STRIDES = ["stride_o_t8", "stride_o_h8", "stride_bt_b"]
_VARYING = ["query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"]


@gluon.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_VARYING)
def _hopper_prefill_kernel(
    out_ptr, lse_ptr, sinks_ptr, q_desc, k_desc, v_desc, query_start_loc_ptr,
    seq_lens_ptr, block_table_ptr, header_ptr, tile_req_ptr, tile_token_ptr, counter_ptr,
    scale_log2, cap_factor, stride_o_t8, stride_o_h8, stride_bt_b,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, GROUP_PAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HAS_LSE: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, BESIDE: gl.constexpr, WIDE_CAP: gl.constexpr,
):  # fmt: skip
    """out = softmax(cap(scale * q k^T) + causal mask) v; grid = (SMs,), tiles from a counter."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    TOKENS: gl.constexpr = ROWS // GROUP_PAD
    PAGE_ROWS: gl.constexpr = BLOCK_N if PAGE_SIZE >= BLOCK_N else PAGE_SIZE
    SLABS: gl.constexpr = BLOCK_D // 64
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    slab_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 64], dtype)
    q_token_s = gl.allocate_shared_memory(dtype, [2, TOKENS, GROUP_PAD, BLOCK_D], q_desc.layout)
    q_s = q_token_s._reinterpret(dtype, [2, ROWS, BLOCK_D], rows_layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], kv_layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], kv_layout)
    pieces: gl.constexpr = STAGES * SLABS * (BLOCK_N // PAGE_ROWS)
    k_pages_s = k_s._reinterpret(dtype, [pieces, 1, 1, PAGE_ROWS, 64], k_desc.layout)
    v_pages_s = v_s._reinterpret(dtype, [pieces, 1, 1, PAGE_ROWS, 64], v_desc.layout)
    v_slabs_s = v_s._reinterpret(dtype, [STAGES * SLABS, BLOCK_N, 64], slab_layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_s = gl.allocate_shared_memory(gl.int32, [2 * TILE_FIELDS, 1], flat)
    bars = (
        barriers(2, 1), barriers(2, 1), barriers(STAGES, 1),
        barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2), barriers(2, 1),
        barriers(2, 2),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consumer, (
                out_ptr, lse_ptr, sinks_ptr, None, None, bars, q_s, q_s, k_s, v_s, v_slabs_s,
                tile_s, stride_o_t8, stride_o_h8, scale_log2, cap_factor, 0, NUM_KV_HEADS,
                GROUP_SIZE, GROUP_PAD, HEAD_DIM, BLOCK_D, HAS_LSE, WINDOW, BLOCK_N, STAGES, 0, 0,
                WIDE_CAP,
            )),
            (consumer, (
                out_ptr, lse_ptr, sinks_ptr, None, None, bars, q_s, q_s, k_s, v_s, v_slabs_s,
                tile_s, stride_o_t8, stride_o_h8, scale_log2, cap_factor, 1, NUM_KV_HEADS,
                GROUP_SIZE, GROUP_PAD, HEAD_DIM, BLOCK_D, HAS_LSE, WINDOW, BLOCK_N, STAGES, 0, 0,
                WIDE_CAP,
            )),
            (producer, (
                q_desc, k_desc, v_desc, query_start_loc_ptr, seq_lens_ptr, block_table_ptr,
                header_ptr, tile_req_ptr, tile_token_ptr, counter_ptr, stride_bt_b, bars,
                q_token_s, k_pages_s, v_pages_s, tile_s, NUM_KV_HEADS, GROUP_SIZE, GROUP_PAD,
                BLOCK_D, PAGE_SIZE, WINDOW, BLOCK_N, STAGES, BESIDE, 2, 64,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_launch_hopper_prefill = Launcher(_hopper_prefill_kernel)


def hopper_prefill_attention(
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
    beside_decode: bool = False,
) -> None:
    """Same contract as ``tilewise.kernels.prefill.prefill_attention`` for tiles of 128 rows.

    ALiBi is not computed; addresses and strides must suit the copy engine
    (``tma_strides``, 16 bytes).

    Parameters
    ----------
    header : Tensor[5], int32
        The plan's; its last two are this kernel's counters, zero before and after every launch.
    num_programs : int
        Persistent programs: one an SM.
    block_n, num_stages : int
        Keys a block; blocks of K, and of V, in flight.
    beside_decode : bool
        Start while the launch before this one runs, which must be the Gluon decode of the same
        plan: programs take the SMs that it leaves idle.
    """
    head_dim, page_size = q.shape[2], kv.page_size
    group_size = q.shape[1] // kv.num_kv_heads
    group_pad = next_power_of_2(group_size)
    block_d = next_power_of_2(head_dim)
    rows = (64 // group_pad, group_pad, block_d)
    page = (1, 1, min(page_size, block_n), 64)
    args = (
        out, lse, logits.sinks, describe(q, rows),
        describe(kv.k, page), describe(kv.v, page),
        query_start_loc, seq_lens, block_table, header, tile_req, tile_token,
        header[COUNTERS:], *capped_scales(logits), out.stride(0) // 8, out.stride(1) // 8,
        block_table.stride(0),
    )  # fmt: skip
    constants = dict(
        NUM_KV_HEADS=kv.num_kv_heads, GROUP_SIZE=group_size, GROUP_PAD=group_pad, HEAD_DIM=head_dim,
        BLOCK_D=block_d, PAGE_SIZE=page_size, HAS_LSE=lse is not None, WINDOW=window,
        BLOCK_N=block_n, STAGES=num_stages, BESIDE=beside_decode,
        WIDE_CAP=wide_cap(logits.softcap, q.dtype),
    )  # fmt: skip
    # A dependent launch that does not wait before it reads: decode has waited for what is read here
    # before it lets this launch start, and writes other rows.
    options = {"launch_pdl": True} if beside_decode else {}
    _launch_hopper_prefill((num_programs, 1, 1), args, constants, num_warps=4, **options)
