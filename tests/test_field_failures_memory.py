"""Field failures A and B: addresses beyond 32 bits, memory that nobody wrote (tests/README.md)."""

import dataclasses

import pytest
import torch
from cases import Case, check, make_attention, make_batch, plan_batch
from field_cases import IGNORE_POISON, KERNEL_IDS, KERNELS, attend, with_config

from tilewise.errors import PlanMismatch
from tilewise.kernels.cache_write import write_kv_cache

pytestmark = IGNORE_POISON

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")


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
