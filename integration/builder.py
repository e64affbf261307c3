"""From vLLM's batch description to a tilewise plan, once a step and without a host sync."""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import CUDAGraphMode, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers

from tilewise import counters, exporter
from tilewise.attention import PagedAttention
from tilewise.errors import UnsupportedConfig
from tilewise.integration import start_up
from tilewise.integration.context_parallel import (
    ShardedAttention,
    group_shards,
    join_group,
)
from tilewise.integration.groups import (
    group_dtypes,
    group_impls,
    group_windows,
    is_encoder,
    make_attention,
    most_requests,
    refuse_mixed_rotation,
)
from tilewise.integration.impl import TilewiseImpl
from tilewise.integration.metadata import TilewiseMetadata
from tilewise.integration.spans import graph_support, has_spans, spans_of
from tilewise.integration.step_metrics import StepMetrics, describe_process, is_drafted
from tilewise.policy import DECODE_MAX_QUERY_LEN
from tilewise.support import PAGE_SIZE_MULTIPLE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Below the logger that vLLM configures, so that the line looks like its own.
logger = logging.getLogger("vllm.tilewise")


class TilewiseMetadataBuilder(AttentionMetadataBuilder[TilewiseMetadata]):
    """Owns the persistent plan buffers of one KV-cache group and refills them every step.

    The launch geometry of a step is a function of its padded shape only, so that the buffers
    written by ``build`` always fit the graph that will be replayed on them:

    - a batch that can be replayed from a graph of mixed batches (``cudagraph_mode=FULL``) is
      planned as if one request could own all its tokens, and as if decodes were there;
    - any other batch is planned from the lengths the host knows.
    """

    supports_update_block_table: bool = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
        """Return which batches may be in a full graph: all, but for models with images in prompts.

        Parameters
        ----------
        vllm_config : VllmConfig
        kv_cache_spec : AttentionSpec
            Of one group; unused.
        """
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
        ours = (x for x in layers.values() if isinstance(getattr(x, "impl", None), TilewiseImpl))
        return graph_support(vllm_config, ours)

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )
        speculative = vllm_config.speculative_config
        self.num_draft_tokens = 0
        if speculative is not None:
            self.num_draft_tokens = speculative.num_speculative_tokens or 0
        self.decode_query_len = 1 + self.num_draft_tokens
        # vLLM's builders of some layer classes (chunked local attention), derived from this one,
        # rewrite batches in `build` and are never in a full graph.
        support = self.get_cudagraph_support(vllm_config, kv_cache_spec)
        self.is_captured = support is not AttentionCGSupport.NEVER
        mixed = support is AttentionCGSupport.ALWAYS
        self._mixed_graph_tokens = _mixed_graph_tokens(vllm_config) if mixed else 0
        self._has_spans = has_spans(vllm_config)
        # Whether vLLM may hand layers an output to quantise; `start_up` compiles for it.
        passes = getattr(vllm_config.compilation_config, "pass_config", None)
        self.quantises_output = bool(getattr(passes, "fuse_attn_quant", False))
        # Whether `start_up` has launched every kernel; a vLLM that binds caches in another way
        # leaves that to the first batch.
        self.is_warm = False

        num_q_heads = get_num_attention_heads_from_layers(vllm_config, layer_names)
        if num_q_heads is None:
            num_q_heads = vllm_config.model_config.get_num_attention_heads(
                vllm_config.parallel_config
            )
        scheduler = vllm_config.scheduler_config
        impls = group_impls(layer_names, vllm_config)
        self.is_encoder = is_encoder(kv_cache_spec, impls)
        self.is_cross = any(impl.is_cross for impl in impls.values())
        # With DCP a rank's key counts lie in another tensor than the plan reads; batches that are
        # rewritten in `build` would not be rewritten again.
        dcp = getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1)
        rewritten = self.is_encoder or self.is_cross or not self.is_captured
        self.supports_draft_decode_metadata_update = dcp == 1 and not rewritten
        for impl in impls.values():
            impl.keep_through_sleep()
        dtype, kv_dtype = group_dtypes(kv_cache_spec, impls, vllm_config, self.is_encoder)
        refuse_mixed_rotation(layer_names, vllm_config)
        parallel = vllm_config.parallel_config
        shards = None if self.is_encoder else group_shards(kv_cache_spec, parallel)
        # Graphs may be captured for more requests than are ever scheduled.
        max_num_tokens = max(scheduler.max_num_batched_tokens, self._largest_graph())
        max_num_reqs = most_requests(
            max(scheduler.max_num_seqs, self._largest_graph()),
            max_num_tokens,
            getattr(kv_cache_spec, "attention_chunk_size", None),
        )
        options = {
            # Keys of encoders lie in no pages, whatever their spec says.
            "page_size": PAGE_SIZE_MULTIPLE if self.is_encoder else kv_cache_spec.block_size,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "max_num_reqs": max_num_reqs,
            "max_num_tokens": max_num_tokens,
            "device": device,
            "decode_query_len": min(self.decode_query_len, DECODE_MAX_QUERY_LEN),
            "batch_invariant": envs.VLLM_BATCH_INVARIANT,
            "alibi": any(impl.alibi_slopes is not None for impl in impls.values()),
            "fp8_matmul": any(impl.fp8_matmul for impl in impls.values()),
            "rotated_keys": any(impl.rotated_keys for impl in impls.values()),
        }
        heads = (
            num_q_heads if shards is None else num_q_heads * shards.count,
            kv_cache_spec.num_kv_heads,
            kv_cache_spec.head_size,
        )
        windows = group_windows(kv_cache_spec, impls, several=self.is_encoder)
        made = make_attention(
            layer_names, heads, windows, options, encoder=self.is_encoder, cross=self.is_cross,
            ranks=1 if shards is None else shards.count,
            caches_prefixes=bool(vllm_config.cache_config.enable_prefix_caching),
        )  # fmt: skip
        self.attn, *self._others = made
        # What `start_up` launches kernels for.
        self.every_attn = tuple(made)
        self.causal_kinds = start_up.causal_kinds(kv_cache_spec, vllm_config, self.is_cross)
        self.sharded = None
        if shards is not None:
            self.sharded = ShardedAttention(shards, join_group(shards, parallel), self.attn)
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
        start_up.watch(self, layers)
        holders: list[PagedAttention | ShardedAttention] = [*made]
        if self.sharded is not None:
            holders.append(self.sharded)
        for holder in holders:
            held = holder.workspace_bytes
            counters.grow("workspace_bytes", held)
            # vLLM makes builders for an estimate of memory, and drops them.
            weakref.finalize(holder, counters.grow, "workspace_bytes", -held)
        workspace = sum(holder.workspace_bytes for holder in holders)
        # Here and not at registration: a forked worker inherits no threads.
        # vLLM resets the data parallel rank in engines of dense models; this number it keeps.
        engine = getattr(parallel, "data_parallel_index", 0) or 0
        exporter.start({"engine": str(engine), "rank": str(getattr(parallel, "rank", 0))})
        logger.info(
            "tilewise attends in %d layers: %d query and %d KV heads of size %d, %s, %s, "
            "%.1f MiB of workspace%s",
            len(layer_names),
            num_q_heads,
            kv_cache_spec.num_kv_heads,
            kv_cache_spec.head_size,
            self.attn.dtype,
            "no cache"
            if self.is_encoder
            else f"{self.attn.kv_dtype} cache in pages of {kv_cache_spec.block_size} tokens",
            workspace / 2**20,
            (", batch-invariant" if self.attn.batch_invariant else "")
            + (", shared prefixes read once" if self.attn.config.prefixes else "")
            + (f", keys shared by {shards.count} ranks" if shards else ""),
        )
        drafts = bool(layers) and all(map(is_drafted, layers.values()))
        self.steps = StepMetrics(self.attn.config, shards.count if shards else 1, drafts)
        describe_process()

    def _largest_graph(self) -> int:
        """Tokens of the largest captured batch; 0 without graphs."""
        return self.vllm_config.compilation_config.max_cudagraph_capture_size or 0

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TilewiseMetadata:
        """Plan one step.

        Parameters
        ----------
        common_prefix_len : int
            Always 0 in the supported vLLM versions.
        common_attn_metadata : CommonAttentionMetadata
            The batch; only its host integers and its device tensors are used.
        fast_build : bool
            Accepted for the interface; a plan costs the same either way.

        Returns
        -------
        TilewiseMetadata
            The batch with its plan.

        Raises
        ------
        UnsupportedConfig
            For a batch with a common prefix, or of a model with R-SWA.
        """
        batch = common_attn_metadata
        _refuse_unsupported(common_prefix_len, batch)
        # Drafts are trimmed on the device, so the host's longest query may understate them.
        # Of rewritten batches it is numpy's.
        max_query_len = int(max(batch.max_query_len, self.decode_query_len))
        if self._may_replay_mixed_graph(batch.num_actual_tokens):
            return self._plan(batch, max(max_query_len, batch.num_actual_tokens), True)
        if not self.is_warm and batch.num_actual_tokens > DECODE_MAX_QUERY_LEN:
            # The runner warms up with short prompts: launching every kernel there compiles them
            # before the first long prompt is served.
            self.is_warm = True
            return self._plan(batch, max(max_query_len, DECODE_MAX_QUERY_LEN + 1), True)
        return self._plan(batch, max_query_len, self._has_decode(batch, max_query_len))

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TilewiseMetadata:
        """Plan a batch that is about to be captured, with the geometry of the worst replay.

        Parameters
        ----------
        common_attn_metadata : CommonAttentionMetadata
            A dummy batch of the captured shape. Its ``max_query_len`` bounds the queries of every
            replay; its lengths do not.

        Returns
        -------
        TilewiseMetadata
            The batch with its plan.
        """
        batch = common_attn_metadata
        if self.is_encoder or self.is_cross or not self.is_captured:
            # vLLM's builders of such layers, derived from this one, change the batch in `build`.
            return self.build(0, batch)
        # V1 gives dummy requests as many keys as the batch has tokens, which may be more than a
        # block table of a short max_model_len can name.
        tokens = batch.block_table_tensor.shape[1] * self.attn.geometry.page_size
        if self.sharded is not None:
            tokens *= self.sharded.shards.count
        batch.seq_lens.clamp_(max=tokens)
        max_query_len = max(batch.max_query_len, self.decode_query_len)
        if self._may_replay_mixed_graph(batch.num_actual_tokens):
            max_query_len = max(max_query_len, batch.num_actual_tokens)
        return self._plan(batch, max_query_len, True, capture=True)

    def update_draft_decode_metadata(self, metadata: TilewiseMetadata) -> None:
        """Plan a batch again whose lengths have changed on the device since it was planned.

        Drafters call this between the steps of one CUDA graph, or record it there: a replay then
        plans from the lengths of its own time.

        Parameters
        ----------
        metadata : TilewiseMetadata
            From this builder's newest ``build``; its plan is replaced.
        """
        plan = metadata.plan
        metadata.plan = metadata.attn.plan(
            plan.query_start_loc,
            plan.seq_lens,
            plan.block_table,
            num_tokens=plan.num_tokens,
            max_query_len=metadata.max_query_len,
            has_decode=plan.has_decode,
            causal=plan.causal,
            spans=plan.spans,
        )

    def _may_replay_mixed_graph(self, num_tokens: int) -> bool:
        """Whether a graph that serves any mix of prefills and decodes covers this many tokens."""
        return num_tokens <= self._mixed_graph_tokens

    def _is_single(self, num_tokens: int, max_query_len: int, capture: bool) -> bool:
        """Whether no request has more than one query token, in every replay of a graph.

        Graphs of mixed batches serve longer queries too, whatever is replayed on them; others serve
        nothing but decodes, whatever they are captured with.
        """
        if self.decode_query_len > 1 or self._may_replay_mixed_graph(num_tokens):
            return False
        return capture or max_query_len <= 1

    def _has_decode(self, batch: CommonAttentionMetadata, max_query_len: int) -> bool:
        """Whether a request of 1..16 tokens is there; True when the host cannot know."""
        if max_query_len <= DECODE_MAX_QUERY_LEN or self.num_draft_tokens > 0:
            return True
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1]
        lengths = starts[1:] - starts[:-1]
        return bool(((lengths > 0) & (lengths <= DECODE_MAX_QUERY_LEN)).any())

    def _spans(self, batch: CommonAttentionMetadata) -> torch.Tensor | None:
        """Bidirectional spans of a step that may not be replayed from a graph without them."""
        if not self._has_spans or (batch.max_query_len <= 1 and self.is_captured):
            return None
        return spans_of(batch, self.attn.device)

    def _plan(
        self,
        batch: CommonAttentionMetadata,
        max_query_len: int,
        has_decode: bool,
        capture: bool = False,
    ) -> TilewiseMetadata:
        """Run the plan kernel for ``batch`` and wrap its result."""
        started = time.perf_counter()
        spans = self._spans(batch)
        tensors: tuple[Any, ...] = (
            batch.query_start_loc,
            None if self.is_encoder else batch.seq_lens,
            None if self.is_encoder else batch.block_table_tensor,
        )
        bounds: dict[str, Any] = {
            "num_tokens": batch.num_actual_tokens, "max_query_len": max_query_len,
            "has_decode": has_decode, "causal": batch.causal,
        }  # fmt: skip
        sharded, others = None, []
        if self.sharded is None:
            plan, *others = (
                attn.plan(*tensors, **bounds, spans=spans) for attn in (self.attn, *self._others)
            )
        else:
            # A graph serves batches with a context, whatever the one it is captured with has.
            has_context = capture or _has_context(batch)
            sharded = self.sharded.plan(
                *tensors, **bounds, has_context=has_context,
                single=self._is_single(batch.num_actual_tokens, max_query_len, capture),
            )  # fmt: skip
            plan = sharded.plan
        self.steps.planned(plan, batch)
        counters.observe("build_seconds", time.perf_counter() - started)
        return TilewiseMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            num_reqs=batch.num_reqs,
            max_query_len=max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            attn=self.attn,
            plan=plan,
            causal=batch.causal,
            mm_prefix_range_tensor=spans,
            steps=self.steps,
            others={
                attn.window: (attn, made) for attn, made in zip(self._others, others, strict=True)
            }
            or None,
            sharded=sharded,
        )


