"""Decode context parallelism without processes: each rank in turn, against attention on one rank.

A cache is dealt out as vLLM deals it. Every rank then runs twice: once to leave its part where the
others find it, and once more with vLLM's own merging of all parts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.ops.dcp import correct_attn_out, cp_lse_ag_out_rs

from tilewise.attention import PagedAttention
from tilewise.errors import UnsupportedConfig, UnsupportedFeature
from tilewise.integration import context_parallel
from tilewise.integration.context_parallel import Group, ShardedAttention, Shards
from tilewise.integration.impl import TilewiseImpl
from tilewise.integration.metadata import TilewiseMetadata
from tilewise.kernels.shards import shard_lengths

pytestmark = [
    pytest.mark.vllm,
    # numpy, in the interpreter: what keys after the query give before they are masked.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]

PAGE, NOWHERE = 16, 2_147_480_000


@pytest.fixture(scope="module", autouse=True)
def _interpreted(device):
    if device.type == "cpu":
        from tilewise_cpu_platform import triton_shims

        triton_shims.install()


# -- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "interleave"), [(2, 1), (2, 16), (4, 8), (3, 1)])
@pytest.mark.parametrize("with_new", [True, False])
def test_every_key_is_counted_on_the_rank_that_holds_it(device, count, interleave, with_new):
    new = [1, 0, 3, 20, 1, 1, 5]
    seq_lens = [1, 0, 3, 130, 33, 64, 7]
    starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32, device=device)
    for rank in range(count):
        lengths = torch.full((len(new),), -1, dtype=torch.int32, device=device)
        shard_lengths(
            lengths, starts, torch.tensor(seq_lens, dtype=torch.int32, device=device),
            count=count, rank=rank, interleave=interleave, with_new=with_new,
        )  # fmt: skip
        keys = seq_lens if with_new else [s - n for s, n in zip(seq_lens, new, strict=True)]
        expected = [sum(p // interleave % count == rank for p in range(n)) for n in keys]
        assert lengths.tolist() == expected


def test_rows_of_padding_have_no_keys(device):
    """A dummy request may have more queries than keys."""
    lengths = torch.full((2,), -1, dtype=torch.int32, device=device)
    starts = torch.tensor([0, 4, 4], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([1, 0], dtype=torch.int32, device=device)
    shard_lengths(lengths, starts, seq_lens, count=2, rank=0, interleave=1, with_new=False)
    assert lengths.tolist() == [0, 0]


# -- a batch on several ranks ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One batch: ``requests`` are (new tokens, tokens before them)."""

    requests: tuple[tuple[int, int], ...]
    count: int = 2
    interleave: int = 1
    heads: int = 2  # of a rank
    size: int = 64
    dtype: torch.dtype = torch.float32
    sinks: bool = False
    soft_cap: float = 0.0
    kv_cache_dtype: str = "auto"
    causal: bool = True
    pad_tokens: int = 0
    pad_requests: int = 0
    features: dict = field(default_factory=dict, hash=False)

    @property
    def tokens(self) -> int:
        return sum(n for n, _ in self.requests)


class Parts:
    """What every rank leaves for the others."""

    def __init__(self, queries: list[torch.Tensor], num_tokens: int) -> None:
        self.queries, self.num_tokens = queries, num_tokens
        self.parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


