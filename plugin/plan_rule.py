"""The rule by which a batch's lengths become prefill tiles and decode splits, on host integers.

``plan_batch`` is the twin of the plan kernel (``tilewise.kernels.plan``).  No torch, no GPU.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tilewise.policy import DECODE_MAX_QUERY_LEN, Config, cdiv


def most_workers(num_reqs: int, config: Config) -> int:
    """How many decode programs a batch of so many requests may have, with no prefill beside."""
    few = config.decodes_few(num_reqs)
    return min(config.num_sms, config.num_workers) if few else config.num_workers


def workers_beside(units: int, blocks: int, config: Config) -> int:
    """How many SMs decode while the others prefill, for so many key tiles and key blocks.

    As many as its share of the work, in which a block of the prefill, 128 rows and keys, counts as
    much as 7 / 3 key tiles of decode; bounded by ``Config.beside``.  Whoever is done first leaves
    its SMs to the prefill.
    """
    fewest, most = config.beside
    share = config.num_sms * 3 * units // max(3 * units + 7 * blocks, 1)
    return min(max(share, fewest), most)


def active_workers(total: int, items: int, config: Config, most: int = 0, longest: int = 0) -> int:
    """How many of ``most`` workers (0: all) share ``total`` units of ``items`` items.

    ``longest`` is the number of units of the longest item; it tells whether all are alike, which
    matters where items outnumber workers.  0: they are not, or it is not known.

    With ``w`` workers each walks ``total / w`` units and whoever finishes an item merges about
    ``w / items`` pieces.  A unit costs about as much as sixteen merged pieces, so the sum is least
    at ``w * w = 16 * total * items``; small batches stop there, large ones at the last worker.  In
    between one worker an SM is better than two on some: two are worth their merging from where
    they are at most half as many as that.  A multiple of ``items`` cuts equal requests at their
    ends; it is taken where it idles few.
    """
    if total == 0:
        return 0
    most = most or config.num_workers
    tiles = total - items * config.item_overhead
    workers = min(tiles, most, math.isqrt(4 * total * items))
    if workers < most:
        workers = min(2 * workers, tiles, most, config.num_sms)
    whole = workers // items * items
    if whole and (workers < most or 8 * whole >= 7 * workers):
        return whole
    even = items // cdiv(items, workers)
    if not whole and total == items * longest and 16 * even >= 15 * workers:
        return even
    return workers


def prefill_blocks(query_len: int, seq_len: int, config: Config) -> int:
    """Blocks of 128 keys that the tiles of one prefill walk, for each KV head; about."""
    return cdiv(query_len, config.prefill_block_q) * cdiv(max(2 * seq_len - query_len, 0), 256)


def decode_workers(
    num_reqs: int, total: int, items: int, longest: int, blocks: int | None, config: Config
) -> int:
    """How many workers decode a batch of ``total`` units in ``items`` items.

    ``longest`` is the number of units of the longest item; ``blocks`` are the prefill's, of one KV
    head; None where the batch has no prefill.
    """
    most = most_workers(num_reqs, config)
    if blocks is not None and config.beside[1]:
        most = workers_beside(total, blocks * config.geometry.num_kv_heads, config)
    return active_workers(total, items, config, most, longest)


def first_unit(worker: int, total: int, active: int) -> int:
    """Where a worker's stretch starts; the stretches are as equal as integers allow."""
    return worker * total // active


def owner(unit: int, total: int, active: int) -> int:
    """The worker whose stretch holds ``unit``: the inverse of ``first_unit``."""
    return ((unit + 1) * active - 1) // total


