"""fp8 caches: the conversions bit for bit, the cache write, and attention over them."""

import dataclasses
import math

import pytest
import torch
import triton
import triton.language as tl
from cases import (
    Case,
    check,
    empty_cache,
    make_attention,
    make_batch,
    plan_batch,
    reference,
    run_and_check,
)

from tilewise import policy
from tilewise.device import fp8_format
from tilewise.errors import PlanMismatch, UnsupportedConfig
from tilewise.kernels.cache_write import write_kv_cache
from tilewise.kernels.fp8 import decode_fp8, encode_fp8, fp16_rows

# numpy's remark on the poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: "e4m3", E5M2: "e5m2"}


@triton.jit
def _decode_kernel(out_ptr, x_ptr, FORMAT: tl.constexpr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, decode_fp8(tl.load(x_ptr + n), FORMAT))


@triton.jit
def _encode_kernel(out_ptr, x_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + n, encode_fp8(tl.load(x_ptr + n), FORMAT))


@triton.jit
def _fp16_rows_kernel(out_ptr, factor_ptr, q_ptr, M: tl.constexpr, D: tl.constexpr):
    at = tl.arange(0, M)[:, None] * D + tl.arange(0, D)[None, :]
    rows, factor = fp16_rows(tl.load(q_ptr + at))
    tl.store(out_ptr + at, rows)
    tl.store(factor_ptr + tl.arange(0, M), factor)


def formats(dtype, device):
    """The bit arithmetic everywhere, and the instruction on the GPUs that have it."""
    yield FORMATS[dtype] + "_bits"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        yield FORMATS[dtype]


def saturated(x, dtype):
    """What torch does not do: beyond the largest finite value, that value."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_byte_decodes_as_in_torch(dtype, device):
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(device)
    expected = bytes_.view(dtype).to(torch.float16)
    assert expected.isnan().sum() == (2 if dtype == E4M3 else 6)
    for name in formats(dtype, device):
        out = torch.empty(256, dtype=torch.float16, device=device)
        _decode_kernel[(1,)](out, bytes_, name, 256)
        assert torch.equal(out.isnan(), expected.isnan())
        same = out.view(torch.int16) == expected.view(torch.int16)  # signs of zeros too
        assert same[~expected.isnan()].all()


def awkward_values(dtype, device):
    """Every value, every tie between two, their neighbours; tiny, huge and random ones; NaN."""
    grid = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    grid = grid[grid.isfinite()].sort().values
    ties = (grid[1:] + grid[:-1]) / 2
    points = torch.cat([grid, ties])
    beside = [torch.nextafter(points, torch.tensor(s)) for s in (-torch.inf, torch.inf)]
    gen = torch.Generator().manual_seed(0)
    scales = 2.0 ** torch.randint(-30, 18, (50_000,), generator=gen)
    random = torch.randn(50_000, generator=gen) * scales
    largest = torch.finfo(dtype).max
    edge = largest * torch.tensor([1.0, 1.03, 1.0625, 1.07, 2.0, 1e9])
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, 3e38, torch.inf, -torch.inf])
    x = torch.cat([points, *beside, random, edge, -edge, special, torch.tensor([torch.nan])])
    return torch.nn.functional.pad(x, (0, -len(x) % 8192)).to(device)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_encoding_rounds_as_torch_and_saturates(dtype, device):
    x = awkward_values(dtype, device)
    expected = saturated(x, dtype)
    for name in formats(dtype, device):
        out = torch.empty(x.shape, dtype=torch.uint8, device=device)
        _encode_kernel[(len(x) // 8192,)](out, x, name, 8192)
        nan = x.isnan()
        assert nan.sum() == 1
        assert out.view(dtype).float()[nan].isnan().all()
        wrong = (out != expected.view(torch.uint8)) & ~nan
        assert not wrong.any(), (name, x[wrong][:5], out[wrong][:5], expected[wrong][:5])


def test_queries_fit_into_fp16(device):
    """Rows of any size keep fp16's precision beside their largest element."""
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(16, 64, generator=gen).to(torch.bfloat16)
    sizes = 2.0 ** torch.linspace(-100, 120, 16)
    q = (q.float() * sizes[:, None]).to(torch.bfloat16)
    q[3] = 0.0
    q[7, 5] = float("nan")
    q = q.to(device)
    rows = torch.empty(q.shape, dtype=torch.float16, device=device)
    factor = torch.empty(16, device=device)
    _fp16_rows_kernel[(1,)](rows, factor, q, 16, 64)
    assert (factor > 0).all()
    assert (factor.log2() == factor.log2().round()).all()
    assert torch.equal(rows.isnan(), q.isnan())
    back = rows.double() * factor.double()[:, None]
    error = (back - q.double()).abs().nan_to_num().amax(1)
    size = q.double().abs().nan_to_num().amax(1)
    assert (error <= size.clamp(min=2.0**-64) * 2.0**-25).all()
    largest = rows.abs().nan_to_num().amax(1)
    assert (((largest >= 1) & (largest < 2)) == (size >= 2.0**-64)).all()


