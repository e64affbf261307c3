"""The plan kernel: lengths on the device become a list of prefill tiles and decode stretches.

It applies the rule that ``tilewise.plan_rule.plan_batch`` states in Python (a test holds the two
equal).  One program, once a step; the host never learns the lengths.

``header`` (int32): [0] prefill tiles, [1] active decode workers, [2] decode units in all;
[3] and [4] belong to the persistent prefill kernel (tiles taken, programs done).

``worker_record`` (int32, eight a worker): [0] first unit and [1] end of its stretch (0, 0 when
idle), [2] the request it starts in, that request's [3] first unit and [4] end, [5] first query
row, [6] query length and [7] sequence length.  One row of 32 bytes, so that a decode program
knows where it starts after a single memory latency.

Where requests share pages (``tilewise.kernels.prefix_find``), the line of units begins with the
groups' work, which ``cu_work`` does not count, and records have sixteen numbers: of a stretch that
starts in a group [2] is that group; of any other [8] is the request's slot, or -1, and [9] the key
tiles that it shares.
"""

import torch
import triton
import triton.language as tl

from tilewise.geometry import next_power_of_2
from tilewise.kernels.launch import Launcher
from tilewise.kernels.pieces import next_cut
from tilewise.kernels.prefix_find import lay_out_groups
from tilewise.kernels.spans import meets_span

HEADER_SIZE = 5
COUNTERS = 3
RECORD_SIZE = 8
SHARED_RECORD_SIZE = 16
BESIDE_BLOCK = tl.constexpr(128)  # keys a block of the Gluon prefill


@triton.jit
def _find_request(cu_ptr, x, num_reqs, mask, SEARCH_STEPS: tl.constexpr):
    """The request ``r`` with ``cu[r] <= x < cu[r + 1]`` for each ``x``, by bisection."""
    lo = tl.zeros_like(x)
    hi = lo + num_reqs
    for _ in range(SEARCH_STEPS):
        mid = (lo + hi) // 2
        below = tl.load(cu_ptr + mid, mask=mask, other=0) <= x
        lo = tl.where(below, mid, lo)
        hi = tl.where(below, hi, mid)
    return lo


@triton.jit
def _active_workers(
    total, items, longest, most_workers, ITEM_OVERHEAD: tl.constexpr, NUM_SMS: tl.constexpr
):
    """Workers that balance walking against merging; see ``tilewise.plan_rule.active_workers``."""
    most = tl.minimum(total - items * ITEM_OVERHEAD, most_workers)
    limit = 4 * total.to(tl.int64) * items
    lo = tl.minimum(total, 1)
    hi = most + 1
    while hi - lo > 1:  # integer square root: floats would round differently from Python
        mid = (lo + hi) // 2
        fits = mid.to(tl.int64) * mid <= limit
        lo = tl.where(fits, mid, lo)
        hi = tl.where(fits, hi, mid)
    few = tl.minimum(tl.minimum(2 * lo, most), NUM_SMS)
    lo = tl.where(lo < most_workers, few, lo)
    whole = lo // tl.maximum(items, 1) * items
    take_whole = (whole > 0) & ((lo < most_workers) | (8 * whole >= 7 * lo))
    even = items // tl.maximum((items + lo - 1) // tl.maximum(lo, 1), 1)
    alike = total == items.to(tl.int64) * longest
    take_even = (whole == 0) & alike & (16 * even >= 15 * lo)
    return tl.where(take_whole, whole, tl.where(take_even, even, lo))


