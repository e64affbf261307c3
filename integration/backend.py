"""What tilewise tells vLLM about itself: the backend class, read off the support table."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from tilewise import policy, support
from tilewise.integration.spans import shows_spans

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability

    from tilewise.integration.builder import TilewiseMetadataBuilder
    from tilewise.integration.impl import TilewiseImpl


# Cache dtypes by the row of the table that has to be native for them.
_KV_DTYPES = {
    "kv_same": ("auto", "float16", "bfloat16"),
    "kv_fp8": ("fp8", "fp8_e4m3"),
    "kv_fp8_e5m2": ("fp8_e5m2",),
}

_CONFIGURATION = inspect.signature(AttentionBackend.validate_configuration)
_REQUEST_FIELDS = frozenset(field.name for field in fields(support.Request))


def request_of(
    config: Mapping[str, Any], layer: Mapping[str, Any] | None = None
) -> support.Request:
    """Describe a layer to the support table.

    Parameters
    ----------
    config : Mapping[str, Any]
        What vLLM shows ``validate_configuration``; names that the table does not know are left out.
    layer : Mapping[str, Any], optional
        Further fields of ``Request``, from the layer's constructor.
    """
    known = {name: value for name, value in config.items() if name in _REQUEST_FIELDS}
    if isinstance(known.get("dtype"), torch.dtype):
        known["dtype"] = str(known["dtype"]).removeprefix("torch.")
    if known.get("device_capability") is not None:
        known["device_capability"] = tuple(known["device_capability"])
    if "attn_type" in known:
        # An enum whose members are strings; only the value reads well.
        known["attn_type"] = str(getattr(known["attn_type"], "value", known["attn_type"]))
    return support.Request(**{**known, **(layer or {})})


class TilewiseBackend(AttentionBackend):
    """Attention over a paged KV cache, for what ``tilewise.support.TABLE`` calls native.

    The rest is refused by :meth:`validate_configuration`, or by the constructor of
    ``TilewiseImpl`` for what vLLM does not show a backend earlier (ALiBi, soft cap);
    ``tilewise.integration.fallback`` finds another backend for it.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [getattr(torch, n) for n in support.DTYPES]
    # an fp32 model says "auto": vLLM has no cache dtype of the name float32
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        name for key, names in _KV_DTYPES.items() if support.is_native(key) for name in names
    ]
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
        return [MultipleOf(support.PAGE_SIZE_MULTIPLE)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether pages of ``block_size`` tokens can be read (None: not chosen yet)."""
        return block_size is None or block_size % support.PAGE_SIZE_MULTIPLE == 0

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Page size to use when the user named none.

        A page of 64 tokens holds one KV tile, so the prefill kernel loads it with one descriptor
        instead of a gather.
        """
        return policy.PREFERRED_PAGE_SIZE

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head sizes the kernels compute."""
        return list(support.HEAD_SIZES)

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        """Ampere and later; None stands for a platform without CUDA devices (the CPU tests)."""
        return capability is None or tuple(capability) >= support.MIN_COMPUTE_CAPABILITY

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoder self-attention, and the others once the table says so."""
        return attn_type == AttentionType.DECODER or support.is_native("attn_type")

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """As the support table says."""
        return support.is_native("sliding_window")

    @classmethod
    def supports_sink(cls) -> bool:
        """As the support table says."""
        return support.is_native("sinks")

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """As the support table says."""
        return support.is_native("alibi_sqrt")

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """As the support table says, where vLLM hands spans to a builder."""
        return support.is_native("mm_prefix") and shows_spans()

    @classmethod
    def supports_non_causal(cls) -> bool:
        """As the support table says."""
        return support.is_native("non_causal")

    @classmethod
    def supports_rswa(cls) -> bool:
        """As the support table says."""
        return support.is_native("rswa")

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """As the support table says."""
        return support.is_native("per_head_scales")

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """As the support table says."""
        return support.is_native("batch_invariant")

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """List every reason why this configuration is refused; empty when it is supported.

        The reasons are those of the support table, and whatever a vLLM newer than the table adds.
        """
        config = _CONFIGURATION.bind(*args, **kwargs).arguments
        return [reason.text for reason in cls.reasons(config)]

    @classmethod
    def reasons(
        cls, config: Mapping[str, Any], layer: Mapping[str, Any] | None = None
    ) -> tuple[support.Reason, ...]:
        """Return every reason why a layer is not computed here.

        Parameters
        ----------
        config : Mapping[str, Any]
            The arguments of ``validate_configuration``.
        layer : Mapping[str, Any], optional
            Further fields of ``tilewise.support.Request``, from the layer's constructor.
        """
        request = request_of(config, layer)
        found = support.check(request)
        # The base class says the same without values, up to the parenthesis.
        said = {reason.text.partition(" (")[0] for reason in found}
        config = {**config, "attn_type": request.attn_type}
        others = [text for text in super().validate_configuration(**config) if text not in said]
        return (*found, *(support.Reason("other", text) for text in others))
