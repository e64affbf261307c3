"""The device memory that a ``PagedAttention`` keeps from batch to batch."""

from __future__ import annotations

import torch

from tilewise import plan_rule, policy
from tilewise.kernels.plan import HEADER_SIZE, RECORD_SIZE
from tilewise.masks import MaskBuffers
from tilewise.pieces import scratch_slots
from tilewise.prefixes import SharedPrefixes


class Buffers:
    """Work lists, which plans write, and scratch of the decode; a graph holds their addresses.

    ``tilewise.kernels.plan`` says what the lists hold, ``tilewise.workspace`` computes their size.

    Parameters
    ----------
    config : policy.Config
    max_num_reqs, max_num_tokens : int
        Bounds on every later batch.
    device : torch.device
    """

    def __init__(
        self, config: policy.Config, max_num_reqs: int, max_num_tokens: int, device: torch.device
    ) -> None:
        workers, decode = config.num_workers, config.decode
        tiles = plan_rule.max_prefill_tiles(
            max_num_tokens, max_num_reqs, config.prefill_block_q, spans=True
        )

        def ints(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int32, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        self.header = ints(HEADER_SIZE)
        self.tile_req, self.tile_token = ints(max(tiles, 1)), ints(max(tiles, 1))
        self.cu_tiles, self.cu_work = ints(max_num_reqs + 1), ints(max_num_reqs + 1)
        self.arrivals, self.own_lengths = ints(workers), ints(max_num_reqs)
        self.worker_record = ints(workers * RECORD_SIZE).view(workers, RECORD_SIZE)
        rows = (scratch_slots(config.pieces, workers), decode.block_m)
        self.partial_acc = floats(*rows, decode.block_d)
        self.partial_m, self.partial_l = floats(*rows), floats(*rows)
        self.shared: SharedPrefixes | None = None
        if config.prefixes is not None:
            self.shared = SharedPrefixes(config, max_num_reqs, device)
        self.masks = MaskBuffers(max_num_reqs, max_num_tokens, device)

    @property
    def nbytes(self) -> int:
        """Device memory of the buffers there are; those of masks come with the first."""
        buffers = (v for v in vars(self).values() if isinstance(v, torch.Tensor))
        held = sum(b.numel() * b.element_size() for b in buffers) + self.masks.nbytes
        return held + (self.shared.workspace_bytes if self.shared is not None else 0)
