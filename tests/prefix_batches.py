"""Batches of requests that share pages, for the interpreter's and the GPU's tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cases import NOWHERE, Batch, Case, check, make_attention, make_batch, plan_batch

from tilewise import prefix_rule
from tilewise.attention import PagedAttention

# Members of a group, in the batch, and how many pages they begin with.
Groups = Sequence[tuple[Sequence[int], int]]


def make_shared(case: Case, groups: Groups, device: str, seed: int = 0) -> Batch:
    """A batch in which the members of each group begin with the pages of its first.

    What were the others' own pages becomes NaN.  Groups of a tree are given from the root.
    """
    batch = make_batch(case, device, seed)
    for (first, *others), pages in groups:
        for member in others:
            # Rows past a request's last page name no page.
            named = batch.block_table[member, :pages].tolist()
            own = {page for page in named if 0 <= page < len(batch.kv_cache)}
            kept = set(batch.block_table[first, :pages].tolist())
            batch.kv_cache[sorted(own - kept)] = float("nan")
            batch.block_table[member, :pages] = batch.block_table[first, :pages]
    return batch


def poison_shared(attn: PagedAttention) -> None:
    """NaN, and page ids of nowhere, in all that a launch may only read after writing it."""
    shared = attn._buffers.shared
    for buffer in (shared.partial_acc, shared.partial_m, shared.partial_l):
        buffer.fill_(float("nan"))
    written = (
        shared.keys, shared.common, shared.found, shared.members, shared.groups, shared.slots,
        shared.shared_header, shared.worker_record,
    )  # fmt: skip
    for buffer in written:
        buffer.fill_(NOWHERE)


def twin(attn: PagedAttention, batch: Batch) -> prefix_rule.SharedPlan:
    """The plan by the rule in Python."""
    lens = [b - a for a, b in zip(batch.qsl, batch.qsl[1:], strict=False)]
    return prefix_rule.plan_shared(lens, batch.lens, batch.block_table.tolist(), attn.config)


def planned(attn: PagedAttention, num_reqs: int) -> prefix_rule.SharedPlan:
    """The plan that the device wrote."""
    shared = attn._buffers.shared
    active, total = attn._buffers.header[1].item(), attn._buffers.header[2].item()
    units, groups = shared.shared_header.tolist()
    rows = shared.groups[:groups].tolist()
    slots = rows[-1][4] + rows[-1][5] if rows else 0
    assert not shared.worker_record[active:, :2].any(), "idle workers must have no stretch"

    def tuples(x: torch.Tensor) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, x.tolist()))

    return prefix_rule.SharedPlan(
        header=(active, total),
        shared_header=(units, groups),
        cu_work=tuple(attn._buffers.cu_work[: num_reqs + 1].tolist()),
        members=tuple(
            row if row[0] >= 0 else (-1, 0, 0, 0) for row in tuples(shared.members[:num_reqs])
        ),
        groups=tuple(map(tuple, rows)),
        slots=tuple(shared.slots[:slots].tolist()),
        worker_record=tuples(shared.worker_record[:active, :10]),
    )


def run_shared(
    case: Case, groups: Groups, device: str, expected: int | None = None, seed: int = 0, **overrides
) -> None:
    """Plan, run and compare one case, with and without sharing.

    ``expected`` groups must have been found, by default all of ``groups``.
    """
    batch = make_shared(case, groups, device, seed)
    attn = make_attention(case, device, shared_prefixes="always", **overrides)
    poison_shared(attn)
    plan = plan_batch(attn, batch)
    assert plan.shared
    assert planned(attn, len(batch.lens)) == twin(attn, batch)
    assert attn._buffers.shared.shared_header[1].item() == (
        len(groups) if expected is None else expected
    )
    out = torch.full_like(batch.q, 7.0)
    out, lse = attn.run(batch.q, batch.kv_cache, out=out, return_lse=True, **batch.features)
    check(batch, out, lse)
    assert (out[batch.num_tokens :] == 7.0).all(), "rows of no request were written"
    assert not attn._buffers.arrivals.any(), "arrival counters must be zero between launches"
    assert not attn._buffers.shared.row_arrivals.any(), (
        "counters of rows must be zero between launches"
    )
    alone = make_attention(case, device)
    plan_batch(alone, batch)
    out_alone, lse_alone = alone.run(batch.q, batch.kv_cache, return_lse=True, **batch.features)
    n = batch.num_tokens
    # Both are within the tolerance of `check`; a few roundings apart from each other.
    eps = torch.finfo(case.dtype).eps
    torch.testing.assert_close(out[:n].float(), out_alone[:n].float(), rtol=8 * eps, atol=16 * eps)
    torch.testing.assert_close(lse[:n], lse_alone[:n], rtol=1e-4, atol=1e-3)
