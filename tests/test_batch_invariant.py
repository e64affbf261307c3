"""Batch-invariant mode: a request's bits are its own, whatever else is in the batch.

Kinds of field failures: C (splits), N (what a batch changes).
"""

import dataclasses
import itertools
import random

import pytest
import torch
from cases import Case, check, make_attention, make_batch, plan_batch, poison_scratch, run_and_check
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import H200, LLAMA, devices, geometries, lengths, requests, windows

from tilewise import plan_rule, policy
from tilewise.errors import UnsupportedConfig
from tilewise.pieces import Pieces, choose_pieces, scratch_slots

# numpy's remark on poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn


# -- where items are cut --------------------------------------------------------------------------


def item_cuts(query_len, seq_len, config):
    """Units at which pieces of an item start, and its end; from the request alone."""
    tiles = max(-(-seq_len // config.decode.block_n), 1)
    if config.window:
        first = max(seq_len - query_len + 1 - config.window, 0) // config.decode.block_n
        tiles = max(-(-seq_len // config.decode.block_n) - first, 1)
    size = config.pieces.min_tiles
    while tiles > size * config.pieces.most:
        size += 1
    return [*range(0, tiles, size), tiles + config.item_overhead]


@given(requests, geometries, devices, windows, st.integers(1, 9), st.integers(1, 70))
@settings(max_examples=300, deadline=None)
def test_stretches_end_where_pieces_do(batch, geometry, device, window, min_tiles, most):
    """They cover the line, and every shared item has slots and a counter of its own."""
    config = dataclasses.replace(
        policy.choose(geometry, device), window=window, pieces=Pieces(min_tiles, most)
    )
    query_lens, seq_lens = lengths(batch)
    plan = plan_rule.plan_batch(query_lens, seq_lens, config)
    _, active, total = plan.header
    stretches = [(*record[:2], w) for w, record in enumerate(plan.worker_record) if any(record)]
    ends = [0, *(end for _, end, _ in stretches)]
    assert [begin for begin, _, _ in stretches] == ends[:-1]
    assert ends[-1] == total
    counted = []
    for r, q in enumerate(query_lens):
        if not 0 < q <= policy.DECODE_MAX_QUERY_LEN:
            continue
        cuts = item_cuts(q, seq_lens[r], config)
        assert len(cuts) - 1 == plan_rule.kv_splits(plan, r, q, config)[0] <= most
        begin, end = plan.cu_work[r : r + 2]
        items = range(begin, end, cuts[-1])
        assert len(items) == plan_rule.decode_items(q, config)
        for item in items:
            inside = [x - item for x in ends if item < x < item + cuts[-1]]
            assert set(inside) <= set(cuts)
            if inside:
                first = plan_rule.owner(item, total, active)
                (starts_in,) = (w for a, b, w in stretches if a <= item < b)
                assert first == starts_in
                counted.append(first)
    assert len(counted) == len(set(counted)), "two shared items would use one counter"


def test_a_long_request_fills_the_gpu_and_a_short_one_stays_whole():
    config = policy.batch_invariant(policy.choose(LLAMA, H200))

    def busy(keys):
        plan = plan_rule.plan_batch([1], [keys], config)
        return sum(any(record) for record in plan.worker_record)

    assert busy(500) == 8
    assert busy(131072) >= 0.9 * config.num_workers
    assert plan_rule.kv_splits(plan_rule.plan_batch([1], [512], config), 0, 1, config) == [1] * 8


@given(geometries, devices, st.integers(1, 16))
def test_scratch_is_bounded_whatever_the_batch(geometry, device, decode_query_len):
    config = policy.batch_invariant(policy.choose(geometry, device, decode_query_len))
    t = config.decode
    slots = scratch_slots(config.pieces, config.num_workers)
    assert slots == (config.pieces.most + 1) * config.num_workers
    bound = max(512 * 1024, 8 * t.block_m * t.block_d * 4) + t.block_m * t.block_d * 4
    assert slots * t.block_m * t.block_d * 4 <= bound * config.num_workers


@pytest.mark.parametrize(
    ("num_kv_heads", "block_m", "block_d", "most"),
    [(8, 16, 128, 32), (1, 16, 128, 64), (1, 16, 64, 128), (128, 16, 64, 8), (1, 128, 256, 8)],
)
def test_pieces_follow_heads_and_memory(num_kv_heads, block_m, block_d, most):
    assert choose_pieces(num_kv_heads, block_m, 64, block_d) == Pieces(min_tiles=8, most=most)
    assert choose_pieces(num_kv_heads, block_m, 128, block_d).min_tiles == 4


def test_cuts_do_not_follow_the_number_of_sms():
    small = policy.Device(arch=90, num_sms=78, shared_memory=227 * 1024)
    configs = [policy.batch_invariant(policy.choose(LLAMA, device)) for device in (H200, small)]
    assert configs[0].pieces == configs[1].pieces
    assert configs[0].decode == configs[1].decode


def test_bad_pieces_are_named(device):
    with pytest.raises(UnsupportedConfig, match="min_tiles=0"):
        Pieces(0, 8)
    with pytest.raises(UnsupportedConfig, match="most=0"):
        Pieces(8, 0)
    case = Case(((1, 5),))
    config = policy.batch_invariant(make_attention(case, device).config)
    with pytest.raises(UnsupportedConfig, match=r"Pieces\(.*batch_invariant=False"):
        make_attention(case, device, config=config)


def test_pieces_in_the_default_mode_are_none(device):
    attn = make_attention(Case(((1, 5),)), device)
    assert attn.config.pieces is None
    assert attn.config.piece_constants == {"piece_tiles": 0, "max_pieces": 0}
    assert attn._buffers.partial_m.shape[0] == 2 * attn.config.num_workers


# -- bits -----------------------------------------------------------------------------------------

# Chunks after a cached prefix, decodes short and long, verification of drafts, no keys to speak of.
REQUESTS = ((1, 700), (20, 30), (1, 0), (5, 400), (0, 0), (1, 130))
CASES = [
    Case(REQUESTS),
    Case(REQUESTS, dtype=BF16, page_size=16, layout="hnd"),
    Case(REQUESTS, window=70, sinks=1.0, dtype=BF16),
    Case(REQUESTS, window=300, dtype=FP16),
    Case(REQUESTS, num_q_heads=5, num_kv_heads=1, head_dim=128, softcap=5.0, alibi="linear"),
    Case(REQUESTS, dtype=BF16, kv_dtype=E4M3, kv_scales="head"),
    Case(REQUESTS, dtype=BF16, kv_dtype=E4M3, kv_scales="tensor", page_size=16, window=250),
    Case(REQUESTS, dtype=BF16, decode_query_len=5, num_q_heads=6, sinks=0.5),
    Case(REQUESTS, head_dim=256, num_q_heads=2, page_size=48),
    # Prefills with blocks of keys that nothing masks: warps of the Gluon kernel choose there.
    Case(
        ((1, 700), (39, 330), (35, 200), (5, 400), (0, 0), (1, 130)),
        num_q_heads=4,
        num_kv_heads=1,
        head_dim=128,
        softcap=50.0,
        dtype=BF16,
    ),
]


def attention_of(case, device, pieces, workers=None, **overrides):
    """An object whose items are cut finely, whatever the device."""
    if pieces is not None or workers is not None:
        config = dataclasses.replace(make_attention(case, device).config, pieces=pieces)
        if workers is not None:
            config = dataclasses.replace(config, num_workers=workers, num_sms=workers)
        overrides["config"] = config
    return make_attention(case, device, batch_invariant=pieces is not None, **overrides)


def run_some(attn, batch, order, pad_rows=0, pad_requests=0, blank=0):
    """Results of those requests of a batch, in that order: ``{request: (out, lse)}``.

    ``blank`` requests without tokens come first, padding last.
    """
    query_lens = [end - begin for begin, end in itertools.pairwise(batch.qsl)]
    rows = [batch.q[batch.qsl[r] : batch.qsl[r + 1]] for r in order]
    nobody = torch.full_like(batch.q[:1], float("nan")).expand(pad_rows, -1, -1)
    lens = [0] * blank + [query_lens[r] for r in order] + [0] * pad_requests
    qsl = [0, *itertools.accumulate(lens)]
    keys = [0] * blank + [batch.lens[r] for r in order] + [0] * pad_requests
    empty = torch.full_like(batch.block_table[:1], 2_147_480_000)
    table = torch.cat(
        [empty] * blank + [batch.block_table[r : r + 1] for r in order] + [empty] * pad_requests
    )
    ints = {"dtype": torch.int32, "device": batch.q.device}
    q = torch.cat([*rows, nobody])
    attn.plan(
        torch.tensor(qsl, **ints), torch.tensor(keys, **ints), table,
        num_tokens=q.shape[0], max_query_len=max(lens),
    )  # fmt: skip
    out, lse = attn.run(q, batch.kv_cache, return_lse=True, **batch.features)
    assert not attn._buffers.arrivals.any(), "arrival counters must be zero between launches"
    starts = dict(zip(order, qsl[blank:], strict=False))
    return {r: (out[a : a + query_lens[r]], lse[a : a + query_lens[r]]) for r, a in starts.items()}


def same(results, alone):
    """Requests whose bits are those they have alone."""
    bits = {FP32: torch.int32, BF16: torch.int16, FP16: torch.int16}
    return {
        r: all(
            torch.equal(x.contiguous().view(bits[x.dtype]), y.contiguous().view(bits[y.dtype]))
            for x, y in zip(got, alone[r], strict=True)
        )
        for r, got in results.items()
    }


def company(batch):
    """``run_some`` options: all, others before and after, other orders, padding."""
    some = [r for r, n in enumerate(batch.lens) if n]
    return [
        {"order": some},
        {"order": some[::-1], "pad_rows": 5, "pad_requests": 3},
        {"order": [some[3], some[0]], "blank": 2, "pad_rows": 64},
    ]


FINE, FEW = Pieces(1, 64), Pieces(2, 3)


@pytest.mark.parametrize(
    ("case", "pieces"),
    [
        *(pytest.param(case, FINE, id=f"{case}-fine") for case in (*CASES[2:3], *CASES[5:6])),
        pytest.param(CASES[7], FEW, id=f"{CASES[7]}-few"),
        *(
            pytest.param(case, pieces, id=f"{case}-{name}", marks=pytest.mark.slow)
            for case in CASES
            for pieces, name in ((FINE, "fine"), (FEW, "few"))
            if (case, name) not in ((CASES[2], "fine"), (CASES[5], "fine"), (CASES[7], "few"))
        ),
    ],
)
def test_bits_are_a_requests_own(case, pieces, device):
    batch = make_batch(case, device)
    room = {"max_num_reqs": 16, "max_num_tokens": 400}
    attn = attention_of(case, device, pieces, workers=7, **room)
    other = attention_of(case, device, pieces, workers=3, max_num_reqs=1000, max_num_tokens=900)
    some = [r for r, n in enumerate(batch.lens) if n]
    alone = {r: run_some(attn, batch, [r])[r] for r in some}
    for options, a in zip(company(batch), (attn, other, attn), strict=True):
        poison_scratch(a)
        results = run_some(a, batch, **options)
        assert all(same(results, alone).values()), (options, same(results, alone))
    out = torch.zeros_like(batch.q)
    for r in some:
        out[batch.qsl[r] : batch.qsl[r + 1]] = alone[r][0]
    check(batch, out)


def test_the_default_mode_does_depend_on_the_batch(device):
    """So the comparison can fail: the same requests, workers and company, cut where it falls."""
    case = CASES[0]
    batch = make_batch(case, device)
    attn = attention_of(case, device, None, workers=7, max_num_reqs=16, max_num_tokens=400)
    long = [r for r, n in enumerate(batch.lens) if n > 200 and case.requests[r][0] <= 16]
    alone = {r: run_some(attn, batch, [r])[r] for r in long}
    results = run_some(attn, batch, **company(batch)[0])
    assert not all(same({r: results[r] for r in long}, alone).values())


def test_items_are_folded_in_both_places(device):
    """The bits above come from items of one worker as well as from shared ones."""
    case, pieces = CASES[0], Pieces(1, 64)
    config = attention_of(case, device, pieces, workers=7).config
    query_lens, seq_lens = [q for q, _ in case.requests], [q + c for q, c in case.requests]

    def owners(query_lens, seq_lens):
        plan = plan_rule.plan_batch(query_lens, seq_lens, config)
        item = plan_rule.decode_units(query_lens[0], seq_lens[0], config) // 2  # two KV heads
        return sum(any(w) and w[0] < item for w in plan.worker_record)

    assert owners(query_lens[:1], seq_lens[:1]) > 1
    assert owners([1] * 14, seq_lens[:1] * 14) == 1
    batch = make_batch(dataclasses.replace(case, requests=case.requests[:1] * 14), device)
    attn = attention_of(case, device, pieces, workers=7, max_num_reqs=40, max_num_tokens=99)
    alone = {r: run_some(attn, batch, [r])[r] for r in (0, 13)}
    results = run_some(attn, batch, list(range(14)))
    assert all(same({r: results[r] for r in alone}, alone).values())


@pytest.mark.parametrize("workers", [1, 2, 5, 64])
def test_any_number_of_workers_gives_the_same_bits(workers, device):
    case, pieces = Case(((1, 500), (3, 377), (1, 90))), Pieces(1, 64)
    batch = make_batch(case, device)
    reference = run_some(attention_of(case, device, pieces, workers=3), batch, [0, 1, 2])
    results = run_some(attention_of(case, device, pieces, workers=workers), batch, [0, 1, 2])
    assert all(same(results, reference).values())


@pytest.mark.parametrize(
    "case",
    [
        Case(((24, -5), (9, -4), (1, 500))),
        Case(((24, -5), (9, -4), (1, 500)), window=100, sinks=1.0),
        Case(((1, 0), (1, 511), (1, 512), (1, 513), (2, 1100)), pad_requests=3, dtype=BF16),
    ],
    ids=str,
)
@pytest.mark.parametrize("pieces", [None, Pieces(1, 64), Pieces(1, 2)])
def test_matches_reference(case, pieces, device):
    """Rows before the first key, ends of pieces, and the policy's own pieces."""
    config = make_attention(case, device).config
    config = dataclasses.replace(config, pieces=pieces)
    run_and_check(case, device, batch_invariant=True, config=config)


def test_a_batch_without_decodes_and_one_without_requests(device):
    case = Case(((40, 10), (0, 0)))
    run_and_check(case, device, batch_invariant=True)
    attn = make_attention(case, device, batch_invariant=True)
    ints = {"dtype": torch.int32, "device": device}
    attn.plan(
        torch.zeros(3, **ints), torch.zeros(2, **ints), torch.zeros((2, 1), **ints),
        num_tokens=0, max_query_len=1,
    )  # fmt: skip
    assert attn._buffers.header[:3].tolist() == [0, 0, 0]
    assert not attn._buffers.worker_record.any()


# -- on a GPU, as the policy has it ---------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case((), 32, 8, 128, dtype=BF16, page_size=64),
        Case((), 32, 8, 128, dtype=BF16, page_size=16),
        Case((), 64, 8, 64, dtype=BF16, window=3000, sinks=1.0),
        Case((), 8, 1, 256, dtype=FP16),
        Case((), 32, 8, 128, dtype=BF16, kv_dtype=E4M3, kv_scales="tensor", page_size=128),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 4])
def test_g_bits_of_long_requests(case, rows, device):
    """Pieces of real size on every SM: alone, among many, in reverse, and again."""
    lens = (30000, 7, 513, 4000, 12345, 511, 9000, 2048)
    case = dataclasses.replace(
        case, requests=(*((rows, n) for n in lens), (300, 1000)), decode_query_len=rows
    )
    batch = make_batch(case, device)
    room = {"max_num_reqs": 256, "max_num_tokens": 2000}
    attn = make_attention(case, device, batch_invariant=True, **room)
    order = list(range(len(case.requests)))
    alone = {r: run_some(attn, batch, [r])[r] for r in order}
    for repeat in range(20):
        random.Random(repeat).shuffle(order)
        results = run_some(attn, batch, order, pad_rows=repeat, pad_requests=repeat)
        assert all(same(results, alone).values()), (order, same(results, alone))
    plan_batch(attn, batch)
    check(batch, attn.run(batch.q, batch.kv_cache, **batch.features))


@pytest.mark.gpu
def test_g_a_graph_replays_the_bits(device):
    """A plan outside and layers inside of a captured graph; other lengths at every replay."""
    case = Case(((1, 9000), (1, 700), (1, 40)), 32, 8, 128, dtype=BF16)
    batch = make_batch(case, device)
    attn = make_attention(case, device, batch_invariant=True)
    full = (batch.query_start_loc, batch.seq_lens, batch.block_table)
    alone = {r: run_some(attn, batch, [r])[r] for r in range(3)}
    plan = attn.plan(*full, num_tokens=3, max_query_len=1)
    out = torch.zeros_like(batch.q)
    attn.run(batch.q, batch.kv_cache, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(batch.q, batch.kv_cache, out=out, plan=plan)
    for lens in ((9001, 701, 41), (5, 701, 41), (9001, 9, 41)):
        plan.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        attn.plan(plan.query_start_loc, plan.seq_lens, plan.block_table, num_tokens=3,
                  max_query_len=1)  # fmt: skip
        out.zero_()
        graph.replay()
        for r, n in enumerate(lens):
            if n == batch.lens[r]:
                assert torch.equal(out[r], alone[r][0][0]), (lens, r)
