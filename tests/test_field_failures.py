"""What went wrong in other attention backends, asked of our kernels; tests/README.md lists it all.

Each name starts with the kind: A addresses, B memory that nobody wrote, C split KV and its merge,
D plans and padding, E metadata that is late, F windows and prefixes, H shapes, I layouts.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from cases import Case, check, make_attention, make_batch, plan_batch, run_and_check

from tilewise import policy
from tilewise.attention import PagedAttention
from tilewise.errors import PlanMismatch
from tilewise.kernels.cache_write import write_kv_cache

# numpy's remark on the poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")
MIXED = ((20, 130), (1, 300), (5, 64), (0, 0), (40, 0))
KERNELS = [((1, 200),), ((20, 130),)]  # a decode and a prefill
KERNEL_IDS = ["decode", "prefill"]


def with_config(case, device, **changes):
    """The case's configuration with other tiles or workers."""
    config = make_attention(case, device).config
    for kernel in ("prefill", "decode"):
        if kernel in changes:
            changes[kernel] = dataclasses.replace(getattr(config, kernel), **changes[kernel])
    return dataclasses.replace(config, **changes)


def attend(batch, device, **overrides):
    """``(out, lse)`` of one batch's own rows, by an object of its own."""
    attn = make_attention(batch.case, device, **overrides)
    plan_batch(attn, batch)
    out, lse = attn.run(batch.q, batch.kv_cache, return_lse=True, **batch.features)
    return out[: batch.num_tokens], lse[: batch.num_tokens]


def stretched(x, axis, device, far=None):
    """A copy of ``x`` whose index ``far`` along ``axis`` lies 2**31 elements from the first.

    By default the last.  What lies between is memory that nobody touches, so on a CPU it costs
    addresses alone.
    """
    far = x.shape[axis] - 1 if far is None else far
    strides = list(torch.empty(x.shape, device="meta").stride())
    strides[axis] = -(-(2**31) // far // 8) * 8
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 2.2 * size * x.element_size():
        pytest.skip(f"needs {size * x.element_size()} bytes of GPU memory, twice")
    view = torch.empty(size, dtype=x.dtype, device=device).as_strided(x.shape, strides)
    assert far * view.stride(axis) >= 2**31
    return view.copy_(x)


# -- A: addresses beyond 32 bits ------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["page", "head", "slot"])
@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("requests", KERNELS, ids=KERNEL_IDS)
def test_a2_cache_offsets_beyond_int32(requests, use_tma, axis, device):
    case = Case(requests, dtype=FP16, head_dim=16)
    batch = make_batch(case, device)
    last_page = batch.kv_cache.shape[0] - 1
    if not (batch.block_table == last_page).any():  # the page that is furthest away holds keys
        batch.block_table[0, 0], batch.kv_cache[last_page] = (
            last_page, batch.kv_cache[batch.block_table[0, 0]].clone()
        )  # fmt: skip
    batch.kv_cache = stretched(batch.kv_cache, ("page", "head", "slot").index(axis), device)
    tiles = {"use_tma": use_tma}
    out, lse = attend(batch, device, config=with_config(case, device, prefill=tiles, decode=tiles))
    check(batch, out, lse)


def test_a2_odd_pages_beyond_int32(device):
    """Every key looks up its page: the wide product is made a row at a time."""
    case = Case(((1, 200), (20, 130)), dtype=FP16, head_dim=16, page_size=48)
    batch = make_batch(case, device)
    batch.kv_cache = stretched(batch.kv_cache, 0, device)
    check(batch, *attend(batch, device))


@pytest.mark.parametrize("wide", ["q", "out"])
def test_a3_rows_beyond_int32(wide, device):
    """Queries or outputs whose last rows lie 2**31 elements into the tensor."""
    case = Case(((90, 0), (1, 30), (200, 5), (40, 9), (3, 60)), dtype=FP16, head_dim=16)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    tensors = {"q": batch.q, "out": torch.full_like(batch.q, 7.0)}
    # Tiles of both kernels begin beyond it, and one lies across.
    tensors[wide] = stretched(tensors[wide], 0, device, far=280)
    attn.run(tensors["q"], batch.kv_cache, out=tensors["out"])
    check(batch, tensors["out"])
    assert (tensors["out"][batch.num_tokens :] == 7.0).all()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["q", "out"])
