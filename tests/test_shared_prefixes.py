"""Decode requests that begin with the same pages: groups, results, graphs."""

import dataclasses
import random

import pytest
import torch
from cases import NOWHERE, Case, check, make_attention, plan_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefix_batches import make_shared, planned, poison_shared, run_shared, twin

from tilewise import PagedAttention, plan_rule, policy, prefix_rule
from tilewise.errors import PlanMismatch, UnsupportedConfig

# numpy's remark on the poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H200 = policy.Device(arch=90, num_sms=132, shared_memory=227 * 1024)

TAILS = ((1, 700), (1, 640), (1, 900), (1, 64), (1, 700))
MANY = tuple((1, 600 + 37 * i) for i in range(12))
# (case, groups, how many of them are worth it)
CASES = {
    "apart": (Case(TAILS), [], 0),
    "interleaved": (Case(TAILS, num_q_heads=8, pad_requests=2), [((0, 2, 4), 9)], 1),
    "two_groups": (Case(MANY, num_q_heads=8), [((0, 3, 5, 7), 9), ((1, 2, 11), 9)], 2),
    "ratio_1": (Case(MANY, num_q_heads=2), [((0, 1, 2, 5, 9), 9)], 1),
    "ratio_7": (
        Case(MANY, num_q_heads=7, num_kv_heads=1, dtype=BF16), [((2, 3, 4, 6, 7, 8, 9, 10), 9)], 1
    ),
    "ratio_7_many_tiles": (
        Case(tuple((1, 400 + i) for i in range(20)), num_q_heads=7, num_kv_heads=1, head_dim=32),
        [(tuple(range(20)), 6)], 1,
    ),
    "ratio_8": (Case(MANY, num_q_heads=8, num_kv_heads=1, dtype=FP16), [((0, 6, 11), 9)], 1),
    "small_pages": (
        Case(TAILS, num_q_heads=8, page_size=16, dtype=BF16), [((0, 1, 2), 39)], 1
    ),
    "pages_of_48": (
        Case(TAILS, num_q_heads=9, num_kv_heads=3, head_dim=80, page_size=48), [((0, 1, 2), 13)], 1
    ),
    "large_pages": (Case(MANY, page_size=128, layout="hnd", num_q_heads=8), [((3, 4, 5), 5)], 1),
    "drafts": (
        Case(((4, 700), (3, 640), (4, 800), (1, 700), (2, 650)), num_q_heads=8,
             decode_query_len=4),
        [((0, 1, 2, 3, 4), 10)], 1,
    ),
    # Requests of two query tiles, more than a shared tile's rows.
    "drafts_of_10": (
        Case(((10, 1100), (10, 1090), (10, 1200)), num_q_heads=14, num_kv_heads=2, head_dim=32,
             dtype=BF16, decode_query_len=10),
        [((0, 1, 2), 17)], 1,
    ),
    "beside_prefills": (
        Case(((1, 700), (40, 640), (1, 800), (0, 0), (1, 700)), num_q_heads=8),
        [((0, 1, 2, 4), 10)], 1,
    ),
    "longer_than_decode_query_len": (
        Case(((1, 700), (9, 640), (1, 800)), num_q_heads=8), [((0, 1, 2), 10)], 1
    ),
    "sinks_and_cap": (
        Case(TAILS, num_q_heads=8, sinks=1.0, softcap=20.0, dtype=BF16), [((0, 1, 2), 10)], 1
    ),
    "alibi": (Case(TAILS, num_q_heads=8, alibi="linear"), [((0, 1, 4), 10)], 1),
    "alibi_sqrt": (Case(TAILS, num_q_heads=8, alibi="sqrt"), [((0, 1, 4), 10)], 1),
    "fp8": (
        Case(TAILS, num_q_heads=8, head_dim=128, dtype=BF16, kv_dtype=torch.float8_e4m3fn,
             kv_scales="head"),
        [((0, 1, 2), 10)], 1,
    ),
    "fp8_fp16_queries": (
        Case(TAILS, num_q_heads=8, dtype=FP16, kv_dtype=torch.float8_e5m2), [((0, 1, 2), 10)], 1
    ),
    "heads_of_256": (
        Case(TAILS, num_q_heads=4, num_kv_heads=1, head_dim=256, dtype=BF16), [((0, 4), 10)], 1
    ),
    # All begin with 5 pages, and some go on together: the deeper groups are taken.
    "tree": (
        Case(MANY, num_q_heads=8, num_kv_heads=1),
        [(tuple(range(12)), 7), ((1, 4, 6), 9), ((2, 5, 9), 9)], 3,
    ),
    "a_whole_request": (
        Case(((1, 640), (1, 640), (1, 704)), num_q_heads=8), [((0, 1, 2), 10)], 1
    ),
    "too_short": (Case(TAILS, num_q_heads=8), [((0, 1, 2), 2)], 0),
}  # fmt: skip


