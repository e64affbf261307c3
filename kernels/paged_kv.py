"""Reading tiles of keys or values out of the paged cache, shared by prefill and decode.

A request's key ``n`` lives in page ``block_table[request, n // PAGE_SIZE]`` at slot
``n % PAGE_SIZE``.  Three ways to fetch ``BLOCK_N`` consecutive keys:

* ``load_tile_tma``: the tile lies inside one page; one bulk tensor copy (sm_90 and later).
* ``load_tile`` with ``PAGE_SIZE % BLOCK_N == 0``: likewise, by pointers; one page id a tile.
* ``load_tile`` otherwise: every row looks up its own page.

``tile_pages`` reads the page ids; the loops call it one tile ahead, so that no copy waits for one.

Page ids are widened before they meet a stride: page * stride passes 2**31 in real caches.
"""

import triton
import triton.language as tl


@triton.jit
def tile_pages(block_table_row_ptr, start, limit, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of keys ``start .. start + BLOCK_N``: one if the tile lies in a page, else a row's.

    Keys at or past ``limit`` look up nothing (id 0), so the table is never read past its request.
    Ids of keys left of a window may be anything: ``load_tile`` does not follow them.  Without a
    table the pages of a request follow each other.
    """
    if block_table_row_ptr is None:
        if PAGE_SIZE % BLOCK_N == 0:
            return start // PAGE_SIZE
        else:
            return (start + tl.arange(0, BLOCK_N)) // PAGE_SIZE
    elif PAGE_SIZE % BLOCK_N == 0:
        return tl.load(block_table_row_ptr + start // PAGE_SIZE, mask=start < limit, other=0)
    else:
        n = start + tl.arange(0, BLOCK_N)
        return tl.load(block_table_row_ptr + n // PAGE_SIZE, mask=n < limit, other=0)


@triton.jit
def load_tile_tma(
    desc,
    page,
    head,
    start,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``[BLOCK_N, BLOCK_D]`` from a descriptor over ``[page, head, slot, d]``; no row is masked."""
    tile = desc.load([page, head, start % PAGE_SIZE, 0])
    return tl.reshape(tile, [BLOCK_N, BLOCK_D])


@triton.jit
def load_tile(
    head_ptr,
    pages,
    start,
    limit,
    first_key,
    stride_page,
    stride_slot,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """``[BLOCK_N, BLOCK_D]`` by pointers; with ``MASKED`` rows at or past ``limit`` read as 0.

    So do, under a window, rows before ``first_key``.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    n = start + offs_n
    if PAGE_SIZE % BLOCK_N == 0:
        tile_ptr = head_ptr + pages.to(tl.int64) * stride_page
        tile_ptr += (start % PAGE_SIZE).to(tl.int64) * stride_slot
        ptrs = tile_ptr + offs_n.to(tl.int64)[:, None] * stride_slot + offs_d[None, :]
    else:
        rows = pages.to(tl.int64) * stride_page + (n % PAGE_SIZE).to(tl.int64) * stride_slot
        ptrs = head_ptr + rows[:, None] + offs_d[None, :]
    ok = n < limit
    if WINDOW:
        ok = ok & (n >= first_key)
    if MASKED and HEAD_DIM < BLOCK_D:
        return tl.load(ptrs, mask=ok[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(ptrs, mask=ok[:, None], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(ptrs, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(ptrs)
