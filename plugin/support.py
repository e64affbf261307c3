"""What tilewise computes, and which backend of vLLM computes the rest right: one table.

``TABLE`` has a row for every feature and configuration. ``check`` says why a layer is not ours,
``targets`` who may take it. The backend's ``validate_configuration``, the fallback, its counters
and the README's matrix (``python -m tilewise.matrix``) all read this table.

To make a feature native, set ``native`` of its row to True. Its ``targets`` stay: a layer that
falls back for another feature still needs a backend that computes this one too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

HEAD_SIZES = (*range(16, 257, 8), 512)
DTYPES = ("float16", "bfloat16", "float32")
PAGE_SIZE_MULTIPLE = 16
MIN_COMPUTE_CAPABILITY = (8, 0)
MAX_GROUP_SIZE, MAX_WIDE_GROUP_SIZE = 128, 32

# Backends of vLLM that may stand in for us, best first. A row names those that compute its
# feature right; whether one fits a layer's head size, dtypes or GPU, vLLM's own check decides.
ORDER = (
    "FLASHINFER",
    "FLASH_ATTN",
    "TRITON_FLASH_ATTN",
    "TRITON_ATTN",
    "FLEX_ATTENTION",
    "TURBOQUANT",
)

# In place of a list of backends: vLLM selects as if no backend had been named.
VLLM_CHOICE = ("vLLM's choice",)

# vLLM's layer classes that rewrite a backend's batches, or count on a mask of its own; all others
# are as good as ``Attention``.
LAYER_KINDS = frozenset(
    {
        "ChunkedLocalAttention",
        "PrefillPrefixLMAttention",
        "RSWAAttention",
        "StaticSinkAttention",
        "WhisperCausalAttentionWithBlockPooling",
    }
)

_NO_TURBOQUANT = ORDER[:-1]
_MAINSTREAM = ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN")
_FLASH_OR_TRITON = ("FLASH_ATTN", "TRITON_ATTN")


@dataclass(frozen=True)
class Request:
    """One attention layer in its configuration; the defaults are what every Llama has.

    The first group is what vLLM shows a backend when it selects one (same names), the second what
    only the layer's constructor sees.
    """

    head_size: int = 128
    dtype: str = "bfloat16"
    kv_cache_dtype: str | None = "auto"
    block_size: int | None = None
    use_mla: bool = False
    has_sink: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_per_head_quant_scales: bool = False
    device_capability: tuple[int, int] | None = None
    attn_type: str = "decoder"
    has_sliding_window: bool = False
    use_non_causal: bool = False
    use_batch_invariant: bool = False
    use_kv_connector: bool = False
    use_pcp: bool = False
    use_adaptive_verification: bool = False
    use_dcp: bool = False
    use_rswa: bool = False

    alibi: bool = False
    alibi_sqrt: bool = False
    soft_cap: float | None = None
    chunk_lookback: int = -1
    layer_kind: str = "Attention"
    head_size_v: int | None = None
    group_size: int = 1
    shares_kv: bool = False
    option: str | None = None


@dataclass(frozen=True)
class Capability:
    """One row of the table.

    Parameters
    ----------
    key : str
        Label of the counters.
    label : str
        The feature, for the README.
    present : Callable[[Request], bool]
        Whether a layer has the feature.
    reason : str
        Why such a layer is refused, with fields of ``Request`` in braces. Up to the first `` (``
        it is what vLLM's own check says, where that knows the feature.
    native : bool
        Whether tilewise computes it.
    targets : tuple of str
        Backends that compute it right; empty if nobody does.
    note : str
        Why not the others.
    """

    key: str
    label: str
    present: Callable[[Request], bool]
    reason: str = ""
    native: bool = False
    targets: tuple[str, ...] = _NO_TURBOQUANT
    note: str = ""


@dataclass(frozen=True)
class Reason:
    """Why a layer is not ours."""

    key: str
    text: str


def _never(request: Request) -> bool:
    """For rows that no single layer shows."""
    return False


def _most_heads(request: Request) -> int:
    """Most query heads a KV head."""
    return MAX_WIDE_GROUP_SIZE if request.head_size > 256 else MAX_GROUP_SIZE


def _kv(request: Request) -> str:
    return request.kv_cache_dtype or "auto"


def _kv_kind(request: Request) -> str:
    """Row of the KV cache's dtype."""
    name = _kv(request)
    if name in ("auto", "float16", "bfloat16"):
        return "kv_same" if name in ("auto", request.dtype) else "kv_other_float"
    if name in ("fp8", "fp8_e4m3"):
        return "kv_fp8"
    if name == "fp8_e5m2":
        return "kv_fp8_e5m2"
    if name.endswith("_per_token_head"):
        return "kv_per_token_head"
    if name.startswith("nvfp4"):
        return "kv_nvfp4"
    return "kv_turboquant" if name.startswith("turboquant") else "kv_other"


def _kv_row(key: str, label: str, *targets: str, native: bool = False) -> Capability:
    """Row of one family of cache dtypes."""
    return Capability(
        key, label, lambda r: _kv_kind(r) == key, native=native, targets=targets,
        reason="kv_cache_dtype not supported ({kv_cache_dtype}; tilewise reads "
        "auto, the model's own dtype, fp8 and fp8_e5m2)",
    )  # fmt: skip


def _kind_row(
    key: str, kind: str, label: str, *targets: str, native: bool = False, note: str = ""
) -> Capability:
    """Row of one of vLLM's layer classes that rewrite a backend's batches."""
    return Capability(
        key, label, lambda r: r.layer_kind == kind, native=native, targets=targets, note=note,
        reason=f"layers of class {kind} not supported",
    )  # fmt: skip


TABLE: tuple[Capability, ...] = (
    # -- what is ours --------------------------------------------------------------------------
    Capability(
        "head_size", "head sizes 16 to 256, multiples of 8, and 512",
        lambda r: r.head_size in HEAD_SIZES, native=True, targets=ORDER,
    ),
    Capability(
        "dtype", "fp16, bf16 and fp32 models", lambda r: r.dtype in DTYPES,
        native=True, targets=ORDER,
    ),
    _kv_row("kv_same", "KV cache in the model's dtype", *ORDER, native=True),
    Capability(
        "group_size", "1 to 128 query heads a KV head (MHA, GQA, MQA); 1 to 32 with heads of 512",
        lambda r: r.group_size <= _most_heads(r), native=True, targets=ORDER,
    ),
    Capability(
        "block_size", "pages of any multiple of 16 tokens",
        lambda r: r.block_size is None or r.block_size % PAGE_SIZE_MULTIPLE == 0,
        native=True, targets=ORDER,
    ),
    Capability(
        "capability", "compute capability 8.0 and later",
        lambda r: (r.device_capability or MIN_COMPUTE_CAPABILITY) >= MIN_COMPUTE_CAPABILITY,
        native=True, targets=ORDER,
    ),
    Capability(
        "speculative", "several query tokens a request (speculative decoding)", _never, native=True
    ),
    Capability(
        "adaptive", "adaptive verification", lambda r: r.use_adaptive_verification,
        native=True,
    ),
    Capability(
        "output_quant", "fp8 static output quantisation, fused", _never, native=True,
        note="by the plain kernels: not asked for where the Gluon prefill serves a layer",
    ),
    Capability("connector", "KV connectors", lambda r: r.use_kv_connector, native=True),
    Capability(
        "shared_kv", "a KV cache shared between layers", lambda r: r.shares_kv,
        native=True, targets=_MAINSTREAM, note="FLEX_ATTENTION refuses it",
    ),
    # -- features of a layer -------------------------------------------------------------------
    Capability(
        "sliding_window", "sliding window", lambda r: r.has_sliding_window,
        "sliding window not supported", native=True, targets=(*_MAINSTREAM, "FLEX_ATTENTION"),
    ),
    Capability(
        "sinks", "attention sinks", lambda r: r.has_sink,
        "attention sinks not supported", native=True, targets=_MAINSTREAM,
        note="FLASHINFER only where vLLM finds its XQA or trtllm kernels; FLEX_ATTENTION has none",
    ),
    Capability(
        "soft_cap", "logits soft cap", lambda r: bool(r.soft_cap),
        "logits soft cap not supported ({soft_cap})", native=True, targets=_FLASH_OR_TRITON,
        note="FLASHINFER's XQA decode ignores it",
    ),
    Capability(
        "alibi", "ALiBi", lambda r: r.alibi and not r.alibi_sqrt,
        "ALiBi slopes not supported", native=True, targets=("TRITON_ATTN",),
        note="FLASHINFER ignores the slopes; FLASH_ATTN needs its version 2, which a Hopper "
        "build may lack",
    ),
    Capability(
        "alibi_sqrt", "ALiBi with square roots", lambda r: r.alibi_sqrt,
        "ALiBi with square roots not supported", native=True, targets=("TRITON_ATTN",),
    ),
    Capability(
        "chunk_lookback", "chunked attention with lookback", lambda r: r.chunk_lookback > -1,
        "chunk_lookback not supported ({chunk_lookback})", targets=("TRITON_ATTN",),
        note="vLLM asks for TRITON_ATTN by name",
    ),
    _kind_row(
        "chunked_local", "ChunkedLocalAttention", "chunked local attention (Llama 4)",
        *_FLASH_OR_TRITON, native=True, note="never in a full CUDA graph: vLLM rules it out",
    ),
    _kind_row(
        "prefix_lm", "PrefillPrefixLMAttention", "prefix language models", *_FLASH_OR_TRITON,
    ),
    _kind_row("static_sink", "StaticSinkAttention", "sinks kept as keys", "FLASH_ATTN"),
    _kind_row(
        "block_pooling", "WhisperCausalAttentionWithBlockPooling", "block pooling (Voxtral)",
        *_FLASH_OR_TRITON,
    ),
    Capability(
        "rswa", "R-SWA: generated tokens see the prompt and a window",
        lambda r: r.use_rswa or r.layer_kind == "RSWAAttention",
        "R-SWA not supported (reference sliding window attention: two ranges of keys a query)",
        targets=("TRITON_ATTN", "FLEX_ATTENTION"),
        note="FLASH_ATTN needs its version 4; for Unlimited-OCR vLLM takes these by name only",
    ),
    Capability(
        "mm_prefix", "bidirectional multimodal prefixes", lambda r: r.use_mm_prefix,
        "partial multimodal token full attention not supported", native=True,
        targets=("TRITON_FLASH_ATTN", "TRITON_ATTN"),
    ),
    Capability(
        "mm_prefix_not_causal", "multimodal prefixes in batches that are causal in part",
        lambda r: r.use_mm_prefix and r.use_non_causal,
        "multimodal prefixes in a layer that is not causal not supported",
        targets=("TRITON_ATTN",),
    ),
    Capability(
        "non_causal", "non-causal decoders, and batches that are causal in part",
        lambda r: r.use_non_causal, "non-causal attention not supported", native=True,
        targets=_FLASH_OR_TRITON, note="FLASHINFER's causal decode kernels may take its batches",
    ),
    Capability(
        "attn_type", "encoders and cross attention", lambda r: r.attn_type != "decoder",
        "attention type {attn_type} not supported", native=True, targets=_FLASH_OR_TRITON,
    ),
    Capability(
        "alibi_not_causal", "ALiBi in layers that are not causal",
        lambda r: r.alibi
        and (r.attn_type != "decoder" or r.use_non_causal or r.use_mm_prefix),
        "ALiBi slopes in a layer that is not causal not supported", targets=(),
        note="TRITON_ATTN ignores the slopes of encoders",
    ),
    Capability(
        "per_head_scales", "per-head scales of an fp8 cache",
        lambda r: r.use_per_head_quant_scales, native=True, targets=("FLASH_ATTN",),
    ),
    Capability(
        "head_size_v", "values of another size than keys",
        lambda r: r.head_size_v not in (None, r.head_size),
        "values of another head size not supported ({head_size_v}; keys have {head_size})",
        targets=(), note="such models name a backend themselves",
    ),
    Capability(
        "option", "layer options that this table does not know",
        lambda r: r.option is not None, "layer option {option} not supported", targets=(),
    ),
    # -- configurations ------------------------------------------------------------------------
    Capability(
        "other_head_size", "other head sizes", lambda r: r.head_size not in HEAD_SIZES,
        "head_size not supported ({head_size}; tilewise computes multiples of 8 from 16 to 256, "
        "and 512)",
    ),
    Capability(
        "other_dtype", "other dtypes of a model", lambda r: r.dtype not in DTYPES,
        "dtype not supported ({dtype}; tilewise computes fp16, bf16 and fp32)", targets=(),
    ),
    _kv_row("kv_fp8", "KV cache in fp8 (e4m3)", *_MAINSTREAM, native=True),
    _kv_row("kv_fp8_e5m2", "KV cache in fp8_e5m2", "FLASHINFER", "TRITON_ATTN", native=True),
    _kv_row("kv_per_token_head", "KV cache with scales per token and head", "TRITON_ATTN"),
    _kv_row("kv_nvfp4", "KV cache in nvfp4", "FLASHINFER"),
    _kv_row("kv_turboquant", "KV cache in turboquant", "TURBOQUANT"),
    _kv_row("kv_other", "other KV cache dtypes"),
    Capability(
        "kv_other_float", "KV cache in another float than the model's",
        lambda r: _kv_kind(r) == "kv_other_float",
        "kv_cache_dtype {kv_cache_dtype} differs from the model's dtype {dtype}", targets=(),
    ),
    Capability(
        "other_group_size", "more query heads a KV head",
        lambda r: r.group_size > _most_heads(r),
        "query heads a KV head not supported ({group_size}; tilewise computes 1 to 128, and "
        "1 to 32 with heads of 512)",
        targets=_FLASH_OR_TRITON,
    ),
    Capability(
        "other_block_size", "other page sizes",
        lambda r: r.block_size is not None and r.block_size % PAGE_SIZE_MULTIPLE != 0,
        "block_size not supported ({block_size}; tilewise reads multiples of 16)", targets=(),
    ),
    Capability(
        "old_gpu", "older GPUs",
        lambda r: (r.device_capability or MIN_COMPUTE_CAPABILITY) < MIN_COMPUTE_CAPABILITY,
        "compute capability not supported ({device_capability}; tilewise needs 8.0 or later)",
        targets=("TRITON_ATTN", "FLEX_ATTENTION"),
    ),
    Capability(
        "batch_invariant", "batch-invariant mode", lambda r: r.use_batch_invariant,
        "batch invariance not supported", native=True,
        targets=(*_FLASH_OR_TRITON, "FLEX_ATTENTION"),
    ),
    Capability(
        "dcp", "decode context parallelism", lambda r: r.use_dcp, "DCP not supported",
        native=True, targets=("FLASHINFER", "FLASH_ATTN"), note="with vLLM 0.33",
    ),
    Capability(
        "dcp_places", "decode context parallelism with a sliding window, chunks, ALiBi, "
        "multimodal prefixes, a shared KV cache or cross attention",
        lambda r: r.use_dcp and bool(
            r.has_sliding_window or r.alibi or r.shares_kv or r.use_mm_prefix
            or r.attn_type == "encoder_decoder" or r.layer_kind == "ChunkedLocalAttention"
        ),
        "DCP with a sliding window, chunks, ALiBi, multimodal prefixes, a shared KV cache or cross "
        "attention not supported",
        targets=(), note="FLASHINFER and FLASH_ATTN count a window in the keys of one rank",
    ),
    Capability(
        "pcp", "prefill context parallelism", lambda r: r.use_pcp, "PCP not supported", targets=(),
    ),
    Capability(
        "mla", "MLA (DeepSeek style)", lambda r: r.use_mla, "MLA not supported",
        targets=VLLM_CHOICE,
    ),
    Capability(
        "sparse", "sparse attention", lambda r: r.use_sparse, "sparse not supported",
        targets=VLLM_CHOICE,
    ),
)  # fmt: skip

_BY_KEY = {row.key: row for row in TABLE}


def is_native(key: str) -> bool:
    """Whether tilewise computes the feature of that row."""
    return _BY_KEY[key].native


def present(request: Request) -> tuple[Capability, ...]:
    """Rows whose feature a layer has."""
    return tuple(row for row in TABLE if row.present(request))


def check(request: Request) -> tuple[Reason, ...]:
    """Return every reason why a layer is not computed here; empty when it is ours.

    Parameters
    ----------
    request : Request
        The layer.
    """
    return tuple(
        Reason(row.key, row.reason.format_map(vars(request)))
        for row in present(request)
        if not row.native
    )


def targets(request: Request) -> tuple[str, ...]:
    """Return the backends that compute every feature of a layer right, best first.

    Parameters
    ----------
    request : Request
        The layer. Its native features count too: who takes it has to compute all of it.
    """
    rows = present(request)
    if any(row.targets == VLLM_CHOICE for row in rows):
        return VLLM_CHOICE
    return tuple(name for name in ORDER if all(name in row.targets for row in rows))