# Of a kind that another case has as well, and long in the interpreter.
SLOW = {
    "ratio_1", "ratio_7", "small_pages", "large_pages", "drafts_of_10", "alibi_sqrt",
    "fp8_fp16_queries",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_matches_reference(name, device):
    case, groups, found = CASES[name]
    run_shared(case, groups, str(device), found)


@pytest.mark.parametrize(
    "num_workers", [1, 3, 13, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 7, 29))]
)
def test_any_number_of_workers_gives_the_same_result(num_workers, device):
    """However the line is cut: within shared items, tails, and between them."""
    case, groups, found = CASES["two_groups"]
    config = make_attention(case, str(device)).config
    config = dataclasses.replace(config, num_workers=num_workers, num_sms=num_workers)
    run_shared(case, groups, str(device), found, config=config)


def test_many_pieces_of_a_row_are_merged(device):
    """More pieces of one shared item than are on their way at a time, whole tails behind it."""
    case = Case(((1, 2900), (1, 2820)), num_q_heads=4, num_kv_heads=1, head_dim=16, page_size=16)
    config = make_attention(case, str(device)).config
    config = dataclasses.replace(config, num_workers=24, num_sms=132)
    run_shared(case, [((0, 1), 170)], str(device), config=config)


def test_results_repeat_bit_for_bit(device):
    """Whatever lay in scratch, and whoever came last."""
    case, groups, _ = CASES["two_groups"]
    batch = make_shared(case, groups, str(device))
    attn = make_attention(case, str(device), shared_prefixes="always")
    outs = []
    for _ in range(2):
        poison_shared(attn)
        plan_batch(attn, batch)
        outs += [attn.run(batch.q, batch.kv_cache)[: batch.num_tokens] for _ in range(2)]
    assert all(torch.equal(outs[0], other) for other in outs[1:])


def test_the_order_of_arrival_changes_no_bit(device, monkeypatch):
    """Workers that come in the opposite order merge the same pieces in the same order."""
    if device.type != "cpu":
        pytest.skip("the order is the interpreter's to choose")
    case, groups, _ = CASES["two_groups"]
    batch = make_shared(case, groups, "cpu")
    config = make_attention(case, "cpu").config
    config = dataclasses.replace(config, num_workers=7, num_sms=7)
    attn = make_attention(case, "cpu", shared_prefixes="always", config=config)
    outs = []
    for backwards in (False, True):
        plan_batch(attn, batch)
        if backwards:
            from triton.runtime import interpreter

            ordered = interpreter.interpreter_builder.set_grid_idx

            def reverse(x, y, z, ordered=ordered):
                last = interpreter.interpreter_builder.grid_dim[0] - 1
                ordered(last - x, y, z)

            monkeypatch.setattr(interpreter.interpreter_builder, "set_grid_idx", reverse)
        outs.append(attn.run(batch.q, batch.kv_cache)[: batch.num_tokens])
    assert torch.equal(*outs)