def test_a5_rows_too_far_apart_for_a_tile_are_named(name, axis, device):
    """Inside a tile offsets have 32 bits; strides that would wrap them are refused."""
    case = Case(((16, 0),), num_q_heads=16, num_kv_heads=1, head_dim=16, dtype=FP16, pad_tokens=0)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    wide = stretched(batch.q, axis, device)
    tensors = {"q": batch.q, "out": torch.empty_like(batch.q)} | {name: wide}
    with pytest.raises(PlanMismatch, match=rf"{name} has strides .*{wide.stride(axis)}.*2\*\*31"):
        attn.run(tensors["q"], batch.kv_cache, out=tensors["out"])


@pytest.mark.parametrize(
    "total",
    [pytest.param(16383, marks=pytest.mark.gpu), pytest.param(16384, marks=pytest.mark.gpu), 16385],
)
def test_a6_ragged_prefill_around_16384_tokens(total, device):
    requests = [(500, 12)] * 16 + [(501, 0)] * 16 + [(17, 100), (1, 4)]
    requests.append((total - sum(q for q, _ in requests), 0))
    case = Case(tuple(requests), 1, 1, head_dim=16, pad_tokens=0, page_size=512)
    tiles = {}
    if device.type == "cpu":  # few programs for the interpreter
        tiles = {"prefill": {"block_m": 512, "block_n": 512}}
    batch = make_batch(case, device)
    out, _ = attend(batch, device, config=with_config(case, device, **tiles))
    assert torch.isfinite(out).all()
    last = dataclasses.replace(
        batch, qsl=batch.qsl[-5:], lens=batch.lens[-4:], block_table=batch.block_table[-4:]
    )
    check(last, out)


