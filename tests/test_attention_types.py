"""Queries that see keys past their own: encoders, cross attention, and flags for each request.

Kinds of field failures: F (windows of layers that are not causal), J (encoders, cross attention).
"""

import dataclasses
import itertools

import pytest
import torch
from cases import Case, check, make_attention, make_batch, plan_batch, poison_scratch, run_and_check
from reference import paged_attention

from tilewise import policy
from tilewise.errors import PlanMismatch

# numpy's remarks on poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

BF16, FP16 = torch.bfloat16, torch.float16
# Whole sequences, short and long; a block of queries behind a context; a request of no tokens.
MIXED = ((40, 0), (1, 300), (5, 64), (0, 0), (150, 70), (9, 0))
# Of cross attention: more queries than keys, none, one, a page, and many keys for one query.
CROSS = ((40, -30), (20, -20), (5, -4), (3, 61), (1, 700), (70, 130), (4, -4))


# -- over the paged cache -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(MIXED),
        Case(MIXED, page_size=16, num_q_heads=8, num_kv_heads=1, dtype=BF16, layout="hnd"),
        Case(MIXED, head_dim=128, num_q_heads=6, pad_requests=2, dtype=FP16),
        Case(MIXED, head_dim=96, page_size=48, num_q_heads=9, num_kv_heads=3),
        Case(MIXED, softcap=5.0, sinks=1.0, layout="cross_layer"),
        Case(((128, 0), (16, 48), (64, 64)), head_dim=256, num_q_heads=2),
        Case(MIXED, dtype=BF16, kv_dtype=torch.float8_e4m3fn, kv_scales="head"),
    ],
    ids=str,
)
def test_every_query_sees_every_key(case, device):
    run_and_check(dataclasses.replace(case, causal=False), device)


@pytest.mark.parametrize(
    ("window", "use_tma"),
    [(1, False), (2, True), (33, True), (64, True), (65, False), (300, True), (2**30, True)],
)
def test_f_windows_reach_both_ways(window, use_tma, device):
    """Both sides of the loops without masks, and windows too narrow for them."""
    case = Case((*MIXED, (330, 20)), window=window, causal=False)
    config = make_attention(case, device).config
    tiles = {
        name: dataclasses.replace(getattr(config, name), use_tma=use_tma, block_n=32)
        for name in ("prefill", "decode")
    }
    run_and_check(case, device, config=dataclasses.replace(config, **tiles))


@pytest.mark.parametrize(
    "case",
    [
        Case(CROSS),
        Case(CROSS, page_size=16, dtype=BF16, num_q_heads=12, num_kv_heads=4, layout="hnd"),
        Case(CROSS, head_dim=128, num_q_heads=2, pad_requests=3),
        Case(CROSS, head_dim=96, softcap=3.0),
    ],
    ids=str,
)
def test_j_cross_attention(case, device):
    """Keys are another sequence's: queries may outnumber them, and their places mean nothing."""
    run_and_check(dataclasses.replace(case, causal=False), device)


@pytest.mark.parametrize(
    ("flags", "window"),
    [((1, 0, 1, 0, 0, 1), None), ((0, 1, 0, 1, 1, 0), 70), ((1,) * 6, None), ((0,) * 6, 33)],
)
def test_flags_say_it_for_each_request(flags, window, device):
    run_and_check(Case(MIXED, window=window, causal=flags), device)


def test_flags_may_lie_anywhere_and_be_any_number_but_0(device):
    batch = make_batch(Case(MIXED, causal=(1, 0, 1, 0, 0, 1)), device)
    buffer = torch.tensor([0, 7, 0, -3, 0, 0, 1, 0], dtype=torch.int32, device=device)
    attn = make_attention(batch.case, device)
    plan_batch(attn, batch, causal=buffer[1:7])
    check(batch, *attn.run(batch.q, batch.kv_cache, return_lse=True))


def test_flags_are_read_when_layers_run(device):
    """As a replayed graph does: the plan holds their tensor, not what it said."""
    batch = make_batch(Case(MIXED, causal=False), device)
    flags = torch.ones(6, dtype=torch.int32, device=device)
    attn = make_attention(batch.case, device)
    plan_batch(attn, batch, causal=flags)
    flags.zero_()
    check(batch, *attn.run(batch.q, batch.kv_cache, return_lse=True))


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_splits_of_short_queries(workers, device):
    case = Case(((16, 1000), (3, 130), (1, 20), (7, 0)), causal=False)
    config = dataclasses.replace(make_attention(case, device).config, num_workers=workers)
    run_and_check(case, device, config=config)


