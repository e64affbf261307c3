"""What other features of vLLM ask of an attention backend, without an engine.

Sleep and wake, KV connectors, drafters in CUDA graphs, dual batch overlap (DBO), fusions of RoPE
with the cache write. ``test_vllm_features_engine`` and ``test_vllm_features_gpu`` run engines.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_builder import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    engine_config,
    interpreted,  # noqa: F401  (a fixture)
    make_batch,
    make_builder,
    make_impl,
)

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("interpreted")]


def make_cache(num_pages: int) -> torch.Tensor:
    """Filled pages; token-major inside a page, as vLLM lays them out by default."""
    cache = torch.randn(num_pages, PAGE, KV_HEADS, 2 * HEAD_DIM)
    return cache.transpose(1, 2)


def attend(builder, batch, query, cache):
    """One layer's output for a batch; rows that belong to nobody stay NaN."""
    metadata = builder.build(0, batch)
    return run_layer(metadata, query, cache)


def run_layer(metadata, query, cache):
    output = torch.full_like(query, float("nan"))
    return make_impl().forward(None, query, None, None, cache, metadata, output)


# -- sleep and wake -------------------------------------------------------------------------------


def spoil(attn) -> int:
    """Fill an object's own buffers with garbage; how many there are."""
    buffers = [v for v in vars(attn._buffers).values() if isinstance(v, torch.Tensor)]
    for buffer in buffers:
        if buffer.dtype == torch.int32:
            buffer.fill_(0x7EADBEEF)
        else:
            buffer.fill_(float("nan"))
    return len(buffers)