# -- the cache write ------------------------------------------------------------------------------


def stored(x, scale, dtype):
    """Bytes that vLLM's own writer stores for ``x`` [tokens, heads, D]: divided, then rounded."""
    scale = torch.ones(()) if scale is None else scale.cpu()
    x = x.float().cpu()
    return saturated(x / (scale if scale.numel() == 1 else scale[:, None]), dtype)


@pytest.mark.parametrize("model_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scales", ["", "scalar", "head"])
@pytest.mark.parametrize("layout", ["nhd", "cross_layer"])
def test_cache_write_stores_the_nearest_bytes(model_dtype, dtype, scales, layout, device):
    heads, head_dim, tokens = 3, 72, 37
    case = Case((), heads, heads, head_dim, 16, kv_dtype=dtype, layout=layout, label="write")
    kv = empty_cache(case, 6, str(device))
    gen = torch.Generator().manual_seed(0)
    slots = torch.randperm(6 * 16, generator=gen)[:tokens]
    slots[[3, 20, 36]] = -1
    fused = torch.randn(tokens + 5, 9, head_dim, generator=gen) * 10
    fused[:, :, 0] *= 1e3  # saturates
    fused[:, :, 1] *= 1e-4  # subnormal
    fused[5, 3], fused[6, 6] = torch.inf, torch.nan
    fused = fused.to(device, model_dtype)
    key, value = fused[:, 2:5], fused[:, 5:8]
    k_scale = v_scale = None
    if scales == "scalar":
        k_scale, v_scale = (torch.tensor(x, device=device) for x in (0.3, 1.7))
    elif scales == "head":
        k_scale, v_scale = (torch.tensor([0.3, 1.7, 0.011], device=device) * x for x in (1, 3))
    memory = torch.as_strided(
        kv.view(torch.uint8), (kv.untyped_storage().nbytes(),), (1,), 0
    )  # the whole buffer, so that bytes between the views are watched too
    before = memory.clone()
    k_cache, v_cache = kv.view(torch.uint8).split(head_dim, -1)
    write_kv_cache(
        k_cache, v_cache, key, value, slots.to(device), fp8_format=fp8_format(dtype, device),
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    expected_k, expected_v = stored(key, k_scale, dtype), stored(value, v_scale, dtype)
    nan_byte = torch.tensor(float("nan")).to(dtype).view(torch.uint8).item()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, row = divmod(slot, 16)
        for cache, expected in ((k_cache, expected_k), (v_cache, expected_v)):
            got, wanted = cache[page, :, row].cpu(), expected[token].view(torch.uint8)
            is_nan = expected[token].float().isnan()
            assert got.view(dtype).float()[is_nan].isnan().all()
            assert torch.equal(got[~is_nan], wanted[~is_nan])
            cache[page, :, row] = nan_byte
    assert torch.equal(memory, before), "bytes of no slot were written"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fp8_format": "e3m4"}, "fp8_format='e3m4'; accepted: '', 'e4m3', 'e5m2'"),
        ({"fp8_format": ""}, "k_cache is torch.uint8 with fp8_format=''"),
        ({"k_scale": torch.ones(2)}, r"k_scale is torch.float32 \(2,\).*1 or 3 elements"),
        ({"v_scale": torch.ones(1).half()}, "v_scale is torch.float16"),
        ({"k_scale": torch.ones(6)[::2]}, "k_scale is .*contiguous"),
    ],
)
def test_cache_writes_that_make_no_sense_are_named(change, named, device):
    cache = torch.zeros(2, 3, 16, 64, dtype=torch.uint8, device=device)
    key = torch.ones(4, 3, 64, device=device)
    slots = torch.arange(4, device=device)
    change = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=named):
        write_kv_cache(cache, cache, key, key, slots, **{"fp8_format": "e4m3_bits"} | change)
    with pytest.raises(ValueError, match=r"k_scale is given for a cache that is not fp8"):
        write_kv_cache(cache.float(), cache.float(), key, key, slots, k_scale=key[0, 0, :1])


