"""Prefill, split-KV decode and mixed batches against the fp32 reference, on the device there is."""

import dataclasses

import pytest
import torch
from cases import Case, check, make_attention, make_batch, plan_batch, run_and_check

from tilewise import plan_rule, policy

# numpy's remark on the poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AROUND_A_PAGE = ((1, 0), (1, 62), (1, 63), (1, 64), (0, 0), (1, 200))
MIXED = ((20, 0), (1, 300), (5, 64), (0, 0), (40, 100))

INTERPRETER_CASES = [
    Case(AROUND_A_PAGE),
    Case(AROUND_A_PAGE, dtype=BF16, layout="hnd", pad_requests=2),
    Case(AROUND_A_PAGE, page_size=16, dtype=FP16),
    Case(MIXED, pad_requests=2),
    Case(MIXED, dtype=BF16, layout="hnd"),
    Case(MIXED, dtype=FP16, layout="cross_layer", page_size=128),
    Case(MIXED, page_size=16, dtype=BF16),
    Case(MIXED, page_size=48, head_dim=96, num_q_heads=9, num_kv_heads=3),
    Case(((17, 3), (1, 600)), page_size=528, num_q_heads=5, num_kv_heads=1, head_dim=80),
    Case(((64, 64), (63, 1), (65, 0), (128, 0)), num_q_heads=2, head_dim=32, dtype=BF16),
    Case(((1, 130), (33, 0)), num_q_heads=7, num_kv_heads=1, head_dim=128, dtype=FP16),
    Case(((2, 90), (18, 0)), num_q_heads=2, num_kv_heads=2, head_dim=256, dtype=BF16),
    Case(((1, 100), (17, 9)), num_q_heads=24, num_kv_heads=1, head_dim=16),
    Case(((4, 150), (3, 20), (4, 0)), dtype=BF16, decode_query_len=4),
    Case(((16, 200), (9, 7), (1, 0)), num_q_heads=8, dtype=FP16),
]


@pytest.mark.parametrize("case", INTERPRETER_CASES, ids=str)
def test_matches_reference(case, device):
    run_and_check(case, device)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 13])
def test_any_number_of_workers_gives_the_same_result(num_workers, device):
    """However the work is cut, pieces and whole items agree with the reference."""
    case = Case(((1, 0), (3, 250), (1, 129), (0, 0), (1, 63)), num_q_heads=6)
    config = make_attention(case, device).config
    config = dataclasses.replace(config, num_workers=num_workers)
    run_and_check(case, device, config=config)


def test_many_pieces_are_merged(device):
    """More pieces of one item than the merge reads at a time."""
    case = Case(((1, 3000),), num_q_heads=2, num_kv_heads=1, head_dim=16, page_size=16)
    config = make_attention(case, device).config
    config = dataclasses.replace(config, num_workers=40, num_sms=132)
    plan = plan_rule.plan_batch([1], [3001], config)
    assert max(plan_rule.kv_splits(plan, 0, 1, config)) > 16
    run_and_check(case, device, config=config)


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
@pytest.mark.parametrize("use_tma", [False, True])
def test_pointer_and_copy_engine_paths_agree(kernel, use_tma, device):
    case = Case(((20, 50), (1, 100), (16, 3)), dtype=FP16, layout="cross_layer")
    config = make_attention(case, device).config
    tiles = dataclasses.replace(getattr(config, kernel), use_tma=use_tma)
    run_and_check(case, device, config=dataclasses.replace(config, **{kernel: tiles}))


@pytest.mark.parametrize(("requests", "decode"), [(((20, -5),), False), (((9, -4),), True)])
def test_rows_without_keys_are_zero(requests, decode, device):
    """More query tokens than keys: leading rows see nothing, so out = 0 and lse = -inf."""
    case = Case(requests)
    query_len, missing = requests[0][0], -requests[0][1]
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    out, lse = attn.run(batch.q, batch.kv_cache, return_lse=True)
    assert (out[:missing] == 0).all()
    assert (lse[:missing] == float("-inf")).all()
    check(batch, out, lse)
    assert torch.isfinite(lse[missing:query_len]).all()


@pytest.mark.parametrize("query_len", [1, 20])
def test_tail_garbage_never_changes_a_bit(query_len, device):
    """What lies past a request's last key changes nothing, finite or not."""
    case = Case(((query_len, 77),))
    outs = []
    for garbage in (float("nan"), 3.0, float("inf")):
        batch = make_batch(case, device)
        batch.kv_cache[torch.isnan(batch.kv_cache)] = garbage
        attn = make_attention(case, device)
        plan_batch(attn, batch)
        outs.append(attn.run(batch.q, batch.kv_cache)[: batch.num_tokens])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("requests", [((1, 200), (3, 90)), ((20, 130),)])