@triton.jit
def _workers_beside(units, blocks, fewest, most, NUM_SMS: tl.constexpr):
    """Decode workers beside a prefill; see ``tilewise.plan_rule.workers_beside``."""
    decode = 3 * units.to(tl.int64)
    share = (NUM_SMS * decode // tl.maximum(decode + 7 * blocks, 1)).to(tl.int32)
    return tl.minimum(tl.maximum(share, fewest), most)


@triton.jit
def _snap(
    unit,
    total,
    cu_work_ptr,
    query_start_loc_ptr,
    num_reqs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DECODE_BLOCK_M: tl.constexpr,
    ITEM_OVERHEAD: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    PIECE_TILES: tl.constexpr,
    MAX_PIECES: tl.constexpr,
):
    """The first end of a piece from each ``unit`` on."""
    inside = unit < total
    req = _find_request(cu_work_ptr, unit, num_reqs, inside, SEARCH_STEPS)
    begin = tl.load(cu_work_ptr + req, mask=inside, other=0)
    end = tl.load(cu_work_ptr + req + 1, mask=inside, other=0)
    query_end = tl.load(query_start_loc_ptr + req + 1, mask=inside, other=0)
    query_len = query_end - tl.load(query_start_loc_ptr + req, mask=inside, other=0)
    items = tl.maximum(tl.cdiv(query_len * GROUP_SIZE, DECODE_BLOCK_M), 1) * NUM_KV_HEADS
    length = tl.maximum((end - begin) // items, 1)  # units of one item
    item_unit = begin + (unit - begin) // length * length
    cut = next_cut(unit - item_unit, length, length - ITEM_OVERHEAD, PIECE_TILES, MAX_PIECES)
    return tl.where(inside, item_unit + cut, total)


@triton.jit
def _store_shared_records(
    worker, unit, unit_end, total, shared_units, num_reqs,
    worker_record_ptr, arrivals_ptr, cu_work_ptr, query_start_loc_ptr, seq_lens_ptr,
    members_ptr, groups_ptr, shared_header_ptr,
    NUM_WORKERS: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """Records of workers where requests share pages; idle workers have empty stretches."""
    here = worker < NUM_WORKERS
    in_group = unit < tl.minimum(unit_end, shared_units)
    lo = tl.zeros_like(unit)
    hi = lo + tl.load(shared_header_ptr + 1)
    for _ in range(SEARCH_STEPS):
        mid = (lo + hi) // 2
        below = tl.load(groups_ptr + mid * 6, mask=in_group & (mid < hi), other=2147483647) <= unit
        lo = tl.where(below, mid, lo)
        hi = tl.where(below, hi, mid)
    alone = (unit < unit_end) & (unit >= shared_units)
    req = _find_request(cu_work_ptr, unit - shared_units, num_reqs, alone, SEARCH_STEPS)
    query_start = tl.load(query_start_loc_ptr + req, mask=alone, other=0)
    query_end = tl.load(query_start_loc_ptr + req + 1, mask=alone, other=0)
    begin = shared_units + tl.load(cu_work_ptr + req, mask=alone, other=0)
    end = shared_units + tl.load(cu_work_ptr + req + 1, mask=alone, other=0)
    record = worker_record_ptr + worker * 16
    tl.store(arrivals_ptr + worker, 0, mask=here)
    tl.store(record, unit, mask=here)
    tl.store(record + 1, unit_end, mask=here)
    tl.store(record + 2, tl.where(in_group, lo, tl.where(alone, req, 0)), mask=here)
    tl.store(record + 3, tl.where(alone, begin, 0), mask=here)
    tl.store(record + 4, tl.where(alone, end, 0), mask=here)
    tl.store(record + 5, query_start, mask=here)
    tl.store(record + 6, query_end - query_start, mask=here)
    tl.store(record + 7, tl.load(seq_lens_ptr + req, mask=alone, other=0), mask=here)
    tl.store(record + 8, tl.load(members_ptr + req * 4, mask=alone, other=-1), mask=here)
    tl.store(record + 9, tl.load(members_ptr + req * 4 + 1, mask=alone, other=0), mask=here)


_NUMBERS = [
    "num_reqs", "max_tiles", "num_spans", "most_workers", "fewest_beside", "most_beside",
]  # fmt: skip
_VARYING = [*_NUMBERS, "query_start_loc_ptr", "seq_lens_ptr", "spans_ptr"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_VARYING)
def _plan_kernel(
    header_ptr,
    tile_req_ptr,
    tile_token_ptr,
    cu_tiles_ptr,
    cu_work_ptr,
    worker_record_ptr,
    arrivals_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    spans_ptr,
    num_spans,
    found_ptr,
    common_ptr,
    members_ptr,
    groups_ptr,
    slots_ptr,
    shared_header_ptr,
    num_reqs,
    max_tiles,
    most_workers,
    fewest_beside,
    most_beside,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DECODE_MAX_QUERY_LEN: tl.constexpr,
    PREFILL_BLOCK_Q: tl.constexpr,
    DECODE_BLOCK_M: tl.constexpr,
    DECODE_BLOCK_N: tl.constexpr,
    NUM_WORKERS: tl.constexpr,
    NUM_SMS: tl.constexpr,
    ITEM_OVERHEAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_LIST: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    WINDOW: tl.constexpr,
    PIECE_TILES: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    SHARED_BLOCK_M: tl.constexpr,
    SHARED_PAGE_SIZE: tl.constexpr,
    SHARED_MAX_QUERY_LEN: tl.constexpr,
):
    """Prefix sums over requests, then one entry per tile and per worker; grid = (1,).

    ``found_ptr`` and what follows it are None, and ``SHARED_…`` 0, where no pages are shared.
    """
    if found_ptr is not None:
        tl.static_assert(WINDOW == 0 and MAX_PIECES == 0)
        shared_units, shared_items = lay_out_groups(
            found_ptr, common_ptr, members_ptr, groups_ptr, slots_ptr, shared_header_ptr,
            query_start_loc_ptr, num_reqs, NUM_KV_HEADS, GROUP_SIZE, DECODE_BLOCK_N, ITEM_OVERHEAD,
            BLOCK_R, SHARED_BLOCK_M, SHARED_PAGE_SIZE, SHARED_MAX_QUERY_LEN,
        )  # fmt: skip
    offs_r = tl.arange(0, BLOCK_R)
    num_tiles = 0
    blocks = tl.zeros([], tl.int64)
    total = 0
    items = tl.zeros([], tl.int32)
    longest = 0
    tl.store(cu_tiles_ptr, 0)
    tl.store(cu_work_ptr, 0)
    for base in range(0, num_reqs, BLOCK_R):
        r = base + offs_r
        ok = r < num_reqs
        start = tl.load(query_start_loc_ptr + r, mask=ok, other=0)
        query_len = tl.load(query_start_loc_ptr + r + 1, mask=ok, other=0) - start
        seq_len = tl.load(seq_lens_ptr + r, mask=ok, other=0)
        is_decode = (query_len > 0) & (query_len <= DECODE_MAX_QUERY_LEN)
        is_prefill = query_len > DECODE_MAX_QUERY_LEN
        if spans_ptr is not None:
            # The prefill kernel alone knows of spans.
            meets = meets_span(spans_ptr, r, num_spans, query_len, seq_len, ok)
            is_prefill = is_prefill | (is_decode & meets)
            is_decode = is_decode & ~is_prefill
        tiles = tl.where(is_prefill, tl.cdiv(query_len, PREFILL_BLOCK_Q), 0)
        tiles_m = tl.cdiv(query_len * GROUP_SIZE, DECODE_BLOCK_M)
        # A request without keys still owns a tile: its rows must be written as zeros.
        key_tiles = tl.cdiv(seq_len, DECODE_BLOCK_N)
        if WINDOW:
            key_tiles -= tl.maximum(seq_len - query_len + 1 - WINDOW, 0) // DECODE_BLOCK_N
        if found_ptr is not None:
            key_tiles -= tl.load(members_ptr + r * 4 + 1, mask=ok, other=0)
        length = tl.maximum(key_tiles, 1) + ITEM_OVERHEAD
        work = tl.where(is_decode, tiles_m * length * NUM_KV_HEADS, 0)
        tl.store(cu_tiles_ptr + r + 1, num_tiles + tl.cumsum(tiles, 0), mask=ok)
        tl.store(cu_work_ptr + r + 1, total + tl.cumsum(work, 0), mask=ok)
        num_tiles += tl.sum(tiles, 0)
        # Key blocks of all tiles, which see half of the new tokens on average.
        # Dummy requests may have fewer keys than queries.
        seen_twice = tl.maximum(2 * seq_len.to(tl.int64) - query_len, 0)
        blocks += tl.sum(tiles * tl.cdiv(seen_twice, 2 * BESIDE_BLOCK), 0)
        total += tl.sum(work, 0)
        items += tl.sum(tl.where(is_decode, tiles_m * NUM_KV_HEADS, 0), 0)
        longest = tl.maximum(longest, tl.max(tl.where(is_decode, length, 0), 0))
    if found_ptr is not None:
        total += shared_units
        items += shared_items
        longest = 0  # items of groups are of other lengths
    # Lengths beyond the bounds the caller gave must not write beyond the buffers.
    num_tiles = tl.minimum(num_tiles, max_tiles)
    if (most_beside > 0) & (num_tiles > 0):
        most_workers = _workers_beside(
            total, blocks * NUM_KV_HEADS, fewest_beside, most_beside, NUM_SMS
        )
    active = _active_workers(total, items, longest, most_workers, ITEM_OVERHEAD, NUM_SMS)
    tl.store(header_ptr, num_tiles)
    tl.store(header_ptr + 1, active)
    tl.store(header_ptr + 2, total)
    # Zero after every launch; zeroed again here, so that a launch cut short spoils one step.
    tl.store(header_ptr + 3, 0)
    tl.store(header_ptr + 4, 0)

    # The bisections read what other threads of this program wrote above.
    tl.debug_barrier()
    worker = tl.arange(0, BLOCK_W)
    divisor = tl.maximum(active, 1)
    unit = (worker * total.to(tl.int64) // divisor).to(tl.int32)
    unit_end = ((worker + 1) * total.to(tl.int64) // divisor).to(tl.int32)
    busy = worker < active
    if MAX_PIECES:
        unit = _snap(
            unit, total, cu_work_ptr, query_start_loc_ptr, num_reqs, NUM_KV_HEADS, GROUP_SIZE,
            DECODE_BLOCK_M, ITEM_OVERHEAD, SEARCH_STEPS, PIECE_TILES, MAX_PIECES,
        )  # fmt: skip
        unit_end = _snap(
            unit_end, total, cu_work_ptr, query_start_loc_ptr, num_reqs, NUM_KV_HEADS, GROUP_SIZE,
            DECODE_BLOCK_M, ITEM_OVERHEAD, SEARCH_STEPS, PIECE_TILES, MAX_PIECES,
        )  # fmt: skip
        busy = busy & (unit < unit_end)
    if found_ptr is not None:
        _store_shared_records(
            worker, tl.where(busy, unit, 0), tl.where(busy, unit_end, 0), total, shared_units,
            num_reqs, worker_record_ptr, arrivals_ptr, cu_work_ptr, query_start_loc_ptr,
            seq_lens_ptr, members_ptr, groups_ptr, shared_header_ptr, NUM_WORKERS, SEARCH_STEPS,
        )  # fmt: skip
    else:
        first_req = _find_request(cu_work_ptr, unit, num_reqs, busy, SEARCH_STEPS)
        if MAX_PIECES:
            first_req = tl.where(busy, first_req, 0)
        query_start = tl.load(query_start_loc_ptr + first_req, mask=busy, other=0)
        query_end = tl.load(query_start_loc_ptr + first_req + 1, mask=busy, other=0)
        record = worker_record_ptr + worker * 8
        here = worker < NUM_WORKERS
        tl.store(arrivals_ptr + worker, 0, mask=here)
        tl.store(record, tl.where(busy, unit, 0), mask=here)
        tl.store(record + 1, tl.where(busy, unit_end, 0), mask=here)
        tl.store(record + 2, first_req, mask=here)
        tl.store(record + 3, tl.load(cu_work_ptr + first_req, mask=busy, other=0), mask=here)
        tl.store(record + 4, tl.load(cu_work_ptr + first_req + 1, mask=busy, other=0), mask=here)
        tl.store(record + 5, query_start, mask=here)
        tl.store(record + 6, query_end - query_start, mask=here)
        tl.store(record + 7, tl.load(seq_lens_ptr + first_req, mask=busy, other=0), mask=here)
    for base in range(0, num_tiles, BLOCK_LIST):
        slot = base + tl.arange(0, BLOCK_LIST)
        ok = slot < num_tiles
        # Last tiles first: under a causal mask they are the long ones.
        tile = num_tiles - 1 - slot
        req = _find_request(cu_tiles_ptr, tile, num_reqs, ok, SEARCH_STEPS)
        before = tl.load(cu_tiles_ptr + req, mask=ok, other=0)
        tl.store(tile_req_ptr + slot, req, mask=ok)
        tl.store(tile_token_ptr + slot, (tile - before) * PREFILL_BLOCK_Q, mask=ok)


_launch_plan = Launcher(_plan_kernel)


def plan_on_device(
    header: torch.Tensor,
    tile_req: torch.Tensor,
    tile_token: torch.Tensor,
    cu_tiles: torch.Tensor,
    cu_work: torch.Tensor,
    worker_record: torch.Tensor,
    arrivals: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_reqs: int,
    *,
    num_kv_heads: int,
    group_size: int,
    decode_max_query_len: int,
    prefill_block_q: int,
    decode_block_m: int,
    decode_block_n: int,
    num_sms: int,
    item_overhead: int,
    window: int,
    most_workers: int = 0,
    beside: tuple[int, int] = (0, 0),
    spans: torch.Tensor | None = None,
    piece_tiles: int = 0,
    max_pieces: int = 0,
    shared: tuple[torch.Tensor, ...] | None = None,
    shared_block_m: int = 0,
    shared_page_size: int = 0,
    shared_max_query_len: int = 0,
) -> None:
    """Write the plan of one batch into persistent buffers; no host sync.

    Parameters
    ----------
    header : Tensor[5], int32
    tile_req, tile_token : Tensor[max_tiles], int32
        Request and first query token (within the request) of each prefill tile, last tile first.
    cu_tiles, cu_work : Tensor[max_num_reqs + 1], int32
        Prefill tiles and decode units before each request.
    worker_record : Tensor[num_workers, 8], int32
        Where each decode worker starts and ends; see the module's head.  [num_workers, 16] with
        ``shared``.
    arrivals : Tensor[num_workers], int32
        The decode kernel's counters of finished pieces; zeroed.
    query_start_loc : Tensor[num_reqs + 1], int32
    seq_lens : Tensor[num_reqs], int32
    most_workers : int
        Workers that may share the work; 0 for all that have a record.
    beside : (int, int)
        Fewest and most workers where the prefill runs beside them; zeros where it does not.
    spans : Tensor[num_reqs, num_spans, 2], int32, contiguous, or None
        Bidirectional spans; a request that has queries in one is a prefill, however short.
    piece_tiles, max_pieces : int
        Fewest key tiles of a piece and most pieces of an item in batch-invariant mode, else 0.
    shared : tuple of Tensor, int32, or None
        ``found``, ``common``, ``members``, ``groups``, ``slots`` and ``shared_header`` where
        requests may share pages; the first two hold what ``find_prefixes`` wrote for this batch.
    shared_block_m, shared_page_size, shared_max_query_len : int
        Rows of a shared tile, tokens a page and longest member with ``shared``, else 0.
    """
    max_reqs = cu_work.shape[0] - 1
    num_workers = worker_record.shape[0]
    args = (
        header, tile_req, tile_token, cu_tiles, cu_work, worker_record, arrivals,
        query_start_loc, seq_lens, spans, None if spans is None else spans.shape[1],
        *(shared or (None,) * 6), num_reqs, tile_req.shape[0], most_workers or num_workers, *beside,
    )  # fmt: skip
    constants = dict(
        NUM_KV_HEADS=num_kv_heads, GROUP_SIZE=group_size,
        DECODE_MAX_QUERY_LEN=decode_max_query_len, PREFILL_BLOCK_Q=prefill_block_q,
        DECODE_BLOCK_M=decode_block_m, DECODE_BLOCK_N=decode_block_n,
        NUM_WORKERS=num_workers, NUM_SMS=num_sms, ITEM_OVERHEAD=item_overhead,
        BLOCK_R=min(next_power_of_2(max_reqs), 1024), BLOCK_LIST=1024,
        BLOCK_W=next_power_of_2(num_workers),
        SEARCH_STEPS=max_reqs.bit_length(), WINDOW=window,
        PIECE_TILES=piece_tiles, MAX_PIECES=max_pieces,
        SHARED_BLOCK_M=shared_block_m, SHARED_PAGE_SIZE=shared_page_size,
        SHARED_MAX_QUERY_LEN=shared_max_query_len,
    )  # fmt: skip
    _launch_plan((1, 1, 1), args, constants, num_warps=8)