# -- over the batch's own rows --------------------------------------------------------------------

ROWS = (1, 40, 16, 0, 17, 150, 2, 64)


def make_rows(case: Case, device, pad: int = 3):
    """Queries, keys and values ``[tokens, H, D]`` of whole sequences, and their starts.

    Keys and values are slices of one wider tensor, as of a fused projection; all else is NaN.
    """
    gen = torch.Generator().manual_seed(0)
    lengths = [q for q, _ in case.requests]
    starts = [0, *itertools.accumulate(lengths)]
    heads, kv_heads, d = case.num_q_heads, case.num_kv_heads, case.head_dim
    width = (heads + 2 * kv_heads) * d
    memory = torch.full((starts[-1] + pad, width + 24), float("nan"), dtype=case.dtype)
    memory[: starts[-1], 8 : 8 + width] = torch.randn(starts[-1], width, generator=gen)
    memory = memory.to(device)
    q, k, v = memory[:, 8 : 8 + width].split([heads * d, kv_heads * d, kv_heads * d], -1)
    return (
        q.unflatten(-1, (heads, d)), k.unflatten(-1, (kv_heads, d)),
        v.unflatten(-1, (kv_heads, d)), starts,
    )  # fmt: skip


def rows_reference(case: Case, q, k, v, starts, dtype, **features):
    """The reference over pages of one token, which these rows are."""
    table = torch.zeros(len(case.requests), max(q for q, _ in case.requests), dtype=torch.int64)
    lengths = [q for q, _ in case.requests]
    for r, length in enumerate(lengths):
        table[r, :length] = torch.arange(starts[r], starts[r] + length)
    caches = (x[:, :, None] for x in (k, v))
    return paged_attention(
        q, *caches, starts, lengths, table.to(q.device), case.head_dim**-0.5, dtype=dtype,
        window=case.window, causal=case.causal, **features,
    )  # fmt: skip


def run_rows(case: Case, device, attn=None):
    """Run whole sequences over their own rows and compare; what is nobody's stays untouched."""
    q, k, v, starts = make_rows(case, device)
    features = {"softcap": case.softcap} if case.softcap else {}
    attn = attn or make_attention(case, device)
    flags = case.causal
    if not isinstance(flags, bool):
        flags = torch.tensor(flags, dtype=torch.int32, device=device)
    attn.plan(
        torch.tensor(starts, dtype=torch.int32, device=device), None, None,
        num_tokens=q.shape[0], max_query_len=max(n for n, _ in case.requests), causal=flags,
    )  # fmt: skip
    out = torch.full(q.shape, 7.0, dtype=q.dtype, device=device)
    out, lse = attn.run(q, (k, v), out=out, return_lse=True, **features)
    expected, expected_lse = rows_reference(case, q, k, v, starts, torch.float32, **features)
    same_dtype, _ = rows_reference(case, q, k, v, starts, case.dtype, **features)
    rows = slice(0, starts[-1])
    torch_error = (same_dtype[rows].float() - expected[rows]).abs().max().item()
    error = (out[rows].float() - expected[rows]).abs().max().item()
    assert error <= max(4 * torch_error, 64 * torch.finfo(case.dtype).eps), error
    atol = 1e-5 if case.dtype == torch.float32 else 1e-3
    torch.testing.assert_close(lse[rows], expected_lse[rows], rtol=1e-4, atol=atol)
    assert (out[starts[-1] :] == 7.0).all()
    assert not attn._buffers.arrivals.any()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 96, "dtype": BF16},
        {"head_dim": 128, "num_q_heads": 6, "page_size": 16},
        {"num_q_heads": 5, "num_kv_heads": 5, "dtype": FP16, "softcap": 4.0},
        {"num_q_heads": 16, "num_kv_heads": 1, "window": 1},
        {"window": 20},
        {"window": 129, "head_dim": 32},
        {"causal": True},
        {"causal": (1, 0, 0, 0, 1, 0, 1, 1), "window": 30},
        {"pad_tokens": 0},
    ],
    ids=str,
)
def test_j_keys_without_a_cache(changes, device):
    """Whole sequences of any length, GQA and MHA, read where a projection left them."""
    case = Case(tuple((n, 0) for n in ROWS), **({"causal": False} | changes))
    run_rows(case, device)


def test_the_page_size_of_an_object_means_nothing_to_rows(device):
    """vLLM gives encoder layers the page size of its caches, whatever that is."""
    for page_size in (16, 48, 528):
        run_rows(Case(((40, 0), (3, 0)), page_size=page_size, causal=False), device)