def test_groups_come_and_go_between_plans(device):
    """One object, batches of other groups, other lengths and none, in the same buffers."""
    case, _, _ = CASES["two_groups"]
    attn = make_attention(case, str(device), shared_prefixes="always")
    rounds = [
        (case, CASES["two_groups"][1], 2),
        (case, [], 0),
        (Case(MANY[::-1], num_q_heads=8), [((4, 8, 9, 10), 9)], 1),
        (Case(((1, 3), (0, 0), (1, 900), (1, 1000)), num_q_heads=8), [((2, 3), 14)], 1),
        (Case(MANY[:1], num_q_heads=8), [], None),
    ]
    for seed, (other, groups, found) in enumerate(rounds):
        batch = make_shared(other, groups, str(device), seed)
        plan = plan_batch(attn, batch)
        assert plan.shared == (found is not None)  # a single request shares nothing
        if found is not None:
            assert planned(attn, len(batch.lens)) == twin(attn, batch)
            assert attn._buffers.shared.shared_header[1].item() == found
        out, lse = attn.run(batch.q, batch.kv_cache, return_lse=True)
        check(batch, out, lse)


def test_what_cannot_share_keeps_its_path(device):
    """Not causal, with spans or without pages: the plan is the one that it was."""
    case, groups, _ = CASES["interleaved"]
    batch = make_shared(case, groups, str(device))
    attn = make_attention(case, str(device), shared_prefixes="always")
    spans = torch.zeros((len(batch.lens), 1, 2), dtype=torch.int32, device=device)
    assert not plan_batch(attn, batch, causal=False).shared
    assert not plan_batch(attn, batch, spans=spans).shared
    out = attn.run(batch.q, batch.kv_cache)
    check(batch, out)


def test_batches_that_gluon_serves_faster_are_left_to_it(monkeypatch):
    """Few requests, and prefills beside decodes; with "always" these share as well."""
    monkeypatch.setattr("tilewise.attention.describe", lambda device: H200)
    options = {
        "page_size": 64, "dtype": BF16, "max_num_reqs": 64, "max_num_tokens": 4096, "device": "cpu"
    }  # fmt: skip
    some, always, none = (
        PagedAttention(32, 8, 128, shared_prefixes=asked, **options)
        for asked in (True, "always", False)
    )
    assert some.config.decodes_few(16)
    assert not some.config.decodes_few(17)
    assert some.config.side_by_side
    assert [some.shares(n) for n in (0, 1, 2, 16, 17, 64)] == [False] * 4 + [True] * 2
    assert [always.shares(n) for n in (0, 1, 2, 16, 17, 64)] == [False] * 2 + [True] * 4
    assert not any(none.shares(n) for n in (2, 17, 64))
    assert not some.shares(64, beside=True)
    assert always.shares(64, beside=True)
    # Where no Gluon kernel serves the layer, every batch may share.
    plain = PagedAttention(32, 8, 96, shared_prefixes=True, **options)
    assert plain.shares(2)
    with pytest.raises(UnsupportedConfig, match="shared_prefixes='yes'; accepted: False, True or"):
        PagedAttention(32, 8, 128, shared_prefixes="yes", **options)


def test_entries_past_the_context_do_not_make_a_group(device):
    """Stale ids that agree beyond a request's keys, and pages of its own new tokens."""
    case = Case(((1, 255), (1, 255), (1, 300)), num_q_heads=8)
    batch = make_shared(case, [], str(device))
    attn = make_attention(case, str(device), shared_prefixes="always")
    batch.block_table[:, 4:] = NOWHERE
    batch.block_table[2, 4] = make_shared(case, [], str(device)).block_table[2, 4]
    # The fourth page of the first two holds their new token: three pages are theirs to share.
    batch.block_table[1, :4] = batch.block_table[0, :4]
    plan_batch(attn, batch)
    assert attn._buffers.shared.shared_header.tolist() == [0, 0]
    assert planned(attn, 3) == twin(attn, batch)


