"""Field failures C, D and F: split KV and merging, plans and padding, windows (tests/README.md)."""

import dataclasses
import math

import pytest
import torch
from cases import Case, check, make_attention, make_batch, plan_batch, run_and_check
from field_cases import IGNORE_POISON, attend, with_config

from tilewise import plan_rule, policy
from tilewise.attention import PagedAttention

pytestmark = IGNORE_POISON

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")
MIXED = ((20, 130), (1, 300), (5, 64), (0, 0), (40, 0))


# -- C: split KV, log-sum-exp, merging ------------------------------------------------------------


def test_c7_the_merge_writes_through_strides(device):
    """Pieces of many workers end up in a strided output, its other bytes untouched."""
    case = Case(((1, 700), (3, 400), (1, 5)), num_q_heads=6, dtype=FP16)
    batch = make_batch(case, device)
    attn = make_attention(
        case, device, config=with_config(case, device, num_workers=13, num_sms=132)
    )
    plan_batch(attn, batch)
    tokens, heads, dim = batch.q.shape
    wide = torch.full((tokens, 2, heads, dim + 8), 5.0, dtype=FP16, device=device)
    out = wide[:, 1, :, :dim]
    _, lse = attn.run(batch.q, batch.kv_cache, out=out, return_lse=True)
    check(batch, out, lse)
    assert (wide[:, 0] == 5.0).all()
    assert (wide[..., dim:] == 5.0).all()


def test_c8_every_request_is_split_by_its_own_length(device):
    """One long request among short ones: the short ones' splits end where their keys do."""
    case = Case(((1, 2000), (1, 3), (2, 70), (1, 0), (1, 129)), num_q_heads=2, num_kv_heads=1,
                head_dim=16)  # fmt: skip
    run_and_check(case, device, config=with_config(case, device, num_workers=17, num_sms=132))


def halves(case, at, device):
    """A batch of one query a request cut into keys before and after ``at``: two batches.

    A single query sees every key, so either half is attention on its own.
    """
    whole = make_batch(case, device)
    at_page = at // case.page_size
    first = dataclasses.replace(whole, lens=[min(n, at) for n in whole.lens])
    second = dataclasses.replace(
        whole, lens=[max(n - at, 0) for n in whole.lens], block_table=whole.block_table[:, at_page:]
    )
    return whole, first, second


