"""The plan kernel and its Python twin: equal, and right about every key of every request."""

import dataclasses

import pytest
import torch
from cases import NOWHERE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewise import plan_rule, policy
from tilewise.attention import PagedAttention
from tilewise.errors import UnsupportedConfig
from tilewise.pieces import Pieces

H200 = policy.Device(arch=90, num_sms=132, shared_memory=227 * 1024)
LLAMA = policy.Geometry(32, 8, 128, 64, 2)

requests = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 20), st.integers(0, 3000)),
        st.one_of(st.just(0), st.integers(0, 9000)),
    ),
    max_size=40,
)  # fmt: skip
geometries = st.builds(
    lambda group, hkv, d, page: policy.Geometry(group * hkv, hkv, d, page, 2),
    st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 48, 128]), st.sampled_from([1, 2, 8]),
    st.sampled_from([64, 80, 96, 128, 256]), st.sampled_from([16, 48, 64, 128, 528]),
)  # fmt: skip
A100, L40 = policy.Device(80, 108, 163 * 1024), policy.Device(89, 128, 99 * 1024)
devices = st.sampled_from([H200, policy.INTERPRETER, A100, L40])
windows = st.one_of(st.just(0), st.integers(1, 300), st.sampled_from([1024, 4096, 2**30]))


def lengths(batch):
    return [q for q, _ in batch], [q + c for q, c in batch]


