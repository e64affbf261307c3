"""Correct bfloat16 arithmetic in Triton's interpreter (3.6 to 3.9).

The interpreter keeps bfloat16 values as the 16 bits that encode them, in arrays of unsigned
integers, and then

* multiplies and adds those integers in ``tl.dot`` and in plain arithmetic,
* compares them as integers, so that negative numbers sort above positive ones,
* cuts the low bits off when it narrows fp32, where the hardware rounds to nearest, ties to even.

None of it raises. ``install`` puts widening to fp32 in front of these operations and rounding
behind them, which is what the hardware does for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_MARK = "_tilewise_bf16_fixed"
_QUIET_NAN = np.uint16(0x7FC0)


def widen(bits: np.ndarray) -> np.ndarray:
    """Return the fp32 values of bfloat16 ``bits`` (uint16, any shape); exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Return the bfloat16 bits (uint16) nearest to ``values``, ties to even; NaN stays NaN."""
    values = np.asarray(values, dtype=np.float32)
    # One dimension at least, and 64 bits: numpy warns when a scalar's sum wraps around.
    bits = np.atleast_1d(values).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(
        np.uint16
    )
    return np.where(np.isnan(values), _QUIET_NAN, rounded.reshape(values.shape))


def _is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _widened(handle: Any) -> Any:
    """The same tile as fp32 if it is bfloat16, else the handle itself."""
    if _is_bf16(handle):
        return interpreter.TensorHandle(widen(handle.data), tl.float32)
    return handle


def _rounded(data: np.ndarray) -> Any:
    """A bfloat16 handle of a floating-point result; comparisons keep their booleans."""
    if data.dtype != np.bool_:
        data = narrow(data)
    return interpreter.TensorHandle(data, tl.bfloat16)


def _fixed_elementwise(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``unary_op`` and its like: operands first, then the numpy function to apply."""

    def call(self: Any, *args: Any) -> Any:
        operands = [a for a in args if isinstance(a, interpreter.TensorHandle)]
        rest = args[len(operands) :]
        # A selection moves bits and does no arithmetic.
        if rest[:1] == (np.where,) or not any(_is_bf16(a) for a in operands):
            return original(self, *args)
        return _rounded(original(self, *(_widened(a) for a in operands), *rest).data)

    return call


def _fixed_dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return original(self, _widened(a), _widened(b), *args)

    return create_dot


def _fixed_cast(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``cast_impl`` and ``create_fp_to_fp``; Triton casts bfloat16 from and to fp32 only."""

    def cast(self: Any, src: Any, dst_type: Any, *args: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16 and target == tl.float32:
            return _widened(src)
        # An explicit rounding mode (`args`) other than the default is left to Triton.
        if source == tl.float32 and target == tl.bfloat16 and not _rounds_to_zero(args):
            return interpreter.TensorHandle(narrow(src.data), tl.bfloat16)
        return original(self, src, dst_type, *args)

    return cast


def _rounds_to_zero(args: tuple[Any, ...]) -> bool:
    return bool(args) and "RTZ" in str(args[0])


def install() -> None:
    """Patch Triton's interpreter in this process; harmless when repeated."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, _MARK, False):
        return
    for name in ("unary_op", "binary_op", "ternary_op", "create_fma"):
        setattr(builder, name, _fixed_elementwise(getattr(builder, name)))
    builder.create_dot = _fixed_dot(builder.create_dot)
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, _fixed_cast(getattr(builder, name)))
    setattr(builder, _MARK, True)