@pytest.mark.parametrize("query_lens", [[1, 5, 1], [40, 1], [33, 20]])
@pytest.mark.parametrize("invariant", ["0", "1"])
def test_buffers_lost_in_sleep_do_no_harm(query_lens, invariant, monkeypatch):
    """Whatever stands in the workspace when a server wakes up, the next step is right."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    torch.manual_seed(0)
    builder = make_builder()
    batch = make_batch(query_lens)
    query, cache = torch.randn(sum(query_lens), HEADS, HEAD_DIM), make_cache(32)
    expected = attend(builder, batch, query, cache)
    assert expected.isfinite().all()
    assert spoil(builder.attn) >= 10
    assert torch.equal(attend(builder, batch, query, cache), expected)


def test_slopes_do_not_lie_in_the_memory_of_the_weights():
    """Sleep of level 2 discards it, and vLLM brings back only what it knows of."""
    from types import SimpleNamespace

    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from tilewise.integration.builder import TilewiseMetadataBuilder

    class Layer(AttentionLayerBase, torch.nn.Module):
        def __init__(self, impl):
            torch.nn.Module.__init__(self)
            self.impl, self.num_heads = impl, HEADS

        def get_attn_backend(self):
            raise NotImplementedError

        def get_kv_cache_spec(self, vllm_config):
            raise NotImplementedError

        def bind_kv_cache(self, kv_cache):
            raise NotImplementedError

    impl = make_impl(alibi_slopes=[0.5, 0.25, 0.125, 0.0625])
    with_weights = impl.alibi_slopes
    config = engine_config()
    config.compilation_config = SimpleNamespace(
        **{**vars(config.compilation_config), "static_forward_context": {"layer.0": Layer(impl)}}
    )
    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.float32
    )
    TilewiseMetadataBuilder(spec, ["layer.0"], config, torch.device("cpu"))
    with_weights.fill_(float("nan"))
    assert impl.alibi_slopes.tolist() == [0.5, 0.25, 0.125, 0.0625]


# -- KV connectors --------------------------------------------------------------------------------


def test_connectors_are_accepted():
    """A connector reads and writes pages of the cache; ours are as vLLM lays them out."""
    from vllm.v1.attention.backend import AttentionType

    from tilewise.integration.backend import TilewiseBackend

    assert TilewiseBackend.supports_kv_connector()
    # No layout of our own, hence any that a connector asks for.
    assert TilewiseBackend.supported_kv_cache_layouts() is None
    settings = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64,
        "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": (9, 0),
        "attn_type": AttentionType.DECODER,
    }  # fmt: skip
    assert TilewiseBackend.validate_configuration(**settings, use_kv_connector=True) == []


# -- drafters in CUDA graphs ----------------------------------------------------------------------


def draft_buffers(builder) -> list[torch.Tensor]:
    return [v.clone() for v in vars(builder.attn._buffers).values() if isinstance(v, torch.Tensor)]


def test_drafters_replan_from_the_lengths_on_the_device():
    """Recorded in a graph, the call is all that a draft step gets: as good as a new build."""
    torch.manual_seed(0)
    builder = make_builder(draft_tokens=3)
    assert builder.supports_draft_decode_metadata_update is True
    batch = make_batch([1, 1, 1], context=200)
    metadata = builder.build(0, batch, True)
    first = metadata.plan
    batch.seq_lens.copy_(torch.tensor([30, 201, 77]))
    query, cache = torch.randn(3, HEADS, HEAD_DIM), make_cache(64)
    builder.update_draft_decode_metadata(metadata)
    updated = draft_buffers(builder)
    assert metadata.plan.generation == first.generation + 1
    output = run_layer(metadata, query, cache)
    again = builder.build(0, batch, True)
    for ours, fresh in zip(updated, draft_buffers(builder), strict=True):
        if ours.dtype == torch.int32:
            assert torch.equal(ours, fresh)
    assert torch.equal(output, run_layer(again, query, cache))


def test_a_plan_that_is_updated_keeps_its_spans():
    builder = make_builder(draft_tokens=3)
    batch = make_batch([4, 4], context=30)
    metadata = builder.build(0, batch, True)
    spans = torch.tensor([[[30, 33]], [[0, 0]]], dtype=torch.int32)
    plan = metadata.plan
    metadata.plan = builder.attn.plan(
        plan.query_start_loc, plan.seq_lens, plan.block_table, num_tokens=plan.num_tokens,
        max_query_len=metadata.max_query_len, spans=spans,
    )  # fmt: skip
    metadata.mm_prefix_range_tensor = spans
    query, cache = torch.randn(8, HEADS, HEAD_DIM), make_cache(16)
    before = run_layer(metadata, query, cache)
    builder.update_draft_decode_metadata(metadata)
    assert metadata.plan.spans is spans
    assert torch.equal(before, run_layer(metadata, query, cache))


def test_a_plan_that_was_updated_is_stale():
    """Metadata of another group's builder, or kept from before, does not pass for the new."""
    import dataclasses

    from tilewise.errors import PlanMismatch

    builder = make_builder(draft_tokens=3)
    metadata = builder.build(0, make_batch([1, 1]))
    kept = dataclasses.replace(metadata)
    builder.update_draft_decode_metadata(metadata)
    query, cache = torch.randn(2, HEADS, HEAD_DIM), make_cache(16)
    run_layer(metadata, query, cache)
    with pytest.raises(PlanMismatch, match="stale plan"):
        run_layer(kept, query, cache)


# -- dual batch overlap ---------------------------------------------------------------------------

UBATCHES = {
    "between requests": [8, 8],
    "within a request": [20, 1, 1, 30],
    "a request over both": [60],
    "decodes": [1] * 7,
    "first request ends there": [16, 3, 13],
}


def split(batch, num_ubatches: int = 2):
    """The batch's micro-batches, sliced as vLLM slices them."""
    from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices, split_attn_metadata

    lengths = np.diff(batch.query_start_loc_cpu.numpy())
    batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
    slices, _ = maybe_create_ubatch_slices(
        True, lengths, batch.num_actual_tokens, batch.num_reqs, num_ubatches
    )
    return slices, split_attn_metadata(slices, batch)


