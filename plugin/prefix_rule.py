"""The rule by which decode requests share the pages that their block tables begin with.

Python twin of ``tilewise.kernels.prefix_find`` and of the plan kernel where pages are shared; and
the policy of it: which layers may share, with which tiles, and which groups are worth it.
No torch, no GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from tilewise import policy
from tilewise.errors import UnsupportedConfig
from tilewise.plan_rule import active_workers, decode_items, decode_units, first_unit
from tilewise.policy import Config, cdiv
from tilewise.prefix_tiles import PrefixTiles

# Rows of a shared tile: the fewest that a warpgroup multiplies at once on Hopper; where products
# are of single warps, rows that leave registers for what reads a tile; and where arithmetic makes
# numbers of an fp8 cache's bytes, so that fewer are left.
SHARED_ROWS, FEWER_ROWS, FEWEST_ROWS = 64, 32, 16

REGISTERS = 65536  # of an SM
RESERVED_BYTES = 1024  # of shared memory, for each program
BARRIER_BYTES = 256

# Shorter prefixes are not looked for: with the largest groups four key tiles of 64 pay (is_worth).
MIN_SHARED_KEYS = 256


def why_not_share(config: Config, device: policy.Device) -> str | None:
    """Why requests of a layer do not share pages, or None where they may.

    Parameters
    ----------
    config : policy.Config
        With the layer's window, and pieces in batch-invariant mode.
    device : policy.Device

    Returns
    -------
    str or None
        What the layer or the device has, and what is accepted.
    """
    geometry = config.geometry
    if config.window:
        # Members' windows begin at different keys, and mostly after what they share.
        return f"window {config.window} (accepted: none)"
    if config.pieces is not None:
        # Whether a request is cut at its prefix depends on the others, and so would its last bits.
        return "batch-invariant mode (accepted: off)"
    if geometry.head_dim > policy.HEAD_DIM_MAX:
        return f"head_dim {geometry.head_dim} (accepted: to {policy.HEAD_DIM_MAX})"
    rows = _rows(config, device)
    if geometry.group_size >= rows:
        # One member fills a tile, so nothing would be read less often.
        return f"group size {geometry.group_size} (accepted: to {rows - 1})"
    if _programs_and_stages(config, device)[0] == 0:
        needed = _shared_bytes(config, device, 1)
        return f"{device.shared_memory} bytes of shared memory (needed: {needed})"
    return None


def share_prefixes(config: Config, device: policy.Device, decode_query_len: int = 1) -> Config:
    """The same configuration with tiles for what requests share.

    Parameters
    ----------
    config : policy.Config
    device : policy.Device
    decode_query_len : int
        Query tokens of a typical decode request; longer ones join no group.

    Raises
    ------
    UnsupportedConfig
        Where ``why_not_share`` has a reason.
    """
    why = why_not_share(config, device)
    if why is not None:
        raise UnsupportedConfig(f"shared_prefixes with {why}")
    programs, stages = _programs_and_stages(config, device)
    registers = REGISTERS // (32 * config.decode.num_warps * programs) // 8 * 8
    prefixes = PrefixTiles(
        block_m=_rows(config, device),
        num_stages=stages,
        max_query_len=decode_query_len,
        min_pages=cdiv(MIN_SHARED_KEYS, config.geometry.page_size),
        max_registers=registers if registers < 256 else 0,
    )
    workers = min(config.num_workers, config.num_sms * programs)
    return replace(config, prefixes=prefixes, num_workers=workers)


def _rows(config: Config, device: policy.Device) -> int:
    """Rows of a shared tile."""
    geometry = config.geometry
    fp8 = geometry.kv_element_size == 1 and geometry.element_size == 2
    if fp8 and device.arch < 89 and geometry.block_d <= 64:
        return FEWEST_ROWS
    if device.arch < 90 or geometry.element_size != 2:
        return FEWER_ROWS
    if device.arch >= 100 and geometry.block_d > 128:
        return FEWER_ROWS  # with more, accumulators leave no registers
    if fp8 and geometry.block_d <= 64:
        # A warpgroup's product would take its values' even columns from where the keys lay, and
        # ptxas 12.8 forgets to compute that address (tilewise.bench.sass finds it).
        return FEWER_ROWS
    return SHARED_ROWS


def _shared_bytes(config: Config, device: policy.Device, stages: int) -> int:
    """Upper estimate of shared memory: weights stay in registers, barriers take a little."""
    tiles = replace(config.decode, block_m=_rows(config, device), num_stages=stages)
    weights = tiles.block_m * tiles.block_n * config.geometry.element_size
    return policy.shared_memory(tiles, config.geometry) - weights + BARRIER_BYTES


def _programs_and_stages(config: Config, device: policy.Device) -> tuple[int, int]:
    """Programs an SM and shared tiles in flight, as many as the plain decode has of both, or fewer.

    Programs first: whoever shares nothing is read by them too.  Zeros if not even one fits.
    """
    for programs in range(max(config.num_workers // config.num_sms, 1), 0, -1):
        # Every program takes a little more of an SM's memory than it may use.
        most = (device.shared_memory + RESERVED_BYTES) // programs - RESERVED_BYTES
        for stages in range(config.decode.num_stages, 0, -1):
            if _shared_bytes(config, device, stages) <= most:
                return programs, stages
    return 0, 0


def is_worth(tails: int, row_tiles: int, key_tiles: int, item_overhead: int) -> bool:
    """Whether a group saves more than it costs, in units of the decode's line, for one KV head.

    A key tile counts one unit whoever reads it. Alone, ``tails`` items read ``key_tiles`` more
    each; together ``row_tiles`` items do. These have to be started, and every tail's rows pass
    through memory and are merged once more, each at the price of an item.
    """
    return (tails - row_tiles) * key_tiles > item_overhead * (tails + row_tiles)


@dataclass(frozen=True)
class SharedPlan:
    """What the kernels write for one batch: see ``tilewise.kernels.prefix_find`` and ``plan``."""

    header: tuple[int, int]
    shared_header: tuple[int, int]
    cu_work: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]
    worker_record: tuple[tuple[int, ...], ...]


def prefix_pages(query_len: int, seq_len: int, width: int, config: Config) -> int:
    """Pages before a request's own query tokens; 0 for one that joins no group."""
    assert config.prefixes is not None
    if not 0 < query_len <= config.prefixes.max_query_len:
        return 0
    return min(max(seq_len - query_len, 0) // config.geometry.page_size, width)


def find_groups(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Sequence[Sequence[int]],
    config: Config,
) -> dict[int, tuple[list[int], int]]:
    """Members of each group and how many pages they share, by leader, worth it or not.

    At a depth of ``min_pages`` pages and at its doubles, requests with the same last page there are
    alike.  Everybody goes on while somebody is alike.  To split off part of a group at twice the
    depth never saves fewer pages than to leave it: ``k`` of ``m`` members in pairs or more save at
    least ``k`` times the lesser depth there, what is left behind saves ``m - k - 1`` times that.
    """
    assert config.prefixes is not None
    pages = [
        prefix_pages(q, s, len(row), config)
        for q, s, row in zip(query_lens, seq_lens, block_table, strict=True)
    ]
    chosen: dict[tuple[int, int], list[int]] = {}
    for r, own in enumerate(pages):
        depth, choice = config.prefixes.min_pages, None
        while depth <= own:
            page = block_table[r][depth - 1]
            alike = [
                o for o, most in enumerate(pages)
                if most >= depth and block_table[o][depth - 1] == page
            ]  # fmt: skip
            if len(alike) < 2:
                break
            choice, depth = (alike[0], depth), 2 * depth
        if choice is not None:
            chosen.setdefault(choice, []).append(r)
    found = {}
    for members in chosen.values():
        leader = members[0]
        shared = pages[leader]
        for r in members[1:]:
            both = min(pages[r], pages[leader])
            mine, theirs = block_table[r][:both], block_table[leader][:both]
            differing = (i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
            shared = min(shared, next(differing, both))
        found[leader] = (members, shared)
    return found


def plan_shared(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Sequence[Sequence[int]],
    config: Config,
) -> SharedPlan:
    """The rule by which a batch's lengths and pages become groups and stretches, on the host.

    Parameters
    ----------
    query_lens, seq_lens : sequence of int, one per request
        New tokens, and context plus new tokens.
    block_table : sequence of sequences of int, one per request
        Page ids, all rows of one length.
    config : policy.Config
        With ``prefixes``.
    """
    assert config.prefixes is not None
    geometry, overhead = config.geometry, config.item_overhead
    found = find_groups(query_lens, seq_lens, block_table, config)
    members = [(-1, 0, 0, 0)] * len(query_lens)
    groups: list[tuple[int, ...]] = []
    slots: list[int] = []
    units = items = 0
    for leader in sorted(found):
        joined, pages = found[leader]
        tokens = sum(query_lens[r] for r in joined)
        tails = sum(decode_items(query_lens[r], config) for r in joined) // geometry.num_kv_heads
        tiles = pages * geometry.page_size // config.decode.block_n
        row_tiles = cdiv(tokens * geometry.group_size, config.prefixes.block_m)
        if not is_worth(tails, row_tiles, tiles, overhead):
            continue
        base, begin = len(slots), units
        units += row_tiles * geometry.num_kv_heads * (tiles + overhead)
        items += row_tiles * geometry.num_kv_heads
        groups.append((begin, units, leader, tiles, base, tokens))
        for r in joined:
            members[r] = (len(slots), tiles, begin, base)
            slots += [r] * query_lens[r]
    work = []
    for r, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if not 0 < query_len <= policy.DECODE_MAX_QUERY_LEN:
            work.append(0)
            continue
        count = decode_items(query_len, config)
        work.append(decode_units(query_len, seq_len, config) - count * members[r][1])
        items += count
    cu_work = tuple(accumulate(work, initial=0))
    total = units + cu_work[-1]
    active = active_workers(total, items, config, config.num_workers)
    query_start = tuple(accumulate(query_lens, initial=0))
    records = []
    g = r = 0
    for worker in range(active):
        stretch = tuple(first_unit(w, total, active) for w in (worker, worker + 1))
        if stretch[0] < units:
            while groups[g][1] <= stretch[0]:
                g += 1
            records.append((*stretch, g, 0, 0, 0, 0, 0, -1, 0))
            continue
        while units + cu_work[r + 1] <= stretch[0]:
            r += 1
        span = (units + cu_work[r], units + cu_work[r + 1])
        lengths = (query_start[r], query_lens[r], seq_lens[r])
        records.append((*stretch, r, *span, *lengths, *members[r][:2]))
    return SharedPlan(
        header=(active, total),
        shared_header=(units, len(groups)),
        cu_work=cu_work,
        members=tuple(members),
        groups=tuple(groups),
        slots=tuple(slots),
        worker_record=tuple(records),
    )
