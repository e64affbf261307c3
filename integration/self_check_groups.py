"""Batches of the self-check whose requests read their first pages once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from tilewise.prefix_rule import plan_shared

if TYPE_CHECKING:
    from tilewise.attention import PagedAttention
    from tilewise.integration.self_check_inputs import Sequence


def fewest_that_share(attn: PagedAttention) -> int:
    """Requests of the smallest batch of decodes that may share pages; 1 if bounds allow none."""
    most = min(attn.max_num_reqs, attn.max_num_tokens)
    return next((n for n in range(2, most + 1) if attn.shares(n)), 1)


def group_of(sequence: Sequence, attn: PagedAttention) -> tuple[Sequence, torch.Tensor] | None:
    """A batch of single queries that begin with the same pages, enough of both to be a group.

    With two members a long prefix pays, with more of them a shorter one.  The borrowed pages that
    are full come again and again in its table, so that a few of them make a long sequence; its tail
    is the last one.

    Returns
    -------
    grouped : Sequence
        With that table and one batch.
    places : Tensor[keys], int64
        Where in the sequence each of its keys is.
    """
    page_size = attn.geometry.page_size
    pages = sequence.block_table[0].tolist()
    full, tail = pages[:-1], len(sequence.key) - (len(pages) - 1) * page_size
    if not full:
        return None
    prefixes = attn.config.prefixes
    assert prefixes is not None
    fewest, most = fewest_that_share(attn), min(attn.max_num_reqs, attn.max_num_tokens)
    if fewest < 2:
        return None
    for rounds, doublings in product(range(1, 4), range(4)):
        members = min(fewest << doublings, most)
        shared = rounds * max(prefixes.min_pages, len(full))
        order = [i % len(full) for i in range(shared)] + [len(full)]
        row = [pages[i] for i in order]
        lengths = [shared * page_size + tail - i % 3 for i in range(members)]
        if plan_shared([1] * members, lengths, [row] * members, attn.config).groups:
            table = torch.tensor([row], dtype=torch.int32, device=attn.device)
            start = torch.tensor(order, device=attn.device) * page_size
            within = torch.arange(page_size, device=attn.device)
            batch = [(1, length) for length in lengths]
            grouped = replace(sequence, block_table=table, batches=[batch])
            return grouped, (start[:, None] + within).flatten()
    return None