# -- attention ------------------------------------------------------------------------------------

AROUND_A_PAGE = ((1, 0), (1, 62), (1, 63), (1, 64), (0, 0), (1, 200))
MIXED = ((20, 0), (1, 300), (5, 64), (0, 0), (40, 100))
FP8 = {"kv_dtype": E4M3, "kv_scales": "tensor"}

CASES = [
    Case(AROUND_A_PAGE, **FP8),
    Case(AROUND_A_PAGE, dtype=BF16, layout="hnd", pad_requests=2, **FP8),
    Case(AROUND_A_PAGE, page_size=16, dtype=FP16, kv_dtype=E5M2, kv_scales="head"),
    Case(MIXED, kv_dtype=E4M3),
    Case(MIXED, dtype=BF16, pad_requests=2, kv_dtype=E4M3, kv_scales="head"),
    Case(MIXED, dtype=BF16, kv_dtype=E5M2, kv_scales="tensor"),
    Case(MIXED, dtype=FP16, layout="cross_layer", page_size=128, **FP8),
    Case(MIXED, page_size=16, dtype=BF16, **FP8),
    Case(MIXED, page_size=48, head_dim=96, num_q_heads=9, num_kv_heads=3, dtype=BF16, **FP8),
    Case(MIXED, num_q_heads=6, head_dim=72, dtype=BF16, kv_dtype=E4M3, kv_scales="head"),
    Case(((1, 300), (33, 4)), num_q_heads=7, num_kv_heads=1, head_dim=128, dtype=BF16, **FP8),
    Case(((1, 130), (33, 0)), num_q_heads=3, num_kv_heads=1, head_dim=128, dtype=FP16, **FP8),
    Case(((2, 90), (18, 0)), num_q_heads=2, head_dim=256, dtype=BF16, **FP8),
    Case(((1, 100), (17, 9)), num_q_heads=24, num_kv_heads=1, head_dim=16, **FP8),
    Case(((4, 150), (3, 20), (4, 0)), dtype=BF16, decode_query_len=4, **FP8),
    Case(((16, 200), (9, 7), (1, 0)), num_q_heads=8, dtype=BF16, **FP8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, device):
    """Every byte that nobody owns is NaN."""
    run_and_check(case, device)


ALL = {"window": 70, "softcap": 5.0, "sinks": 1.0}


@pytest.mark.parametrize(
    "case",
    [
        Case(MIXED, **ALL, alibi="linear", dtype=BF16, kv_dtype=E4M3, kv_scales="head"),
        Case(MIXED, **ALL, alibi="sqrt", page_size=16, dtype=FP16, **FP8),
        Case(MIXED, window=300, dtype=BF16, layout="hnd", **FP8),
        Case(((20, 300), (1, 500)), 64, 8, window=128, sinks=1.0, dtype=BF16, **FP8),
        Case(((24, -5), (9, -4), (1, 500)), **ALL, dtype=BF16, **FP8),
    ],
    ids=str,
)
def test_features_combine(case, device):
    run_and_check(case, device)


@pytest.mark.parametrize("num_workers", [1, 3, 13])
@pytest.mark.parametrize("use_tma", [False, True])
def test_any_cut_and_either_way_to_read(num_workers, use_tma, device):
    case = Case(((1, 0), (3, 250), (1, 429), (0, 0), (20, 63)), num_q_heads=6, dtype=BF16, **FP8)
    config = make_attention(case, device).config
    tiles = {
        kernel: dataclasses.replace(getattr(config, kernel), use_tma=use_tma)
        for kernel in ("prefill", "decode")
    }
    config = dataclasses.replace(config, num_workers=num_workers, num_sms=132, **tiles)
    run_and_check(case, device, config=config)


def run(batch, device, *, kv_cache=None, **features):
    """Plan and run a batch; features override the batch's own."""
    attn = make_attention(batch.case, device)
    plan_batch(attn, batch)
    kv_cache = batch.kv_cache if kv_cache is None else kv_cache
    return attn.run(batch.q, kv_cache, return_lse=True, **(batch.features | features))


@pytest.mark.parametrize("query_len", [1, 20])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("kv_scales", ["tensor", "head"])
def test_a_scale_that_is_ignored_is_seen(query_len, name, kv_scales, device):
    """Negative control: without one of its scales no batch passes."""
    case = Case(((query_len, 100),), dtype=BF16, kv_dtype=E4M3, kv_scales=kv_scales)
    batch = make_batch(case, device)
    check(batch, *run(batch, device))
    with pytest.raises(AssertionError, match="request 0: error"):
        check(batch, *run(batch, device, **{name: None}))
    if kv_scales == "head":
        first = batch.features[name][:1].clone()
        with pytest.raises(AssertionError, match="request 0: error"):
            check(batch, *run(batch, device, **{name: first}))


def test_scales_are_read_when_the_kernels_run(device):
    """What a graph replays: same plan, same tensors, other values in them."""
    case = Case(MIXED, dtype=BF16, kv_dtype=E4M3, kv_scales="head")
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    check(batch, attn.run(batch.q, batch.kv_cache, **batch.features))
    batch.features["k_scale"] *= 1.5
    batch.features["v_scale"] *= 0.7
    check(batch, attn.run(batch.q, batch.kv_cache, **batch.features))


def test_bytes_and_scalars_are_as_good(device):
    """vLLM keeps an fp8 cache as uint8 and a scale without axes."""
    case = Case(MIXED, dtype=BF16, **FP8)
    batch = make_batch(case, device)
    out, lse = run(batch, device)
    scales = {name: batch.features[name].squeeze() for name in ("k_scale", "v_scale")}
    assert scales["k_scale"].shape == ()
    as_bytes = batch.kv_cache.view(torch.uint8)
    pair = as_bytes.split(case.head_dim, -1)
    for kv_cache in (as_bytes, pair, tuple(x.view(E4M3) for x in pair)):
        again, lse_again = run(batch, device, kv_cache=kv_cache, **scales)
        assert torch.equal(out[: batch.num_tokens], again[: batch.num_tokens])
        assert torch.equal(lse[: batch.num_tokens], lse_again[: batch.num_tokens])


@pytest.mark.parametrize("query_len", [1, 20])
def test_nan_that_is_owned_stays_nan(query_len, device):
    """A NaN among the keys a row sees is not turned into a number."""
    case = Case(((query_len, 100), (query_len, 90)), dtype=BF16, **FP8)
    for half in ("k_cache", "v_cache"):
        batch = make_batch(case, device)
        page = int(batch.block_table[0, 0])
        getattr(batch, half)[page, 1, 3] = torch.tensor(float("nan")).to(E4M3)
        out, _ = run(batch, device)
        assert out[:query_len, 2:].isnan().all(), half
        assert out[:query_len, :2].isfinite().all(), half
        assert out[query_len : 2 * query_len].isfinite().all(), half


@pytest.mark.parametrize("query_len", [1, 20])
def test_bfloat16_queries_beyond_fp16(query_len, device):
    """Queries too large and too small for fp16: each row counts by itself."""
    case = Case(((query_len, 100),), dtype=BF16, **FP8)
    batch = make_batch(case, device)
    sizes = torch.tensor([1e-15, 1.0, 1e8, 1e15], device=device)
    batch.q.copy_(batch.q.float() * sizes[:, None])
    # With logits of the size they have otherwise, head by head, nothing may be lost on the way.
    for head, size in enumerate(sizes.tolist()):
        part = make_batch(case, device)
        part.q.copy_(batch.q)
        out, _ = run(part, device, k_scale=batch.features["k_scale"] / size)
        part.features["k_scale"] = batch.features["k_scale"] / size
        expected, _ = reference(part, FP32)
        rows = slice(0, query_len)
        error = (out[rows, head].float() - expected[rows, head]).abs().max()
        assert error <= 4 * torch.finfo(BF16).eps * expected[rows, head].abs().max(), (head, error)


@pytest.mark.parametrize("query_len", [1, 20])
def test_small_weights_of_many_keys_count(query_len, device):
    """One loud key and many that weigh 2**-26 of it each: fp16 alone would drop these."""
    keys = 4000
    case = Case(((query_len, keys - query_len),), 2, 1, 16, dtype=BF16, kv_dtype=E4M3)
    batch = make_batch(case, device)
    owned = ~batch.kv_cache.float().isnan()
    values = torch.zeros(batch.kv_cache.shape, device=device)
    page = batch.block_table[0, 0].long()
    values[..., 16:] = 448.0
    values[page, 0, 0] = 0.0
    values[page, 0, 0, 0] = 18.0
    # Its bytes: torch does not index fp8 everywhere.
    batch.kv_cache.view(torch.uint8)[owned] = values[owned].to(E4M3).view(torch.uint8)
    batch.q.zero_()
    batch.q[..., 0] = 4 * math.log(2)  # logits of 18 log(2) for the loud key, 0 for the others
    out, _ = run(batch, device)
    expected, _ = reference(batch, FP32)
    rows = slice(0, query_len)
    assert (expected[rows] > 5).all()
    torch.testing.assert_close(out[rows].float(), expected[rows], rtol=0.02, atol=0)


@pytest.mark.parametrize("query_len", [1, 20])
@pytest.mark.parametrize("size", [2.0**22, 2.0**27, 2.0**31])
def test_huge_logits_pick_one_key(query_len, size, device):
    """Where a maximum less 15 rounds to much less, weights stay within fp16."""
    batch = make_batch(Case(((query_len, 200),), dtype=BF16, **FP8), device)
    batch.features["k_scale"] = batch.features["k_scale"] * size
    out, lse = run(batch, device)
    assert lse[:query_len].isfinite().all()
    check(batch, out)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"k_scale": torch.ones(3)}, r"k_scale is torch.float32 \(3,\)"),
        ({"v_scale": torch.ones(4)[::2]}, r"v_scale is torch.float32 \(2,\)"),
        ({"k_scale": torch.ones(1, dtype=BF16)}, "k_scale is torch.bfloat16"),
        ({"v_scale": torch.ones(1, 1)}, r"v_scale is torch.float32 \(1, 1\)"),
    ],
)
def test_bad_scales_are_named(change, named, device):
    batch = make_batch(Case(((1, 20),), dtype=BF16, kv_dtype=E4M3), device)
    change = {name: x.to(device) for name, x in change.items()}
    with pytest.raises(PlanMismatch, match=named + ".*accepted: contiguous torch.float32 of shape"):
        run(batch, device, **change)


