"""Packed rows of requests that share pages: where their pieces lie, and who merges them.

A packed row ``x`` is one (query token, query head of a KV head) of a member of a group: its token's
slot times the heads that share the KV head, plus the head.  Scratch begins with two slots of
``BLOCK_M`` rows for the tails that each worker cuts, goes on with two of ``SHARED_BLOCK_M`` for
shared items, and ends with two rows for every packed row of every KV head, for items that are not
cut.  See ``tilewise.kernels.prefix_decode``.
"""

import triton
import triton.language as tl

from tilewise.kernels.decode_parts import owner, write_rows
from tilewise.kernels.pieces import _fold


@triton.jit
def _pieces_of(unit, length, total, active):
    """``(first, pieces)``: the worker in whose stretch an item begins, and how many share it."""
    first = tl.minimum(owner(unit, total, active), active - 1)
    last = tl.minimum(owner(unit + length - 1, total, active), active - 1)
    return first, tl.maximum(last - first, 0) + 1


@triton.jit
def _row_pieces(
    x, ok, kv_head, query_start_loc_ptr, cu_work_ptr, members_ptr, slots_ptr,
    shared_units, total, active,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, ITEM_OVERHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, SHARED_BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Where the pieces of packed rows ``x`` lie.

    Returns ``(query_row, first_s, pieces_s, row_s, first_t, pieces_t, row_t)``: the row's token,
    and first worker, pieces and row within a tile of its shared item and of its tail.
    """
    slot = x // GROUP_SIZE
    req = tl.load(slots_ptr + slot, mask=ok, other=0)
    first_slot = tl.load(members_ptr + req * 4, mask=ok, other=0)
    tiles = tl.load(members_ptr + req * 4 + 1, mask=ok, other=0)
    group_unit = tl.load(members_ptr + req * 4 + 2, mask=ok, other=0)
    group_slot = tl.load(members_ptr + req * 4 + 3, mask=ok, other=0)
    query_start = tl.load(query_start_loc_ptr + req, mask=ok, other=0)
    query_len = tl.load(query_start_loc_ptr + req + 1, mask=ok, other=0) - query_start
    begin = tl.load(cu_work_ptr + req, mask=ok, other=0)
    end = tl.load(cu_work_ptr + req + 1, mask=ok, other=0)

    packed = x - group_slot * GROUP_SIZE
    length = tiles + ITEM_OVERHEAD
    unit = group_unit + (packed // SHARED_BLOCK_M * NUM_KV_HEADS + kv_head) * length
    first_s, pieces_s = _pieces_of(unit, length, total, active)
    flat = x - first_slot * GROUP_SIZE
    tiles_m = tl.maximum(tl.cdiv(query_len * GROUP_SIZE, BLOCK_M), 1)
    length = tl.maximum((end - begin) // (tiles_m * NUM_KV_HEADS), 1)
    unit = shared_units + begin + (kv_head * tiles_m + flat // BLOCK_M) * length
    first_t, pieces_t = _pieces_of(unit, length, total, active)
    query_row = query_start + slot - first_slot
    return (
        query_row, first_s, pieces_s, packed % SHARED_BLOCK_M, first_t, pieces_t, flat % BLOCK_M
    )  # fmt: skip


@triton.jit
def _pieces_wanted(
    x, ok, kv_head, query_start_loc_ptr, cu_work_ptr, members_ptr, slots_ptr,
    shared_units, total, active,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, ITEM_OVERHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, SHARED_BLOCK_M: tl.constexpr,
):  # fmt: skip
    """How many pieces packed rows ``x`` have in all."""
    _row, _first_s, pieces_s, _row_s, _first_t, pieces_t, _row_t = _row_pieces(
        x, ok, kv_head, query_start_loc_ptr, cu_work_ptr, members_ptr, slots_ptr,
        shared_units, total, active, NUM_KV_HEADS, GROUP_SIZE, ITEM_OVERHEAD, BLOCK_M,
        SHARED_BLOCK_M,
    )  # fmt: skip
    return pieces_s + pieces_t


@triton.jit
def whole_ids(x, kv_head, part, BLOCK_M: tl.constexpr, SHARED_BLOCK_M: tl.constexpr,
             NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr):  # fmt: skip
    """Scratch rows of whole items at packed rows ``x``: part 0 is the shared one, 1 the tail.

    They follow the two slots that each worker has for tails, and for shared items, that it cuts.
    """
    base = 2 * tl.num_programs(0) * (BLOCK_M + SHARED_BLOCK_M)
    counter = _counter_ids(x, kv_head, NUM_KV_HEADS, GROUP_SIZE)
    return base + 2 * counter.to(tl.int64) + part


@triton.jit
def _counter_ids(x, kv_head, NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Numbers of packed rows ``x`` among those of all KV heads."""
    slot = x // GROUP_SIZE
    return (slot * NUM_KV_HEADS + kv_head) * GROUP_SIZE + x % GROUP_SIZE


@triton.jit
def leave(
    partial_acc_ptr, partial_m_ptr, partial_l_ptr, ids, acc, m_i, l_i, ok, BLOCK_D: tl.constexpr
):
    """Put a piece into scratch rows ``ids``."""
    offs_d = tl.arange(0, BLOCK_D)
    tl.store(partial_acc_ptr + ids[:, None] * BLOCK_D + offs_d[None, :], acc, mask=ok[:, None])
    tl.store(partial_m_ptr + ids, m_i, mask=ok)
    tl.store(partial_l_ptr + ids, l_i, mask=ok)


@triton.jit
def arrive(
    x0, count, kv_head, worker, shared_units, total, active,
    out_ptr, lse_ptr, query_start_loc_ptr, cu_work_ptr, members_ptr, slots_ptr,
    partial_acc_ptr, partial_m_ptr, partial_l_ptr, row_arrivals_ptr,
    sinks_ptr, v_scale_ptr, out_scale_ptr, stride_o_t, stride_o_h,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    ITEM_OVERHEAD: tl.constexpr, HAS_LSE: tl.constexpr, BLOCK_M: tl.constexpr,
    SHARED_BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    V_SCALE_STEP: tl.constexpr, OUT_FORMAT: tl.constexpr,
):  # fmt: skip
    """Announce a piece of packed rows ``x0 .. x0 + count``, and finish those whose last it was."""
    # A lane for every thread at least: each counter is then added to, and read, by one of them.
    lane = tl.arange(0, LANES)
    ok = lane < count
    wanted = _pieces_wanted(
        x0 + lane, ok, kv_head, query_start_loc_ptr, cu_work_ptr, members_ptr, slots_ptr,
        shared_units, total, active, NUM_KV_HEADS, GROUP_SIZE, ITEM_OVERHEAD, BLOCK_M,
        SHARED_BLOCK_M,
    )  # fmt: skip
    lane_counters = row_arrivals_ptr + _counter_ids(x0 + lane, kv_head, NUM_KV_HEADS, GROUP_SIZE)
    # Every thread's partial must be out before the atomics that announce it.
    tl.debug_barrier()
    arrived = tl.atomic_add(lane_counters, 1, mask=ok, sem="acq_rel", scope="gpu")
    done = ok & (arrived == wanted - 1)
    # Marked as this worker's: a row is finished by one, another row of the tile by another.
    tl.store(lane_counters, -1 - worker, mask=done)
    some = tl.max(done.to(tl.int32), 0)
    tl.debug_barrier()
    if some > 0:
        offs_d = tl.arange(0, BLOCK_D)
        for begin in range(0, count, ROWS):
            row = begin + tl.arange(0, ROWS)
            x = x0 + row
            counters = row_arrivals_ptr + _counter_ids(x, kv_head, NUM_KV_HEADS, GROUP_SIZE)
            mine = tl.load(counters, mask=row < count, other=0) == -1 - worker
            if tl.max(mine.to(tl.int32), 0) > 0:
                query_row, first_s, pieces_s, row_s, first_t, pieces_t, row_t = _row_pieces(
                    x, mine, kv_head, query_start_loc_ptr, cu_work_ptr, members_ptr, slots_ptr,
                    shared_units, total, active, NUM_KV_HEADS, GROUP_SIZE, ITEM_OVERHEAD,
                    BLOCK_M, SHARED_BLOCK_M,
                )  # fmt: skip
                shared_base = 2 * tl.num_programs(0) * BLOCK_M
                whole = whole_ids(x, kv_head, 0, BLOCK_M, SHARED_BLOCK_M, NUM_KV_HEADS, GROUP_SIZE)
                pieces = pieces_s + pieces_t
                m_i = tl.full([ROWS], float("-inf"), tl.float32)
                l_i = tl.zeros([ROWS], tl.float32)
                acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
                most = tl.max(tl.where(mine, pieces, 0), 0)
                for i in tl.range(0, most, loop_unroll_factor=4):
                    j = i - pieces_s
                    slot_s = 2 * (first_s + i) + tl.where(i == 0, 1, 0)
                    slot_t = 2 * (first_t + j) + tl.where(j == 0, 1, 0)
                    cut_s = (shared_base + slot_s * SHARED_BLOCK_M + row_s).to(tl.int64)
                    cut_t = (slot_t * BLOCK_M + row_t).to(tl.int64)
                    id_s = tl.where(pieces_s == 1, whole, cut_s)
                    id_t = tl.where(pieces_t == 1, whole + 1, cut_t)
                    ids = tl.where(j < 0, id_s, id_t)
                    there = mine & (i < pieces)
                    acc_ptrs = partial_acc_ptr + ids[:, None] * BLOCK_D + offs_d[None, :]
                    acc_p = tl.load(acc_ptrs, mask=there[:, None], other=0.0)
                    m_p = tl.load(partial_m_ptr + ids, mask=there, other=float("-inf"))
                    l_p = tl.load(partial_l_ptr + ids, mask=there, other=0.0)
                    acc, m_i, l_i = _fold(acc, m_i, l_i, acc_p, m_p, l_p)
                sink = None
                if sinks_ptr is not None:
                    sink = tl.load(sinks_ptr + kv_head * GROUP_SIZE + x % GROUP_SIZE)
                flat = query_row.to(tl.int64) * GROUP_SIZE + x % GROUP_SIZE
                write_rows(
                    acc, m_i, l_i, flat, mine, offs_d, kv_head, 0,
                    out_ptr, lse_ptr, sink, v_scale_ptr, out_scale_ptr, stride_o_t, stride_o_h,
                    NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, HAS_LSE, V_SCALE_STEP, OUT_FORMAT,
                )  # fmt: skip
                # Only after every thread has seen the mark; ready for the next launch.
                tl.debug_barrier()
                tl.store(counters, 0, mask=mine)
