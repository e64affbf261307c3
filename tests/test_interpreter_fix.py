"""bfloat16 in Triton's interpreter, corrected by us, against torch."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tilewise.kernels import interpreter as interpreter_fix

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="about the interpreter: needs TRITON_INTERPRET=1"
)

SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 3.4e38, -3.4e38, 1e-40]
)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    tile = row[:, None] * SIZE + row[None, :]
    product = tl.dot(tl.load(a_ptr + tile), tl.load(b_ptr + tile))
    tl.store(out_ptr + tile, product)


@triton.jit
def copy_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


@triton.jit
def elementwise_kernel(a_ptr, b_ptr, out_ptr, mask_ptr, SIZE: tl.constexpr, OP: tl.constexpr):
    at = tl.arange(0, SIZE)
    a = tl.load(a_ptr + at)
    b = tl.load(b_ptr + at)
    if OP == "add":
        out = a + b
    elif OP == "mul":
        out = a * b
    elif OP == "sub":
        out = a - b
    elif OP == "neg":
        out = -a
    elif OP == "abs":
        out = tl.abs(a)
    elif OP == "max":
        out = tl.maximum(a, b)
    else:
        out = tl.where(a < b, a, b)
    tl.store(out_ptr + at, out)
    tl.store(mask_ptr + at, a < b)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


def test_install_twice_patches_once():
    builder = interpreter_fix.interpreter.InterpreterBuilder
    interpreter_fix.install()
    once = builder.create_dot
    interpreter_fix.install()
    assert builder.create_dot is once


def test_dot_multiplies_values_not_bit_patterns():
    torch.manual_seed(0)
    a, b = torch.randn(2, 32, 32).to(torch.bfloat16)
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, SIZE=32)
    torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_narrowing_rounds_to_nearest_even(seed):
    generator = torch.Generator().manual_seed(seed)
    # Any bit pattern of fp32: subnormals, infinities, NaN and exact ties among them.
    x = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=generator).to(torch.int32)
    x[::4] = (x[::4] & ~0xFFFF) | 0x8000
    x = x.view(torch.float32)
    x[: len(SPECIAL)] = SPECIAL
    out = torch.empty(len(x), dtype=torch.bfloat16)
    copy_kernel[(1,)](x, out, SIZE=len(x))
    expected = x.to(torch.bfloat16)
    nan = expected.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(bits(out)[~nan], bits(expected)[~nan])


def test_every_bfloat16_widens_exactly():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = torch.empty(len(every))
    copy_kernel[(1,)](every, out, SIZE=len(every))
    assert torch.equal(out.view(torch.int32), every.float().view(torch.int32))


def test_a_scalar_rounds_without_a_warning():
    assert interpreter_fix.narrow(np.float32("nan")) == 0x7FC0
    assert interpreter_fix.narrow(np.float32(-1.0)) == 0xBF80
    assert interpreter_fix.narrow(np.float32(1.0)).shape == ()


@pytest.mark.parametrize("op", ["add", "mul", "sub", "neg", "abs", "max", "min"])
def test_elementwise_arithmetic(op):
    torch.manual_seed(1)
    a, b = torch.randn(2, 256).to(torch.bfloat16)
    out = torch.empty_like(a)
    less = torch.empty(256, dtype=torch.bool)
    elementwise_kernel[(1,)](a, b, out, less, SIZE=256, OP=op)
    wide_a, wide_b = a.float(), b.float()
    expected = {
        "add": wide_a + wide_b,
        "mul": wide_a * wide_b,
        "sub": wide_a - wide_b,
        "neg": -wide_a,
        "abs": wide_a.abs(),
        "max": torch.maximum(wide_a, wide_b),
        "min": torch.minimum(wide_a, wide_b),
    }[op]
    assert torch.equal(out, expected.to(torch.bfloat16))
    assert torch.equal(less, wide_a < wide_b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_are_left_alone(dtype):
    torch.manual_seed(2)
    a, b = torch.randn(2, 256).to(dtype)
    out = torch.empty_like(a)
    less = torch.empty(256, dtype=torch.bool)
    elementwise_kernel[(1,)](a, b, out, less, SIZE=256, OP="add")
    assert torch.equal(out, a + b)
    assert torch.equal(less, a < b)
