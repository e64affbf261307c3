"""Products of fp8 operands: queries and weights rounded to e4m3, keys and values as cached."""

import dataclasses
import itertools
import json

import pytest
import torch
from cases import Case, check, make_attention, make_batch, plan_batch
from reference import paged_attention

from tilewise import policy
from tilewise.bench import fp8_accuracy as accuracy
from tilewise.errors import PlanMismatch, UnsupportedConfig, UnsupportedFp8
from tilewise.kernels.cache_write import write_kv_cache
from tilewise.kernels.hadamard import rotation

# numpy's remark on the poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
FP8 = {"kv_dtype": E4M3, "kv_scales": "head"}
MIXED = ((20, 0), (1, 300), (5, 64), (0, 0), (40, 100))


def rotate(x):
    """Rows of ``x`` rotated in fp32, by the kernels' own additions in their order.

    What is rounded afterwards may lie halfway between two values of e4m3: another order of
    additions, or a wider type, would round a few elements the other way.
    """
    dim = x.shape[-1]
    signs = (rotation(dim)[0] * dim**0.5).round().to(x)
    x = x * signs
    for _ in range(dim.bit_length() - 1):
        a, b = x[..., 0::2], x[..., 1::2]
        x = torch.cat([a + b, a - b], -1)
    return x * dim**-0.5


def rounded_rows(q):
    """Queries as the kernels round them: e4m3 times a power of two for each row."""
    q = q.float()
    exponent = torch.frexp(q.abs().amax(-1, keepdim=True))[1] - 1
    factor = torch.exp2((exponent.clamp(-64, 126) - 7).float())
    return (q / factor).clamp(-448, 448).to(E4M3).float() * factor


def dequantised(batch, k_scale, v_scale):
    """Keys and values in fp32; scales of heads or of pages."""
    out = []
    for x, s in ((batch.k_cache, k_scale), (batch.v_cache, v_scale)):
        heads, pages = x.shape[1], x.shape[0]
        s = torch.ones(heads) if s is None else s.cpu()
        s = s.expand(pages, heads) if s.dim() < 2 else s
        out.append(x.float() * s.to(x.device)[:, :, None, None])
    return out


def check_rounded(batch, q, out, lse):
    """Hold rows to fp32 attention with rounded queries, but for rounded weights.

    A weight is off by up to 2**-4 of itself, at random.  So each output's error has a standard
    deviation below ``2**-4 sqrt(sum(w**2 v**2))``, and is never beyond ``2**-4 sum(w abs(v))`` but
    for what e4m3 drops below 2**-16 of the largest weight.  The sum of ``w**2`` is that of a
    softmax over doubled logits.
    """
    case, features = batch.case, dict(batch.features)
    scales = [features.pop(name, None) for name in ("k_scale", "v_scale")]
    k, v = dequantised(batch, *scales)
    features |= {"window": case.window, "causal": case.causal}
    scale = case.head_dim**-0.5

    def attend(values, scale, features):
        args = (q, k, values, batch.qsl, batch.lens, batch.block_table, scale)
        return paged_attention(*args, dtype=FP32, **features)

    expected, expected_lse = attend(v, scale, features)
    bound, _ = attend(v.abs(), scale, features)
    doubled = {n: 2 * features[n] for n in ("softcap", "sinks", "alibi_slopes") if n in features}
    squares, lse2 = attend(v * v, 2 * scale, features | doubled)
    share = torch.where(expected_lse.isneginf(), 0.0, torch.exp(lse2 - 2 * expected_lse))
    spread = 2**-4 * (squares * share[..., None]).sqrt()
    eps = torch.finfo(case.dtype).eps
    for r, (begin, end) in enumerate(itertools.pairwise(batch.qsl)):
        if end - begin <= policy.DECODE_MAX_QUERY_LEN:
            continue
        rows = slice(begin, end)
        error = (out[rows].float() - expected[rows]).abs()
        rounding = 2 * eps * expected[rows].abs() + 2**-16 * batch.lens[r] * bound[rows].max()
        assert (error <= 2**-4 * bound[rows] + rounding).all(), f"request {r}: {error.max()}"
        rms = (error - rounding).clamp_min(0).pow(2).mean().sqrt()
        allowed = spread[rows].pow(2).mean().sqrt()
        assert rms <= allowed, f"request {r}: rms {rms:.3g}, allowed {allowed:.3g} ({case})"
        if lse is not None:
            torch.testing.assert_close(lse[rows], expected_lse[rows], rtol=1e-4, atol=2e-3)


