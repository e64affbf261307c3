"""Bidirectional spans of multimodal prompts: what vLLM shows of them, as our plans take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def shows_spans() -> bool:
    """Whether this vLLM hands spans to metadata builders."""
    return "mm_req_doc_ranges" in CommonAttentionMetadata.__dataclass_fields__


def graph_support(vllm_config: VllmConfig, layers: Iterable[Any]) -> AttentionCGSupport:
    """Which batches may be replayed from a full graph, which knows of no spans.

    A request of one token sees nothing new in its span, as no later key is there, unless the span
    reaches left of the layer's window: vLLM leaves out only those longer than the model's own.

    Parameters
    ----------
    vllm_config : VllmConfig
    layers : iterable of AttentionLayerBase
        Those of ours.
    """
    if not has_spans(vllm_config):
        return AttentionCGSupport.ALWAYS
    longest = vllm_config.model_config.get_sliding_window()
    windows = [layer.impl.window for layer in layers if not is_clamped(layer)]
    if any(w is not None and (longest is None or w < longest) for w in windows):
        return AttentionCGSupport.NEVER
    return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def is_clamped(layer: Any) -> bool:
    """Whether a layer's window hides keys of a span as well."""
    return bool(getattr(layer, "mm_prefix_clamp_sliding_window", False))


def has_spans(vllm_config: VllmConfig) -> bool:
    """Whether the model's prompts may hold bidirectional spans."""
    return bool(getattr(vllm_config.model_config, "is_mm_prefix_lm", False))


def spans_of(batch: CommonAttentionMetadata, device: torch.device) -> torch.Tensor | None:
    """Return the spans of a batch as ``PagedAttention.plan`` takes them, or None.

    None where no query of the batch is in one, so that text and decodes are planned as ever.

    Parameters
    ----------
    batch : CommonAttentionMetadata
        Its lengths on the host are exact for prompts; of other requests they may be too large,
        which moves these farther past their spans.
    device : torch.device

    Returns
    -------
    Tensor[num_reqs, num_spans, 2], int32, or None
    """
    ranges: dict[int, list[tuple[int, int]]] | None = getattr(batch, "mm_req_doc_ranges", None)
    if not ranges:
        return None
    rows = [list(ranges.get(r, ())) for r in range(batch.num_reqs)]
    lengths = batch.seq_lens_cpu_upper_bound
    if lengths is not None:
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
        for r, seq_len in enumerate(lengths[: batch.num_reqs].tolist()):
            first = seq_len - (starts[r + 1] - starts[r])
            rows[r] = [(s, e) for s, e in rows[r] if s < e and s < seq_len and e >= first]
    most = max(map(len, rows), default=0)
    if most == 0:
        return None
    filled = [[*row, *[(0, 0)] * (most - len(row))] for row in rows]
    pinned = device.type == "cuda"
    return torch.tensor(filled, dtype=torch.int32, pin_memory=pinned).to(device, non_blocking=True)


def mode_of(layer: Any, metadata: Any) -> str:
    """Return what a layer makes of its step's spans: ``spans`` of ``PagedAttention.run``.

    A model may have taken them off the metadata for layers that are causal throughout (Gemma 4).
    """
    if metadata.mm_prefix_range_tensor is None:
        return "off"
    return "windowed" if is_clamped(layer) else "whole"
