"""What tilewise tells vLLM about itself: the attention backend class and its support table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability

    from tilewise.integration.builder import TilewiseMetadataBuilder
    from tilewise.integration.impl import TilewiseImpl

PAGE_SIZE_MULTIPLE = 16
PREFERRED_PAGE_SIZE = 64
MIN_COMPUTE_CAPABILITY = (8, 0)

_KV_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def _supported_head_sizes() -> list[int]:
    """Every multiple of 8 from 16 to 256; the kernels pad to the next power of two."""
    return list(range(16, 257, 8))


class TilewiseBackend(AttentionBackend):
    """Causal decoder attention over a paged KV cache, for fp16, bf16 and fp32 models.

    Everything that is not supported is refused by :meth:`validate_configuration` before the model
    is built, or by the constructor of ``TilewiseImpl`` for what vLLM does not show a backend
    earlier (ALiBi, soft cap).
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    # an fp32 model says "auto": vLLM has no cache dtype of the name float32
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *_KV_DTYPES]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Name of an ``AttentionBackendEnum`` member: vLLM looks the layer's backend up by it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TilewiseImpl]:
        """Class of the per-layer implementation."""
        from tilewise.integration.impl import TilewiseImpl

        return TilewiseImpl

    @staticmethod
    def get_builder_cls() -> type[TilewiseMetadataBuilder]:
        """Class of the per-group metadata builder."""
        from tilewise.integration.builder import TilewiseMetadataBuilder

        return TilewiseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: Any = None,
    ) -> list[int | MultipleOf]:
        """Page sizes the kernels read: any multiple of 16."""
        return [MultipleOf(PAGE_SIZE_MULTIPLE)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether pages of ``block_size`` tokens can be read (None: not chosen yet)."""
        return block_size is None or block_size % PAGE_SIZE_MULTIPLE == 0

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Page size to use when the user named none.

        A page of 64 tokens holds one KV tile, so the prefill kernel loads it with one descriptor
        instead of a gather.
        """
        return PREFERRED_PAGE_SIZE

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head sizes the kernels compute."""
        return _supported_head_sizes()

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        """Ampere and later; None stands for a platform without CUDA devices (the CPU tests)."""
        return capability is None or tuple(capability) >= MIN_COMPUTE_CAPABILITY

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Only decoder self-attention."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        *args: Any,
        **kwargs: Any,
    ) -> str | None:
        """Reason against the combination: the cache must hold the model's own dtype."""
        named = _KV_DTYPES.get(kv_cache_dtype or "auto")
        if named is not None and named != dtype:
            return f"kv_cache_dtype {kv_cache_dtype} differs from the model's dtype {dtype}"
        return None

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """List every reason why this configuration is refused; empty when it is supported.

        The generic reasons of vLLM get the offending value and the accepted ones appended.
        """
        reasons = super().validate_configuration(*args, **kwargs)
        return [_explain(reason, kwargs) for reason in reasons]


def _explain(reason: str, config: dict[str, Any]) -> str:
    """Add the offending and the accepted values to one of vLLM's generic reasons."""
    capability = config.get("device_capability")
    details = {
        "head_size not supported": (
            f"{config.get('head_size')}; tilewise computes multiples of 8 from 16 to 256"
        ),
        "dtype not supported": f"{config.get('dtype')}; tilewise computes fp16, bf16 and fp32",
        "kv_cache_dtype not supported": (
            f"{config.get('kv_cache_dtype')}; tilewise reads auto, float16 and bfloat16"
        ),
        "block_size not supported": (
            f"{config.get('block_size')}; tilewise reads multiples of {PAGE_SIZE_MULTIPLE}"
        ),
        "compute capability not supported": (
            f"{tuple(capability) if capability is not None else None}; tilewise needs 8.0 or later"
        ),
    }
    detail = details.get(reason)
    return reason if detail is None else f"{reason} ({detail})"
