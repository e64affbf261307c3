"""The buffers by which decode requests share the pages that their block tables begin with."""

from typing import Any

import torch

from tilewise import counters
from tilewise.kernels.plan import SHARED_RECORD_SIZE
from tilewise.kernels.prefix_decode import scratch_rows
from tilewise.kernels.prefix_find import (
    FOUND_SIZE,
    GROUP_RECORD,
    MEMBER_SIZE,
    SHARED_HEADER,
    find_prefixes,
)
from tilewise.policy import Config


class SharedPrefixes:
    """Persistent buffers of a ``PagedAttention`` whose requests may share pages.

    Parameters
    ----------
    config : policy.Config
        With ``prefixes``.
    max_num_reqs : int
        Bound on every later batch.
    device : torch.device
    """

    def __init__(self, config: Config, max_num_reqs: int, device: torch.device) -> None:
        assert config.prefixes is not None
        self.config, self._tiles = config, config.prefixes
        workers = config.num_workers
        slots = max_num_reqs * self._tiles.max_query_len
        packed_rows = slots * config.geometry.num_q_heads
        rows = scratch_rows(workers, config.decode.block_m, self._tiles.block_m, packed_rows)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        self.keys, self.common = ints(max_num_reqs), ints(max_num_reqs)
        self.found = ints(max_num_reqs, FOUND_SIZE)
        self.members = ints(max_num_reqs, MEMBER_SIZE)
        self.groups = ints(max_num_reqs, GROUP_RECORD)
        self.slots, self.shared_header = ints(slots), ints(SHARED_HEADER)
        self.worker_record = ints(workers, SHARED_RECORD_SIZE)
        self.row_arrivals = ints(packed_rows)
        self.partial_acc = floats(rows, config.decode.block_d)
        self.partial_m, self.partial_l = floats(rows), floats(rows)

    @property
    def workspace_bytes(self) -> int:
        """Device memory held by the buffers."""
        buffers = (v for v in vars(self).values() if isinstance(v, torch.Tensor))
        return sum(b.numel() * b.element_size() for b in buffers)

    @property
    def tiles(self) -> dict[str, int]:
        """Of the decode launch: rows of a shared tile, tiles in flight, registers."""
        return {
            "shared_block_m": self._tiles.block_m, "shared_stages": self._tiles.num_stages,
            "max_registers": self._tiles.max_registers,
        }  # fmt: skip

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Of the decode launch, in its order: records, groups and scratch."""
        return (
            self.worker_record, self.shared_header, self.members, self.groups, self.slots,
            self.partial_acc, self.partial_m, self.partial_l,
        )  # fmt: skip

    def find(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> dict[str, Any]:
        """Find a batch's groups on the device; returns what the plan needs to lay them out.

        Parameters
        ----------
        query_start_loc : Tensor[num_reqs + 1], int32
        seq_lens : Tensor[num_reqs], int32
        block_table : Tensor[num_reqs, pages], int32
        """
        cfg, geometry = self.config, self.config.geometry
        find_prefixes(
            self.keys, self.common, self.found, self.row_arrivals,
            query_start_loc, seq_lens, block_table,
            num_q_heads=geometry.num_q_heads, group_size=geometry.group_size,
            page_size=geometry.page_size, decode_block_m=cfg.decode.block_m,
            max_query_len=self._tiles.max_query_len, min_pages=self._tiles.min_pages,
        )  # fmt: skip
        counters.add("launches", kernel="prefix_keys")
        counters.add("launches", kernel="prefix_groups")
        return {
            "shared": (
                self.found, self.common, self.members, self.groups, self.slots, self.shared_header,
            ),
            "shared_block_m": self._tiles.block_m,
            "shared_page_size": geometry.page_size,
            "shared_max_query_len": self._tiles.max_query_len,
        }  # fmt: skip
