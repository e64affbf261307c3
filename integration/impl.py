"""The attention layer that vLLM calls: KV-cache write and attention, nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from tilewise import counters
from tilewise.kernels.cache_write import write_kv_cache

if TYPE_CHECKING:
    from tilewise.integration.builder import TilewiseMetadata


class TilewiseImpl(AttentionImpl["TilewiseMetadata"]):
    """Runs one layer's attention on the plan that the step's builder made.

    Parameters
    ----------
    num_heads, head_size, scale, num_kv_heads
        Query heads, head size, softmax scale and KV heads of this rank.
    alibi_slopes, sliding_window, logits_soft_cap
        Must be None (a soft cap of 0 counts as none).
    kv_cache_dtype : str
        ``auto`` or the model's own dtype.
    attn_type : str
        ``AttentionType.DECODER``.
    kv_sharing_target_layer_name : str, optional
        The layer whose KV cache this one reads; then nothing is written here.
    **extra
        Further features of a model; any that is switched on is refused.

    Raises
    ------
    NotImplementedError
        Naming the feature that tilewise does not compute.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        if alibi_slopes is not None:
            raise _unsupported("ALiBi slopes")
        if sliding_window is not None:
            raise _unsupported(f"a sliding window ({sliding_window})")
        if logits_soft_cap:
            raise _unsupported(f"a logits soft cap ({logits_soft_cap})")
        if attn_type != AttentionType.DECODER:
            raise _unsupported(
                f"attention type {attn_type!r} (only {AttentionType.DECODER.value!r})"
            )
        if kv_cache_dtype not in ("auto", "float16", "bfloat16"):
            raise _unsupported(f"kv_cache_dtype {kv_cache_dtype!r}")
        for name, value in extra.items():
            if not _switched_off(value):
                raise _unsupported(f"the layer option {name!r} ({type(value).__name__})")
        if self.num_heads % self.num_kv_heads != 0:
            raise _unsupported(f"{self.num_heads} query heads over {self.num_kv_heads} KV heads")

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's keys and values to their slots.

        Parameters
        ----------
        layer : torch.nn.Module
            The attention layer; unused.
        key, value : Tensor[num_tokens, num_kv_heads, head_size]
            New keys and values; rows beyond ``slot_mapping`` are padding.
        kv_cache : Tensor[num_pages, num_kv_heads, page_size, 2 * head_size]
            Keys and values side by side, with any strides but a unit last one.
        slot_mapping : Tensor[num_slots], int64
            Page times page size plus place in the page; -1 for padding.
        """
        if self.kv_sharing_target_layer_name is not None or slot_mapping.shape[0] == 0:
            return
        k_cache, v_cache = kv_cache.split(self.head_size, dim=-1)
        write_kv_cache(k_cache, v_cache, key, value, slot_mapping)
        counters.add("launches", kernel="cache_write")

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: TilewiseMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the paged KV cache.

        Parameters
        ----------
        layer : torch.nn.Module
            The attention layer; unused.
        query : Tensor[num_tokens, num_heads, head_size]
            Queries; may have more rows than the step has tokens.
        key, value : Tensor[num_tokens, num_kv_heads, head_size], optional
            Already in the cache; unused.
        kv_cache : Tensor[num_pages, num_kv_heads, page_size, 2 * head_size]
            The layer's cache.
        attn_metadata : TilewiseMetadata, optional
            The step's plan; None in vLLM's memory profiling run.
        output : Tensor[num_tokens, num_heads, head_size]
            Filled in place; rows beyond the step's tokens are left alone.
        output_scale, output_block_scale : Tensor, optional
            Must be None: the output is not quantised here.

        Returns
        -------
        Tensor[num_tokens, num_heads, head_size]
            ``output``.

        Raises
        ------
        NotImplementedError
            When a quantised output is asked for.
        """
        if output_scale is not None or output_block_scale is not None:
            raise _unsupported("a quantised attention output (output_scale)")
        if attn_metadata is None:
            return output.fill_(0)
        attn_metadata.attn.run(
            query, kv_cache, scale=self.scale, out=output, plan=attn_metadata.plan
        )
        return output


def _switched_off(value: Any) -> bool:
    """Whether an option's value means that its feature is not used."""
    return value is None or value is False or (isinstance(value, int) and value < 0)


def _unsupported(feature: str) -> NotImplementedError:
    """Error for a feature that vLLM shows a backend only when the layer is built."""
    return NotImplementedError(
        f"tilewise does not support {feature}; choose another --attention-backend for this model"
    )
