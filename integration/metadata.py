"""What a step's metadata builder hands to the layers of one KV-cache group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.attention import PagedAttention, Plan
from tilewise.integration.context_parallel import ShardedStep
from tilewise.integration.step_metrics import StepMetrics


@dataclass
class TilewiseMetadata:
    """One step's batch as the layers of one KV-cache group see it.

    A plain dataclass on purpose: vLLM subclasses it and copies its fields.
    """

    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    attn: PagedAttention
    plan: Plan
    causal: bool | torch.Tensor = True
    # Bidirectional spans, where a query of the batch is in one; under vLLM's name, since models
    # take them off for some of their layers.
    mm_prefix_range_tensor: torch.Tensor | None = None
    steps: StepMetrics | None = None
    # Of encoders, whose layers may have other windows than the first: theirs.
    others: dict[int | None, tuple[PagedAttention, Plan]] | None = None
    # Under decode context parallelism; `attn` and `plan` are then those of its first part.
    sharded: ShardedStep | None = None

    def planned(self, window: int | None) -> tuple[PagedAttention, Plan]:
        """Return what a layer of that window runs on; the first layer's where there is no other."""
        first = (self.attn, self.plan)
        return first if self.others is None else self.others.get(window, first)