@pytest.mark.parametrize("axis", ["page", "head", "slot"])
def test_a4_cache_is_written_beyond_int32(axis, device):
    shape = (3, 2, 16, 16)
    cache = stretched(
        torch.full(shape, NAN, dtype=FP16), ("page", "head", "slot").index(axis), device
    )
    key, value = torch.randn(2, 4, 2, 8, device=device).half()
    slots = torch.tensor([0, 15, 16, 47], device=device)
    write_kv_cache(cache[..., :8], cache[..., 8:], key, value, slots)
    for token, slot in enumerate(slots.tolist()):
        row = cache[slot // 16, :, slot % 16]
        assert torch.equal(row, torch.cat([key[token], value[token]], -1))
    assert (~torch.isnan(cache)).sum() == key.numel() + value.numel()


@pytest.mark.parametrize("axis", [0, 1])
def test_a4_rows_are_written_from_beyond_int32(axis, device):
    cache = torch.full((3, 2, 16, 16), NAN, dtype=FP16, device=device)
    key = stretched(torch.randn(40, 2, 8).half(), axis, device)
    value = torch.randn(40, 2, 8, device=device).half()
    write_kv_cache(cache[..., :8], cache[..., 8:], key, value, torch.arange(40, device=device))
    written = cache.transpose(1, 2).reshape(48, 2, 16)[:40]
    assert torch.equal(written, torch.cat([key, value], -1))


@pytest.mark.parametrize("slot", [-1, -2, -16, -17, -(2**31), -(2**40)])
def test_a8_negative_slots_touch_nothing(slot, device):
    """Whichever page and row a division of the negative slot would name."""
    memory = torch.full((5, 2, 16, 16), NAN, dtype=FP16, device=device)
    cache = memory[2:4]  # what lies before and after is watched as well
    key = torch.ones(3, 2, 8, dtype=FP16, device=device)
    slots = torch.tensor([slot, 17, slot], device=device)
    write_kv_cache(cache[..., :8], cache[..., 8:], key, key, slots)
    assert (cache[1, :, 1] == 1.0).all()
    assert (~torch.isnan(memory)).sum() == 2 * 16


# -- B: memory that nobody wrote ------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [16, 48, 64])
@pytest.mark.parametrize("requests", KERNELS, ids=KERNEL_IDS)
def test_b6_a_dirty_null_page_reaches_nobody(page_size, requests, device):
    """Unused table entries name page 0, as vLLM's do, and page 0 holds NaN."""
    case = Case(requests, page_size=page_size, dtype=BF16)
    batch = make_batch(case, device)
    pages = batch.kv_cache
    null = torch.full_like(pages[:1], NAN)
    batch.kv_cache = torch.cat([null, pages])
    owned = batch.block_table < pages.shape[0]
    batch.block_table = torch.where(owned, batch.block_table + 1, 0)
    check(batch, *attend(batch, device))


@pytest.mark.parametrize("requests", KERNELS, ids=KERNEL_IDS)
def test_b7_recycled_pages_of_another_state(requests, device):
    """Page tails hold the bits of someone's fp32 state: NaNs, infinities, anything."""
    batch = make_batch(Case(requests, dtype=BF16), device)
    expected = attend(batch, device)
    nobody = torch.isnan(batch.kv_cache)
    for seed in range(3):
        gen = torch.Generator().manual_seed(seed)
        bits = torch.randint(-(2**15), 2**15, nobody.shape, generator=gen, dtype=torch.int16)
        batch.kv_cache[nobody] = bits.to(device).view(BF16)[nobody]
        again = attend(batch, device)
        assert torch.equal(again[0], expected[0])
        assert torch.equal(again[1], expected[1])


@pytest.mark.parametrize("query_len", [9, 40])
def test_b10_rows_without_keys_are_written(query_len, device):
    """The output is not zero beforehand: rows that see no key must be made so."""
    case = Case(((query_len, -7), (1, 50)))
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    out = torch.full_like(batch.q, NAN)
    attn.run(batch.q, batch.kv_cache, out=out)
    assert (out[:7] == 0.0).all()
    check(batch, out)


@pytest.mark.parametrize("alibi", ["linear", "sqrt"])
@pytest.mark.parametrize("requests", KERNELS, ids=KERNEL_IDS)
def test_b16_biases_do_not_revive_garbage(requests, alibi, device):
    """A bias added to the product with a NaN key is NaN: masked logits are selected away."""
    batch = make_batch(Case(requests, alibi=alibi, dtype=BF16), device)
    nobody = torch.isnan(batch.kv_cache)
    outs = []
    for garbage in (NAN, INF, -INF, 0.0):
        batch.kv_cache[nobody] = garbage
        outs.append(attend(batch, device)[0])
    assert torch.isfinite(outs[0]).all()
    assert all(torch.equal(outs[0], other) for other in outs[1:])


@pytest.mark.parametrize("poison", [NAN, INF])
def test_b14_poison_of_one_request_stays_there(poison, device):
    """Keys, values and queries that are no numbers: the neighbours' bits do not change."""
    case = Case(((1, 200), (20, 60), (1, 70), (18, 0)), pad_tokens=0)
    batch = make_batch(case, device)
    config = with_config(case, device, num_workers=7, num_sms=132)
    before, _ = attend(batch, device, config=config)
    for r in (1, 2):
        begin, end = batch.qsl[r], batch.qsl[r + 1]
        batch.q[begin:end] = poison
        page = batch.block_table[r, 0]
        batch.kv_cache[page] = poison
    after, _ = attend(batch, device, config=config)
    for r in (0, 3):
        rows = slice(batch.qsl[r], batch.qsl[r + 1])
        assert torch.equal(before[rows], after[rows])
    # Poison that a request owns is its own to see, not silently zero.
    assert not torch.isfinite(after[batch.qsl[1] : batch.qsl[3]]).any()


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


@pytest.mark.parametrize("head_dim", [80, 96, 192])
def test_h8_scratch_holds_padded_heads(head_dim, device):
    """Pieces are as wide as the padded head; the scratch around them is NaN."""
    case = Case(((1, 900), (2, 300)), head_dim=head_dim, num_q_heads=6)
    run_and_check(case, device, config=with_config(case, device, num_workers=13, num_sms=132))


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
    torch.testing.assert_close(lse[:, 0], expected, rtol=1e-6, atol=1e-6)


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
    with_lse, _ = attn.run(batch.q, batch.kv_cache, return_lse=True)
    assert torch.equal(plain, with_lse[: batch.num_tokens])


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
    buffers = {k: v.data_ptr() for k, v in vars(attn).items() if isinstance(v, torch.Tensor)}
    assert len(buffers) >= 9
    for requests in (((1, 70),), MIXED, ((400, 0), (1, 2000)), ((0, 0),)):
        batch = make_batch(Case(requests), device)
        plan_batch(attn, batch)
        attn.run(batch.q, batch.kv_cache)
        now = {k: v.data_ptr() for k, v in vars(attn).items() if isinstance(v, torch.Tensor)}
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
    table = torch.zeros((1, 2048), **ints).expand(512, 2048)
    for query_len, seq_len in ((1, 131072), (5, 100_000), (16, 16), (16, 131072)):
        attn.plan(
            torch.arange(513, **ints) * query_len, torch.full((512,), seq_len, **ints), table,
            num_tokens=512 * query_len, max_query_len=query_len,
        )  # fmt: skip
        tiles, active, total = attn._header.tolist()
        assert (tiles, active) == (0, config.num_workers)
        assert total == 512 * policy.decode_units(query_len, seq_len, config)
        ends = attn._worker_record[:, 1]
        assert ends[-1] == total
    assert attn._partial_m.shape[0] == 2 * config.num_workers


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
    assert count == pytest.approx(min(seq_len, 4096), rel=1e-5)


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


# -- H: head counts, head sizes, page sizes -------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(5, 1), (10, 2), (12, 2), (14, 2), (24, 2), (48, 1), (71, 1), (128, 1)]
)
def test_h2_any_ratio_of_heads(heads, kv_heads, device):
    run_and_check(Case(((20, 30), (1, 100), (4, 60)), heads, kv_heads, head_dim=16), device)