# -- the rule -------------------------------------------------------------------------------------


@st.composite
def trees(draw):
    """``(query_lens, seq_lens, block_table)`` of requests that often begin alike."""
    width = 80
    rows, query_lens, seq_lens = [], [], []
    for r in range(draw(st.integers(1, 14))):
        row = list(range(1000 * r, 1000 * r + width))
        if rows and draw(st.integers(0, 3)):
            other = draw(st.integers(0, len(rows) - 1))
            alike = draw(st.sampled_from([1, 3, 4, 7, 8, 16, 17, 40, width]))
            row[:alike] = rows[other][:alike]
            if draw(st.integers(0, 5)) == 0:
                row[draw(st.integers(0, width - 1))] = 0  # what no prefix cache would make
        rows.append(row)
        query_lens.append(draw(st.sampled_from([0, 1, 1, 1, 2, 4, 16, 40])))
        seq_lens.append(query_lens[-1] + draw(st.one_of(st.integers(0, 300), st.integers(0, 4000))))
    return query_lens, seq_lens, rows


geometries = st.builds(
    lambda group, hkv, d, page: policy.Geometry(group * hkv, hkv, d, page, 2),
    st.sampled_from([1, 2, 3, 4, 7, 8, 16, 48]), st.sampled_from([1, 2, 8]),
    st.sampled_from([64, 80, 128, 256]), st.sampled_from([16, 48, 64, 128]),
)  # fmt: skip


@given(trees(), geometries, st.sampled_from([1, 4, 16]))
@settings(max_examples=300, deadline=None)
def test_groups_are_right(batch, geometry, decode_query_len):
    """Members see all they share, by the same pages, and nobody's keys are counted twice."""
    query_lens, seq_lens, table = batch
    config = policy.choose(geometry, H200, decode_query_len)
    config = prefix_rule.share_prefixes(config, H200, decode_query_len)
    plan = prefix_rule.plan_shared(query_lens, seq_lens, table, config)
    block_n = config.decode.block_n
    joined = [r for r, m in enumerate(plan.members) if m[0] >= 0]
    assert sorted(set(plan.slots)) == joined
    for r in joined:
        slot, tiles, begin, base = plan.members[r]
        (group,) = (g for g in plan.groups if g[0] == begin)
        leader = group[2]
        assert (group[3], group[4]) == (tiles, base)
        assert 0 < query_lens[r] <= decode_query_len
        assert plan.slots[slot : slot + query_lens[r]] == (r,) * query_lens[r]
        assert 0 < tiles * block_n <= seq_lens[r] - query_lens[r]
        pages = policy.cdiv(tiles * block_n, geometry.page_size)
        assert table[r][:pages] == table[leader][:pages]
    for group in plan.groups:
        assert sum(group[0] == plan.members[r][2] for r in joined) >= 2
    # Tails and shared keys together are all keys.
    alone = [
        plan_rule.decode_units(q, s, config) if 0 < q <= 16 else 0
        for q, s in zip(query_lens, seq_lens, strict=True)
    ]
    for r, units in enumerate(alone):
        tail = plan.cu_work[r + 1] - plan.cu_work[r]
        items = plan_rule.decode_items(query_lens[r], config)
        assert units - tail == plan.members[r][1] * (items if units else 0)
    assert plan.header[1] == plan.cu_work[-1] + plan.shared_header[0] <= sum(alone)
    assert (plan.header[1] < sum(alone)) == bool(plan.groups)


