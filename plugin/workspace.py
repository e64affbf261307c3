"""Device memory of ``PagedAttention``'s buffers, from a configuration alone."""

from __future__ import annotations

from tilewise import plan_rule, policy
from tilewise.kernels.plan import HEADER_SIZE, RECORD_SIZE
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
    return 4 * (lists + workers * (per_worker + partials))