@pytest.mark.parametrize("at", [64, 192])
def test_c9_lse_is_natural_and_merges(at, device):
    """Partial results merge by base-e weights, also where one side has no key at all."""
    case = Case(((1, 300), (1, 63), (1, 64), (1, 0)), pad_tokens=0)
    whole, first, second = halves(case, at, device)
    expected, expected_lse = attend(whole, device)
    (out_a, lse_a), (out_b, lse_b) = attend(first, device), attend(second, device)
    empty = torch.tensor(second.lens, device=device) == 0
    assert (lse_b[empty] == -INF).all()
    assert (out_b[empty] == 0.0).all()
    assert empty.any()
    lse = torch.logaddexp(lse_a, lse_b)
    merged = sum(o * (part - lse).exp()[..., None] for o, part in ((out_a, lse_a), (out_b, lse_b)))
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_c10_lse_counts_keys_in_base_e(device):
    """Equal logits: the log-sum-exp is ln of the number of keys, however long the prefix."""
    case = Case(((1, 0), (1, 1), (1, 4095), (20, 480)), 1, 1, head_dim=16, pad_tokens=0)
    batch = make_batch(case, device)
    batch.q.zero_()
    _, lse = attend(batch, device)
    keys = [1, 2, 4096, *range(481, 501)]
    expected = torch.tensor([math.log(n) for n in keys], device=device)
    torch.testing.assert_close(lse[:, 0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query_len", [1, 5, 30])
def test_c11_requests_without_keys_among_others(query_len, device):
    """No key for some requests (an empty chunk of a prefix): zeros there, the rest unchanged."""
    case = Case(((query_len, -query_len), (1, 300), (query_len, 40), (1, -1), (2, 90)))
    batch = make_batch(case, device)
    out, lse = attend(batch, device, config=with_config(case, device, num_workers=7, num_sms=132))
    check(batch, out, lse)
    for r in (0, 3):
        rows = slice(batch.qsl[r], batch.qsl[r + 1])
        assert (out[rows] == 0.0).all()
        assert (lse[rows] == -INF).all()


def test_c12_splits_need_no_lse_of_the_caller(device):
    case = Case(((1, 900), (20, 60)))
    batch = make_batch(case, device)
    attn = make_attention(
        case, device, config=with_config(case, device, num_workers=13, num_sms=132)
    )
    plan_batch(attn, batch)
    plain = attn.run(batch.q, batch.kv_cache)[: batch.num_tokens]
    check(batch, plain)
    with_lse, _ = attn.run(batch.q, batch.kv_cache, return_lse=True)
    torch.testing.assert_close(plain, with_lse[: batch.num_tokens], rtol=1e-5, atol=1e-5)


# -- D: plans, padding, buffers that graphs hold --------------------------------------------------


def test_d3_workspace_follows_workers_not_lengths(device):
    """Neither the model's length nor the layers make it grow."""
    small, large = (
        PagedAttention(
            32, 8, 128, page_size=64, dtype=BF16, max_num_reqs=64, max_num_tokens=tokens,
            device=device,
        ).workspace_bytes
        for tokens in (1024, 131072)
    )  # fmt: skip
    tiles = (
        2
        * 4
        * (131072 // make_attention(Case(((1, 0),), 32, 8, 128), device).config.prefill_block_q)
    )
    assert large - small <= tiles


@pytest.mark.parametrize("rows", [1, 10, 64])
def test_d5_more_rows_than_the_batch_has_tokens(rows, device):
    """Padded to a graph's size, with a bound on the tokens that is padded too."""
    case = Case(((1, 70), (20, 4), (1, 0)), pad_tokens=rows)
    batch = make_batch(case, device)
    for num_tokens in (batch.num_tokens, batch.num_tokens + rows):
        attn = make_attention(case, device)
        plan_batch(attn, batch, num_tokens=num_tokens)
        out = torch.full_like(batch.q, 7.0)
        attn.run(batch.q, batch.kv_cache, out=out)
        check(batch, out)
        assert (out[batch.num_tokens :] == 7.0).all()


def test_d9_plans_are_made_in_place(device):
    """A graph holds addresses: no plan, of whatever batch, may move a buffer."""
    attn = make_attention(Case(((1, 0),)), device, max_num_reqs=8, max_num_tokens=500)
    buffers = {
        k: v.data_ptr() for k, v in vars(attn._buffers).items() if isinstance(v, torch.Tensor)
    }
    assert len(buffers) >= 9
    for requests in (((1, 70),), MIXED, ((400, 0), (1, 2000)), ((0, 0),)):
        batch = make_batch(Case(requests), device)
        plan_batch(attn, batch)
        attn.run(batch.q, batch.kv_cache)
        now = {
            k: v.data_ptr() for k, v in vars(attn._buffers).items() if isinstance(v, torch.Tensor)
        }
        assert now == buffers


def test_d11_short_contexts_under_a_table_for_long_ones(device):
    """The table is as wide as a model of a million tokens wants; the lengths are short."""
    case = Case(((1, 70), (20, 4), (3, 200)), page_size=16)
    batch = make_batch(case, device)
    wide = torch.full((3, 2**20 // 16), 2_147_480_000, dtype=torch.int32, device=device)
    wide[:, : batch.block_table.shape[1]] = batch.block_table
    batch.block_table = wide
    check(batch, *attend(batch, device))


@pytest.mark.parametrize(
    "requests",
    [
        ((1, 5), (0, 0), (1, 0), (0, 0)),
        ((0, 0), (0, 0), (1, 300), (0, 0), (0, 0), (4, 60)),
        ((0, 70), (1, 300), (0, 5), (20, 0), (0, 64)),
        ((0, 0),) * 9,
    ],
)  # fmt: skip
def test_d12_requests_of_no_tokens_anywhere(requests, device):
    """First, last, in between, with and without keys: they get no work and shift nobody's."""
    case = Case(requests)
    run_and_check(case, device, config=with_config(case, device, num_workers=5, num_sms=132))


@pytest.mark.parametrize("use_tma", [False, True])
def test_d18_the_cache_may_move_between_runs(use_tma, device):
    """After a sleep the cache lies elsewhere, perhaps at another alignment; the plan stays."""
    case = Case(((1, 70), (20, 4)), dtype=FP16)
    batch = make_batch(case, device)
    tiles = {"use_tma": use_tma}
    attn = make_attention(
        case, device, config=with_config(case, device, prefill=tiles, decode=tiles)
    )
    plan_batch(attn, batch)
    expected = attn.run(batch.q, batch.kv_cache)[: batch.num_tokens]
    check(batch, expected)
    dense = batch.kv_cache.transpose(1, 2).clone()  # as it lies in memory
    assert dense.is_contiguous()
    for shift in (0, 8, 1):  # the same place in a page, 16 bytes on, and 2
        memory = torch.full((dense.numel() + 16,), NAN, dtype=FP16, device=device)
        moved = memory[shift : shift + dense.numel()].view(dense.shape)
        moved.copy_(dense)
        batch.kv_cache.fill_(NAN)
        batch.kv_cache = moved.transpose(1, 2)
        out = attn.run(batch.q, batch.kv_cache)[: batch.num_tokens]
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
        check(batch, out)


def test_d22_workspace_suffices_for_the_worst_batch(device):
    """64/4 heads, 512 requests, every worker of a big GPU busy: nothing outgrows its buffer."""
    geometry = policy.Geometry(64, 4, 128, 64, 2)
    config = policy.choose(geometry, policy.Device(90, 132, 227 * 1024), 5)
    attn = PagedAttention(
        64, 4, 128, page_size=64, dtype=BF16, max_num_reqs=512, max_num_tokens=8192,
        device=device, config=config, decode_query_len=5,
    )  # fmt: skip
    ints = {"dtype": torch.int32, "device": device}
    table = torch.zeros((1, 2049), **ints).expand(512, 2049)
    for query_len, seq_len in ((1, 131072), (5, 100_000), (16, 16), (16, 131072)):
        seq_lens = torch.full((512,), seq_len, **ints)
        seq_lens[0] += 64  # equal requests would leave a few workers out
        attn.plan(
            torch.arange(513, **ints) * query_len, seq_lens, table,
            num_tokens=512 * query_len, max_query_len=query_len,
        )  # fmt: skip
        tiles, active, total = attn._buffers.header[:3].tolist()
        assert (tiles, active) == (0, config.num_workers)
        units = [plan_rule.decode_units(query_len, n, config) for n in (seq_len + 64, seq_len)]
        assert total == units[0] + 511 * units[1]
        ends = attn._buffers.worker_record[:, 1]
        assert ends[-1] == total
    assert attn._buffers.partial_m.shape[0] == 2 * config.num_workers


# -- F: sliding windows, prefixes -----------------------------------------------------------------


def seen_keys(case, device):
    """For one decoded token: which keys are seen, from values that name them, and how many."""
    batch = make_batch(case, device)
    (seq_len,) = batch.lens
    batch.q.zero_()  # all visible keys weigh alike
    seen = torch.zeros(seq_len, dtype=torch.bool)
    first = max(seq_len - case.window, 0) if case.window else 0
    for n in (first - 1, first, first + 1, seq_len - 1):
        if n < 0:
            continue
        for key in range(first // case.page_size * case.page_size, seq_len):
            page = batch.block_table[0, key // case.page_size]
            batch.kv_cache[page, :, key % case.page_size] = float(key == n)
        out, lse = attend(batch, device)
        seen[n] = bool((out != 0).any())
    return seen, lse.exp().item()


@pytest.mark.parametrize("seq_len", [4095, 4096, 4097, 5000])
def test_f1_the_oldest_key_of_a_window(seq_len, device):
    """At 5,000 tokens a window of 4,096 begins with key 904: 903 counts for nothing."""
    case = Case(((1, seq_len - 1),), 1, 1, head_dim=16, window=4096, page_size=64)
    seen, count = seen_keys(case, device)
    first = max(seq_len - 4096, 0)
    assert seen[[first, first + 1, seq_len - 1]].all()
    assert not seen[:first].any()
    assert count == pytest.approx(min(seq_len, 4096), rel=1e-4)


def test_f5_a_prefix_hit_beside_a_cold_request(device):
    """One request has its prefix cached; the other has none, and a table row of zeros."""
    case = Case(((20, 128), (17, 0), (1, 0)))
    batch = make_batch(case, device)
    null = torch.full_like(batch.kv_cache[:1], NAN)
    pages = batch.kv_cache.shape[0]
    batch.kv_cache = torch.cat([null, batch.kv_cache])
    batch.block_table = torch.where(batch.block_table < pages, batch.block_table + 1, 0)
    check(batch, *attend(batch, device))


@pytest.mark.parametrize("cached", [16, 64, 100])
def test_f12_a_cached_prefix_changes_rounding_only(cached, device):
    """The same tokens in one chunk, and behind a cached prefix: equal up to rounding."""
    whole = Case(((150, 0),), pad_tokens=0)
    batch = make_batch(whole, device)
    cold, cold_lse = attend(batch, device)
    hit = dataclasses.replace(whole, requests=((150 - cached, cached),))
    rest = dataclasses.replace(batch, case=hit, q=batch.q[cached:], qsl=[0, 150 - cached])
    warm, warm_lse = attend(rest, device)
    torch.testing.assert_close(warm, cold[cached:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(warm_lse, cold_lse[cached:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("requests", [((3, 300), (40, 7), (1, 64)), ((40, 300), (3, 0))])
def test_f15_keys_have_offsets_of_their_own(requests, device):
    """Requests whose numbers of keys and of queries run in opposite orders."""
    run_and_check(Case(requests), device)
    run_and_check(Case(requests[::-1]), device)
