"""Batch-invariant decode on the device: see ``tilewise.pieces`` for where items are cut.

Pieces are folded one after another, first to last, in one of two places: an item that lies in one
worker's stretch is folded as it is walked; of an item that several share, every piece has a slot of
its own and the last worker to arrive folds them.  Both give the same bits: ``_fold`` says itself
which products are fused, so that no compiler chooses differently in the two places.
"""

import triton
import triton.language as tl


@triton.jit
def piece_at(begin, end, length, tiles_n, PIECE_TILES: tl.constexpr, MAX_PIECES: tl.constexpr):
    """``(piece, pieces, lo, hi, end)``: the piece that unit ``begin`` of an item lies in.

    Its key tiles are ``lo .. hi``; the walk goes on at the returned ``end``, in units, which is
    never beyond the given one.
    """
    tiles = tl.maximum(tl.cdiv(tiles_n, MAX_PIECES), PIECE_TILES)
    pieces = tl.maximum(tl.cdiv(tiles_n, tiles), 1)
    piece = tl.minimum(begin // tiles, pieces - 1)
    lo = piece * tiles
    hi = tl.minimum(lo + tiles, tiles_n)
    end = tl.minimum(end, tl.where(piece == pieces - 1, length, lo + tiles))
    return piece, pieces, lo, hi, end


@triton.jit
def next_cut(unit, length, tiles_n, PIECE_TILES: tl.constexpr, MAX_PIECES: tl.constexpr):
    """First unit from ``unit`` on, within an item, at which a piece or the item ends."""
    tiles = tl.maximum(tl.cdiv(tiles_n, MAX_PIECES), PIECE_TILES)
    piece = tl.cdiv(unit, tiles)
    return tl.where(piece >= tl.cdiv(tiles_n, tiles), length, piece * tiles)


@triton.jit
def _fold(acc, m_i, l_i, acc_p, m_p, l_p):
    """Merge one piece into what is merged so far."""
    m_new = tl.maximum(m_i, m_p)
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    keep = tl.exp2(m_i - pivot)
    add = tl.exp2(m_p - pivot)
    l_i = tl.fma(l_p, add, l_i * keep)
    acc = tl.fma(acc_p, tl.broadcast_to(add[:, None], acc_p.shape), acc * keep[:, None])
    return acc, m_new, l_i


@triton.jit
def _load(
    partial_acc_ptr, partial_m_ptr, partial_l_ptr, slot, rows, offs_d, row_ok,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A partial result: weighted values [BLOCK_M, BLOCK_D], maxima and sums [BLOCK_M]."""
    ids = slot.to(tl.int64) * BLOCK_M + rows
    acc_ptrs = partial_acc_ptr + ids[:, None] * BLOCK_D + offs_d[None, :]
    acc = tl.load(acc_ptrs, mask=row_ok[:, None], other=0.0)
    m_i = tl.load(partial_m_ptr + ids, mask=row_ok, other=float("-inf"))
    return acc, m_i, tl.load(partial_l_ptr + ids, mask=row_ok, other=0.0)


@triton.jit
def _store(
    partial_acc_ptr, partial_m_ptr, partial_l_ptr, acc, m_i, l_i, slot, rows, offs_d, row_ok,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    ids = slot.to(tl.int64) * BLOCK_M + rows
    acc_ptrs = partial_acc_ptr + ids[:, None] * BLOCK_D + offs_d[None, :]
    tl.store(acc_ptrs, acc, mask=row_ok[:, None])
    tl.store(partial_m_ptr + ids, m_i, mask=row_ok)
    tl.store(partial_l_ptr + ids, l_i, mask=row_ok)


@triton.jit
def gather_pieces(
    acc,
    m_i,
    l_i,
    partial_acc_ptr,
    partial_m_ptr,
    partial_l_ptr,
    arrivals_ptr,
    worker,
    first,
    piece,
    pieces,
    item_unit,
    item_end,
    walked,
    stretch_begin,
    stretch_end,
    rows,
    offs_d,
    row_ok,
    MAX_PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``(acc, m_i, l_i, complete)``: the item's result where this was its last piece to come.

    The item has the units ``item_unit .. item_end``, starts in the stretch of worker ``first`` and
    has been walked up to ``walked`` by this worker.  Slot ``first * MAX_PIECES + i`` holds piece
    ``i`` of a shared item; at most one of these starts in a stretch.  ``arrivals_ptr`` counts its
    units that are walked, which add up to the item's whatever pieces they are thought to be.
    """
    complete = True
    if pieces > 1:
        if (item_unit >= stretch_begin) & (item_end <= stretch_end):
            slot = tl.num_programs(0) * MAX_PIECES + worker
            if piece > 0:
                acc_b, m_b, l_b = _load(
                    partial_acc_ptr, partial_m_ptr, partial_l_ptr, slot,
                    rows, offs_d, row_ok, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                acc, m_i, l_i = _fold(acc_b, m_b, l_b, acc, m_i, l_i)
            complete = piece == pieces - 1
            if piece < pieces - 1:
                # Threads need not read what they themselves wrote.
                tl.debug_barrier()
                _store(
                    partial_acc_ptr, partial_m_ptr, partial_l_ptr, acc, m_i, l_i, slot,
                    rows, offs_d, row_ok, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                tl.debug_barrier()
        else:
            _store(
                partial_acc_ptr, partial_m_ptr, partial_l_ptr, acc, m_i, l_i,
                first * MAX_PIECES + piece, rows, offs_d, row_ok, BLOCK_M, BLOCK_D,
            )  # fmt: skip
            complete = False
            if (walked >= stretch_end) | (walked >= item_end):
                mine = walked - tl.maximum(item_unit, stretch_begin)
                # Every thread's partials must be out before the one atomic that announces them.
                tl.debug_barrier()
                arrived = tl.atomic_add(arrivals_ptr + first, mine, sem="acq_rel", scope="gpu")
                complete = arrived + mine == item_end - item_unit
                if complete:
                    tl.store(arrivals_ptr + first, 0)  # ready for the next launch
                    acc, m_i, l_i = _load(
                        partial_acc_ptr, partial_m_ptr, partial_l_ptr, first * MAX_PIECES,
                        rows, offs_d, row_ok, BLOCK_M, BLOCK_D,
                    )  # fmt: skip
                    for i in tl.range(1, pieces, loop_unroll_factor=4):
                        acc_p, m_p, l_p = _load(
                            partial_acc_ptr, partial_m_ptr, partial_l_ptr, first * MAX_PIECES + i,
                            rows, offs_d, row_ok, BLOCK_M, BLOCK_D,
                        )  # fmt: skip
                        acc, m_i, l_i = _fold(acc, m_i, l_i, acc_p, m_p, l_p)
    return acc, m_i, l_i, complete