def _has_context(batch: CommonAttentionMetadata) -> bool:
    """Whether a request may have keys besides its new ones; the same on all ranks."""
    lengths = batch.seq_lens_cpu_upper_bound
    if lengths is None:
        return True
    starts = batch.query_start_loc_cpu[: batch.num_reqs + 1]
    return bool((lengths[: batch.num_reqs] > starts[1:] - starts[:-1]).any())


def _mixed_graph_tokens(vllm_config: VllmConfig) -> int:
    """Largest batch, in tokens, that a full graph of mixed batches may serve; 0 without one."""
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or mode.mixed_mode() != CUDAGraphMode.FULL:
        return 0
    return compilation.max_cudagraph_capture_size or 0


def _refuse_unsupported(common_prefix_len: int, batch: CommonAttentionMetadata) -> None:
    """Raise for what the kernels cannot mask."""
    if common_prefix_len != 0:
        raise UnsupportedConfig(
            f"common_prefix_len is {common_prefix_len}; tilewise has no cascade attention (0 only)"
        )
    if getattr(batch, "rswa_prefix_lens", None) is not None:
        # Selection sends such layers elsewhere; the cache has no pages between prompt and window.
        raise UnsupportedConfig(
            "a batch with rswa_prefix_lens; tilewise has no R-SWA (TRITON_ATTN and FLEX_ATTENTION "
            "compute it)"
        )
