"""Builders and the start of layers whose keys are shared by two ranks, one of which is played."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from test_builder import HEADS, PAGE, make_batch
from test_builder import make_builder as make_plain_builder
from test_start_up import checks, make_builder, make_cache, make_layer

from tilewise import counters
from tilewise.errors import SelfCheckFailed
from tilewise.integration import builder as builder_module
from tilewise.integration import context_parallel, start_up
from tilewise.integration.context_parallel import Alone

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

INTERLEAVE = 2


@pytest.fixture(autouse=True)
def second_rank(monkeypatch):
    """This process is the second of two ranks; the other one never answers."""
    monkeypatch.setattr(
        "vllm.distributed.parallel_state.get_dcp_world_size_and_rank",
        lambda enabled=True: (2, 1) if enabled else (1, 0),
    )
    monkeypatch.setattr(builder_module, "join_group", lambda shards, parallel: Alone(shards))
    monkeypatch.setattr("test_builder.KV_HEADS", 1)
    original = builder_module.group_shards

    def group_shards(spec, parallel):
        parallel.cp_kv_cache_interleave_size = INTERLEAVE
        return original(spec, parallel)

    monkeypatch.setattr(builder_module, "group_shards", group_shards)
    monkeypatch.setattr(start_up, "_checked", set())
    monkeypatch.setattr(start_up, "_compiled", set())
    counters.reset()


@pytest.fixture
def cpu(device):
    if device.type != "cpu":
        pytest.skip("runs on CPU tensors, in the interpreter")


def lengths(builder, metadata) -> list[int]:
    return builder.sharded._lengths[: metadata.num_reqs].tolist()


# -- plans ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cpu")
def test_single_queries_are_planned_over_all_keys_of_this_rank():
    builder = make_plain_builder()
    metadata = builder.build(0, make_batch([1, 1, 1], context=6))
    assert metadata.sharded.new is None
    assert metadata.sharded.plan is metadata.plan
    # Of 7 keys, the second rank has 2, 3 and 6.
    assert lengths(builder, metadata) == [3, 3, 3]
    assert metadata.plan.causal is False
    assert builder.attn.geometry.num_q_heads == 2 * HEADS
    assert builder.sharded.new.geometry.num_q_heads == HEADS


@pytest.mark.usefixtures("cpu")
def test_longer_queries_are_planned_over_the_context():
    builder = make_plain_builder()
    flags = torch.tensor([1, 0], dtype=torch.int32)
    metadata = builder.build(0, make_batch([1, 20], context=6, causal=flags))
    # Of 6 keys before the new ones, the second rank has 2 and 3.
    assert lengths(builder, metadata) == [2, 2]
    assert metadata.sharded.new.causal is flags
    assert metadata.sharded.new.block_table is None
    assert metadata.sharded.has_context


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    ("context", "bounds", "expected"),
    [(0, [20, 3], False), (6, [26, 9], True), (0, [20, 4], True), (0, None, True)],
)
def test_the_host_says_whether_there_is_a_context(context, bounds, expected):
    batch = make_batch([20, 3], context=context)
    if bounds is not None:
        batch.seq_lens_cpu_upper_bound = torch.tensor(bounds, dtype=torch.int32)
    assert make_plain_builder().build(0, batch).sharded.has_context is expected


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("draft_tokens", [None, 2])
def test_a_graph_holds_what_its_replays_need(mode, draft_tokens):
    """The context's exchange is captured though dummies have none; the same plans are refreshed.

    A replay may have fewer tokens than the graph, and a dummy any bound of its queries.
    """
    builder = make_plain_builder(mode=mode, draft_tokens=draft_tokens)
    query_len = 1 + (draft_tokens or 0)
    for reqs in (1, 2, 8):
        tokens = [query_len] * reqs
        dummy = make_batch(tokens, context=0)
        dummy.seq_lens_cpu_upper_bound = dummy.seq_lens.clone()
        dummy.max_query_len = sum(tokens)
        captured = builder.build_for_cudagraph_capture(dummy).sharded
        assert captured.has_context
        assert (captured.new is None) == (mode != "FULL" and draft_tokens is None)
        replayed = [tokens, tokens[:1]]
        if mode == "FULL":
            replayed.append([sum(tokens)])  # one prefill of as many tokens
        for query_lens in replayed:
            step = builder.build(0, make_batch(query_lens, context=9)).sharded
            assert (step.new is None) == (captured.new is None)


@pytest.mark.usefixtures("cpu")
def test_dummies_may_have_as_many_keys_as_all_ranks_hold():
    batch = make_batch([1], context=8)
    batch.seq_lens.fill_(10**6)
    builder = make_plain_builder(mode="FULL")
    builder.build_for_cudagraph_capture(batch)
    assert batch.seq_lens.tolist() == [batch.block_table_tensor.shape[1] * PAGE * 2]


def workspace() -> int:
    return sum(n for name, _, n in counters.totals() if name == "workspace_bytes")


@pytest.mark.usefixtures("cpu")
def test_workspace_of_both_parts_is_counted():
    builder = make_plain_builder()
    held = builder.attn.workspace_bytes + builder.sharded.workspace_bytes
    assert builder.sharded.workspace_bytes > builder.sharded.new.workspace_bytes
    assert workspace() == held
    del builder
    assert workspace() == 0


@pytest.mark.usefixtures("cpu")
def test_groups_that_every_rank_holds_whole_are_planned_as_ever(monkeypatch):
    """A replicated draft model beside a sharded target."""
    monkeypatch.setattr(builder_module, "group_shards", lambda *_: None)
    builder = make_plain_builder()
    assert builder.attn.geometry.num_q_heads == HEADS
    assert builder.build(0, make_batch([1])).sharded is None


# -- the self-check -------------------------------------------------------------------------------

FEATURES = {
    "plain": {},
    "sinks": {"sinks": torch.tensor([2.0, -1.0, 0.5, 3.0])},
    "soft_cap": {"logits_soft_cap": 2.0},
    "fp8": {"kv_cache_dtype": "fp8", "k_scale": 0.05, "v_scale": 0.03},
    "size_40": {"head_size": 40},
}


def start(device, dtype=torch.float16, **features):
    if "sinks" in features:
        features["sinks"] = features["sinks"].to(device)
    layer = make_layer(device, num_kv_heads=1, **features)
    make_builder(device, layer, dtype=dtype)
    fp8 = layer.impl.kv_dtype is not None
    cache = make_cache(
        device, heads=1, size=layer.impl.head_size, dtype=torch.uint8 if fp8 else dtype
    )
    before = cache.clone()
    try:
        layer.bind_kv_cache(cache)
    finally:
        assert torch.equal(cache, before)
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FEATURES)
def test_layers_are_checked_on_a_rank_that_holds_all_keys(device, name, dtype):
    start(device, dtype, **FEATURES[name])
    assert checks() == (1, 0)


def drop_context(output, context, context_lse, new, new_lse):
    output.copy_(new)


def drop_new(output, context, context_lse, new, new_lse):
    output.copy_(context)


@pytest.mark.parametrize("merge", [drop_context, drop_new])
def test_a_wrong_merge_stops_the_server(device, monkeypatch, merge):
    monkeypatch.setattr(context_parallel, "_merge", merge)
    with pytest.raises(SelfCheckFailed, match="kernel is wrong"):
        start(device)
    assert checks() == (0, 1)


def test_sinks_that_count_on_no_rank_stop_the_server(device, monkeypatch):
    monkeypatch.setattr(context_parallel.ShardedAttention, "_own_sinks", lambda *_: None)
    with pytest.raises(SelfCheckFailed, match="decode kernel is wrong"):
        start(device, **FEATURES["sinks"])
