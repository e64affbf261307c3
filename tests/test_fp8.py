"""fp8 caches: the conversions bit for bit, the cache write, and attention over them."""

import pytest
import torch
import triton
import triton.language as tl

from tilewise.kernels.fp8 import decode_fp8, encode_fp8, fp16_rows

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
    """Every value, every tie between two, their neighbours; tiny, huge and random ones; no number."""
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
    sizes = 2.0 ** torch.linspace(-60, 120, 16)
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
    assert (error <= q.double().abs().nan_to_num().amax(1) * 2.0**-25).all()
    largest = rows.abs().nan_to_num().amax(1)
    assert ((largest >= 1) & (largest < 2) | (torch.arange(16, device=device) == 3)).all()
