"""What the launchers share: views of the paged cache and the arguments made from them."""

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

# Batches arrive as slices of larger buffers: their addresses may have any alignment, and a kernel
# compiled for one must serve all.
BATCH_ARGUMENTS = ["query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "stride_bt_b"]


LOG2E = 1.4426950408889634


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
    """Keys and values of one layer, as strided views.

    Parameters
    ----------
    k, v : Tensor[num_pages, num_kv_heads, page_size, head_dim]
        Any strides, unit stride in the last axis.  In vLLM both are halves of one row.
        An fp8 cache comes as bytes, uint8.
    format : str
        How those bytes are read (``tilewise.kernels.fp8``); "" for a cache in the queries' dtype.
    k_scale, v_scale : Tensor[1] or Tensor[num_kv_heads], fp32, contiguous, or None
        What an fp8 cache's values are multiplied with; None for 1.
    """

    k: torch.Tensor
    v: torch.Tensor
    format: str = ""
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the layer on this rank."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[2]

    @property
    def constants(self) -> dict[str, str | int]:
        """``KV_FORMAT``, ``K_SCALE_STEP`` and ``V_SCALE_STEP`` of the kernels."""
        steps = (int(x is not None and x.numel() > 1) for x in (self.k_scale, self.v_scale))
        names = ("KV_FORMAT", "K_SCALE_STEP", "V_SCALE_STEP")
        return dict(zip(names, (self.format, *steps), strict=True))


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


def _descriptor(x: torch.Tensor, block_n: int, block_d: int) -> TensorDescriptor:
    size = x.element_size()
    strides = list(x.stride())
    # Singleton axes may carry strides the copy engine refuses; any aligned value will do.
    for axis, length in enumerate(x.shape[:-1]):
        if length == 1:
            strides[axis] = 16 // size * max(1, x.shape[-1] * size // 16)
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, block_n, block_d])


def kv_arguments(kv: KvCache, block_n: int, block_d: int, use_tma: bool) -> tuple:
    """``(k_src, v_src, strides)``: descriptors or tensors, then page, head and slot strides."""
    strides = (*kv.k.stride()[:3], *kv.v.stride()[:3])
    if not use_tma:
        return kv.k, kv.v, strides
    # The descriptors carry the strides; constants keep them out of the specialisation key.
    return (
        _descriptor(kv.k, block_n, block_d),
        _descriptor(kv.v, block_n, block_d * kv.k.element_size() // kv.v.element_size()),
        (1, 1, 1, 1, 1, 1),
    )
