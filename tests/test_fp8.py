"""Attention over fp8 caches, against fp32 attention over the dequantised cache."""

import dataclasses
import math

import pytest
import torch
from cases import Case, check, make_attention, make_batch, plan_batch, reference, run_and_check

from tilewise import policy
from tilewise.errors import PlanMismatch, UnsupportedConfig

# numpy's remark on the poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

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


@pytest.mark.parametrize("query_len", [1, 300])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_maxima_that_rise_slowly(query_len, head_dim, device):
    """By somewhat less than 2**8 from tile to tile: weights stay within fp16 all the same."""
    keys = 300
    case = Case(((query_len, keys - query_len),), 2, 1, head_dim, dtype=BF16, kv_dtype=E4M3)
    batch = make_batch(case, device)
    for i, page in enumerate(batch.block_table[0, : -(-keys // case.page_size)].tolist()):
        first = i * case.page_size
        ramp = torch.arange(first, min(first + case.page_size, keys), device=device)
        rows = batch.k_cache[page, 0, : len(ramp)]
        rows.copy_(torch.zeros(rows.shape, device=device).to(E4M3))
        rows[:, 0].copy_(ramp.float().to(E4M3))
    batch.q[: batch.num_tokens] = 0.0
    batch.q[: batch.num_tokens, :, 0] = 7 * math.log(2) / 64 * head_dim**0.5
    check(batch, *run(batch, device))


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
        ({"v_scale": (torch.ones(4), 2)}, r"v_scale is torch.float32 \(2,\)"),
        ({"k_scale": torch.ones(1, dtype=BF16)}, "k_scale is torch.bfloat16"),
        ({"v_scale": torch.ones(1, 1)}, r"v_scale is torch.float32 \(1, 1\)"),
    ],
)
def test_bad_scales_are_named(change, named, device):
    batch = make_batch(Case(((1, 20),), dtype=BF16, kv_dtype=E4M3), device)
    ((name, x),) = change.items()
    x, step = x if isinstance(x, tuple) else (x, 1)  # strided there: a copy to a GPU is contiguous
    change = {name: x.to(device)[::step]}
    with pytest.raises(PlanMismatch, match=named + ".*accepted: contiguous torch.float32 of shape"):
        run(batch, device, **change)


def test_bad_caches_are_named(device):
    case = Case(((1, 20),), dtype=BF16, kv_dtype=E4M3)
    batch = make_batch(case, device)
    with pytest.raises(PlanMismatch, match=r"k cache is torch.bfloat16.*float8_e4m3fn, uint8"):
        run(batch, device, kv_cache=batch.kv_cache.to(BF16))
    with pytest.raises(PlanMismatch, match=r"k cache is torch.float8_e5m2.*float8_e4m3fn, uint8"):
        run(batch, device, kv_cache=batch.kv_cache.view(E5M2))
    with pytest.raises(UnsupportedConfig, match=r"kv_dtype=torch.float16; accepted: bfloat16"):
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


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.parametrize("page_size", [16, 48, 64, 128, 528])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 128, 256])
def test_tiles_suit_a_cache_of_bytes(arch, page_size, head_dim):
    memory = {80: 163, 89: 99, 90: 227, 100: 227}[arch] * 1024
    device = policy.Device(arch, 132, memory)
    plain, fp8 = (
        policy.choose(policy.Geometry(32, 8, head_dim, page_size, 2, size), device)
        for size in (2, 1)
    )
    for tiles in (fp8.prefill, fp8.decode):
        assert policy.shared_memory(tiles, fp8.geometry) <= memory
        assert tiles.use_tma <= (arch >= 90 and page_size % tiles.block_n == 0)
        assert tiles.block_m >= fp8.geometry.group_size
    # Whole pages stay whole tiles.
    if plain.decode.use_tma:
        assert fp8.decode.use_tma
    if arch >= 90 and page_size == 128 and head_dim == 128:
        assert fp8.decode.block_n == 128
