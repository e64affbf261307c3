"""What vLLM asks of compiled Triton kernels and interpreted ones lack."""

from __future__ import annotations

import inspect

from triton.runtime.interpreter import InterpretedFunction


def _constexprs(kernel: InterpretedFunction) -> list[int]:
    """Places of a kernel's constants in its signature."""
    parameters = inspect.signature(kernel.fn).parameters.values()
    return [i for i, p in enumerate(parameters) if "constexpr" in str(p.annotation)]


def install() -> None:
    """Give interpreted kernels ``constexprs``, which vLLM counts; harmless when repeated."""
    InterpretedFunction.constexprs = property(_constexprs)