@given(requests, geometries, devices, st.integers(1, 16), windows)
@settings(max_examples=300, deadline=None)
def test_every_key_tile_is_walked_exactly_once(batch, geometry, device, decode_query_len, window):
    """Workers' stretches cover all units in order; tiles cover every prefill token."""
    config = policy.choose(geometry, device, decode_query_len)
    config = dataclasses.replace(config, window=window)
    query_lens, seq_lens = lengths(batch)
    plan = plan_rule.plan_batch(query_lens, seq_lens, config)
    tiles, active, total = plan.header
    assert total == plan.cu_work[-1]
    assert 0 <= active <= config.num_workers
    assert (active > 0) == (total > 0)
    starts = [plan_rule.first_unit(w, total, active) for w in range(active)] + [total]
    assert len(plan.worker_record) == active
    for worker, record in enumerate(plan.worker_record):
        unit, unit_end, r, begin, end, _, query_len, seq_len = record
        assert (unit, unit_end) == (starts[worker], starts[worker + 1])
        assert plan.cu_work[r : r + 2] == (begin, end)
        assert begin <= unit < end
        assert (query_len, seq_len) == (query_lens[r], seq_lens[r])
        assert unit_end - unit in (total // active, total // active + 1)
        for unit in (starts[worker], starts[worker + 1] - 1):
            assert plan_rule.owner(unit, total, active) == worker
    covered = {
        (r, t)
        for r, first in zip(plan.tile_req, plan.tile_token, strict=True)
        for t in range(first, min(first + config.prefill_block_q, query_lens[r]))
    }
    wanted = {(r, t) for r, q in enumerate(query_lens) if q > 16 for t in range(q)}
    assert covered == wanted
    bound = plan_rule.max_prefill_tiles(sum(query_lens), len(batch), config.prefill_block_q)
    assert tiles == len(plan.tile_req) <= bound


@given(requests, st.integers(1, 16), windows)
@settings(max_examples=100, deadline=None)
def test_splits_follow_lengths_and_sms(batch, decode_query_len, window):
    """No item is cut finer than its key tiles; splits of all items add up to the pieces."""
    config = dataclasses.replace(policy.choose(LLAMA, H200, decode_query_len), window=window)
    query_lens, seq_lens = lengths(batch)
    plan = plan_rule.plan_batch(query_lens, seq_lens, config)
    pieces = 0
    for r, q in enumerate(query_lens):
        splits = plan_rule.kv_splits(plan, r, q, config)
        if not 0 < q <= policy.DECODE_MAX_QUERY_LEN:
            assert splits == []
            continue
        length = plan_rule.decode_units(q, seq_lens[r], config) // plan_rule.decode_items(q, config)
        assert all(1 <= s <= length for s in splits)
        pieces += sum(splits)
    items = sum(plan_rule.decode_items(q, config) for q in query_lens if 0 < q <= 16)
    assert pieces <= items + max(plan.header[1] - 1, 0)


@given(st.integers(1, 16), st.integers(0, 20_000), windows.filter(bool))
def test_units_of_a_window_cover_the_keys_that_are_seen(query_len, context, window):
    """From the tile of the first query's first key to that of the last key, and no more."""
    config = dataclasses.replace(policy.choose(LLAMA, H200), window=window)
    seq_len = query_len + context
    first_key = max(context - window + 1, 0)
    block_n = config.decode.block_n
    tiles = len({n // block_n for n in range(first_key, seq_len)})
    units = plan_rule.decode_units(query_len, seq_len, config)
    assert units == plan_rule.decode_items(query_len, config) * (tiles + config.item_overhead)
    assert units <= plan_rule.decode_units_bound(query_len, seq_len, config)


@pytest.mark.parametrize("plain", [False, True])
def test_workers_follow_the_work(plain):
    config = policy.choose(LLAMA, H200, plain=plain)

    def active(batch):
        return plan_rule.plan_batch([1] * len(batch), batch, config).header[1]

    assert active([1]) == 8  # one key tile a head
    assert active([131072]) >= 7 / 8 * plan_rule.most_workers(1, config)
    assert 8 < active([256]) < active([1024]) <= active([8192]) <= config.num_sms
    # Equal requests are cut at their own ends while that leaves few workers idle.
    assert active([4096] * 32) == 32 * 8
    assert active([8192] * 17) == config.num_workers


def test_equal_requests_are_cut_at_their_ends():
    config = policy.choose(LLAMA, H200)
    for n, keys in ((1, 1024), (1, 8192), (8, 4096), (32, 4096), (33, 4096)):
        plan = plan_rule.plan_batch([1] * n, [keys] * n, config)
        splits = {s for r in range(n) for s in plan_rule.kv_splits(plan, r, 1, config)}
        assert splits == {plan.header[1] // (8 * n)}


@pytest.mark.parametrize(("num_reqs", "each"), [(64, 2), (128, 4), (256, 8)])
def test_many_equal_requests_are_not_cut(plan_on, num_reqs, each):
    """Their items are shared out whole where that idles few workers, by the kernel as well."""
    config = policy.choose(LLAMA, H200)
    batch = [(1, 1000)] * num_reqs
    plan = plan_rule.plan_batch(*lengths(batch), config)
    assert plan.header[1] * each == 8 * num_reqs
    assert {s for r in range(num_reqs) for s in plan_rule.kv_splits(plan, r, 1, config)} == {1}
    assert plan_on(batch, config, num_reqs) == plan
    # One longer request, and whole items would not end where stretches do.
    batch[3] = (1, 2000)
    plan = plan_rule.plan_batch(*lengths(batch), config)
    assert plan.header[1] == config.num_workers
    assert plan_on(batch, config, num_reqs) == plan


def test_neighbouring_batches_cost_alike():
    """No cliff: one more request never makes any worker walk much more than its share."""
    config = policy.choose(LLAMA, H200)
    for n in range(1, 80):
        _, active, total = plan_rule.plan_batch([1] * n, [8192] * n, config).header
        most = plan_rule.most_workers(n, config)
        assert active >= 7 / 8 * most
        assert policy.cdiv(total, active) <= 8 / 7 * total / most + 1


def test_many_short_requests_do_not_fall_on_one_worker():
    """Starting an item costs time too: requests of a key each must spread like long ones."""
    config = policy.choose(LLAMA, H200)
    lens = [1] * 64 + [16000] * 32
    plan = plan_rule.plan_batch([1] * len(lens), lens, config)
    _, active, total = plan.header
    short_units = plan.cu_work[64]
    assert plan_rule.owner(short_units - 1, total, active) >= 4


@pytest.fixture(scope="module")
def plan_on(device):
    def run(batch, config, max_reqs=48):
        g = config.geometry
        query_lens, seq_lens = lengths(batch)
        attn = PagedAttention(
            g.num_q_heads, g.num_kv_heads, g.head_dim, page_size=g.page_size,
            dtype=torch.bfloat16, max_num_reqs=max_reqs, max_num_tokens=200_000, device=device,
            config=config, window=config.window or None,
            batch_invariant=config.pieces is not None,
        )  # fmt: skip
        for buffer in (
            attn._buffers.tile_req,
            attn._buffers.tile_token,
            attn._buffers.cu_work,
            attn._buffers.worker_record,
        ):
            buffer.fill_(NOWHERE)
        ints = {"dtype": torch.int32, "device": device}
        qsl = torch.tensor([sum(query_lens[:i]) for i in range(len(batch) + 1)], **ints)
        attn.plan(
            qsl, torch.tensor(seq_lens, **ints), torch.zeros((len(batch), 150), **ints),
            num_tokens=sum(query_lens), max_query_len=3000,
        )  # fmt: skip
        n, active = attn._buffers.header[0].item(), attn._buffers.header[1].item()
        assert not attn._buffers.worker_record[active:, :2].any(), (
            "idle workers must have no stretch"
        )
        return plan_rule.BatchPlan(
            header=tuple(attn._buffers.header[:3].tolist()),
            tile_req=tuple(attn._buffers.tile_req[:n].tolist()),
            tile_token=tuple(attn._buffers.tile_token[:n].tolist()),
            cu_work=tuple(attn._buffers.cu_work[: len(batch) + 1].tolist()),
            worker_record=tuple(map(tuple, attn._buffers.worker_record[:active].tolist())),
        )

    return run


@given(
    batch=requests.filter(len),
    geometry=geometries,
    decode_query_len=st.sampled_from([1, 5]),
    window=windows,
)
@settings(max_examples=40, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
def test_plan_kernel_equals_its_twin(plan_on, batch, geometry, decode_query_len, window):
    config = policy.choose(geometry, H200, decode_query_len)
    config = dataclasses.replace(config, window=window)
    assert plan_on(batch, config) == plan_rule.plan_batch(*lengths(batch), config)
    # A worker an SM where the batch is the Gluon kernel's, fewer beside a prefill.
    few = policy.HopperTiles(config.decode.block_n, 2)
    config = dataclasses.replace(config, hopper_decode=few, pdl=config.hopper_prefill is not None)
    assert plan_on(batch, config) == plan_rule.plan_batch(*lengths(batch), config)


def test_plan_kernel_equals_its_twin_at_lengths_near_the_end_of_int32(plan_on):
    """Of the rule for decodes beside a prefill, which counts keys twice."""
    config = policy.choose(LLAMA, H200)
    assert config.side_by_side
    batch = [(1000, 2**31 - 3000), (1, 900_000), (16, 5)]
    assert plan_on(batch, config) == plan_rule.plan_batch(*lengths(batch), config)


@pytest.mark.parametrize("batch", [[(20, -20)], [(300, -300), (17, -17)], [(300, -290), (1, 50)]])
def test_plan_kernel_equals_its_twin_where_keys_are_missing(plan_on, batch):
    """Dummy batches may have fewer keys than queries, or none and no decode beside."""
    config = policy.choose(LLAMA, H200)
    assert config.side_by_side
    assert plan_on(batch, config) == plan_rule.plan_batch(*lengths(batch), config)


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("batch", [[(1, 5000)] * 4, [(1, 5000)] * 40, [(1, 5000)] * 4 + [(99, 0)]])
def test_no_plan_has_more_workers_than_records(plan_on, batch, num_workers):
    """Whichever kernel a batch is for, and however few workers a caller's own choice has."""
    config = dataclasses.replace(policy.choose(LLAMA, H200), num_workers=num_workers)
    assert config.hopper_decode is not None
    planned = plan_on(batch, config)
    assert planned == plan_rule.plan_batch(*lengths(batch), config)
    assert planned.header[1] == len(planned.worker_record) <= num_workers
    assert planned.worker_record[-1][1] == planned.header[2]


@given(
    batch=requests.filter(len),
    geometry=geometries,
    window=windows,
    pieces=st.one_of(st.none(), st.builds(Pieces, st.integers(1, 9), st.integers(1, 70))),
)
@settings(max_examples=40, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
def test_plan_kernel_equals_its_twin_in_batch_invariant_mode(
    plan_on, batch, geometry, window, pieces
):
    """With the policy's pieces and any others."""
    config = dataclasses.replace(policy.choose(geometry, H200), window=window, pieces=pieces)
    config = policy.batch_invariant(config)
    assert plan_on(batch, config) == plan_rule.plan_batch(*lengths(batch), config)


@pytest.mark.parametrize("window", [1, 100, 1000])
def test_plan_kernel_equals_its_twin_at_every_left_edge(plan_on, window):
    """Windows that start at each key of a tile."""
    config = dataclasses.replace(policy.choose(LLAMA, H200), window=window)
    batch = [(1 + i % 16, window + i) for i in range(130)]
    assert plan_on(batch, config, 130) == plan_rule.plan_batch(*lengths(batch), config)


def test_plan_kernel_equals_its_twin_beyond_one_block_of_requests(plan_on):
    config = policy.choose(LLAMA, H200)
    batch = [(1 + i % 18, 37 * i % 4000) for i in range(2500)]
    assert plan_on(batch, config, 3000) == plan_rule.plan_batch(*lengths(batch), config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_q_heads": 10, "num_kv_heads": 4}, "num_q_heads=10"),
        ({"head_dim": 264}, "head_dim=264"),
        ({"head_dim": 20}, "head_dim=20"),
        ({"page_size": 8}, "page_size=8"),
        ({"page_size": 24}, "page_size=24"),
        ({"num_q_heads": 258, "num_kv_heads": 2}, "129"),
        ({"element_size": 1}, "element_size=1"),
    ],
)
def test_bad_geometry_is_named(change, named):
    with pytest.raises(UnsupportedConfig, match=named):
        dataclasses.replace(LLAMA, **change)


def test_bad_device_and_query_length_are_named():
    with pytest.raises(UnsupportedConfig, match=r"7\.5"):
        policy.choose(LLAMA, policy.Device(75, 40, 64 * 1024))
    with pytest.raises(UnsupportedConfig, match="decode_query_len=17"):
        policy.choose(LLAMA, H200, 17)


@given(geometries, devices, st.integers(1, 16))
@settings(max_examples=200, deadline=None)
def test_tiles_fit_the_device(geometry, device, decode_query_len):
    config = policy.choose(geometry, device, decode_query_len)
    for tiles in (config.prefill, config.decode):
        assert policy.shared_memory(tiles, geometry) <= device.shared_memory
        assert not tiles.use_tma or geometry.page_size % tiles.block_n == 0
        assert tiles.block_d >= geometry.head_dim
    assert config.prefill.block_m >= geometry.group_size