def run_and_check(case, device, rotated=False, page_scales=False, change=None, **overrides):
    batch = make_batch(case, device)
    if change is not None:
        change(batch)
    if page_scales:
        pages = batch.kv_cache.shape[0]
        gen = torch.Generator().manual_seed(5)
        for name, size in (("k_scale", 0.02), ("v_scale", 0.05)):
            s = size * (0.5 + torch.rand(pages, case.num_kv_heads, generator=gen))
            batch.features[name] = s.to(device)
    attn = make_attention(case, device, fp8_matmul=True, rotated_keys=rotated, **overrides)
    plan_batch(attn, batch)
    out, lse = attn.run(
        batch.q, batch.kv_cache, out=torch.full_like(batch.q, 7.0), return_lse=True,
        **batch.features,
    )  # fmt: skip
    q = batch.q.float()
    if rotated:
        q = rotate(q).to(case.dtype).float()
    check_rounded(batch, rounded_rows(q), out, lse)
    # Short requests are decoded with products of 16 bits.
    k, v = dequantised(batch, batch.features.get("k_scale"), batch.features.get("v_scale"))
    features = {n: x for n, x in batch.features.items() if not n.endswith("_scale")}
    args = (q, k, v, batch.qsl, batch.lens, batch.block_table, case.head_dim**-0.5)
    expected, _ = paged_attention(*args, window=case.window, causal=case.causal, **features)
    for begin, end in itertools.pairwise(batch.qsl):
        if 0 < end - begin <= policy.DECODE_MAX_QUERY_LEN:
            wide = expected[begin:end]
            tolerance = {FP32: 2e-4, FP16: 4e-3, BF16: 3e-2}[case.dtype] * wide.abs().max().item()
            torch.testing.assert_close(out[begin:end].float(), wide, rtol=0, atol=tolerance)
    assert (out[batch.num_tokens :] == 7.0).all(), "rows of no request were written"
    return attn


