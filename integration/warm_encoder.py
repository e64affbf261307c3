"""Launches every kernel of a layer whose keys are its own rows: encoders, which have no cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise.checks import FP8_OUT
from tilewise.integration.metadata import TilewiseMetadata
from tilewise.integration.self_check_inputs import QUERY_LENS, draw_rows
from tilewise.policy import DECODE_MAX_QUERY_LEN

if TYPE_CHECKING:
    from typing import Any

    from tilewise.attention import PagedAttention
    from tilewise.integration.impl import TilewiseImpl


def row_batches(attn: PagedAttention) -> list[list[int]]:
    """Query lengths of batches that launch everything of a layer whose keys are its own rows."""
    lengths = [min(n, attn.max_num_tokens) for n in QUERY_LENS]
    if len(lengths) <= attn.max_num_reqs and sum(lengths) <= attn.max_num_tokens:
        return [lengths]
    return [[n] for n in lengths]


def attend_to_rows(
    impl: TilewiseImpl,
    layer: Any,
    attn: PagedAttention,
    lengths: list[int],
    row_pads: tuple[int, int, int],
    output_scale: torch.Tensor | None = None,
) -> None:
    """Plan and run one batch of a layer without a cache; its result is nobody's.

    ``row_pads`` are elements between the rows of queries, of keys and of values.
    """
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    query_start_loc = torch.tensor(starts, dtype=torch.int32, device=attn.device)
    heads = (impl.num_heads, impl.num_kv_heads, impl.num_kv_heads)
    query, key, value = (
        draw_rows(attn, starts[-1], h, impl.head_size, pad, seed=4)
        for h, pad in zip(heads, row_pads, strict=True)
    )
    plan = attn.plan(
        query_start_loc, None, None, num_tokens=starts[-1], max_query_len=max(lengths),
        has_decode=min(lengths) <= DECODE_MAX_QUERY_LEN, causal=False,
    )  # fmt: skip
    metadata = TilewiseMetadata(
        num_actual_tokens=starts[-1],
        num_reqs=len(lengths),
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        query_start_loc=query_start_loc,
        seq_lens=plan.seq_lens,
        block_table=query_start_loc,  # nobody reads it
        slot_mapping=query_start_loc,
        attn=attn,
        plan=plan,
        causal=False,
    )
    output = torch.empty(query.shape, dtype=attn.dtype, device=attn.device)
    if output_scale is not None:
        output = output.to(FP8_OUT)
    impl.forward(layer, query, key, value, query, metadata, output, output_scale)