@pytest.fixture(scope="module")
def plan_on(device):
    def run(batch, config, max_reqs=16):
        query_lens, seq_lens, table = batch
        g = config.geometry
        attn = PagedAttention(
            g.num_q_heads, g.num_kv_heads, g.head_dim, page_size=g.page_size,
            dtype=torch.bfloat16, max_num_reqs=max_reqs, max_num_tokens=200_000, device=device,
            decode_query_len=config.prefixes.max_query_len, config=config, shared_prefixes="always",
        )  # fmt: skip
        poison_shared(attn)
        ints = {"dtype": torch.int32, "device": device}
        qsl = torch.tensor([sum(query_lens[:i]) for i in range(len(query_lens) + 1)], **ints)
        attn.plan(
            qsl, torch.tensor(seq_lens, **ints), torch.tensor(table, **ints),
            num_tokens=sum(query_lens), max_query_len=40,
        )  # fmt: skip
        return planned(attn, len(query_lens))

    return run


@given(trees().filter(lambda b: len(b[0]) > 1), geometries, st.sampled_from([1, 4, 16]))
@settings(max_examples=40, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
def test_plan_kernels_equal_their_twin(plan_on, batch, geometry, decode_query_len):
    config = policy.choose(geometry, H200, decode_query_len)
    config = prefix_rule.share_prefixes(config, H200, decode_query_len)
    assert plan_on(batch, config) == prefix_rule.plan_shared(*batch, config)


@pytest.mark.slow
def test_plan_kernels_equal_their_twin_beyond_one_block_of_requests(plan_on):
    config = policy.choose(policy.Geometry(32, 8, 128, 64, 2), H200)
    config = prefix_rule.share_prefixes(config, H200)
    rng = random.Random(0)
    table = [[10_000 * (r % 7) + i for i in range(20)] for r in range(1100)]
    table = [row[: 4 + r % 5 * 4] + [10**6 + r] * (16 - r % 5 * 4) for r, row in enumerate(table)]
    batch = ([1] * 1100, [rng.randint(1, 1280) for _ in table], table)
    expected = prefix_rule.plan_shared(*batch, config)
    assert expected.shared_header[1] > 7
    assert plan_on(batch, config, 1200) == expected


def test_pages_are_read_once_for_64_requests():
    """The work of a long prefix does not grow with those who share it, but by their rows."""
    config = policy.choose(policy.Geometry(32, 8, 128, 64, 2), H200)
    config = prefix_rule.share_prefixes(config, H200)
    table = [[*range(512), *range(1000 + 10 * r, 1008 + 10 * r)] for r in range(64)]
    plan = prefix_rule.plan_shared([1] * 64, [33_280] * 64, table, config)
    assert plan.shared_header == (8 * 4 * (512 + 3), 1)
    assert plan.cu_work[-1] == 64 * 8 * (8 + 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"window": 1024}, "window 1024"),
        ({"pieces": policy.choose_pieces(8, 16, 64, 128)}, "batch-invariant"),
        ({"geometry": policy.Geometry(64, 1, 128, 64, 2)}, "group size 64"),
        ({"geometry": policy.Geometry(8, 1, 512, 64, 2)}, "head_dim 512"),
    ],
)
def test_what_does_not_share_is_named(change, named):
    geometry = change.get("geometry", policy.Geometry(32, 8, 128, 64, 2))
    config = dataclasses.replace(policy.choose(geometry, H200), **change)
    assert named in prefix_rule.why_not_share(config, H200)
    with pytest.raises(UnsupportedConfig, match=named):
        prefix_rule.share_prefixes(config, H200)