def max_prefill_tiles(num_tokens: int, num_reqs: int, block_q: int, spans: bool = False) -> int:
    """Bound on the prefill tiles of any batch of ``num_tokens`` in ``num_reqs`` requests.

    With ``spans`` requests of any length may be prefills.
    """
    prefills = min(num_reqs, num_tokens // (1 if spans else DECODE_MAX_QUERY_LEN + 1))
    return cdiv(num_tokens, block_q) + prefills if prefills else 0


@dataclass(frozen=True)
class BatchPlan:
    """What the plan kernel writes for one batch; see ``plan_batch``."""

    header: tuple[int, int, int]
    tile_req: tuple[int, ...]
    tile_token: tuple[int, ...]
    cu_work: tuple[int, ...]
    worker_record: tuple[tuple[int, ...], ...]


def plan_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    config: Config,
    spans: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> BatchPlan:
    """The rule by which lengths become tiles and splits, on host integers.

    Parameters
    ----------
    query_lens, seq_lens : sequence of int, one per request
        New tokens, and context plus new tokens.  A request of no tokens gets no work.
    spans : sequence of sequences of (int, int), one per request, optional
        First and last position of bidirectional spans; a request with queries in one is a prefill.

    Returns
    -------
    BatchPlan
        ``header`` = (prefill tiles, active workers, total units); ``tile_req``/``tile_token``
        per prefill tile, last tile first; ``cu_work`` decode units before each request;
        ``worker_record`` per active worker: its stretch, the request it starts in, that
        request's units, first query row, query and sequence length.
    """
    block_q = config.prefill_block_q
    tiles: list[tuple[int, int]] = []
    work: list[int] = []
    items = blocks = longest = 0
    for r, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        work.append(0)
        meets = spans is not None and any(
            first < last and first < seq_len and last >= seq_len - query_len
            for first, last in spans[r]
        )
        if query_len > DECODE_MAX_QUERY_LEN or meets:
            tiles += [(r, i * block_q) for i in range(cdiv(query_len, block_q))]
            blocks += prefill_blocks(query_len, seq_len, config)
        elif query_len > 0:
            work[r] = decode_units(query_len, seq_len, config)
            items += decode_items(query_len, config)
            longest = max(longest, work[r] // decode_items(query_len, config))
    cu_work = tuple(accumulate(work, initial=0))
    total = cu_work[-1]
    active = decode_workers(
        len(query_lens), total, items, longest, blocks if tiles else None, config
    )
    query_start = tuple(accumulate(query_lens, initial=0))
    records = []
    r = 0
    for worker in range(active):
        unit, unit_end = (first_unit(w, total, active) for w in (worker, worker + 1))
        if config.pieces is not None:
            unit, unit_end = (snap(x, cu_work, query_lens, config) for x in (unit, unit_end))
            if unit == unit_end:
                records.append((0,) * 8)
                continue
        while cu_work[r + 1] <= unit:
            r += 1
        span = (cu_work[r], cu_work[r + 1])
        records.append((unit, unit_end, r, *span, query_start[r], query_lens[r], seq_lens[r]))
    return BatchPlan(
        header=(len(tiles), active, total),
        tile_req=tuple(r for r, _ in reversed(tiles)),
        tile_token=tuple(t for _, t in reversed(tiles)),
        cu_work=cu_work,
        worker_record=tuple(records),
    )


def snap(unit: int, cu_work: Sequence[int], query_lens: Sequence[int], config: Config) -> int:
    """The first end of a piece from ``unit`` on, in batch-invariant mode.

    Several stretches may end at one and the same place; all but the first are empty then.
    """
    assert config.pieces is not None
    if unit >= cu_work[-1]:
        return cu_work[-1]
    r = bisect_right(cu_work, unit) - 1
    length = (cu_work[r + 1] - cu_work[r]) // decode_items(query_lens[r], config)
    begin = unit - (unit - cu_work[r]) % length
    overhead = config.item_overhead
    return begin + config.pieces.next_cut(unit - begin, length - overhead, overhead)


def decode_items(query_len: int, config: Config) -> int:
    """Items of one decode request: query tiles x KV heads."""
    tiles_m = cdiv(query_len * config.geometry.group_size, config.decode.block_m)
    return tiles_m * config.geometry.num_kv_heads


def decode_units(query_len: int, seq_len: int, config: Config) -> int:
    """Units of one decode request: its items times their key tiles and overhead.

    Under a window the tiles start at the one that holds the first token's first key.
    """
    tiles = cdiv(seq_len, config.decode.block_n)
    if config.window:
        tiles -= max(seq_len - query_len + 1 - config.window, 0) // config.decode.block_n
    return decode_items(query_len, config) * (max(tiles, 1) + config.item_overhead)


def decode_units_bound(query_len: int, keys: int, config: Config) -> int:
    """Bound on ``decode_units`` of any request of so many query tokens and keys at most."""
    tiles = max(cdiv(keys, config.decode.block_n), 1)
    return decode_items(query_len, config) * (tiles + config.item_overhead)


def decode_units_of_all(num_reqs: int, query_len: int, keys: int, config: Config) -> int:
    """Bound on the units of so many requests that share so many keys, each key in one request."""
    tiles = keys // config.decode.block_n + num_reqs
    return decode_items(query_len, config) * (tiles + num_reqs * config.item_overhead)


def kv_splits(plan: BatchPlan, request: int, query_len: int, config: Config) -> list[int]:
    """How many workers share each item of a decode request; its pieces, where items have them."""
    _, active, total = plan.header
    begin, end = plan.cu_work[request], plan.cu_work[request + 1]
    if begin == end:
        return []
    length = (end - begin) // decode_items(query_len, config)
    if config.pieces is not None:
        count = config.pieces.count(length - config.item_overhead)
        return [count] * decode_items(query_len, config)
    return [
        owner(start + length - 1, total, active) - owner(start, total, active) + 1
        for start in range(begin, end, length)
    ]