@pytest.mark.parametrize("name", UBATCHES)
def test_micro_batches_add_up_to_the_batch(name):
    """Each has a builder; both are planned before a layer runs, and layers alternate."""
    torch.manual_seed(0)
    query_lens = UBATCHES[name]
    batch = make_batch(query_lens)
    caches = [make_cache(64), make_cache(64)]
    query = torch.randn(sum(query_lens), HEADS, HEAD_DIM)
    whole = make_builder()
    expected = [attend(whole, batch, query, cache) for cache in caches]
    slices, halves = split(batch)
    assert len(halves) == 2
    built = [make_builder().build(0, half) for half in halves]
    for cache, right in zip(caches, expected, strict=True):
        for piece, metadata in zip(slices, built, strict=True):
            rows = piece.token_slice
            output = run_layer(metadata, query[rows], cache)
            torch.testing.assert_close(output, right[rows], atol=1e-5, rtol=1e-5)


def test_micro_batches_share_no_buffer():
    """And two of one builder, whose buffers hold the last plan only, are refused."""
    from tilewise.errors import PlanMismatch

    batch = make_batch([8, 8])
    slices, halves = split(batch)
    builders = [make_builder(), make_builder()]
    owned = [
        {
            v.untyped_storage().data_ptr()
            for v in vars(x.attn._buffers).values()
            if torch.is_tensor(v)
        }
        for x in builders
    ]
    assert len(owned[0]) >= 10
    assert not owned[0] & owned[1]
    first, _ = (builders[0].build(0, half) for half in halves)
    query = torch.randn(16, HEADS, HEAD_DIM)[slices[0].token_slice]
    with pytest.raises(PlanMismatch, match="stale plan"):
        run_layer(first, query, make_cache(64))


def test_a_micro_batch_of_padding_has_no_work():
    """vLLM's V2 runner leaves a trailing one with the last request and none of its tokens."""
    from vllm.v1.worker.gpu.ubatch_utils import _slice_query_start_loc, _slice_seq_lens

    torch.manual_seed(0)
    batch = make_batch([3, 4])
    padded = 16  # two micro-batches of 8, and 7 tokens
    starts = _slice_query_start_loc(
        batch.query_start_loc, torch.zeros(2, dtype=torch.int32), 1, 2, 8, padded - 8
    )
    seq_lens = _slice_seq_lens(
        batch.seq_lens, torch.zeros(1, dtype=torch.int32), batch.query_start_loc, 1, 2, padded
    )
    assert starts.tolist() == [0, 0]
    assert seq_lens.tolist() == [24]
    half = batch.replace(
        query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=seq_lens, num_reqs=1,
        num_actual_tokens=padded - 8, block_table_tensor=batch.block_table_tensor[1:],
        slot_mapping=torch.full((padded - 8,), -1),
    )  # fmt: skip
    query = torch.randn(padded - 8, HEADS, HEAD_DIM)
    assert attend(make_builder(), half, query, make_cache(64)).isnan().all()


# -- fusions --------------------------------------------------------------------------------------


def test_no_fusion_takes_the_cache_write_from_us():
    """vLLM asks each layer; what it fuses would write the cache in a kernel of another backend."""
    from tilewise.integration.backend import TilewiseBackend

    impl = make_impl()
    assert impl.fused_rope_kvcache_supported() is False
    assert impl.fused_qk_norm_rope_kvcache_supported() is False
    assert impl.fused_qk_norm_mrope_kvcache_supported() is False
    assert TilewiseBackend.supports_kv_cache_update_bypass is False


@pytest.mark.parametrize("switch", ["fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache"])
def test_vllm_switches_those_fusions_off_but_on_rocm(switch):
    from vllm.config.compilation import PassConfig
    from vllm.platforms import current_platform

    assert not current_platform.is_rocm()
    assert getattr(PassConfig(**{switch: True}), switch) is False