@pytest.mark.parametrize("query_len", [1, 2, 4, 16])
def test_h3_verification_of_a_ratio_that_is_no_power_of_two(query_len, device):
    """Six heads and four tokens are 24 rows of a tile of 32."""
    case = Case(((query_len, 90), (1, 20)), 12, 2, head_dim=16, decode_query_len=query_len)
    run_and_check(case, device)


def test_h5_each_group_reads_its_own_keys(device):
    """Values name their KV head: head h of the output belongs to KV head h // ratio."""
    case = Case(((1, 70), (20, 4)), 12, 3, head_dim=16)
    batch = make_batch(case, device)
    for head in range(3):
        values = batch.v_cache[:, head]
        values[~torch.isnan(values)] = float(head)
    out, _ = attend(batch, device)
    expected = (torch.arange(12, device=device) // 4).float()
    torch.testing.assert_close(out, expected[None, :, None].expand_as(out))


@pytest.mark.parametrize("head_dim", [16, 24, 72, 80, 88, 96, 112, 160, 192, 256])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_h6_head_sizes_between_powers_of_two(head_dim, dtype, device):
    """Lanes beyond the head are another row's: they neither count nor are written."""
    case = Case(((20, 30), (1, 100)), 3, 3, head_dim, dtype=dtype, layout="hnd")
    run_and_check(case, device)


@pytest.mark.parametrize("page_size", [32, 48, 528, 544, 784, 1056])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_h11_pages_of_hybrid_models(page_size, head_dim, device):
    case = Case(((20, 1000), (1, 1100), (17, 0)), 2, 1, head_dim, page_size=page_size)
    run_and_check(case, device)


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("page_size", [16, 48, 544, 784, 1056, 2**15])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_h12_tiles_do_not_grow_with_pages(arch, page_size, head_dim):
    """And those of odd pages are powers of two that fit the device."""
    shared = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}[arch] * 1024
    device = policy.Device(arch, 100, shared)
    geometry = policy.Geometry(32, 8, head_dim, page_size, 2)
    config = policy.choose(geometry, device)
    for tiles in (config.prefill, config.decode):
        assert tiles.block_n in (16, 32, 64)
        assert policy.shared_memory(tiles, geometry) <= shared
        assert not tiles.use_tma or page_size % tiles.block_n == 0


