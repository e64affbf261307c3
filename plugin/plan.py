"""What ``PagedAttention.plan`` returns and ``run`` takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.kernels.masks import KeyMask


@dataclass(frozen=True)
class Plan:
    """One batch, planned.  Valid until the next ``plan()`` of the object that made it.

    ``query_start_loc``, ``seq_lens``, ``block_table``, ``spans`` and ``causal`` (where it is a
    tensor) are the caller's own: whoever replays a captured graph refreshes them in place and plans
    again.
    Without a ``block_table`` keys are rows, and ``seq_lens`` is the object's.  ``why_plain`` says
    why the Gluon kernels leave the batch to their plain twins, if they do.
    """

    owner: int
    generation: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    num_reqs: int
    num_tokens: int
    max_prefill_tiles: int
    has_decode: bool
    causal: bool | torch.Tensor = True
    decodes_few: bool = False
    side_by_side: bool = False
    spans: torch.Tensor | None = None
    kv_starts: torch.Tensor | None = None
    num_keys: int = 0
    mask: KeyMask | None = None
    why_plain: str | None = None
    shared: bool = False