def test_bad_arguments_are_named(device):
    case = Case(TAILS)
    with pytest.raises(UnsupportedConfig, match="window 100"):
        make_attention(dataclasses.replace(case, window=100), str(device), shared_prefixes="always")
    with pytest.raises(UnsupportedConfig, match="batch-invariant"):
        make_attention(case, str(device), shared_prefixes="always", batch_invariant=True)
    config = make_attention(case, str(device), shared_prefixes="always").config
    with pytest.raises(UnsupportedConfig, match="shared_prefixes=False"):
        make_attention(case, str(device), config=config)
    for beside, named in (({"window": 100}, "window=100"), ({}, "batch_invariant")):
        options = {"batch_invariant": not beside, "shared_prefixes": True, "config": config}
        with pytest.raises(UnsupportedConfig, match=f"PrefixTiles.* with {named}; accepted"):
            make_attention(dataclasses.replace(case, **beside), str(device), **options)
    cached = dataclasses.replace(case, kv_dtype=torch.float8_e4m3fn, dtype=FP16)
    with pytest.raises(UnsupportedConfig, match="shared_prefixes with rotated_keys"):
        make_attention(cached, str(device), shared_prefixes="always", rotated_keys=True)


def test_scales_of_pages_are_refused(device):
    """Packed queries of several requests would meet the scales of one request's pages."""
    case = Case(TAILS, kv_dtype=torch.float8_e4m3fn, dtype=FP16, page_size=64)
    batch = make_shared(case, [], str(device))
    attn = make_attention(case, str(device), shared_prefixes="always")
    plan_batch(attn, batch)
    of_pages = torch.ones(batch.kv_cache.shape[0], case.num_kv_heads, device=device)
    scales = {"k_scale": of_pages, "v_scale": of_pages}
    with pytest.raises(PlanMismatch, match="of pages with shared_prefixes"):
        attn.run(batch.q, batch.kv_cache, **(batch.features | scales))


def test_the_workspace_counts_its_buffers(device):
    case = Case(TAILS)
    alone, shared = (make_attention(case, str(device), shared_prefixes=on) for on in (False, True))
    assert shared.workspace_bytes > alone.workspace_bytes
    held = shared._buffers.shared.workspace_bytes
    assert shared.workspace_bytes == alone.workspace_bytes + held


# -- on a GPU -------------------------------------------------------------------------------------