@pytest.mark.parametrize("width", [5, 7, 13])
def test_h15_odd_tables(width, device):
    """Rows of a block table at odd strides and addresses."""
    case = Case(((1, 70), (20, 4), (2, 40)), page_size=16)
    batch = make_batch(case, device)
    used = batch.block_table.shape[1]
    table = torch.full((4, width + used), 2_147_480_000, dtype=torch.int32, device=device)
    table[1:, width:] = batch.block_table
    batch.block_table = table[1:, width:]
    check(batch, *attend(batch, device))


@pytest.mark.parametrize("query_len", range(1, 18))
def test_h16_every_short_query_is_bottom_right(query_len, device):
    """Each row's log-sum-exp counts its keys: the last query sees all of them."""
    case = Case(((query_len, 64 - query_len),), 2, 1, head_dim=16, pad_tokens=0)
    batch = make_batch(case, device)
    batch.q.zero_()
    _, lse = attend(batch, device)
    keys = torch.arange(65 - query_len, 65, device=device).log()
    torch.testing.assert_close(lse, keys[:, None].expand_as(lse), rtol=1e-6, atol=1e-6)


# -- I: layouts and strides -----------------------------------------------------------------------


def test_i8_layouts_that_changed_are_seen(device):
    """What was checked for one layout is not believed of another."""
    case = Case(((1, 70), (20, 4)), dtype=FP16)
    attn = make_attention(case, device)
    layouts = ("nhd", "hnd", "cross_layer", "nhd")
    for layout, fused in itertools.product(layouts, (False, True)):
        batch = make_batch(dataclasses.replace(case, layout=layout), device)
        plan_batch(attn, batch)
        q = batch.q
        if fused:
            wide = torch.full((q.shape[0], 8, q.shape[2]), NAN, dtype=FP16, device=device)
            wide[:, 2:6] = q
            q = wide[:, 2:6]
        check(batch, attn.run(q, batch.kv_cache))
    with pytest.raises(PlanMismatch, match=r"q is torch\.float32"):
        attn.run(batch.q.float(), batch.kv_cache)


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("requests", KERNELS, ids=KERNEL_IDS)
def test_i5_keys_and_values_with_strides_of_their_own(use_tma, requests, device):
    """Every axis of the values' cache is laid out otherwise than the keys'."""
    case = Case(requests, dtype=FP16)
    batch = make_batch(case, device)
    k = torch.full((*batch.k_cache.shape[:3], 72), NAN, dtype=FP16, device=device)[..., :64]
    v = torch.full((64, 2, k.shape[0], 80), NAN, dtype=FP16, device=device).permute(2, 1, 0, 3)
    k.copy_(batch.k_cache)
    v = v[..., :64].copy_(batch.v_cache)
    assert all(a != b for a, b in zip(k.stride()[:3], v.stride()[:3], strict=True))
    tiles = {"use_tma": use_tma}
    attn = make_attention(
        case, device, config=with_config(case, device, prefill=tiles, decode=tiles)
    )
    plan_batch(attn, batch)
    check(batch, attn.run(batch.q, (k, v)))