def test_one_object_serves_rows_and_pages_in_turn(device):
    case = Case(tuple((n, 0) for n in ROWS), causal=False)
    attn = make_attention(case, device)
    batch = make_batch(Case(((40, 9), (3, 100)), causal=False), device)
    for _ in range(2):
        run_rows(case, device, attn=attn)
        poison_scratch(attn)
        plan_batch(attn, batch)
        check(batch, *attn.run(batch.q, batch.kv_cache, return_lse=True))
        poison_scratch(attn)


# -- which kernel ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False, (1, 0)])
def test_the_gluon_prefill_takes_causal_batches_only(causal, device, monkeypatch):
    from tilewise import counters

    case = Case(
        ((200, 100), (90, 0)), num_q_heads=8, head_dim=128, page_size=128, dtype=BF16,
        causal=causal,
    )  # fmt: skip
    before = counters.snapshot()
    run_and_check(case, device)
    name = "launches{kernel=hopper_prefill}"
    ran = counters.snapshot().get(name, 0) - before.get(name, 0)
    fits = policy.why_not_hopper(make_attention(case, device).geometry, policy_device(device))
    assert ran == (1 if causal is True and fits is None else 0)


def policy_device(device):
    from tilewise.device import describe

    return describe(device)


# -- refusals -------------------------------------------------------------------------------------


def flags_of(num_reqs, device):
    return torch.ones(num_reqs, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("causal", "text"),
    [
        (lambda device: None, "causal=None; accepted: True, False"),
        (lambda device: torch.ones(2, device=device), r"causal is torch.float32 \(2,\)"),
        (lambda device: flags_of(3, device), r"\(3,\) on .*; accepted: .* \(2,\)"),
        (lambda device: flags_of(4, device)[::2], "accepted: True, False or contiguous"),
    ],
)
def test_flags_that_do_not_fit(causal, text, device):
    batch = make_batch(Case(((1, 2), (3, 4))), device)
    attn = make_attention(batch.case, device)
    with pytest.raises(PlanMismatch, match=text):
        attn.plan(
            batch.query_start_loc, batch.seq_lens, batch.block_table, num_tokens=4,
            max_query_len=3, causal=causal(device),
        )  # fmt: skip


def test_alibi_needs_a_causal_batch(device):
    """Which sign a distance past the query has is not ours to choose."""
    batch = make_batch(Case(((1, 2), (20, 4)), alibi="linear", causal=False), device)
    attn = make_attention(batch.case, device)
    plan_batch(attn, batch)
    with pytest.raises(PlanMismatch, match="alibi_slopes with a plan that is not causal"):
        attn.run(batch.q, batch.kv_cache, **batch.features)


def test_rows_that_do_not_fit(device):
    case = Case(((20, 0), (3, 0)), causal=False)
    q, k, v, starts = make_rows(case, device)
    attn = make_attention(case, device)
    starts = torch.tensor(starts, dtype=torch.int32, device=device)
    seq_lens = starts[1:] - starts[:-1]
    sizes = {"num_tokens": 23, "max_query_len": 20, "causal": False}
    table = torch.zeros(2, 1, dtype=torch.int32, device=device)
    with pytest.raises(PlanMismatch, match="seq_lens is None; accepted: only without"):
        attn.plan(starts, None, table, **sizes)
    with pytest.raises(PlanMismatch, match="seq_lens without a block_table"):
        attn.plan(starts, seq_lens, None, **sizes)
    with pytest.raises(PlanMismatch, match="of at most 4 requests"):
        attn.plan(torch.zeros(6, dtype=torch.int32, device=device), None, None, **sizes)
    odd_starts = ((starts[0], r"shape \(\)"), (starts.float(), "query_start_loc is torch.float32"))
    for odd, text in odd_starts:
        with pytest.raises(PlanMismatch, match=text):
            attn.plan(odd, None, None, **sizes)
    with pytest.raises(PlanMismatch, match=r"seq_lens has shape \(\)"):
        attn.plan(starts, seq_lens[0], table, **sizes)
    attn.plan(starts, None, None, **sizes)
    cache = torch.zeros(1, 2, 64, 128, device=device)
    for kv, text in (
        (cache, r"must be a pair \(k, v\)"),
        ((k[:20], v), "k has 20 rows; the plan covers 23"),
        ((k, v[:, :1]), r"v has shape \(26, 1, 64\)"),
        ((k.half(), v), "k is torch.float16"),
    ):
        with pytest.raises(PlanMismatch, match=text):
            attn.run(q, kv)
    with pytest.raises(PlanMismatch, match="scales"):
        attn.run(q, (k, v), k_scale=torch.ones(1, device=device))
