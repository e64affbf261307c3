"""The attention layer that vLLM calls: KV-cache write and attention, nothing else."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from tilewise import counters, policy, support
from tilewise.checks import FP8_OUT
from tilewise.device import describe, fp8_format
from tilewise.errors import UnsupportedConfig, UnsupportedFeature
from tilewise.integration.compat import shards_caches
from tilewise.integration.spans import mode_of
from tilewise.integration.step_metrics import is_drafted
from tilewise.kernels.cache_write import write_kv_cache
from tilewise.settings import load_settings

if TYPE_CHECKING:
    from tilewise.integration.metadata import TilewiseMetadata

# Layers whose keys are the rows of their own batch: they have no cache.
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

_DCP = support.is_native("dcp") and shards_caches()

_CACHE_WRITE = counters.cell("launches", kernel="cache_write")

# vLLM's names of fp8 caches: row of the support table, and dtype of the bytes.
_FP8_CACHES = {
    "fp8": ("kv_fp8", torch.float8_e4m3fn),
    "fp8_e4m3": ("kv_fp8", torch.float8_e4m3fn),
    "fp8_e5m2": ("kv_fp8_e5m2", torch.float8_e5m2),
}


class TilewiseImpl(AttentionImpl["TilewiseMetadata"]):
    """Runs one layer's attention on the plan that the step's builder made.

    Parameters
    ----------
    num_heads, head_size, scale, num_kv_heads
        Query heads, head size, softmax scale and KV heads of this rank.
    alibi_slopes, sliding_window, logits_soft_cap
        One slope a head, the number of keys a query may see (itself included), and the bound of
        the logits; None for none (so is a soft cap of 0).
    kv_cache_dtype : str
        ``auto``, the model's own dtype, ``fp8``, ``fp8_e4m3`` or ``fp8_e5m2``.
    attn_type : str
        One of ``AttentionType``. Encoders read the keys they are given, all others the cache;
        whether a batch is causal is the builder's to know.
    kv_sharing_target_layer_name : str, optional
        The layer whose KV cache this one reads; then nothing is written here.
    sinks : Tensor[num_heads], optional
        One logit a head that joins the softmax's denominator.
    use_alibi_sqrt : bool
        Take ALiBi's distances under a square root.
    **extra
        Further features of a model; any that is switched on is refused.

    Raises
    ------
    NotImplementedError
        Naming the feature that tilewise does not compute: what ``tilewise.support`` does not call
        native, and values that make no sense.
    """

    # Quantised queries would cost a launch a layer and precision; the kernels gain nothing by them.
    supports_quant_query_input: bool = False

    # vLLM starts with decode context parallelism only where all of these say so. Queries of any
    # number of tokens see their context apart from each other, so that interleaving is free.
    supports_dcp: bool = _DCP
    can_return_lse_for_decode: bool = _DCP
    supports_mtp_with_cp_non_trivial_interleave_size: bool = _DCP
    lse_base_on_e: bool = True

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
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        **extra: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._set_features(alibi_slopes, sliding_window, logits_soft_cap, sinks, use_alibi_sqrt)
        if attn_type != AttentionType.DECODER:
            if not support.is_native("attn_type"):
                raise _unsupported(
                    f"attention type {attn_type!r} (only {AttentionType.DECODER.value!r})"
                )
            if alibi_slopes is not None:
                raise _unsupported(f"ALiBi slopes with attention type {attn_type!r}")
        # The builder asks for the next two.
        self.is_encoder = attn_type in _ENCODERS
        self.is_cross = attn_type == AttentionType.ENCODER_DECODER
        self.kv_dtype = None if self.is_encoder else self._kv_dtype()
        self.fp8_matmul, self.rotated_keys = self._fp8_attention()
        if self.dcp_world_size > 1 and not self.is_encoder:
            self._check_for_dcp()
        for name, value in extra.items():
            if not _switched_off(value):
                raise _unsupported(f"the layer option {name!r} ({type(value).__name__})")
        if self.num_heads % self.num_kv_heads != 0:
            raise _unsupported(f"{self.num_heads} query heads over {self.num_kv_heads} KV heads")

    def _kv_dtype(self) -> torch.dtype | None:
        """Dtype of an fp8 cache; None for one in the model's dtype."""
        if self.kv_cache_dtype in ("auto", "float16", "bfloat16"):
            return None
        row, dtype = _FP8_CACHES.get(self.kv_cache_dtype, ("", None))
        if dtype is None or not support.is_native(row):
            raise _unsupported(f"kv_cache_dtype {self.kv_cache_dtype!r}")
        return dtype

    def _fp8_attention(self) -> tuple[bool, bool]:
        """Whether the prefill multiplies fp8 operands, and whether keys are rotated."""
        if self.kv_dtype != torch.float8_e4m3fn:
            return False, False
        asked = load_settings(os.environ).fp8_attention
        return asked != "off", asked == "rotated"

    def _set_features(
        self,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        logits_soft_cap: float | None,
        sinks: torch.Tensor | None,
        use_alibi_sqrt: bool,
    ) -> None:
        """Keep what shapes the logits for ``forward``, or refuse it."""
        soft_cap = float(logits_soft_cap or 0.0)
        row = "alibi_sqrt" if use_alibi_sqrt else "alibi"
        if alibi_slopes is not None and not support.is_native(row):
            raise _unsupported("ALiBi slopes" + " under a square root" * use_alibi_sqrt)
        if sliding_window is not None and not (
            support.is_native("sliding_window") and sliding_window > 0
        ):
            raise _unsupported(f"a sliding window ({sliding_window})")
        if soft_cap and not (
            support.is_native("soft_cap") and soft_cap > 0 and math.isfinite(soft_cap)
        ):
            raise _unsupported(f"a logits soft cap ({logits_soft_cap})")
        if sinks is not None and not support.is_native("sinks"):
            raise _unsupported(f"the layer option 'sinks' ({type(sinks).__name__})")
        for name, x in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
            if x is not None and len(x) != self.num_heads:
                raise _unsupported(f"{len(x)} {name} for {self.num_heads} query heads")
        self.window = sliding_window
        self.soft_cap = soft_cap
        # Read at every step: its values are loaded after the layer is built.
        self.sinks = sinks
        self.alibi_slopes = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        self.alibi_sqrt = use_alibi_sqrt

    def _check_for_dcp(self) -> None:
        """Refuse what needs to know where in its sequence a key of a shared cache stands."""
        features = {
            "a sliding window": self.window is not None,
            "ALiBi slopes": self.alibi_slopes is not None,
            "a KV cache shared between layers": self.kv_sharing_target_layer_name is not None,
            "cross attention": self.is_cross,
            "TILEWISE_FP8_ATTENTION": self.fp8_matmul,
        }
        for name, present in features.items():
            if present:
                raise _unsupported(f"{name} with decode context parallelism")

    def _kv_scales(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Scales of an fp8 cache, still on the device: a graph sees what is loaded later."""
        if self.kv_dtype is None:
            return None, None
        return layer._k_scale, layer._v_scale

    def keep_through_sleep(self) -> None:
        """Move what this layer made of its own out of the memory of the weights.

        vLLM's sleep of level 2 discards that memory; it reloads parameters and restores buffers,
        and knows of nothing else. What is allocated with the KV cache's builders is kept.
        """
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.clone()

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether ``forward`` can write a quantised output: fp8 (e4m3) with one static scale.

        Parameters
        ----------
        quant_key : QuantKey
            vLLM's name for dtype and scales.
        """
        from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

        if not self.may_quantise_output():
            return False
        return bool(quant_key == kFp8StaticTensorSym and quant_key.dtype == FP8_OUT)

    def may_quantise_output(self) -> bool:
        """Whether ``forward`` can ever be asked for a quantised output."""
        if self.dcp_world_size > 1:
            return False  # parts of several ranks are merged first
        # The Gluon prefill writes the model's dtype only, and is worth more than a quantisation
        # saved.
        return not self._prefills_in_gluon()

    def _prefills_in_gluon(self) -> bool:
        """Whether layers like this one have the Gluon prefill, at the page size we ask for."""
        capped = self.fp8_matmul and self.soft_cap
        if capped or self.alibi_slopes is not None or self.is_encoder:
            return False
        if not torch.cuda.is_available():
            return False
        kv_size = 0 if self.kv_dtype is None else self.kv_dtype.itemsize
        geometry = policy.Geometry(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            policy.PREFERRED_PAGE_SIZE,
            2,
            kv_size,
        )
        device = describe(torch.device("cuda", torch.cuda.current_device()))
        window = self.window or 0
        if self.fp8_matmul:
            return policy.why_not_hopper_fp8(geometry, device, window) is None
        return policy.why_not_hopper(geometry, device, window) is None

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
            The attention layer; of an fp8 cache it holds the scales, ``_k_scale`` and ``_v_scale``.
        key, value : Tensor[num_tokens, num_kv_heads, head_size]
            New keys and values; rows beyond ``slot_mapping`` are padding.
        kv_cache : Tensor[num_pages, num_kv_heads, page_size, 2 * head_size]
            Keys and values side by side, with any strides but a unit last one; uint8 for fp8.
        slot_mapping : Tensor[num_slots], int64
            Page times page size plus place in the page; -1 for padding.
        """
        if self.kv_sharing_target_layer_name is not None or slot_mapping.shape[0] == 0:
            return
        if self.is_encoder:
            return
        k_cache, v_cache = kv_cache.split(self.head_size, dim=-1)
        if self.kv_dtype is None:
            write_kv_cache(k_cache, v_cache, key, value, slot_mapping)
        else:
            k_scale, v_scale = self._kv_scales(layer)
            write_kv_cache(
                k_cache, v_cache, key, value, slot_mapping,
                fp8_format=fp8_format(self.kv_dtype, kv_cache.device, write=True),
                k_scale=k_scale, v_scale=v_scale, rotated=self.rotated_keys,
            )  # fmt: skip
        _CACHE_WRITE.n += 1

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
        """Attend to the paged KV cache, or, in an encoder, to the batch's own keys.

        Parameters
        ----------
        layer : torch.nn.Module
            The attention layer; of an fp8 cache it holds the scales, ``_k_scale`` and ``_v_scale``.
        query : Tensor[num_tokens, num_heads, head_size]
            Queries; may have more rows than the step has tokens.
        key, value : Tensor[num_tokens, num_kv_heads, head_size], optional
            Of a decoder already in the cache, and unused but for decode context parallelism.
        kv_cache : Tensor[num_pages, num_kv_heads, page_size, 2 * head_size]
            The layer's cache; of an encoder anything.
        attn_metadata : TilewiseMetadata, optional
            The step's plan; None in vLLM's memory profiling run.
        output : Tensor[num_tokens, num_heads, head_size]
            Filled in place; rows beyond the step's tokens are left alone.
        output_scale : Tensor[1], fp32, optional
            With one, ``output`` is float8_e4m3fn and holds the result divided by it.
        output_block_scale : Tensor, optional
            Must be None: the output has one scale at most.

        Returns
        -------
        Tensor[num_tokens, num_heads, head_size]
            ``output``.

        Raises
        ------
        NotImplementedError
            When an output with scales of blocks is asked for.
        UnsupportedConfig
            When the step was planned for another sliding window than this layer's.
        """
        if output_block_scale is not None:
            raise _unsupported("an output with scales of blocks (output_block_scale)")
        if attn_metadata is None:
            return output.fill_(0)
        steps = attn_metadata.steps
        if steps is not None and steps.mode is None and not is_drafted(layer):
            steps.ran()
        if attn_metadata.sharded is not None:
            step = attn_metadata.sharded
            step.attention.run(
                step, self, query, key, value, kv_cache, output, self._kv_scales(layer)
            )
            return output
        attn, plan = attn_metadata.planned(self.window)
        if attn.window != self.window:
            raise UnsupportedConfig(
                f"the step was planned for a window of {attn.window}, the layer's is {self.window}"
            )
        k_scale, v_scale = self._kv_scales(layer)
        kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = kv_cache
        if self.is_encoder:
            if key is None or value is None:
                raise UnsupportedConfig("an encoder layer was called without keys or values")
            kv = key, value
        attn.run(
            query, kv, scale=self.scale, out=output, plan=plan,
            sinks=self.sinks, softcap=self.soft_cap, alibi_slopes=self.alibi_slopes,
            alibi_sqrt=self.alibi_sqrt, k_scale=k_scale, v_scale=v_scale,
            spans=mode_of(layer, attn_metadata), out_scale=output_scale,
        )  # fmt: skip
        return output


def _switched_off(value: Any) -> bool:
    """Whether an option's value means that its feature is not used."""
    return value is None or value is False or (isinstance(value, int) and value < 0)


def _unsupported(feature: str) -> UnsupportedFeature:
    """Error for a feature that vLLM shows a backend only when the layer is built."""
    return UnsupportedFeature(
        f"tilewise does not support {feature}; choose another --attention-backend for this model"
    )