def test_bad_caches_are_named(device):
    case = Case(((1, 20),), dtype=BF16, kv_dtype=E4M3)
    batch = make_batch(case, device)
    with pytest.raises(PlanMismatch, match=r"k cache is torch.bfloat16.*float8_e4m3fn, uint8"):
        run(batch, device, kv_cache=batch.kv_cache.to(BF16))
    with pytest.raises(PlanMismatch, match=r"k cache is torch.float8_e5m2.*float8_e4m3fn, uint8"):
        run(batch, device, kv_cache=batch.kv_cache.view(E5M2))
    with pytest.raises(
        UnsupportedConfig, match=r"kv_dtype=torch.float16; accepted: bfloat16, float8"
    ):
        make_attention(case, device, kv_dtype=FP16)
    with pytest.raises(UnsupportedConfig, match=r"kv_dtype=torch.uint8"):
        make_attention(case, device, kv_dtype=torch.uint8)
    plain = make_batch(Case(((1, 20),), dtype=BF16), device)
    with pytest.raises(PlanMismatch, match=r"k_scale is given for a cache of torch.bfloat16"):
        run(plain, device, k_scale=torch.ones((), device=device))


def test_geometry_knows_the_caches_bytes():
    assert policy.Geometry(8, 2, 128, 64, 2) == policy.Geometry(8, 2, 128, 64, 2, 2)
    assert policy.Geometry(8, 2, 128, 64, 2, 1).kv_element_size == 1
    with pytest.raises(UnsupportedConfig, match=r"kv_element_size=4.*1 .fp8. and 2"):
        policy.Geometry(8, 2, 128, 64, 2, 4)