class FakeGroup:
    """One rank's view of a group, as far as vLLM's merging asks for it."""

    def __init__(self, parts: Parts, rank: int) -> None:
        self.all, self.rank_in_group = parts, rank
        self.world_size = len(parts.queries)
        self.calls = 0

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self.calls += 1
        if x.dim() == 3:
            assert dim == 1
            assert x.is_contiguous()
            mine = self.all.queries[self.rank_in_group]
            assert torch.equal(x.nan_to_num(), mine[: x.shape[0]].nan_to_num())
            return torch.cat([q[: x.shape[0]] for q in self.all.queries], 1)
        # Rows of padding hold anything.
        left, rows = self.all.parts[self.rank_in_group][1], self.all.num_tokens
        assert torch.equal(x[:rows].nan_to_num(), left[:rows].nan_to_num())
        return torch.cat([self.all.parts[r][1] for r in range(self.world_size)], dim)

    def reduce_scatter(self, out: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 1
        lses = torch.stack([self.all.parts[r][1] for r in range(self.world_size)])
        total = out.clone()
        for rank in set(range(self.world_size)) - {self.rank_in_group}:
            total += correct_attn_out(self.all.parts[rank][0].clone(), lses, rank, None)[0]
        return total.chunk(self.world_size, 1)[self.rank_in_group].contiguous()

    def leave(self, out, lse, group, return_lse):
        """In place of a merge: the rank's part is all there is so far."""
        assert group is self
        assert return_lse
        self.all.parts[self.rank_in_group] = out.clone(), lse.clone()
        return out.chunk(self.world_size, 1)[self.rank_in_group], lse.chunk(self.world_size, 1)[0]


def deal(case: Case, rank: int, starts: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Block table, and the slot of every token in request order; -1 where others hold it."""
    span = PAGE * case.count
    widths = [-(-(n + c) // span) for n, c in case.requests]
    order = torch.randperm(sum(widths) + 2, generator=torch.Generator().manual_seed(5)).tolist()
    table = torch.full((len(widths) + case.pad_requests, max(widths) + 1), NOWHERE)
    slots = []
    for row, (new, context) in enumerate(case.requests):
        pages = [order.pop() for _ in range(widths[row])]
        table[row, : len(pages)] = torch.tensor(pages)
        for place in range(new + context):
            turn, within = divmod(place % span // case.interleave, case.count)
            local = turn * case.interleave + place % case.interleave
            slots.append(pages[place // span] * PAGE + local if within == rank else -1)
    return table.int(), slots


def reference(case: Case, q, keys, values, sinks) -> torch.Tensor:
    """All heads of all ranks with all keys, fp32; one request after another."""
    out = torch.zeros((case.tokens, *q.shape[1:]), dtype=torch.float32)
    row = first = 0
    for new, context in case.requests:
        k, v = (x[first : first + new + context, 0].float().cpu() for x in (keys, values))
        s = torch.einsum("qhd,kd->hqk", q[row : row + new].float().cpu(), k) * case.size**-0.5
        if case.soft_cap:
            s = case.soft_cap * torch.tanh(s / case.soft_cap)
        if case.causal:
            hidden = torch.arange(new + context) > context + torch.arange(new)[:, None]
            s = s.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            s = torch.cat([s, sinks.float().cpu()[:, None, None].expand(-1, new, 1)], -1)
        p = torch.softmax(s, -1)[..., : new + context]
        out[row : row + new] = torch.einsum("hqk,kd->qhd", p, v)
        row, first = row + new, first + new + context
    return out


def run_ranks(case: Case, device, has_context: bool = True, spoil=None):
    """The output of every rank joined along the heads, what it should be, and the groups."""
    gen = torch.Generator().manual_seed(0)
    all_heads, tokens = case.count * case.heads, case.tokens
    rows = tokens + case.pad_tokens

    def draw(*shape):
        return torch.randn(shape, generator=gen).to(device=device, dtype=case.dtype)

    q = draw(rows, all_heads, case.size) * 2
    q[tokens:] = float("nan")
    total = sum(n + c for n, c in case.requests)
    keys, values = draw(total, 1, case.size), draw(total, 1, case.size)
    sinks = torch.randn(all_heads, generator=gen).to(device) + 1 if case.sinks else None
    starts = [0, *itertools.accumulate(n for n, _ in case.requests)]
    ends = list(itertools.accumulate(n + c for n, c in case.requests))
    newest = [i for e, (n, _) in zip(ends, case.requests, strict=True) for i in range(e - n, e)]
    query_start_loc = torch.tensor(
        starts + [starts[-1]] * case.pad_requests, dtype=torch.int32, device=device
    )
    seq_lens = torch.tensor(
        [n + c for n, c in case.requests] + [0] * case.pad_requests,
        dtype=torch.int32, device=device,
    )  # fmt: skip
    layer = SimpleNamespace(
        _k_scale=torch.tensor(0.05, device=device), _v_scale=torch.tensor(0.03, device=device)
    )
    queries = [q[:, r * case.heads : (r + 1) * case.heads] for r in range(case.count)]
    parts = Parts(queries, tokens)

    def run(rank: int, merge) -> tuple[torch.Tensor, FakeGroup]:
        own = slice(rank * case.heads, (rank + 1) * case.heads)
        impl = TilewiseImpl(
            case.heads, case.size, case.size**-0.5, 1, logits_soft_cap=case.soft_cap,
            sinks=None if sinks is None else sinks[own], kv_cache_dtype=case.kv_cache_dtype,
        )  # fmt: skip
        table, slots = deal(case, rank, starts)
        fp8 = impl.kv_dtype is not None
        cache = torch.full((int(max(table[table < NOWHERE])) + 3, PAGE, 1, 2 * case.size), 255)
        cache = cache.to(device=device, dtype=torch.uint8 if fp8 else case.dtype).transpose(1, 2)
        cache.fill_(255 if fp8 else float("nan"))
        impl.do_kv_cache_update(
            layer, keys, values, cache, torch.tensor(slots, dtype=torch.int64, device=device)
        )
        group = FakeGroup(parts, rank)
        attn = PagedAttention(
            all_heads, 1, case.size, page_size=PAGE, dtype=case.dtype, kv_dtype=impl.kv_dtype,
            max_num_reqs=len(case.requests) + 2, max_num_tokens=rows + 3, device=device,
        )  # fmt: skip
        combine = group.leave if merge is None else merge
        shards = Shards(case.count, rank, case.interleave)
        sharded = ShardedAttention(shards, Group(group, combine), attn)
        if spoil is not None:
            spoil(sharded, rank)
        step = sharded.plan(
            query_start_loc, seq_lens, table.to(device), num_tokens=rows, causal=case.causal,
            max_query_len=max(n for n, _ in case.requests), has_context=has_context,
        )  # fmt: skip
        metadata = TilewiseMetadata(
            rows, seq_lens.shape[0], max(n for n, _ in case.requests), int(seq_lens.max()),
            query_start_loc, seq_lens, table, torch.tensor(slots), attn, step.plan, sharded=step,
        )  # fmt: skip
        new = [*newest, *[0] * case.pad_tokens]
        output = torch.full((rows + 1, case.heads, case.size), float("nan")).to(q)
        # Rows beyond the plan, as vLLM's buffers have them.
        query = torch.cat([q[:, own], q[:1, own]])
        done = impl.forward(layer, query, keys[new], values[new], cache, metadata, output)
        assert done is output
        assert output[rows:].isnan().all()
        return output[:tokens], group

    for rank in range(case.count):
        run(rank, None)
    outputs, groups = zip(*(run(rank, cp_lse_ag_out_rs) for rank in range(case.count)), strict=True)
    return torch.cat(outputs, 1).float().cpu(), reference(case, q, keys, values, sinks), groups


DECODES = ((1, 0), (1, 1), (1, 2), (1, 40), (1, 95))
MIXED = ((1, 0), (1, 63), (3, 1), (3, 70), (16, 5), (20, 0), (20, 1), (33, 47))
CASES = {
    "decodes": Case(DECODES),
    "decodes_interleaved": Case(DECODES, interleave=16),
    "decodes_of_four_ranks": Case(DECODES, count=4, interleave=4),
    "mixed": Case(MIXED),
    "mixed_interleaved": Case(MIXED, interleave=8, dtype=torch.float16),
    "mixed_of_four_ranks": Case(MIXED[2:4], count=4, interleave=2, heads=3),
    "mixed_padded": Case(MIXED[:4], pad_tokens=3, pad_requests=2),
    "decodes_padded": Case(DECODES, pad_tokens=2, pad_requests=2),
    "new_prefills": Case(((20, 0), (5, 0), (1, 0))),
    "bf16": Case(MIXED[2:], dtype=torch.bfloat16),
    "head_size_80": Case(MIXED[1:6], size=80),
    "head_size_72_decodes": Case(DECODES, size=72, dtype=torch.float16),
    "sinks": Case(MIXED, sinks=True),
    "sinks_decodes": Case(DECODES, sinks=True, interleave=16),
    "soft_cap": Case(MIXED[1:5], soft_cap=3.0),
    "not_causal": Case(((5, 40), (20, 3)), causal=False),
}


def bound(case: Case) -> float:
    """Of the largest error: parts are rounded once a rank, and once more when merged."""
    return 8 * max(torch.finfo(case.dtype).eps, 2.0**-20)


# Ten seconds each in the interpreter, where "mixed" and the decodes have the same to say.
LONG = ("mixed_interleaved", "mixed_of_four_ranks", "bf16", "sinks")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in LONG else [])
        for name, case in CASES.items()
    ],
)
def test_ranks_together_see_every_key_once(device, case):
    out, expected, _ = run_ranks(case, device)
    assert not out.isnan().any()
    torch.testing.assert_close(out, expected, atol=bound(case), rtol=bound(case))


@pytest.mark.parametrize("requests", [DECODES, MIXED[1:5]], ids=["decodes", "mixed"])
def test_fp8_caches_are_read_with_their_scales(device, requests):
    """Beside the fp8 of the context, which is most of the error, there is little."""
    case = Case(requests, dtype=torch.bfloat16, kv_cache_dtype="fp8")
    out, expected, _ = run_ranks(case, device)
    assert not out.isnan().any()
    assert (out - expected).square().mean().sqrt() < 0.1 * expected.square().mean().sqrt()


def test_without_a_context_nothing_is_exchanged(device):
    case = CASES["new_prefills"]
    out, expected, groups = run_ranks(case, device, has_context=False)
    torch.testing.assert_close(out, expected, atol=bound(case), rtol=bound(case))
    assert [group.calls for group in groups] == [0] * case.count


def test_a_promise_of_no_context_does_not_hold_back_single_queries(device):
    """Their own key is in the shards, so ranks exchange in any case."""
    case = Case(((1, 0), (1, 0)))
    out, expected, groups = run_ranks(case, device, has_context=False)
    torch.testing.assert_close(out, expected, atol=bound(case), rtol=bound(case))
    assert all(group.calls for group in groups)


def forget_a_rank(sharded: ShardedAttention, rank: int) -> None:
    if rank == 1:
        sharded._dealt = Shards(10**6, 10**6 - 1)  # no key lies there


def deal_otherwise(sharded: ShardedAttention, rank: int) -> None:
    sharded._dealt = Shards(2, 1 - rank, 1)


@pytest.mark.parametrize("spoil", [forget_a_rank, deal_otherwise])
def test_wrong_shards_are_noticed(device, spoil):
    """So the comparison can fail."""
    case = CASES["decodes"]
    out, expected, _ = run_ranks(case, device, spoil=spoil)
    # NaN where a key was read that nobody wrote.
    assert not (out - expected).abs().max() < 100 * bound(case)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "text"),
    [
        ({"sliding_window": 8}, "a sliding window"),
        ({"alibi_slopes": [0.5, 0.25]}, "ALiBi slopes"),
        ({"kv_sharing_target_layer_name": "layer.0"}, "a KV cache shared between layers"),
        ({"attn_type": "encoder_decoder"}, "cross attention"),
    ],
)
def test_what_needs_places_of_keys_is_refused(monkeypatch, feature, text):
    TilewiseImpl(2, 64, 0.125, 1, **feature)
    monkeypatch.setattr(
        "vllm.distributed.parallel_state.get_dcp_world_size_and_rank", lambda *_: (2, 0)
    )
    with pytest.raises(UnsupportedFeature, match=f"{text} with decode context parallelism"):
        TilewiseImpl(2, 64, 0.125, 1, **feature)
    impl = TilewiseImpl(2, 64, 0.125, 1)
    # What vLLM asks of every layer before it starts.
    assert impl.need_to_return_lse_for_decode
    assert impl.supports_mtp_with_cp_non_trivial_interleave_size
    assert TilewiseImpl(2, 64, 0.125, 1, attn_type="encoder_only", sliding_window=4).is_encoder


def test_several_kv_heads_a_rank_are_refused(device):
    attn = PagedAttention(8, 2, 64, page_size=PAGE, dtype=torch.float32, max_num_reqs=1,
                          max_num_tokens=1, device=device)  # fmt: skip
    with pytest.raises(UnsupportedConfig, match="2 KV heads a rank; accepted: 1"):
        ShardedAttention(Shards(2, 0), SimpleNamespace(), attn)


def test_three_ranks_need_the_other_exchange(monkeypatch):
    monkeypatch.setattr(
        "vllm.distributed.get_dcp_group", lambda: SimpleNamespace(device_communicator=None)
    )
    three = Shards(3, 0)
    with pytest.raises(UnsupportedConfig, match="size 3; accepted: a power of two"):
        context_parallel.join_group(three, SimpleNamespace(dcp_comm_backend="ag_rs"))
    context_parallel.join_group(three, SimpleNamespace(dcp_comm_backend="a2a"))


def test_a_group_whose_exchange_would_not_happen_is_refused(monkeypatch):
    """Without its NCCL communicator vLLM's reduce-scatter returns memory as it finds it."""
    communicator = SimpleNamespace(pynccl_comm=SimpleNamespace(disabled=True))
    group = SimpleNamespace(device_communicator=communicator)
    monkeypatch.setattr("vllm.distributed.get_dcp_group", lambda: group)
    two, reduce_scatter = Shards(2, 0), SimpleNamespace(dcp_comm_backend="ag_rs")
    with pytest.raises(UnsupportedConfig, match=r"has not loaded NCCL .*VLLM_NCCL_SO_PATH"):
        context_parallel.join_group(two, reduce_scatter)
    context_parallel.join_group(two, SimpleNamespace(dcp_comm_backend="a2a"))
    communicator.pynccl_comm.disabled = False
    context_parallel.join_group(two, reduce_scatter)
    communicator.pynccl_comm = None
    context_parallel.join_group(two, reduce_scatter)


def test_caches_that_every_rank_holds_whole_are_not_sharded(monkeypatch):
    monkeypatch.setattr(
        "vllm.distributed.parallel_state.get_dcp_world_size_and_rank", lambda *_: (2, 1)
    )
    parallel = SimpleNamespace(cp_kv_cache_interleave_size=4)
    for spec, expected in (
        (SimpleNamespace(dcp_sharded=True), Shards(2, 1, 4)),
        (SimpleNamespace(dcp_sharded=False), None),
        (SimpleNamespace(), None),
    ):
        assert context_parallel.group_shards(spec, parallel) == expected