CASES = [
    Case(MIXED, **FP8),
    Case(MIXED, dtype=BF16, head_dim=128, layout="hnd", pad_requests=2, **FP8),
    Case(MIXED, dtype=FP16, page_size=16, kv_dtype=E4M3),
    Case(((40, 500), (17, 3)), dtype=BF16, window=130, sinks=1.0, **FP8),
    Case(((33, 100),), 6, 1, 96, dtype=BF16, softcap=5.0, alibi="linear", **FP8),
    Case(((24, -5), (90, 0)), 2, 2, 256, dtype=BF16, **FP8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, device):
    run_and_check(case, device)


def test_the_twin_of_the_rotation_rotates():
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        rotate(x).double(), x.double() @ rotation(64).T, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_rotated_keys(head_dim, device):
    run_and_check(Case(MIXED, head_dim=head_dim, dtype=BF16, **FP8), device, rotated=True)


@pytest.mark.parametrize(("page_size", "dtype"), [(64, BF16), (128, FP32)])
def test_scales_of_pages(page_size, dtype, device):
    case = Case(MIXED, page_size=page_size, dtype=dtype, kv_dtype=E4M3)
    run_and_check(case, device, page_scales=True)


def test_scales_of_pages_with_products_of_16_bits(device):
    """The same scales in the kernels that decode the cache, windows too."""
    case = Case(((40, 300), (3, 200), (1, 0)), window=150, dtype=BF16, kv_dtype=E4M3)
    batch = make_batch(case, device)
    attn = make_attention(case, device, rotated_keys=True)
    plan_batch(attn, batch)
    pages = batch.kv_cache.shape[0]
    scale = (0.01 + 0.02 * torch.rand(pages, 2)).to(device)
    out = attn.run(batch.q, batch.kv_cache, k_scale=scale, v_scale=2 * scale)
    k, v = dequantised(batch, scale, 2 * scale)
    q = rotate(batch.q).to(BF16).float()
    args = (q, k, v, batch.qsl, batch.lens, batch.block_table, case.head_dim**-0.5)
    expected, _ = paged_attention(*args, window=150)
    rows = slice(0, batch.num_tokens)
    limit = 2e-2 * expected[rows].abs().max().item()
    torch.testing.assert_close(out[rows].float(), expected[rows], rtol=0, atol=limit)


@pytest.mark.parametrize("ignored", ["rotation", "k_scale", "v_scale", "rounding"])
def test_the_check_sees_what_is_left_out(ignored, device):
    """Negative control."""
    case = Case(((40, 200),), head_dim=64, dtype=BF16, **FP8)
    batch = make_batch(case, device)
    attn = make_attention(case, device, fp8_matmul=True, rotated_keys=ignored == "rotation")
    plan_batch(attn, batch)
    features = {n: x for n, x in batch.features.items() if n != ignored}
    out, lse = attn.run(batch.q, batch.kv_cache, return_lse=True, **features)
    q = batch.q.float() * (1.03 if ignored == "rounding" else 1.0)
    with pytest.raises(AssertionError):
        check_rounded(batch, rounded_rows(q), out, lse)


@pytest.mark.parametrize("by", ["head", "page"])
@pytest.mark.parametrize("dim", [16, 128])
def test_keys_are_written_rotated(by, dim, device):
    tokens, heads, page = 37, 2, 64
    gen = torch.Generator().manual_seed(3)
    key, value = (torch.randn(tokens, heads, dim, generator=gen).to(device) for _ in range(2))
    cache = torch.full((2, 3, heads, page, dim), 0xFF, dtype=torch.uint8, device=device)
    slots = torch.randperm(3 * page, generator=gen)[:tokens].to(device)
    slots[5] = -1
    shape = (3, heads) if by == "page" else (heads,)
    k_scale, v_scale = (0.01 + 0.02 * torch.rand(shape, generator=gen).to(device) for _ in "kv")
    write_kv_cache(
        cache[0], cache[1], key, value, slots, fp8_format="e4m3_bits",
        k_scale=k_scale, v_scale=v_scale, rotated=True,
    )  # fmt: skip
    kept = [t for t in range(tokens) if t != 5]
    for x, rows, scale in ((cache[0], rotate(key), k_scale), (cache[1], value, v_scale)):
        scale = scale.expand(3, heads)
        for t in kept:
            p, s = divmod(int(slots[t]), page)
            stored = x[p, :, s].view(E4M3).float() * scale[p][:, None]
            bound = 2**-4 * rows[t].abs() * 1.001 + 2**-10 * scale[p][:, None]
            assert ((stored - rows[t]).abs() <= bound).all()
    untouched = torch.ones(3 * page, dtype=torch.bool)
    untouched[slots[kept].cpu()] = False
    flat = cache[0].transpose(1, 2).reshape(3 * page, -1)
    assert (flat[untouched.to(device)] == 0xFF).all()


def test_a_rotation_changes_no_product():
    q, k = torch.randn(5, 128), torch.randn(7, 128)
    torch.testing.assert_close(rotate(q) @ rotate(k).T, q @ k.T, rtol=1e-5, atol=1e-5)
    signs = torch.sign(rotation(128))[0]
    assert 40 < (signs > 0).sum() < 88


def test_rotation_undoes_outliers(device):
    """The paper's finding, at a length that the interpreter reaches; the ratio grows with it."""
    only = ["per block, rotated"]
    found = accuracy.errors(2048, queries=64, heads=2, dim=128, device=device, variants=only)
    assert found["per tensor"] > 1.4 * found["per block, rotated"], found


def test_promotion_finds_the_needle():
    """A tensor core's accumulator over 64k keys, emulated; our tiles of 64 keys beside it."""
    q, k, v, wanted = accuracy.needles(draws=8, keys=65536, dim=64)
    assert accuracy.retrieved(accuracy.emulated(q, k, v), wanted) < 0.5
    assert accuracy.retrieved(accuracy.emulated(q, k, v, promote=64), wanted) > 0.95


def test_the_emulated_accumulator_drops_what_is_small():
    p, v = torch.ones(1, 96), torch.ones(1, 96, 1)
    v[0, 0] = 8192.0
    v[0, 64:] = 0.5
    # 8192 has a unit of 1: ones still count, halves do not.
    assert accuracy.accumulate(p, v).item() == 8192 + 63
    assert accuracy.accumulate(p, v, promote=32).item() == 8192 + 31 + 32 + 16


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"fp8_matmul": True}, "fp8_matmul with kv_dtype=torch.bfloat16"),
        ({"fp8_matmul": True, "kv_dtype": torch.float8_e5m2}, "kv_dtype=torch.float8_e5m2"),
        ({"rotated_keys": True}, "rotated_keys with kv_dtype=torch.bfloat16"),
        ({"rotated_keys": True, "kv_dtype": E4M3, "head_dim": 96}, "head_dim=96"),
        ({"fp8_matmul": True, "kv_dtype": E4M3, "head_dim": 512}, "head_dim=512"),
        ({"fp8_matmul": True, "kv_dtype": E4M3, "head_dim": 16}, "head_dim=16"),
    ],
)
def test_what_does_not_go_together_is_refused(options, named, device):
    head_dim = options.pop("head_dim", 64)
    case = Case(MIXED, head_dim=head_dim, dtype=BF16, kv_dtype=options.pop("kv_dtype", None))
    with pytest.raises(UnsupportedFp8, match=named):
        make_attention(case, device, **options)


