"""Bidirectional spans inside causal sequences, as of images among text (Gemma 3 and 4, PaliGemma).

Kinds of field failures: B (garbage nobody sees), F (windows), G (the rest).
"""

import dataclasses
import itertools

import pytest
import torch
from cases import (
    NOWHERE,
    Case,
    check,
    make_attention,
    make_batch,
    plan_batch,
    run_and_check,
    spans_tensor,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import counters, plan_rule, policy
from tilewise.errors import PlanMismatch

# numpy's remarks on poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

BF16, FP16 = torch.bfloat16, torch.float16
# Whole prompts, one behind a context, decodes, short chunks, and a request of no tokens.
REQUESTS = ((100, 0), (40, 130), (1, 300), (7, 64), (0, 0), (3, 200), (16, 0))
SPANS = (
    ((3, 40), (41, 99)),  # side by side, to the last token
    ((100, 120), (128, 150), (160, 400)),  # behind, astride, and past the keys that are there
    ((10, 200),),  # of a prompt whose tokens follow
    ((60, 70),),  # a short chunk inside
    (),
    ((201, 201), (5, 3)),  # neither is a span
    ((0, 15),),
)


@pytest.mark.parametrize(
    "case",
    [
        Case(REQUESTS, spans=SPANS),
        Case(REQUESTS, spans=SPANS, page_size=16, num_q_heads=8, num_kv_heads=1, layout="hnd"),
        Case(REQUESTS, spans=SPANS, head_dim=128, num_q_heads=6, pad_requests=2, dtype=FP16),
        Case(REQUESTS, spans=SPANS, head_dim=96, page_size=48, num_q_heads=9, num_kv_heads=3),
        Case(REQUESTS, spans=SPANS, softcap=5.0, sinks=1.0, layout="cross_layer"),
        Case(REQUESTS, spans=SPANS, head_dim=256, num_q_heads=2, dtype=BF16),
        Case(REQUESTS, spans=SPANS, dtype=BF16, kv_dtype=torch.float8_e4m3fn, kv_scales="head"),
    ],
    ids=str,
)
def test_queries_see_their_span(case, device):
    run_and_check(case, device)


@pytest.mark.parametrize("spans_in_window", [False, True])
@pytest.mark.parametrize(
    ("window", "use_tma", "block_n"),
    [
        (1, False, 32), (9, True, 64), (33, True, 32), (64, False, 64), (129, True, 32),
        (2**30, True, 64),
    ],
)  # fmt: skip
def test_f_spans_meet_windows(window, use_tma, block_n, spans_in_window, device):
    """Keys left of the window are seen inside the own span only, or not at all."""
    case = Case(REQUESTS, spans=SPANS, window=window, spans_in_window=spans_in_window)
    config = make_attention(case, device).config
    tiles = dataclasses.replace(config.prefill, use_tma=use_tma, block_n=block_n)
    run_and_check(case, device, config=dataclasses.replace(config, prefill=tiles))


@st.composite
def spanned_requests(draw):
    """Requests and spans that cut their sequences anywhere, and reach past them."""
    requests, spans = [], []
    for _ in range(draw(st.integers(1, 4))):
        query_len, context = draw(st.integers(0, 70)), draw(st.integers(0, 150))
        requests.append((query_len, context if query_len else 0))
        cuts = sorted(draw(st.lists(st.integers(0, 240), max_size=6, unique=True)))
        spans.append(tuple(zip(cuts[::2], cuts[1::2], strict=False)))
    return tuple(requests), tuple(spans)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    batch=spanned_requests(),
    window=st.sampled_from([None, 1, 20, 100]),
    inside=st.booleans(),
    page_size=st.sampled_from([16, 48, 64]),
)
def test_any_spans_match_reference(batch, window, inside, page_size, device):
    requests, spans = batch
    if not any(q for q, _ in requests):
        requests, spans = (*requests, (1, 0)), (*spans, ())
    case = Case(
        requests, 4, 2, 16, page_size=page_size, window=window, spans=spans, spans_in_window=inside
    )
    run_and_check(case, device)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("last", [2**31 - 2, 2**31 - 1])
def test_a_span_may_end_at_any_position(last, window, device):
    """As of a prompt that comes in chunks and whose span has no end yet."""
    case = Case(((70, 30), (3, 90)), head_dim=16, spans=(((40, 200),),) * 2, window=window)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    spans = torch.tensor([[[40, last]]] * 2, dtype=torch.int32, device=device)
    plan_batch(attn, batch, spans=spans)
    check(batch, *attn.run(batch.q, batch.kv_cache, return_lse=True))


def test_a_span_changes_what_is_computed(device):
    """So that agreement with the reference says something."""
    case = Case(((40, 10),), spans=(((15, 30),),))
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    spanned = attn.run(batch.q, batch.kv_cache)
    causal = attn.run(batch.q, batch.kv_cache, spans="off")
    differs = (spanned != causal).flatten(1).any(1)[: batch.num_tokens].tolist()
    # The last query of the span sees nothing new.
    assert differs == [15 <= pos < 30 for pos in range(10, 50)]
    check(dataclasses.replace(batch, case=dataclasses.replace(case, spans=None)), causal)


