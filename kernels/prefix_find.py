"""Decode requests whose block tables begin with the same pages, found on the device.

Three steps of one plan, each for all requests at once, without a host sync:

* ``_prefix_keys_kernel``: every request picks the depth at which it looks for others.  Depths are
  ``MIN_PAGES`` and its doubles; requests are alike at a depth if the page there, the depth's last,
  is the same.  A request takes the greatest depth at which it is not alone.
* ``_prefix_groups_kernel``: requests of one choice are a group, led by the one of lowest index.
  Each counts how many pages of its row are the leader's, from the first on; the group shares the
  fewest of these.
* ``lay_out_groups``, within the plan kernel: which groups are worth it, where their work lies.

Only pages that lie wholly before a request's own query tokens count, so every member sees all keys
that are shared, and entries past a request's length are never read.  Equal ids are equal memory,
whatever they are, so a null page needs no exception.  ``tilewise.prefix_rule`` is the Python twin.

``found`` (int32, four a request): [0] leader or -1, [1] query tokens of members before it, [2]
query tokens and [3] decode items a KV head of the whole group.

``members`` (int32, four a request): [0] slot of its first query token among those of all groups, or
-1, [1] key tiles that it shares, [2] the group's first unit, [3] the group's first slot.

``groups`` (int32, six a group): [0] first unit and [1] end, [2] leader, [3] key tiles, [4] first
slot, [5] query tokens.  ``slots`` has the request of every slot.  ``shared_header``: [0] units and
[1] number of all groups.
"""

import torch
import triton
import triton.language as tl

from tilewise.geometry import next_power_of_2
from tilewise.kernels.launch import Launcher

FOUND_SIZE, MEMBER_SIZE, GROUP_RECORD, SHARED_HEADER = 4, 4, 6, 2
NOBODY = tl.constexpr(2147483647)

_NUMBERS = ["num_reqs", "table_width", "stride_bt_b"]
_VARYING = [*_NUMBERS, "query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"]