LONG = tuple((1, 8300 + 131 * i) for i in range(24))
FOUR_GROUPS = [(tuple(range(g, 24, 4)), 100 + 5 * g) for g in range(4)]
GPU_CASES = {
    **{f"d{d}": (Case(LONG, 32, 8, d, dtype=BF16), FOUR_GROUPS, 4) for d in (64, 128, 256)},
    **{
        f"ratio_{hq}_{hkv}": (Case(LONG, hq, hkv, 128, dtype=BF16), FOUR_GROUPS, 4)
        for hq, hkv in ((8, 8), (28, 4), (64, 8), (32, 1))
    },
    "page_16": (
        Case(LONG, 32, 8, 128, page_size=16, dtype=FP16),
        [(m, 4 * pages) for m, pages in FOUR_GROUPS], 4,
    ),
    "page_48": (Case(LONG, 28, 4, 128, page_size=48, dtype=BF16), FOUR_GROUPS, 4),
    "fp8": (
        Case(LONG, 32, 8, 128, dtype=BF16, kv_dtype=torch.float8_e4m3fn, kv_scales="head"),
        FOUR_GROUPS, 4,
    ),
    "features": (
        Case(LONG, 32, 8, 128, dtype=BF16, sinks=1.0, softcap=30.0, alibi="linear"),
        FOUR_GROUPS, 4,
    ),
    "drafts": (
        Case(tuple((1 + i % 4, 8300 + 97 * i) for i in range(24)), 32, 8, 128, dtype=BF16,
             decode_query_len=4),
        FOUR_GROUPS, 4,
    ),
    "drafts_in_two_query_tiles": (
        Case(tuple((10, 4200 + 97 * i) for i in range(24)), 28, 4, 128, dtype=BF16,
             decode_query_len=10),
        [((0, 5, 9, 11), 60), ((1, 2), 60)], 2,
    ),
    "beside_prefills": (
        Case((*LONG[:12], (700, 9000), (40, 0), (0, 0), *LONG[12:20]), 32, 8, 128, dtype=BF16),
        [((0, 3, 14, 15, 19), 110), ((1, 4, 5), 120)], 2,
    ),
    "many": (
        Case(tuple((1, 2100 + 13 * i % 700) for i in range(256)), 32, 8, 128, dtype=BF16),
        [(tuple(range(0, 256, 2)), 30), (tuple(range(1, 100, 2)), 32)], 2,
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_matches_reference_on_a_gpu(name):
    case, groups, found = GPU_CASES[name]
    run_shared(case, groups, "cuda", found)


@pytest.mark.gpu
def test_launches_repeat_bit_for_bit_on_a_gpu():
    """Workers race; who comes last differs from launch to launch."""
    case, groups, _ = GPU_CASES["d128"]
    batch = make_shared(case, groups, "cuda")
    attn = make_attention(case, "cuda", shared_prefixes="always")
    plan_batch(attn, batch)
    first = attn.run(batch.q, batch.kv_cache)[: batch.num_tokens]
    for _ in range(50):
        again = attn.run(batch.q, batch.kv_cache)[: batch.num_tokens]
        assert torch.equal(first, again)
    assert not attn._buffers.shared.row_arrivals.any()


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [1, 4])
def test_a_graph_is_replayed_with_other_groups(drafts):
    """Captured without a group; then groups, others and none, ragged and padded."""
    reqs, pages = 24, 170
    case = Case(((1, 0),), 32, 8, 128, dtype=BF16, decode_query_len=drafts)
    attn = make_attention(
        case, "cuda", max_num_reqs=reqs, max_num_tokens=reqs * drafts, shared_prefixes="always"
    )
    ints = {"dtype": torch.int32, "device": "cuda"}
    qsl = torch.arange(reqs + 1, **ints)
    lens = torch.ones(reqs, **ints)
    table = torch.zeros((reqs, pages), **ints)
    q = torch.zeros((reqs * drafts, 32, 128), dtype=BF16, device="cuda")
    out = torch.zeros_like(q)
    cache = torch.zeros((reqs * pages + 8, 64, 8, 256), dtype=BF16, device="cuda")
    cache = cache.permute(0, 2, 1, 3)

    def plan():
        attn.plan(qsl, lens, table, num_tokens=reqs * drafts, max_query_len=drafts)

    plan()
    attn.run(q, cache, out=out, return_lse=True)
    torch.cuda.synchronize()
    plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan()  # detection and plan inside the graph too
        _, lse = attn.run(q, cache, out=out, return_lse=True)
    rng = random.Random(drafts)
    rounds = [
        (24, [(tuple(range(24)), 120)]),
        (24, []),
        (17, [((0, 4, 8), 100), ((1, 2, 3, 16), 110), ((5, 15), 90)]),
        (3, [((0, 2), 128)]),
        (24, FOUR_GROUPS),
    ]
    for seed, (count, groups) in enumerate(rounds):
        requests = tuple((rng.randint(1, drafts), rng.randint(8200, 10_000)) for _ in range(count))
        other = dataclasses.replace(case, requests=requests, pad_requests=reqs - count)
        batch = make_shared(other, groups, "cuda", seed)
        n, width = batch.num_tokens, batch.block_table.shape[1]
        cache.fill_(float("nan"))
        cache[: len(batch.kv_cache)] = batch.kv_cache
        qsl.copy_(batch.query_start_loc)
        lens.copy_(batch.seq_lens)
        table.fill_(NOWHERE)
        table[:, :width] = batch.block_table
        q.fill_(float("nan"))
        q[:n] = batch.q[:n]
        out.fill_(7.0)
        poison_shared(attn)
        graph.replay()
        torch.cuda.synchronize()
        assert attn._buffers.shared.shared_header[1].item() == len(groups)
        check(batch, out, lse)
        assert (out[n:] == 7.0).all()
        assert not attn._buffers.arrivals.any()
        assert not attn._buffers.shared.row_arrivals.any()
