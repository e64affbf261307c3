"""What launches share: the call itself, views of the paged cache, and arguments made of these."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

# Batches arrive as slices of larger buffers: their addresses may have any alignment, and a kernel
# compiled for one must serve all.
BATCH_ARGUMENTS = [
    "query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "causal_ptr", "spans_ptr",
    "out_scale_ptr", "kv_start_ptr", "mask_ptr", "mask_start_ptr", "stride_bt_b",
]  # fmt: skip

LOG2E = 1.4426950408889634

# Specialisations a launcher remembers; a server meets a few dozen.
MAX_REMEMBERED = 1024


class Launcher:
    """Launches one kernel; what Triton's own call looks up in Python every time is remembered.

    Triton binds, types and specialises every argument of every call, which costs more host time
    than most decode kernels run. Here the first call of a kind goes that way and leaves a compiled
    kernel; later ones hand their arguments straight to it. A kind is at least as fine as Triton's
    specialisation: dtypes and alignment of addresses, integers that are 1, multiples of 16 or
    wide, boxes of descriptors, all constants and options.  What Triton reads anew at every call,
    its hooks before a launch and its debugging switches, counts when a kind first comes.

    Parameters
    ----------
    kernel : triton.JITFunction or GluonJITFunction
        Its constants come last in its signature.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple, Any] = {}
        self._interpreted = not isinstance(kernel, triton.JITFunction)

    def __call__(
        self, grid: tuple[int, int, int], args: tuple, constants: Mapping[str, Any], **options: Any
    ) -> None:
        """Launch on the current device and stream.

        Parameters
        ----------
        grid : (int, int, int)
        args : tuple
            Tensors, integers, floats, descriptors and None, in the order of the signature.
        constants : mapping of str to value
            The kernel's constexprs, in the order of the signature.
        options : int
            ``num_warps`` and the like.
        """
        if self._interpreted:
            self._call(grid, args, constants, options)
            return
        device = triton.runtime.driver.active.get_current_device()
        key = (device, *constants.values(), *options.items(), *map(_kind, args))
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*args, *constants.values())
            return
        if len(self._compiled) >= MAX_REMEMBERED:
            self._compiled.clear()
        self._compiled[key] = self._call(grid, args, constants, options)

    def _call(self, grid: tuple, args: tuple, constants: Mapping, options: Mapping) -> Any:
        """Launch by Triton's own way, which names the constants; the compiled kernel does not."""
        expected = self.kernel.arg_names[len(args) :]
        if expected != list(constants):
            raise TypeError(f"constants {list(constants)}; the kernel's signature has {expected}")
        return self.kernel[grid](*args, **constants, **options)


@lru_cache(maxsize=16384)
def _kind_of_int(argument: int) -> tuple:
    """Whether it is 1, a multiple of 16, within 32 bits, beyond 63."""
    return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31, argument >= 2**63


def _kind(argument: Any) -> Any:
    """What a compiled kernel may depend on of one argument."""
    if type(argument) is int:  # not bool; most arguments are
        return _kind_of_int(argument)
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, bool):
        return bool
    if isinstance(argument, int):
        return _kind_of_int(int(argument))
    if isinstance(argument, float):
        return float
    if argument is None:
        return None
    if not hasattr(argument, "block_shape"):
        raise TypeError(
            f"{argument!r} is a {type(argument).__name__}; accepted: tensors, descriptors, int, "
            "float, bool and None"
        )
    layout = getattr(argument, "layout", None)  # of Gluon's descriptors
    return argument.base.dtype, *argument.block_shape, layout


@dataclass(frozen=True)
class Logits:
    """How one layer makes logits of products: see ``tilewise.kernels.logits`` for the order.

    Parameters
    ----------
    scale : float
        Positive factor.
    softcap : float
        Bound of the logits, by ``tanh``; 0 for none.
    sinks : Tensor[num_q_heads] or None
        One more logit a head, in the denominator only.
    alibi_slopes : Tensor[num_q_heads] or None
    alibi_sqrt : bool
        Take the square root of ALiBi's distances.
    """

    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    alibi_sqrt: bool = False

    @property
    def arguments(self) -> tuple[float, float | None, torch.Tensor | None, torch.Tensor | None]:
        """``scale_log2``, ``cap_log2``, ``sinks_ptr`` and ``slopes_ptr`` of the kernels.

        What is None is compiled out.
        """
        cap_log2 = self.softcap * LOG2E if self.softcap else None
        return self.scale * LOG2E, cap_log2, self.sinks, self.alibi_slopes