@pytest.mark.parametrize("options", [{"head_dim": 20}, {"decode_query_len": 17}], ids=str)
def test_what_is_refused_without_them_too_is_not_their_fault(options, device):
    case = Case(MIXED, dtype=BF16, kv_dtype=E4M3, **options)
    ((name, value),) = options.items()
    with pytest.raises(UnsupportedConfig, match=f"{name}={value}; accepted") as caught:
        make_attention(case, device, fp8_matmul=True, rotated_keys=True)
    assert not isinstance(caught.value, UnsupportedFp8)


def test_a_config_must_agree(device):
    case = Case(MIXED, dtype=BF16, kv_dtype=E4M3)
    config = make_attention(case, device).config
    with pytest.raises(UnsupportedConfig, match="fp8_dot=''"):
        make_attention(case, device, config=config, fp8_matmul=True)
    with pytest.raises(UnsupportedConfig, match="fp8_dot='fast'"):
        dataclasses.replace(config, fp8_dot="fast")


@pytest.mark.parametrize(
    ("page_size", "k_shape", "v_shape", "named"),
    [
        (64, (4, 2), (2,), "both of pages, or neither"),
        (64, (3, 2), None, "torch.float32 of shape"),
        (16, (4, 2), (4, 2), "page_size=16"),
    ],
)
def test_scales_that_do_not_fit_are_refused(page_size, k_shape, v_shape, named, device):
    case = Case(((20, 0),), page_size=page_size, dtype=BF16, kv_dtype=E4M3)
    batch = make_batch(case, device)
    batch.kv_cache = batch.kv_cache[:4].clone()
    assert batch.kv_cache.shape[0] == 4
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    scales = [None if s is None else torch.ones(s, device=device) for s in (k_shape, v_shape)]
    with pytest.raises(PlanMismatch, match=named):
        attn.run(batch.q, batch.kv_cache, k_scale=scales[0], v_scale=scales[1])


def test_what_is_no_tensor_is_named(device):
    case = Case(((20, 0),), dtype=BF16, kv_dtype=E4M3)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    for given, text in (
        ({"k_scale": 0.5}, "k_scale=0.5; accepted: a tensor or None"),
        ({"v_scale": 2}, "v_scale=2; accepted"),
        ({"sinks": [1.0]}, r"sinks=\[1.0\]; accepted"),
        ({"alibi_slopes": [1.0]}, r"alibi_slopes=\[1.0\]; accepted"),
    ):
        with pytest.raises(PlanMismatch, match=text):
            attn.run(batch.q, batch.kv_cache, **given)
    with pytest.raises(PlanMismatch, match=r"tuple of 0; accepted: \(k, v\)"):
        attn.run(batch.q, ())


@pytest.mark.parametrize(
    ("arch", "kv_size", "named"),
    [(80, 1, "compute capability 8.0"), (90, 2, "2 bytes an element")],
)
def test_the_policy_refuses(arch, kv_size, named):
    geometry = policy.Geometry(32, 8, 128, 64, 2, kv_size)
    device = policy.Device(arch=arch, num_sms=108, shared_memory=163 * 1024)
    with pytest.raises(UnsupportedConfig, match=named):
        policy.choose(geometry, device, fp8_matmul=True)


def test_off_by_default(device):
    case = Case(MIXED, dtype=BF16, **FP8)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    assert attn.config.fp8_dot == ""
    plan_batch(attn, batch)
    check(batch, attn.run(batch.q, batch.kv_cache, **batch.features))


def test_the_accuracy_command(tmp_path, capsys, device):
    out = tmp_path / "accuracy.json"
    sizes = ["--keys", "256", "--queries", "8", "--heads", "1", "--draws", "0"]
    words = ["--device", device.type, *sizes, "--out", str(out)]
    assert accuracy.main(words) == 0
    rows = {row["name"]: row["value"] for row in json.loads(out.read_text())["rows"]}
    assert {"per tensor", "per block", "per block, rotated"} <= set(rows)
    assert all(0 < value < 1 for value in rows.values())
    assert "per tensor" in capsys.readouterr().out
