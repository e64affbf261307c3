"""The Gluon decode for Hopper: compiled everywhere, run where there is such a GPU."""

import dataclasses

import pytest
import torch
from aot_quick import gluon_chunks
from cases import Case, check, make_attention, make_batch, plan_batch
from test_hopper import BF16, FP16, HOPPER, LLAMA, needs_hopper

from tilewise import attention, counters, plan_rule, policy

VARIANTS = [
    {"kernel": "decode"},
    {"kernel": "decode", "group_size": 8, "lse": True, "sinks": True, "window": 700},
    {"kernel": "decode", "group_size": 32, "page_size": 128, "dtype": "fp16"},
    {"kernel": "decode", "group_size": 16, "query_len": 4},
]


def check_budget(rows):
    for row in rows:
        assert row["shared_bytes"] <= 227 * 1024, row
        assert row["registers"] * row["threads"] <= 65536, row
        assert row["spill_bytes"] <= 64, row
        assert row["wgmma"] >= 8, row
        assert row["tma"] >= 6, row
        assert min(row["sass"]["UTMALDG"], row["sass"]["HGMMA"]) > 0, row
        loops = [loop for loop in row["loops"] if loop["MUFU.EX2"] > 30]
        assert loops, row
        for loop in loops:
            assert loop["LDL"] == loop["STL"] == 0, row


@pytest.mark.parametrize("old_triton", [False, True])
@pytest.mark.parametrize("variants", gluon_chunks(VARIANTS))
def test_variants_compile_without_spills_in_their_loops(variants, old_triton, compiled):
    check_budget(compiled("gluon", variants, old_triton))


RAGGED = ((1, 0), (1, 62), (1, 63), (1, 64), (1, 5000), (0, 0), (2, 700), (16, 90), (1, 129))
MQA = {"num_q_heads": 32, "num_kv_heads": 1, "head_dim": 128, "dtype": BF16}
GPU_CASES = [
    Case(((1, 0),), **LLAMA),
    Case(((1, 8191),), **LLAMA),
    Case(((1, 40000),), **LLAMA),
    Case(RAGGED, pad_requests=3, pad_tokens=5, **LLAMA),
    Case(RAGGED, layout="hnd", **(LLAMA | {"dtype": FP16})),
    Case(RAGGED, layout="cross_layer", page_size=128, **LLAMA),
    Case(RAGGED, page_size=192, sinks=2.0, **LLAMA),
    Case(RAGGED, window=64, **LLAMA),
    Case(RAGGED, window=1, **LLAMA),
    Case(RAGGED, window=700, sinks=1.0, **(LLAMA | {"num_q_heads": 64})),
    Case(((1, -7), (3, -1), (1, 500)), **LLAMA),
    Case(((4, 9000), (4, 33), (3, 700)), decode_query_len=4, **LLAMA),
    Case(((16, 9000), (9, 64)), decode_query_len=8, **LLAMA),
    Case(((5, 2000), (1, 0)), **(LLAMA | {"num_q_heads": 8})),
    Case(tuple((1, 37 * i * i) for i in range(30)), **MQA),
    Case(((8, 4000), (7, 120)), decode_query_len=8, **MQA),
    Case(((2, 4000), (1, 64)), **(MQA | {"num_q_heads": 64})),
    Case(((1, 3000), (40, 100), (1, 64), (300, 0)), **LLAMA),
    Case(RAGGED, softcap=5.0, **LLAMA),
    Case(RAGGED, softcap=50.0, window=700, sinks=1.0, **(LLAMA | {"num_q_heads": 64})),
]