@pytest.mark.parametrize("window", [None, 20])
def test_b_nothing_out_of_sight_changes_a_bit(window, device):
    """Evicted keys, their table entries, and rows past the sequence."""
    case = Case(((30, 100), (5, 90)), spans=(((90, 140),), ((70, 92),)), window=window)
    outs = []
    for garbage, entry in ((float("nan"), NOWHERE), (3.0, 0), (float("inf"), -1)):
        batch = make_batch(case, device)
        batch.kv_cache[torch.isnan(batch.kv_cache)] = garbage
        batch.block_table[batch.block_table == NOWHERE] = entry
        attn = make_attention(case, device)
        plan_batch(attn, batch)
        outs.append(attn.run(batch.q, batch.kv_cache)[: batch.num_tokens])
    assert torch.isfinite(outs[0]).all()
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_only_requests_in_a_span_leave_the_decode_kernel(device):
    """The plan's twin on host integers says which; the decode kernel keeps the others."""
    case = Case(REQUESTS, spans=SPANS)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    query_lens = [q for q, _ in REQUESTS]
    expected = plan_rule.plan_batch(query_lens, batch.lens, attn.config, SPANS)
    tiles, active, total = expected.header
    assert attn._buffers.header[:3].tolist() == [tiles, active, total]
    assert tuple(attn._buffers.tile_req[:tiles].tolist()) == expected.tile_req
    assert tuple(attn._buffers.tile_token[:tiles].tolist()) == expected.tile_token
    assert tuple(attn._buffers.cu_work[: len(REQUESTS) + 1].tolist()) == expected.cu_work
    assert set(expected.tile_req) == {0, 1, 3, 6}
    assert [b > a for a, b in itertools.pairwise(expected.cu_work)] == [
        False, False, True, False, False, True, False,
    ]  # fmt: skip


@given(
    batch=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 400)), min_size=1, max_size=12),
    block_q=st.sampled_from([1, 5, 16, 64]),
)
def test_every_request_may_be_a_prefill(batch, block_q):
    query_lens = [q for q, _ in batch]
    tiles = sum(policy.cdiv(q, block_q) for q in query_lens)
    assert tiles <= plan_rule.max_prefill_tiles(sum(query_lens), len(batch), block_q, spans=True)


def test_many_short_requests_in_spans_fit_the_plan(device):
    """As many tiles as requests; the object has no room to spare."""
    requests = tuple((1 + i % 3, 20 + i) for i in range(12))
    case = Case(requests, spans=(((5, 60),),) * 12, pad_tokens=0, head_dim=16)
    tokens = sum(q for q, _ in requests)
    run_and_check(case, device, max_num_reqs=12, max_num_tokens=tokens)


def test_the_same_bits_in_batch_invariant_mode(device):
    """A request in a span, alone and among others."""
    case = Case(REQUESTS, spans=SPANS, dtype=BF16)
    batch = make_batch(case, device)
    attn = make_attention(case, device, batch_invariant=True)
    plan_batch(attn, batch)
    together = attn.run(batch.q, batch.kv_cache)
    for r in (0, 1, 3):
        rows = slice(batch.qsl[r], batch.qsl[r + 1])
        starts = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=device)
        attn.plan(
            starts, batch.seq_lens[r : r + 1], batch.block_table[r : r + 1],
            num_tokens=rows.stop - rows.start, max_query_len=rows.stop - rows.start,
            spans=spans_tensor(batch)[r : r + 1],
        )  # fmt: skip
        alone = attn.run(batch.q[rows].contiguous(), batch.kv_cache)
        assert torch.equal(alone, together[rows])


def test_layers_with_spans_take_the_plain_kernel(device):
    """And are counted there, whatever serves the others."""
    case = Case(((40, 0),), spans=(((3, 20),),), head_dim=128, dtype=BF16)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    counters.reset()
    attn.run(batch.q, batch.kv_cache)
    counts = counters.snapshot()
    assert counts["launches{kernel=prefill}"] == 1
    assert "launches{kernel=hopper_prefill}" not in counts


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"spans": torch.zeros(1, 2, 2)}, r"spans is torch.float32 \(1, 2, 2\)"),
        ({"spans": torch.zeros(2, 2, 2, dtype=torch.int32)}, r"spans is torch.int32 \(2, 2, 2\)"),
        ({"spans": torch.zeros(1, 0, 2, dtype=torch.int32)}, r"accepted: contiguous torch.int32"),
        ({"spans": torch.zeros(1, 2, dtype=torch.int32)}, r"\(1, 1 or more, 2\)"),
        ({"spans": [[(3, 9)]]}, r"spans=\[\[\(3, 9\)\]\]; accepted: a tensor or None"),
        ({"causal": False}, "spans of a batch that is not causal"),
    ],
)
def test_g14_bad_spans_are_named(change, named, device):
    batch = make_batch(Case(((20, 0),), spans=(((3, 9),),)), device)
    attn = make_attention(batch.case, device)
    change = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(PlanMismatch, match=named):
        plan_batch(attn, batch, **change)


def test_what_a_layer_cannot_make_of_spans_is_named(device):
    batch = make_batch(Case(((20, 0),), spans=(((3, 9),),)), device)
    attn = make_attention(batch.case, device)
    plan_batch(attn, batch)
    with pytest.raises(PlanMismatch, match="spans='left'; accepted: 'whole', 'windowed', 'off'"):
        attn.run(batch.q, batch.kv_cache, spans="left")
    slopes = torch.ones(4, device=device)
    with pytest.raises(PlanMismatch, match="alibi_slopes with a plan that is not causal"):
        attn.run(batch.q, batch.kv_cache, alibi_slopes=slopes)
    attn.run(batch.q, batch.kv_cache, alibi_slopes=slopes, spans="off")
