"""fp8 conversions bit for bit, against torch's; and the cache write that uses them."""

import pytest
import torch
import triton
import triton.language as tl
from cases import Case, empty_cache

from tilewise import device as device_module
from tilewise import policy
from tilewise.device import fp8_format
from tilewise.errors import UnsupportedConfig
from tilewise.kernels.cache_write import write_kv_cache
from tilewise.kernels.fp8 import decode_fp8, decode_pairs, encode_fp8, fp16_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: "e4m3", E5M2: "e5m2"}


@triton.jit
def _decode_kernel(out_ptr, x_ptr, FORMAT: tl.constexpr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, decode_fp8(tl.load(x_ptr + n), FORMAT))


@triton.jit
def _decode_pairs_kernel(low_ptr, high_ptr, x_ptr, FORMAT: tl.constexpr, N: tl.constexpr):
    n = tl.program_id(0) * N + tl.arange(0, N)
    low, high = decode_pairs(tl.load(x_ptr + n), FORMAT)
    tl.store(low_ptr + n, low)
    tl.store(high_ptr + n, high)


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


def formats(dtype, device, *, write=False):
    """The bit arithmetic everywhere, and the instruction where the policy would take it."""
    return sorted({FORMATS[dtype] + "_bits", fp8_format(dtype, device, write=write)})


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


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_pair_of_bytes_decodes_as_in_torch(dtype, device):
    pairs = torch.arange(65536, dtype=torch.int32).to(torch.int16).to(device)
    expected = pairs.view(torch.uint8).view(dtype).to(torch.float16).view(-1, 2)
    for name in formats(dtype, device):
        out = torch.zeros(2, 65536, dtype=torch.float16, device=device)
        _decode_pairs_kernel[(4,)](out[0], out[1], pairs.view(torch.uint16), name, 16384)
        got = out.T
        assert torch.equal(got.isnan(), expected.isnan())
        same = got.contiguous().view(torch.int16) == expected.view(torch.int16)
        assert same[~expected.isnan()].all()


def awkward_values(dtype, device):
    """Every value, every tie, their neighbours; tiny, huge and random numbers; and no number."""
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
    for name in formats(dtype, device, write=True):
        out = torch.empty(x.shape, dtype=torch.uint8, device=device)
        _encode_kernel[(len(x) // 8192,)](out, x, name, 8192)
        nan = x.isnan()
        assert nan.sum() == 1
        assert out.view(dtype).float()[nan].isnan().all()
        wrong = (out != expected.view(torch.uint8)) & ~nan
        assert not wrong.any(), (name, x[wrong][:5], out[wrong][:5], expected[wrong][:5])


@pytest.mark.parametrize(
    ("arch", "reads", "writes"),
    [
        (80, "_bits", "_bits"),
        (86, "_bits", "_bits"),
        (89, "", "_bits"),
        (90, "", ""),
        (100, "", ""),
    ],
)
def test_instructions_are_used_where_they_are_right(arch, reads, writes, monkeypatch):
    described = policy.Device(arch=arch, num_sms=100, shared_memory=99 * 1024)
    monkeypatch.setattr(device_module, "describe", lambda device: described)
    chosen = device_module.fp8_format.__wrapped__  # past the memory of earlier answers
    for dtype, name in FORMATS.items():
        assert chosen(dtype, torch.device("cuda", 0)) == name + reads
        assert chosen(dtype, torch.device("cuda", 0), write=True) == name + writes
        assert chosen(dtype, torch.device("cpu")) == name + "_bits"
    with pytest.raises(
        UnsupportedConfig, match=r"kv_dtype=torch.int8; accepted: torch.float8_e4m3"
    ):
        chosen(torch.int8, torch.device("cpu"))


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
        k_cache, v_cache, key, value, slots.to(device),
        fp8_format=fp8_format(dtype, device, write=True), k_scale=k_scale, v_scale=v_scale,
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
        (
            {"k_scale": torch.ones(2)},
            r"k_scale is torch.float32 \(2,\).*\(1,\), \(3,\) or \(2, 3\) on",
        ),
        # Of two axes, so read as scales of pages that are not there.
        ({"k_scale": torch.ones(1, 3)}, r"k_scale is torch.float32 \(1, 3\)"),
        ({"v_scale": torch.ones(3, 1)}, r"v_scale is torch.float32 \(3, 1\)"),
        ({"v_scale": torch.ones(1, 1)}, r"v_scale is torch.float32 \(1, 1\)"),
        ({"k_scale": 0.5}, "k_scale=0.5; accepted: a tensor or None"),
        ({"v_scale": torch.ones(1).half()}, "v_scale is torch.float16"),
        ({"k_scale": (torch.ones(6), 2)}, "k_scale is .*contiguous"),
    ],
)
def test_cache_writes_that_make_no_sense_are_named(change, named, device):
    cache = torch.zeros(2, 3, 16, 64, dtype=torch.uint8, device=device)
    key = torch.ones(4, 3, 64, device=device)
    slots = torch.arange(4, device=device)
    for name, value in change.items():
        if isinstance(value, tuple):  # strided there: a copy to a GPU is contiguous
            change = {name: value[0].to(device)[:: value[1]]}
        elif isinstance(value, torch.Tensor):
            change = {name: value.to(device)}
    with pytest.raises(ValueError, match=named):
        write_kv_cache(cache, cache, key, key, slots, **{"fp8_format": "e4m3_bits"} | change)
    with pytest.raises(ValueError, match="k_scale is given for a cache that is not fp8"):
        write_kv_cache(cache.float(), cache.float(), key, key, slots, k_scale=key[0, 0, :1])


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_scales_of_pages_go_with_no_others(shape, device):
    """One of the two would be read as if every page had some."""
    cache = torch.zeros(2, 3, 16, 64, dtype=torch.uint8, device=device)
    key, slots = torch.ones(4, 3, 64, device=device), torch.arange(4, device=device)
    of_pages, other = (torch.ones(x, device=device) for x in ((2, 3), shape))
    for k_scale, v_scale in ((of_pages, other), (other, of_pages)):
        with pytest.raises(ValueError, match="scales of pages with scales of heads"):
            write_kv_cache(
                cache, cache, key, key, slots, fp8_format="e4m3_bits",
                k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