@dataclass(frozen=True)
class KvCache:
    """Keys and values of one layer, as strided views: pages of a cache, or rows without pages.

    Parameters
    ----------
    k, v : Tensor[num_pages, num_kv_heads, page_size, head_dim]
        Any strides, unit stride in the last axis.  In vLLM both are halves of one row.
        An fp8 cache comes as bytes, uint8.
    format : str
        How those bytes are read (``tilewise.kernels.fp8``); "" for a cache in the queries' dtype.
    k_scale, v_scale : Tensor[1], [num_kv_heads] or [num_pages, num_kv_heads], fp32, or None
        Contiguous; what an fp8 cache's values are multiplied with; None for 1.  Both are of pages,
        or neither is.
    rotated : bool
        Keys of an fp8 cache are rotated (``tilewise.kernels.hadamard``); queries have to be.
    rows_per_page : int
        0 for a paged cache.  Otherwise ``k`` and ``v`` are [1, num_kv_heads, rows, head_dim], a
        request's keys are consecutive rows, and kernels walk them as pages of so many.
    """

    k: torch.Tensor
    v: torch.Tensor
    format: str = ""
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    rows_per_page: int = 0
    rotated: bool = False

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the layer on this rank."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.rows_per_page or self.k.shape[2]

    def strides(self, x: torch.Tensor) -> tuple[int, int, int]:
        """Page, head and slot stride of ``k`` or ``v``."""
        page, head, slot = x.stride()[:3]
        return (self.rows_per_page * slot if self.rows_per_page else page), head, slot

    @property
    def options(self) -> dict[str, bool]:
        """How kernels that read the cache are compiled.

        An fp8 cache's scale may be anything, and so the logits large: a product that is rounded
        in the maximum and not rounded in the difference would make weights of 2**(its rounding).
        Kernels that know a bound of their logits may ask for single fused operations.
        """
        return {"enable_fp_fusion": False} if self.format else {}

    @property
    def constants(self) -> dict[str, str | int]:
        """``KV_FORMAT``, how scales lie, and whether keys are ``ROTATED``, for the kernels."""
        steps = tuple(int(x is not None and x.numel() > 1) for x in (self.k_scale, self.v_scale))
        if self.page_scales:
            steps = (-1, -1)
        names = ("KV_FORMAT", "K_SCALE_STEP", "V_SCALE_STEP", "ROTATED")
        return dict(zip(names, (self.format, *steps, self.rotated), strict=True))

    @property
    def page_scales(self) -> bool:
        """Whether an fp8 cache has a scale for every page and head."""
        return any(x is not None and x.dim() == 2 for x in (self.k_scale, self.v_scale))


def tma_strides(kv: KvCache) -> bool:
    """Whether both views' strides suit the copy engine: positive multiples of 16 bytes.

    A single KV head is never stepped over, so its stride is free to be anything.
    """
    return all(
        stride > 0 and stride * x.element_size() % 16 == 0
        for x in (kv.k, kv.v)
        for axis, stride in enumerate(x.stride()[:-1])
        if not (axis == 1 and x.shape[1] == 1)
    )


class Descriptors:
    """Makes tensor descriptors; the first of a kind is checked by Triton, others are its copies.

    Their constructors check in Python what a layer never changes.  Addresses are left to the
    caller: multiples of 16 bytes.

    Parameters
    ----------
    make : callable
        ``make(tensor, shape, strides, block)`` returns a descriptor.
    """

    def __init__(
        self, make: Callable[[torch.Tensor, list[int], list[int], list[int]], Any]
    ) -> None:
        self._make = make
        self._templates: dict[tuple, Any] = {}

    def __call__(self, x: torch.Tensor, block: tuple[int, ...]) -> Any:
        """Describe ``x`` in boxes of ``block``, one length an axis."""
        length = x.shape[0]
        key = (x.dtype, x.stride(), x.shape[1:], length == 1, block)
        template = self._templates.get(key)
        if template is None:
            template = self._make(x, list(x.shape), _free_singletons(x), list(block))
            template.base = None  # or it would keep one layer's memory
            if len(self._templates) >= MAX_REMEMBERED:
                self._templates.clear()
            self._templates[key] = template
        made = object.__new__(type(template))
        made.__dict__.update(template.__dict__)
        made.base = x
        made.shape = [length, *template.shape[1:]]
        return made


def _free_singletons(x: torch.Tensor) -> list[int]:
    """Strides of ``x``; those of axes of one element become any that the copy engine takes."""
    size = x.element_size()
    row = 16 // size * max(1, x.shape[-1] * size // 16)
    lengths = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return [*(row if n == 1 else stride for n, stride in lengths), x.stride(-1)]


_describe = Descriptors(lambda x, shape, strides, block: TensorDescriptor(x, shape, strides, block))


def kv_arguments(kv: KvCache, block_n: int, block_d: int, use_tma: bool) -> tuple:
    """``(k_src, v_src, strides)``: descriptors or tensors, then page, head and slot strides."""
    strides = (*kv.strides(kv.k), *kv.strides(kv.v))
    if not use_tma:
        return kv.k, kv.v, strides
    # The descriptors carry the strides; constants keep them out of the specialisation key.
    return (
        _describe(kv.k, (1, 1, block_n, block_d)),
        _describe(kv.v, (1, 1, block_n, block_d * kv.k.element_size() // kv.v.element_size())),
        (1, 1, 1, 1, 1, 1),
    )