def launches(kernel="hopper_decode"):
    return counters.snapshot().get(f"launches{{kernel={kernel}}}", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_matches_reference(case):
    needs_hopper()
    batch = make_batch(case, "cuda")
    attn = make_attention(case, "cuda")
    plan_batch(attn, batch)
    outs = []
    for _ in range(3):  # launches back to back: the arrivals must come back to zero
        before = launches()
        out, lse = attn.run(
            batch.q, batch.kv_cache, out=torch.full_like(batch.q, 7.0), return_lse=True,
            **batch.features,
        )  # fmt: skip
        assert launches() == before + 1
        check(batch, out, lse)
        assert (out[batch.num_tokens :] == 7.0).all()
        assert not attn._buffers.arrivals.any()
        poison_scratch_of_results(attn)
        outs.append(out[: batch.num_tokens])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def poison_scratch_of_results(attn):
    """NaN where partial results were; the plan stays."""
    for buffer in (attn._buffers.partial_acc, attn._buffers.partial_m, attn._buffers.partial_l):
        buffer.fill_(float("nan"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES[1::3], ids=str)
def test_the_plain_twin_agrees_on_the_same_plan(case):
    needs_hopper()
    batch = make_batch(case, "cuda")
    attn = make_attention(case, "cuda")
    plan = plan_batch(attn, batch)
    assert plan.decodes_few
    fast, fast_lse = attn.run(batch.q, batch.kv_cache, return_lse=True, **batch.features)
    before = launches()
    plain_plan = dataclasses.replace(plan, decodes_few=False)
    plain, plain_lse = attn.run(
        batch.q, batch.kv_cache, return_lse=True, plan=plain_plan, **batch.features
    )
    assert launches() == before
    check(batch, plain, plain_lse)
    rows = slice(0, batch.num_tokens)
    torch.testing.assert_close(fast[rows], plain[rows], rtol=2e-2, atol=4e-3)
    torch.testing.assert_close(fast_lse[rows], plain_lse[rows], rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [GPU_CASES[2], GPU_CASES[3], GPU_CASES[14]], ids=str)
def test_a_plan_for_more_programs_is_served_as_well(case):
    """A captured graph keeps its kernel, whatever kernel later plans are made for."""
    needs_hopper()
    batch = make_batch(case, "cuda")
    attn = make_attention(case, "cuda")
    config = attn.config
    attn.config = dataclasses.replace(config, hopper_decode=None)  # plans for the plain kernel
    plan = plan_batch(attn, batch)
    assert not plan.decodes_few
    assert int(attn._buffers.header[1]) > config.num_sms
    attn.config = config
    before = launches()
    out, lse = attn.run(
        batch.q, batch.kv_cache, return_lse=True,
        plan=dataclasses.replace(plan, decodes_few=True), **batch.features,
    )  # fmt: skip
    assert launches() == before + 1
    check(batch, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change", ["alibi", "odd rows", "many requests", "not causal", "batch invariant"]
)
def test_what_it_does_not_take_goes_to_the_plain_twin(change):
    needs_hopper()
    features = {"alibi": {"alibi": "linear"}}.get(change, {})
    if change == "not causal":
        features["causal"] = False
    requests = ((1, 200), (3, 40)) * (9 if change == "many requests" else 1)
    case = Case(requests, **LLAMA, **features)
    batch = make_batch(case, "cuda")
    if change == "odd rows":
        rows, heads, d = batch.q.shape
        wide = torch.full((rows, heads * d + 4), float("nan"), dtype=BF16, device="cuda")
        wide[:, : heads * d] = batch.q.flatten(1)
        batch.q = wide[:, : heads * d].view(rows, heads, d)
    attn = make_attention(case, "cuda", batch_invariant=change == "batch invariant")
    plan_batch(attn, batch)
    before, plain = launches(), launches("decode")
    out, lse = attn.run(batch.q, batch.kv_cache, return_lse=True, **batch.features)
    assert (launches(), launches("decode")) == (before, plain + 1)
    check(batch, out, lse)


@pytest.mark.gpu
def test_graphs_replay_with_other_lengths():
    """Dependent launches one after another, captured; idle rows, and lengths from 1 up."""
    needs_hopper()
    case = Case(((1, 9000), (1, 3), (1, 64), (1, 2000)), **LLAMA)
    batch = make_batch(case, "cuda")
    attn = make_attention(case, "cuda")
    lens = batch.seq_lens.clone()
    out = torch.empty_like(batch.q)
    plan_batch(attn, batch)
    attn.run(batch.q, batch.kv_cache, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            attn.run(batch.q, batch.kv_cache, out=out)
    for change in (lens, torch.ones_like(lens), lens // 2 + 1, lens):
        batch.seq_lens.copy_(change)
        now = dataclasses.replace(batch, lens=change.tolist())
        plan_batch(attn, now)
        poison_scratch_of_results(attn)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(now, out)


MIXTURES = [
    Case(((1, 3000), (40, 100), (1, 64), (300, 0)), **LLAMA),
    Case((*((1, 500 + 97 * i) for i in range(60)), (700, 1000), (17, 30)), **LLAMA),
    Case(((900, 0), *((1, 8000),) * 3, (0, 0), (2, 90), (64, 64)), pad_requests=2, **LLAMA),
    Case(((1, 9000), (3000, 0)), sinks=1.0, window=700, **LLAMA),
    Case((*((1, 30),) * 200, (20, 3)), **MQA),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", MIXTURES, ids=str)
def test_prefill_and_decode_side_by_side(case):
    """Both at once, layer after layer in one graph: whoever comes next has to wait for both."""
    needs_hopper()
    batch = make_batch(case, "cuda")
    attn = make_attention(case, "cuda")
    plan = plan_batch(attn, batch)
    assert plan.side_by_side
    active, (fewest, most) = int(attn._buffers.header[1]), attn.config.beside
    assert 0 < active <= most
    assert fewest < most < attn.config.num_sms
    before = launches(), launches("hopper_prefill")
    layers = [torch.empty_like(batch.q) for _ in range(6)]
    copies = [torch.empty_like(batch.q) for _ in layers]
    attn.run(batch.q, batch.kv_cache, out=layers[0], **batch.features)
    assert (launches(), launches("hopper_prefill")) == (before[0] + 1, before[1] + 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out, copy in zip(layers, copies, strict=True):
            out.fill_(float("nan"))
            attn.run(batch.q, batch.kv_cache, out=out, **batch.features)
            copy.copy_(out)  # too early, and NaN is what it copies
    for _ in range(3):
        poison_scratch_of_results(attn)
        graph.replay()
        torch.cuda.synchronize()
        for copy in copies:
            check(batch, copy)
            assert torch.equal(copy[: batch.num_tokens], copies[0][: batch.num_tokens])
    assert not attn._buffers.arrivals.any()
    assert attn._buffers.header[3:].tolist() == [0, 0]


def test_decode_gets_its_share_of_the_sms():
    config = policy.choose(policy.Geometry(32, 8, 128, 64, 2), HOPPER)
    fewest, most = config.beside
    assert (fewest, most) == (66, 118)
    assert plan_rule.workers_beside(1, 10**9, config) == fewest
    assert plan_rule.workers_beside(10**9, 1, config) == most
    shares = [plan_rule.workers_beside(units, 10_000, config) for units in range(0, 200_000, 5000)]
    assert shares == sorted(shares)
    assert len(set(shares)) > 10
    # 128 decodes of 2k keys beside two prefills of 2k: neither bound.
    plan = plan_rule.plan_batch([1] * 128 + [2048] * 2, [2048] * 130, config)
    assert fewest < plan.header[1] < most
    alone = plan_rule.plan_batch([1] * 128, [2048] * 128, config)
    assert alone.header[1] > most
    for other in (
        policy.choose(policy.Geometry(32, 8, 128, 64, 2), HOPPER, plain=True),
        policy.choose(policy.Geometry(32, 8, 64, 64, 2), HOPPER),
        policy.batch_invariant(config),
    ):
        assert other.beside == (0, 0)


@pytest.mark.parametrize(
    ("geometry", "device", "query_len", "reason"),
    [
        ((32, 8, 128, 64, 2), {}, 1, None),
        ((32, 1, 128, 128, 2), {}, 1, None),
        ((32, 8, 128, 64, 2), {}, 5, None),
        ((28, 4, 128, 64, 2), {}, 1, "group size 7"),
        ((128, 1, 128, 64, 2), {}, 1, "group size 128"),
        ((64, 8, 64, 64, 2), {}, 1, "head_dim 64"),
        ((32, 8, 128, 16, 2), {}, 1, "page_size 16"),
        ((32, 8, 128, 64, 4), {}, 1, "4 bytes"),
        ((32, 8, 128, 64, 2, 1), {}, 1, "1 bytes an element of the cache"),
        ((32, 8, 128, 64, 2), {"arch": 100}, 1, "capability 10.0"),
        ((32, 8, 128, 64, 2), {"interpreted": True}, 1, "interpreter"),
    ],
)
def test_the_policy_says_why_not(geometry, device, query_len, reason):
    geometry, device = policy.Geometry(*geometry), dataclasses.replace(HOPPER, **device)
    config = policy.choose(geometry, device, query_len)
    why = policy.why_not_hopper_decode(geometry, device, config.decode)
    if reason is None:
        assert why is None
    else:
        assert reason in why
    assert (config.hopper_decode is None) == (reason is not None)


def test_alibi_leaves_the_gluon_kernels_out(device, monkeypatch):
    """Their batches would be planned for kernels that never run."""
    monkeypatch.setattr(attention, "describe", lambda _: HOPPER)
    sizes = {"page_size": 64, "dtype": BF16, "max_num_reqs": 4, "max_num_tokens": 64}
    for shaped in (False, True):
        attn = attention.PagedAttention(32, 8, 128, device=device, alibi=shaped, **sizes)
        assert attn.config.decodes_few(1) is not shaped
        assert attn.config.side_by_side is not shaped
        geometry = policy.Geometry(32, 8, 128, 64, 2)
        assert attn.config == policy.choose(geometry, HOPPER, plain=shaped)


def test_few_items_are_its_own_and_get_a_worker_an_sm():
    config = policy.choose(policy.Geometry(32, 8, 128, 64, 2), HOPPER)
    few = HOPPER.num_sms // 8
    assert config.decodes_few(few)
    assert not config.decodes_few(few + 1)
    assert plan_rule.most_workers(few, config) == config.num_sms
    assert plan_rule.most_workers(few + 1, config) == config.num_workers == 2 * config.num_sms
    plan = plan_rule.plan_batch([1] * few, [100000] * few, config)
    assert len(plan.worker_record) <= config.num_sms
    assert not policy.batch_invariant(config).decodes_few(1)
    plain = policy.choose(policy.Geometry(32, 8, 128, 64, 2), HOPPER, plain=True)
    assert not plain.decodes_few(1)
