"""Three ways to cut the same decode batch, as records of the decode kernel, and a model of each.

* ``fixed``: every item, one (request, KV head, query tile), has the same number of splits.
* ``heuristic``: that number is chosen by flash-decoding's rule, which knows the items, the places
  for programs and the longest request, not how long the others are.
* ``even``: tilewise's stretches of equal work (``tilewise.plan_rule``).

The kernel is the same, and so is all that it reads; only records differ.  No torch and no GPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise import plan_rule, policy
from tilewise.policy import Config, cdiv

RULES = ("fixed", "heuristic", "even")
MAX_SPLITS = 128
# A unit, one key tile, costs about as much as merging so many pieces; see plan_rule.active_workers.
PIECES_A_UNIT = 16


@dataclass(frozen=True)
class Cut:
    """One batch, cut.

    Parameters
    ----------
    rule : str
        One of ``RULES``.
    splits : int or None
        Splits of each item; None for even stretches, which have no such number.
    records : tuple of tuples of 8 ints
        Of each program, as the plan kernel writes them; zeros for one without work.
    shared : tuple of (int, int), or None
        Of each program, the first of those that share its item and how many they are; None where
        the kernel computes it, for even stretches.
    cu_work : tuple of int
        Units before each request.
    work : tuple of float
        Of each program in units, with what it starts and merges.
    """

    rule: str
    splits: int | None
    records: tuple[tuple[int, ...], ...]
    shared: tuple[tuple[int, int], ...] | None
    cu_work: tuple[int, ...]
    work: tuple[float, ...]


@dataclass(frozen=True)
class Item:
    """One (request, KV head, query tile): its request, first unit and units."""

    request: int
    begin: int
    length: int


def items_of(query_lens: Sequence[int], cu_work: Sequence[int], config: Config) -> list[Item]:
    """Items of a decode batch, in the order of the line of units."""
    items = []
    for r, query_len in enumerate(query_lens):
        count = plan_rule.decode_items(query_len, config)
        length = (cu_work[r + 1] - cu_work[r]) // count
        items += [Item(r, cu_work[r] + i * length, length) for i in range(count)]
    return items


def heuristic_splits(items: int, places: int, longest: int, most: int = MAX_SPLITS) -> int:
    """How many splits flash-decoding gives every item.

    From the efficiency of waves (``num_splits_heuristic`` of FlashAttention 2.2 and later): with
    ``s`` splits there are ``items * s / places`` waves, of which the last may be short.  1 where
    the items alone fill 80 % of the places; otherwise the fewest splits that come within 85 % of
    the best efficiency, among those that change how many key tiles a split has.

    Parameters
    ----------
    items : int
        Programs without splits.
    places : int
        Programs that run at the same time.
    longest : int
        Key tiles of the longest item.
    most : int
        Bound on the splits.
    """
    if 10 * items >= 8 * places:
        return 1
    efficiency: dict[int, float] = {}
    for splits in range(1, min(most, places, longest) + 1):
        if splits == 1 or cdiv(longest, splits) != cdiv(longest, splits - 1):
            waves = items * splits / places
            efficiency[splits] = waves / -(-items * splits // places)
    best = max(efficiency.values(), default=1.0)
    return next((s for s, e in efficiency.items() if e >= 0.85 * best), 1)


def cut_evenly(query_lens: Sequence[int], seq_lens: Sequence[int], config: Config) -> Cut:
    """The stretches that the plan kernel makes."""
    plan = plan_rule.plan_batch(query_lens, seq_lens, config)
    _, active, total = plan.header
    work = [float(r[1] - r[0]) for r in plan.worker_record]
    for item in items_of(query_lens, plan.cu_work, config):
        last = plan_rule.owner(item.begin + item.length - 1, total, active)
        pieces = last - plan_rule.owner(item.begin, total, active) + 1
        if pieces > 1:
            work[last] += pieces / PIECES_A_UNIT
    return Cut("even", None, plan.worker_record, None, plan.cu_work, tuple(work))


def cut_by_splits(
    query_lens: Sequence[int], seq_lens: Sequence[int], config: Config, splits: int, rule: str
) -> Cut:
    """As many programs an item, each with an equal share of its key tiles.

    As flash-decoding launches them: programs of the same item follow each other, and short items
    leave some without work.
    """
    plan = plan_rule.plan_batch(query_lens, seq_lens, config)
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    records: list[tuple[int, ...]] = []
    shared: list[tuple[int, int]] = []
    work: list[float] = []
    for item in items_of(query_lens, plan.cu_work, config):
        r = item.request
        tiles = item.length - config.item_overhead
        share = cdiv(tiles, splits)
        pieces = cdiv(tiles, share)
        first = len(records)
        span = (plan.cu_work[r], plan.cu_work[r + 1])
        for i in range(splits):
            shared.append((first, pieces))
            if i >= pieces:
                records.append((0,) * 8)
                work.append(0.0)
                continue
            begin, end = (_unit(min(x * share, tiles), tiles, item.length) for x in (i, i + 1))
            stretch = (item.begin + begin, item.begin + end)
            records.append((*stretch, r, *span, starts[r], query_lens[r], seq_lens[r]))
            walked = min((i + 1) * share, tiles) - i * share
            merging = pieces / PIECES_A_UNIT if pieces > 1 and i == pieces - 1 else 0.0
            work.append(walked + config.item_overhead + merging)
    return Cut(rule, splits, tuple(records), tuple(shared), plan.cu_work, tuple(work))


def _unit(tile: int, tiles: int, length: int) -> int:
    """The unit of an item from which on the kernel counts ``tile`` key tiles as walked."""
    return cdiv(tile * length, tiles)


def cut(
    rule: str, query_lens: Sequence[int], seq_lens: Sequence[int], config: Config, fixed: int
) -> Cut:
    """Cut a batch of decodes by one of ``RULES``.

    Parameters
    ----------
    rule : str
    query_lens, seq_lens : sequence of int
        1 to 16 new tokens of each request, and its keys.
    config : policy.Config
        Of the plain kernel, without batch-invariant mode.
    fixed : int
        Splits of the rule ``fixed``.

    Raises
    ------
    ValueError
        For requests that are no decodes, or a rule that is none.
    """
    for query_len in query_lens:
        if not 1 <= query_len <= policy.DECODE_MAX_QUERY_LEN:
            raise ValueError(
                f"{query_len} query tokens; accepted: 1 to {policy.DECODE_MAX_QUERY_LEN}"
            )
    if rule == "even":
        return cut_evenly(query_lens, seq_lens, config)
    if rule == "fixed":
        return cut_by_splits(query_lens, seq_lens, config, fixed, rule)
    if rule != "heuristic":
        raise ValueError(f"rule {rule!r}; accepted: {', '.join(RULES)}")
    plan = plan_rule.plan_batch(query_lens, seq_lens, config)
    items = items_of(query_lens, plan.cu_work, config)
    longest = max(item.length for item in items) - config.item_overhead
    splits = heuristic_splits(len(items), config.num_workers, longest)
    return cut_by_splits(query_lens, seq_lens, config, splits, rule)


def modelled_idle(cut: Cut, places: int) -> float:
    """Share of the places' time in which no program runs, by counted work.

    Programs start in their order, each on the place that is free first, and take as long as their
    units; memory is shared evenly.

    Parameters
    ----------
    cut : Cut
    places : int
        Programs that run at the same time.

    Returns
    -------
    float
        0 to 1, from the first start to the last end.
    """
    free = [0.0] * places
    for work in cut.work:
        if work:
            heapq.heapreplace(free, free[0] + work)
    end = max(free)
    return 1.0 - sum(cut.work) / (places * end) if end else 0.0


def measured_idle(clocks: Sequence[Sequence[int]], num_sms: int) -> float:
    """Share of the SMs' time in which they run no program, by the programs' own clocks.

    Parameters
    ----------
    clocks : sequence of (int, int, int)
        Start and end in nanoseconds, and SM, of each program; zeros for one without work.
    num_sms : int

    Returns
    -------
    float
        0 to 1, from the first start to the last end.
    """
    ran = sorted((sm, start, end) for start, end, sm in clocks if end)
    if not ran:
        return 0.0
    window = max(end for _, _, end in ran) - min(start for _, start, _ in ran)
    busy, at_sm, until = 0, -1, 0
    for sm, start, end in ran:
        if sm != at_sm:
            at_sm, until = sm, start
        busy += max(end - max(start, until), 0)
        until = max(until, end)
    return 1.0 - busy / (num_sms * window) if window else 0.0
