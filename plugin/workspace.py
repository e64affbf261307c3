"""Device memory of ``PagedAttention``'s buffers, from a configuration alone."""

from __future__ import annotations

from tilewise import plan_rule, policy
from tilewise.kernels.plan import HEADER_SIZE, RECORD_SIZE, SHARED_RECORD_SIZE
from tilewise.kernels.prefix_decode import scratch_rows
from tilewise.kernels.prefix_find import FOUND_SIZE, GROUP_RECORD, MEMBER_SIZE, SHARED_HEADER
from tilewise.pieces import scratch_slots


def workspace_bytes(config: policy.Config, max_num_reqs: int, max_num_tokens: int) -> int:
    """Return what ``PagedAttention.workspace_bytes`` would be, without allocating it.

    Parameters
    ----------
    config : policy.Config
        The policy's choice for the layer and the GPU.
    max_num_reqs, max_num_tokens : int
        The bounds that the object would be built with.
    """
    tiles = plan_rule.max_prefill_tiles(max_num_tokens, max_num_reqs, config.prefill_block_q, True)
    workers, decode = config.num_workers, config.decode
    lists = HEADER_SIZE + 2 * max(tiles, 1) + 2 * (max_num_reqs + 1) + max_num_reqs
    per_worker = 1 + RECORD_SIZE  # counter of arrivals, record
    # An accumulator, a maximum and a sum for each row of a slot.
    partials = scratch_slots(config.pieces, 1) * decode.block_m * (decode.block_d + 2)
    return 4 * (lists + workers * (per_worker + partials) + _shared_elements(config, max_num_reqs))


def _shared_elements(config: policy.Config, max_num_reqs: int) -> int:
    """Elements of four bytes by which decodes share pages (``tilewise.prefixes``)."""
    tiles, decode = config.prefixes, config.decode
    if tiles is None:
        return 0
    slots = max_num_reqs * tiles.max_query_len
    packed_rows = slots * config.geometry.num_q_heads
    rows = scratch_rows(config.num_workers, decode.block_m, tiles.block_m, packed_rows)
    of_request = 2 + FOUND_SIZE + MEMBER_SIZE + GROUP_RECORD
    lists = max_num_reqs * of_request + slots + SHARED_HEADER + packed_rows
    return lists + config.num_workers * SHARED_RECORD_SIZE + rows * (decode.block_d + 2)