def test_masked_keys_weigh_nothing(requests, device):
    """Logits near -2e4 for every visible key: a finite mask value would win over them."""
    case = Case(requests)
    batch = make_batch(case, device)
    owned = ~torch.isnan(batch.kv_cache)
    keys = batch.k_cache
    keys[owned[..., : case.head_dim]] = -300.0
    batch.q.fill_(8.0)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    out, lse = attn.run(batch.q, batch.kv_cache, return_lse=True)
    check(batch, out)
    assert (lse[: batch.num_tokens] < -1e4).all()


def test_query_and_output_strides_are_honoured(device):
    """q sliced out of a fused QKV, out inside a wider buffer whose other bytes stay."""
    case = Case(MIXED, dtype=FP16)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    tokens, heads, dim = batch.q.shape
    fused = torch.full((tokens, 3 * heads, dim), float("nan"), dtype=FP16, device=device)
    fused[:, heads : 2 * heads] = batch.q
    wide = torch.full((tokens, heads, 2 * dim), 5.0, dtype=FP16, device=device)
    attn.run(fused[:, heads : 2 * heads], batch.kv_cache, out=wide[..., :dim])
    check(batch, wide[..., :dim])
    assert (wide[..., dim:] == 5.0).all()


def test_separate_key_and_value_caches(device):
    """A pair of caches with strides of their own."""
    case = Case(((1, 70), (20, 4)))
    batch = make_batch(case, device)
    k = batch.k_cache.contiguous()
    v = batch.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    assert k.stride() != v.stride()
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    check(batch, attn.run(batch.q, (k, v)))


def test_custom_scale(device):
    case = Case(((1, 70), (20, 4)))
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    out = attn.run(batch.q, batch.kv_cache, scale=2 * case.head_dim**-0.5)
    batch.q *= 2
    check(batch, out)


def test_empty_batches(device):
    """No requests, and only padding requests: nothing is written, nothing is read."""
    case = Case(((1, 70),))
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    for num_reqs in (0, 1):
        qsl = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
        lens = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        table = batch.block_table[:1].clone().fill_(2_147_480_000)
        attn.plan(qsl, lens, table, num_tokens=4, max_query_len=32)
        out = torch.full_like(batch.q, 7.0)
        attn.run(batch.q, batch.kv_cache, out=out)
        assert (out == 7.0).all()


def test_decode_beyond_one_query_tile_reads_its_own_rows(device):
    """16 tokens of a wide group need several query tiles of the decode kernel."""
    case = Case(((16, 100), (2, 64), (1, 5)), num_q_heads=8, num_kv_heads=1)
    assert policy.cdiv(16 * 8, make_attention(case, device).config.decode.block_m) > 1
    run_and_check(case, device)


@pytest.mark.parametrize("change", ["no rows", "more rows", "fewer rows", "other keys"])
def test_lengths_that_changed_since_the_plan_end_no_walk_and_leave_no_tensor(change, device):
    """Results are wrong then; but the kernel ends, and writes to nobody else's memory."""
    case = Case(((1, 700), (1, 300), (2, 100)), pad_tokens=40)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    config = dataclasses.replace(attn.config, num_workers=2)
    attn = make_attention(case, device, config=config)
    plan_batch(attn, batch)
    starts = batch.query_start_loc
    if change == "other keys":
        batch.seq_lens.fill_(3)
    else:
        new = {"no rows": [0, 0, 0, 0], "more rows": [0, 16, 32, 44], "fewer rows": [0, 1, 1, 1]}
        starts.copy_(torch.tensor(new[change], dtype=torch.int32))
    frame = torch.full((3, *batch.q.shape), 7.0, dtype=batch.q.dtype, device=device)
    attn.run(batch.q, batch.kv_cache, out=frame[1])
    assert (frame[0] == 7.0).all()
    assert (frame[2] == 7.0).all()
    starts.copy_(torch.tensor(batch.qsl, dtype=torch.int32))
    batch.seq_lens.copy_(torch.tensor(batch.lens, dtype=torch.int32))
    plan_batch(attn, batch)
    check(batch, attn.run(batch.q, batch.kv_cache))