@triton.jit
def _prefix_pages(
    query_start_loc_ptr, seq_lens_ptr, r, num_reqs, table_width,
    MAX_QUERY_LEN: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """``(query_len, pages)``: pages before a request's own tokens; 0 for one that joins nobody."""
    ok = r < num_reqs
    start = tl.load(query_start_loc_ptr + r, mask=ok, other=0)
    query_len = tl.load(query_start_loc_ptr + r + 1, mask=ok, other=0) - start
    seq_len = tl.load(seq_lens_ptr + r, mask=ok, other=0)
    joins = (query_len > 0) & (query_len <= MAX_QUERY_LEN)
    pages = tl.minimum(tl.maximum(seq_len - query_len, 0) // PAGE_SIZE, table_width)
    return query_len, tl.where(joins, pages, 0)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_VARYING)
def _prefix_keys_kernel(
    keys_ptr,
    common_ptr,
    row_arrivals_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    num_reqs,
    table_width,
    stride_bt_b,
    PAGE_SIZE: tl.constexpr,
    MAX_QUERY_LEN: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """keys[r] = (lowest request alike at r's depth) * 32 + depth's number, or -1; grid = (reqs,).

    Also clears what this step counts in: pages in common, and arrivals at packed rows.
    """
    req = tl.program_id(0)
    tl.store(common_ptr + req, NOBODY)
    offs_z = tl.arange(0, BLOCK_Z)
    arrivals = row_arrivals_ptr + req * (MAX_QUERY_LEN * NUM_Q_HEADS) + offs_z
    tl.store(arrivals, 0, mask=offs_z < MAX_QUERY_LEN * NUM_Q_HEADS)
    _own_len, pages = _prefix_pages(
        query_start_loc_ptr, seq_lens_ptr, req, num_reqs, table_width, MAX_QUERY_LEN, PAGE_SIZE
    )
    row_ptr = block_table_ptr + req.to(tl.int64) * stride_bt_b
    key = -1
    level = 0
    depth = MIN_PAGES
    while depth <= pages:
        page = tl.load(row_ptr + depth - 1)
        count = 0
        first = NOBODY
        for base in range(0, num_reqs, BLOCK_R):
            r = base + tl.arange(0, BLOCK_R)
            _len_r, pages_r = _prefix_pages(
                query_start_loc_ptr, seq_lens_ptr, r, num_reqs, table_width,
                MAX_QUERY_LEN, PAGE_SIZE,
            )  # fmt: skip
            deep = pages_r >= depth
            entry_ptrs = block_table_ptr + r.to(tl.int64) * stride_bt_b + depth - 1
            alike = deep & (tl.load(entry_ptrs, mask=deep, other=0) == page)
            count += tl.sum(alike.to(tl.int32), 0)
            first = tl.minimum(first, tl.min(tl.where(alike, r, NOBODY), 0))
        if count > 1:
            key = first * 32 + level
            level += 1
            depth = depth * 2
        else:
            depth = pages + 1  # alone from here on
    tl.store(keys_ptr + req, key)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_VARYING)
def _prefix_groups_kernel(
    found_ptr,
    common_ptr,
    keys_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    num_reqs,
    table_width,
    stride_bt_b,
    PAGE_SIZE: tl.constexpr,
    MAX_QUERY_LEN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DECODE_BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """``found`` of every request, common[leader] = pages that its group shares; grid = (reqs,)."""
    req = tl.program_id(0)
    key = tl.load(keys_ptr + req)
    _own_len, pages = _prefix_pages(
        query_start_loc_ptr, seq_lens_ptr, req, num_reqs, table_width, MAX_QUERY_LEN, PAGE_SIZE
    )
    leader = NOBODY
    rank = 0
    tokens = 0
    items = 0
    for base in range(0, num_reqs, BLOCK_R):
        r = base + tl.arange(0, BLOCK_R)
        query_len, _pages_r = _prefix_pages(
            query_start_loc_ptr, seq_lens_ptr, r, num_reqs, table_width, MAX_QUERY_LEN, PAGE_SIZE
        )
        alike = (tl.load(keys_ptr + r, mask=r < num_reqs, other=-1) == key) & (key >= 0)
        leader = tl.minimum(leader, tl.min(tl.where(alike, r, NOBODY), 0))
        rank += tl.sum(tl.where(alike & (r < req), query_len, 0), 0)
        tokens += tl.sum(tl.where(alike, query_len, 0), 0)
        tiles_m = tl.cdiv(query_len * GROUP_SIZE, DECODE_BLOCK_M)
        items += tl.sum(tl.where(alike, tiles_m, 0), 0)
    found = found_ptr + req * 4
    tl.store(found, tl.where(key >= 0, leader, -1))
    tl.store(found + 1, rank)
    tl.store(found + 2, tokens)
    tl.store(found + 3, items)
    if key >= 0:
        _leader_len, limit = _prefix_pages(
            query_start_loc_ptr, seq_lens_ptr, leader, num_reqs, table_width,
            MAX_QUERY_LEN, PAGE_SIZE,
        )  # fmt: skip
        limit = tl.minimum(limit, pages)
        row_ptr = block_table_ptr + req.to(tl.int64) * stride_bt_b
        leader_ptr = block_table_ptr + leader.to(tl.int64) * stride_bt_b
        common = limit
        begin = tl.where(leader == req, limit, 0)
        while begin < limit:
            page = begin + tl.arange(0, BLOCK_C)
            ok = page < limit
            mine = tl.load(row_ptr + page, mask=ok, other=0)
            theirs = tl.load(leader_ptr + page, mask=ok, other=0)
            common = tl.min(tl.where(ok & (mine != theirs), page, limit), 0)
            begin = tl.where(common < limit, limit, begin + BLOCK_C)
        tl.atomic_min(common_ptr + leader, common)


@triton.jit
def lay_out_groups(
    found_ptr,
    common_ptr,
    members_ptr,
    groups_ptr,
    slots_ptr,
    shared_header_ptr,
    query_start_loc_ptr,
    num_reqs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DECODE_BLOCK_N: tl.constexpr,
    ITEM_OVERHEAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHARED_BLOCK_M: tl.constexpr,
    SHARED_PAGE_SIZE: tl.constexpr,
    SHARED_MAX_QUERY_LEN: tl.constexpr,
):
    """``(units, items)`` of all groups; writes ``members``, ``groups`` and ``slots``.

    A group whose key tiles cost more to share than to read is dissolved: see
    ``tilewise.prefix_rule.is_worth``.
    """
    units = 0
    items = 0
    num_groups = 0
    num_slots = 0
    for base in range(0, num_reqs, BLOCK_R):
        r = base + tl.arange(0, BLOCK_R)
        ok = r < num_reqs
        leader = tl.load(found_ptr + r * 4, mask=ok, other=-1)
        tokens = tl.load(found_ptr + r * 4 + 2, mask=ok, other=0)
        tails = tl.load(found_ptr + r * 4 + 3, mask=ok, other=0)
        pages = tl.load(common_ptr + leader, mask=ok & (leader >= 0), other=0)
        tiles = (pages.to(tl.int64) * SHARED_PAGE_SIZE // DECODE_BLOCK_N).to(tl.int32)
        row_tiles = tl.cdiv(tokens * GROUP_SIZE, SHARED_BLOCK_M)
        saved = (tails - row_tiles).to(tl.int64) * tiles
        worth = (leader >= 0) & (saved > ITEM_OVERHEAD * (tails + row_tiles))
        leads = worth & (leader == r)
        tl.store(members_ptr + r * 4, -1, mask=ok)
        tl.store(members_ptr + r * 4 + 1, tl.where(worth, tiles, 0), mask=ok)
        length = tiles + ITEM_OVERHEAD
        work = tl.where(leads, row_tiles * NUM_KV_HEADS * length, 0)
        end = units + tl.cumsum(work, 0)
        joined = tl.where(leads, tokens, 0)
        slot = num_slots + tl.cumsum(joined, 0) - joined
        # Of leaders only: their members take it from there.
        tl.store(members_ptr + r * 4 + 2, tl.where(leads, end - work, 0), mask=ok)
        tl.store(members_ptr + r * 4 + 3, tl.where(leads, slot, 0), mask=ok)
        one = leads.to(tl.int32)
        group = groups_ptr + (num_groups + tl.cumsum(one, 0) - one) * 6
        tl.store(group, end - work, mask=leads)
        tl.store(group + 1, end, mask=leads)
        tl.store(group + 2, r, mask=leads)
        tl.store(group + 3, tiles, mask=leads)
        tl.store(group + 4, slot, mask=leads)
        tl.store(group + 5, tokens, mask=leads)
        units += tl.sum(work, 0)
        items += tl.sum(tl.where(leads, row_tiles * NUM_KV_HEADS, 0), 0)
        num_groups += tl.sum(one, 0)
        num_slots += tl.sum(joined, 0)
    tl.store(shared_header_ptr, units)
    tl.store(shared_header_ptr + 1, num_groups)
    tl.debug_barrier()  # members read what other threads wrote of their leaders
    for base in range(0, num_reqs, BLOCK_R):
        r = base + tl.arange(0, BLOCK_R)
        ok = r < num_reqs
        member = ok & (tl.load(members_ptr + r * 4 + 1, mask=ok, other=0) > 0)
        leader = tl.load(found_ptr + r * 4, mask=member, other=0)
        first_unit = tl.load(members_ptr + leader * 4 + 2, mask=member, other=0)
        first_slot = tl.load(members_ptr + leader * 4 + 3, mask=member, other=0)
        slot = first_slot + tl.load(found_ptr + r * 4 + 1, mask=member, other=0)
        start = tl.load(query_start_loc_ptr + r, mask=member, other=0)
        query_len = tl.load(query_start_loc_ptr + r + 1, mask=member, other=0) - start
        tl.store(members_ptr + r * 4, slot, mask=member)
        tl.store(members_ptr + r * 4 + 2, first_unit, mask=member)
        tl.store(members_ptr + r * 4 + 3, first_slot, mask=member)
        for token in range(SHARED_MAX_QUERY_LEN):
            tl.store(slots_ptr + slot + token, r, mask=member & (token < query_len))
    tl.debug_barrier()
    return units, items


_launch_keys = Launcher(_prefix_keys_kernel)
_launch_groups = Launcher(_prefix_groups_kernel)


def find_prefixes(
    keys: torch.Tensor,
    common: torch.Tensor,
    found: torch.Tensor,
    row_arrivals: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    num_q_heads: int,
    group_size: int,
    page_size: int,
    decode_block_m: int,
    max_query_len: int,
    min_pages: int,
) -> None:
    """Write who could share which pages with whom; no host sync.

    Parameters
    ----------
    keys, common : Tensor[max_num_reqs], int32
        Scratch, and pages that the group of each leader shares.
    found : Tensor[max_num_reqs, 4], int32
        See the module's head.
    row_arrivals : Tensor[max_num_reqs * max_query_len * num_q_heads], int32
        The decode kernel's counters of packed rows; zeroed.
    query_start_loc : Tensor[num_reqs + 1], int32
    seq_lens : Tensor[num_reqs], int32
    block_table : Tensor[num_reqs, pages], int32
        Unit stride in the last axis.
    max_query_len, min_pages : int
        Of ``tilewise.prefix_tiles.PrefixTiles``.
    """
    num_reqs, width = seq_lens.shape[0], block_table.shape[1]
    block_r = min(next_power_of_2(common.shape[0]), 1024)
    batch = (
        query_start_loc, seq_lens, block_table, num_reqs, width, block_table.stride(0),
    )  # fmt: skip
    common_constants = {"PAGE_SIZE": page_size, "MAX_QUERY_LEN": max_query_len}
    _launch_keys(
        (num_reqs, 1, 1), (keys, common, row_arrivals, *batch),
        common_constants | dict(
            MIN_PAGES=min_pages, NUM_Q_HEADS=num_q_heads, BLOCK_R=block_r,
            BLOCK_Z=next_power_of_2(max_query_len * num_q_heads),
        ),
        num_warps=4,
    )  # fmt: skip
    _launch_groups(
        (num_reqs, 1, 1), (found, common, keys, *batch),
        common_constants | dict(
            GROUP_SIZE=group_size, DECODE_BLOCK_M=decode_block_m, BLOCK_R=block_r, BLOCK_C=1024,
        ),
        num_warps=4,
    )  # fmt: skip
