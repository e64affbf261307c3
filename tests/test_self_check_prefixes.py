"""The start-up check where decodes may share pages: a group is formed, and its results are held."""

import itertools

import pytest

pytest.importorskip("vllm")

import torch
from test_start_up import _fresh, checks, make_builder, make_cache, make_layer, pytestmark

from tilewise import attention, launches
from tilewise.errors import SelfCheckFailed
from tilewise.integration import self_check_groups, self_check_inputs
from tilewise.prefix_rule import plan_shared

PAGE = 16
# Fixture and marks of that module are in force here too.
__all__ = ["_fresh", "pytestmark"]


@pytest.fixture(autouse=True)
def _shared(monkeypatch):
    monkeypatch.setenv("TILEWISE_SHARED_PREFIXES", "1")


def groups_seen(monkeypatch) -> list[int]:
    """How many groups each plan of a start-up found, by the rule, as they are made."""
    seen: list[int] = []
    original = attention.PagedAttention.plan

    def plan(self, query_start_loc, seq_lens, block_table, **bounds):
        starts = query_start_loc.tolist()
        query_lens = [b - a for a, b in itertools.pairwise(starts)]
        if self.config.prefixes is not None:
            rows = block_table.tolist()
            found = plan_shared(query_lens, seq_lens.tolist(), rows, self.config)
            seen.append(len(found.groups))
        return original(self, query_start_loc, seq_lens, block_table, **bounds)

    monkeypatch.setattr(attention.PagedAttention, "plan", plan)
    return seen


@pytest.mark.parametrize(
    ("page", "pages", "dtype", "features"),
    [
        (PAGE, 7, torch.float16, {}),
        (64, 3, torch.bfloat16, {"sinks": torch.tensor([2.0, -1.0, 0.5, 3.0])}),
        (48, 2, torch.float32, {"logits_soft_cap": 2.0}),
        # Two requests have as many query tiles as the heads of one.
        (PAGE, 7, torch.float16, {"num_heads": 20, "num_kv_heads": 1}),
    ],
)
def test_a_group_is_formed_and_right(device, monkeypatch, page, pages, dtype, features):
    if "sinks" in features:
        features = {"sinks": features["sinks"].to(device)}
    seen = groups_seen(monkeypatch)
    layer = make_layer(device, **features)
    builder = make_builder(device, layer, page=page, dtype=dtype)
    assert builder.attn.config.prefixes is not None
    heads = features.get("num_kv_heads", 2)
    cache = make_cache(device, pages=pages, heads=heads, page=page, dtype=dtype)
    before = cache.clone()
    layer.bind_kv_cache(cache)
    assert 1 in seen
    assert checks() == (1, 0)
    assert torch.equal(cache, before)


def test_without_room_for_a_group_the_rest_is_checked(device, monkeypatch):
    seen = groups_seen(monkeypatch)
    layer = make_layer(device)
    make_builder(device, layer, reqs=1)
    layer.bind_kv_cache(make_cache(device))
    assert seen
    assert not any(seen)
    assert checks() == (1, 0)


@pytest.mark.parametrize("spoil", ["zeros", "one_member", "even_columns"])
def test_a_broken_kernel_stops_the_server(device, monkeypatch, spoil):
    """As it was where ptxas read the even columns of shared values from a wrong place."""
    original = launches.prefix_decode_attention

    def call(out, *args, **kwargs):
        original(out, *args, **kwargs)
        shared_header = args[9]
        if not shared_header[1].item():
            return  # no group: what is told apart here is the shared part
        if spoil == "zeros":
            out.zero_()
        elif spoil == "one_member":
            out[1] += 0.2
        else:
            out[:, :, ::2] *= 0.8

    monkeypatch.setattr(launches, "prefix_decode_attention", call)
    layer = make_layer(device)
    make_builder(device, layer)
    with pytest.raises(SelfCheckFailed, match="the prefix_decode kernel is wrong"):
        layer.bind_kv_cache(make_cache(device))
    assert checks() == (0, 1)


def test_places_are_those_of_the_table(device):
    layer = make_layer(device)
    builder = make_builder(device, layer)
    cache = make_cache(device)
    sequence = self_check_inputs.make_sequence(layer.impl, layer, builder.attn, cache)
    grouped, places = self_check_groups.group_of(sequence, builder.attn)
    pages = sequence.block_table[0].tolist()
    for i, page in enumerate(grouped.block_table[0].tolist()):
        first = places[i * PAGE].item()
        assert pages[first // PAGE] == page
        assert places[i * PAGE : (i + 1) * PAGE].tolist() == list(range(first, first + PAGE))
    (batch,) = grouped.batches
    assert max(length for _, length in batch) <= len(places)
    # The tail is the last page, of which only some rows are written.
    assert places[batch[0][1] - 1].item() == len(sequence.key) - 1
