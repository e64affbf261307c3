"""Metadata builder and layer implementation against vLLM's contract, without an engine."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("interpreted")]

PAGE, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 16


@pytest.fixture
def interpreted(device):
    if device.type != "cpu":
        pytest.skip("runs on CPU tensors, in the interpreter")


def engine_config(
    mode: str = "NONE",
    draft_tokens: int | None = None,
    max_capture: int = 64,
    caches_prefixes: bool = True,
):
    """The few settings that the builder reads."""
    from vllm.config import CUDAGraphMode

    speculative = None
    if draft_tokens is not None:
        speculative = SimpleNamespace(num_speculative_tokens=draft_tokens, parallel_drafting=False)
    return SimpleNamespace(
        speculative_config=speculative,
        use_v2_model_runner=True,
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=caches_prefixes),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode[mode],
            max_cudagraph_capture_size=None if mode == "NONE" else max_capture,
            static_forward_context={},
        ),
        model_config=SimpleNamespace(get_num_attention_heads=lambda _: HEADS),
    )


def make_builder(builder_cls=None, **config):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from tilewise.integration.backend import TilewiseBackend

    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.float32
    )
    builder_cls = builder_cls or TilewiseBackend.get_builder_cls()
    return builder_cls(spec, ["layer.0", "layer.1"], engine_config(**config), torch.device("cpu"))


def make_batch(query_lens: list[int], context: int = 20, num_tokens: int | None = None, **fields):
    """What vLLM passes; ``num_tokens`` beyond the requests' own plays graph padding."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor([n + context if n else 0 for n in query_lens], dtype=torch.int32)
    num_tokens = int(starts[-1]) if num_tokens is None else num_tokens
    width = -(-(max(query_lens) + context) // PAGE)
    table = torch.arange(1, len(query_lens) * width + 1, dtype=torch.int32)
    described = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": seq_lens,
        "num_reqs": len(query_lens),
        "num_actual_tokens": num_tokens,
        "max_query_len": max(query_lens),
        "max_seq_len": int(seq_lens.max()),
        "block_table_tensor": table.view(len(query_lens), width),
        "slot_mapping": torch.full((num_tokens,), -1, dtype=torch.int64),
    }
    return CommonAttentionMetadata(**(described | fields))


def launches(metadata) -> tuple[bool, bool]:
    """Whether the layers will launch the decode and the prefill kernel."""
    return metadata.plan.has_decode, metadata.plan.max_prefill_tiles > 0


# -- what vLLM reads off the classes --------------------------------------------------------------


def test_backend_declares_the_contract():
    from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from tilewise.integration.backend import TilewiseBackend as Backend

    assert Backend.forward_includes_kv_cache_update is False
    assert Backend.get_name() in AttentionBackendEnum.__members__
    assert Backend.full_cls_name() == ("tilewise.integration.backend", "TilewiseBackend")
    assert Backend.get_supported_kernel_block_sizes() == [MultipleOf(16)]
    assert Backend.get_supported_kernel_block_sizes(object()) == [MultipleOf(16)]
    assert Backend.get_preferred_block_size(16) == 64
    assert Backend.supported_kv_cache_layouts() is None
    builder = Backend.get_builder_cls()
    assert builder.get_cudagraph_support(engine_config(), None) is AttentionCGSupport.ALWAYS
    assert builder.supports_update_block_table is False


def test_metadata_is_a_plain_dataclass():
    from tilewise.integration.metadata import TilewiseMetadata

    assert dataclasses.is_dataclass(TilewiseMetadata)
    assert not hasattr(TilewiseMetadata, "__slots__")
    metadata = make_builder().build(0, make_batch([1, 2]))
    metadata.injected = 1
    assert dataclasses.replace(metadata, num_reqs=5).num_reqs == 5


def test_vllm_can_subclass_builder_and_metadata():
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    from tilewise.integration.backend import TilewiseBackend
    from tilewise.integration.metadata import TilewiseMetadata

    fast = create_fast_prefill_custom_backend("Fast", TilewiseBackend)
    batch = make_batch(
        [20, 1],
        logits_indices_padded=torch.tensor([19, 20]),
        num_logits_indices=2,
        max_logits_per_req=1,
    )
    metadata = make_builder(fast.get_builder_cls()).build(0, batch)
    assert isinstance(metadata, TilewiseMetadata)
    assert metadata.plan.num_reqs == 2


# -- launch geometry ------------------------------------------------------------------------------

EAGER_CASES = {
    "decodes": ([1, 1, 1], (True, False)),
    "short_queries": ([1, 16], (True, False)),
    "prefills": ([17, 40], (False, True)),
    "mixed": ([1, 40], (True, True)),
    "padded_prefills": ([40, 0, 0], (False, True)),
}


@pytest.mark.parametrize("name", EAGER_CASES)
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_eager_batches_launch_what_they_need(name, mode):
    query_lens, expected = EAGER_CASES[name]
    builder = make_builder(mode=mode)
    builder.build(0, make_batch([20]))
    assert launches(builder.build(0, make_batch(query_lens), False)) == expected


def test_first_build_launches_everything():
    """So that the runner's warm-up, whose prompts have two tokens, compiles the prefill kernel."""
    builder = make_builder()
    assert launches(builder.build(0, make_batch([1]))) == (True, False)
    assert launches(builder.build(0, make_batch([3] * 7))) == (True, True)
    assert launches(builder.build(0, make_batch([3] * 7))) == (True, False)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_vllms_switch_makes_plans_batch_invariant(switch, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", switch)
    attn = make_builder().attn
    assert attn.batch_invariant is (switch == "1")
    assert (attn.config.pieces is not None) is (switch == "1")


@pytest.mark.parametrize("query_lens", [[1] * 8, [24], [8, 8, 8], [1, 20, 0]])
def test_full_graphs_of_mixed_batches_have_one_geometry(query_lens):
    """Captured with any lengths, replayed with any others: the launches are the same."""
    builder = make_builder(mode="FULL")
    captured = builder.build_for_cudagraph_capture(make_batch([3] * 8, max_query_len=24))
    replayed = builder.build(0, make_batch(query_lens, num_tokens=24))
    assert launches(captured) == (True, True)
    assert replayed.plan.has_decode == captured.plan.has_decode
    # the graph holds the captured grid; a replay's plan must not need more
    padded = builder.build(0, make_batch(query_lens + [0] * (8 - len(query_lens)), num_tokens=24))
    assert padded.plan.max_prefill_tiles == captured.plan.max_prefill_tiles


def test_capture_does_not_trust_the_dummy_batch():
    """A mixed graph may replay one request with all tokens, whatever the dummy's longest query."""
    builder = make_builder(mode="FULL")
    captured = builder.build_for_cudagraph_capture(make_batch([3] * 8))
    assert launches(captured) == (True, True)


def test_small_mixed_graphs_need_no_prefill_kernel():
    builder = make_builder(mode="FULL")
    captured = builder.build_for_cudagraph_capture(make_batch([1] * 8, max_query_len=8))
    assert launches(captured) == (True, False)
    assert launches(builder.build(0, make_batch([8], num_tokens=8))) == (True, False)


def test_batches_beyond_the_graphs_are_planned_as_they_are():
    builder = make_builder(mode="FULL", max_capture=64)
    builder.build(0, make_batch([20] * 6))
    assert launches(builder.build(0, make_batch([100]))) == (False, True)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_decode_graphs_hold_the_decode_kernel_only(mode):
    builder = make_builder(mode=mode)
    captured = builder.build_for_cudagraph_capture(make_batch([1] * 8))
    assert launches(captured) == (True, False)


def test_wide_verification_graphs_hold_both_kernels():
    """With more than 15 drafts a verification is a prefill to the kernels."""
    builder = make_builder(mode="FULL_AND_PIECEWISE", draft_tokens=20)
    captured = builder.build_for_cudagraph_capture(make_batch([21] * 3))
    assert launches(captured) == (True, True)


def test_plan_reads_device_lengths_at_every_build():
    builder = make_builder(mode="FULL")
    batch = make_batch([1, 1, 0, 0], num_tokens=4)
    builder.build_for_cudagraph_capture(batch)
    before = builder.attn._buffers.cu_work.clone()
    batch.seq_lens.copy_(torch.tensor([1000, 1, 0, 0]))
    builder.build(0, batch)
    assert not torch.equal(before, builder.attn._buffers.cu_work)


# -- speculative decoding -------------------------------------------------------------------------


@pytest.mark.parametrize(("drafts", "threshold"), [(None, 1), (0, 1), (4, 5), (30, 31)])
def test_reorder_threshold_is_a_verification_request(drafts, threshold):
    builder = make_builder(draft_tokens=drafts)
    assert builder.reorder_batch_threshold == threshold
    assert builder.decode_query_len == threshold


def test_drafts_may_be_trimmed_on_the_device():
    """The host's longest query may understate a verification request's."""
    builder = make_builder(draft_tokens=20)
    metadata = builder.build(0, make_batch([10, 10]))
    assert launches(metadata) == (True, True)


# -- refusals -------------------------------------------------------------------------------------


def test_common_prefix_is_refused():
    from tilewise.errors import UnsupportedConfig

    with pytest.raises(UnsupportedConfig, match="common_prefix_len is 16"):
        make_builder().build(16, make_batch([1, 1]))


# -- the layer ------------------------------------------------------------------------------------


def make_impl(**changes):
    from tilewise.integration.impl import TilewiseImpl

    settings = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    return TilewiseImpl(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, **(settings | changes))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"attn_type": "encoder"}, "attention type 'encoder'"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype 'nvfp4'"),
        ({"chunk_lookback": 2}, "option 'chunk_lookback'"),
    ],
)
def test_layers_with_other_features_are_refused(change, text, monkeypatch):
    """What the table does not call native, the implementation refuses."""
    from tilewise import support

    monkeypatch.setattr(support, "is_native", lambda key: False)
    with pytest.raises(NotImplementedError, match=text):
        make_impl(**change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"alibi_slopes": [0.5] * HEADS}, "ALiBi"),
        ({"sliding_window": 128}, r"sliding window \(128\)"),
        ({"logits_soft_cap": 30.0}, r"soft cap \(30.0\)"),
        ({"sinks": torch.zeros(HEADS)}, "option 'sinks'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
    ],
)
def test_layers_take_what_the_support_table_calls_ours(change, text, monkeypatch):
    from tilewise import support

    assert make_impl(**change).scale == HEAD_DIM**-0.5
    monkeypatch.setattr(support, "is_native", lambda key: False)
    with pytest.raises(NotImplementedError, match=text):
        make_impl(**change)


@pytest.mark.parametrize(
    "change", [{"logits_soft_cap": 0.0}, {"sinks": None}, {"chunk_lookback": -1}]
)
def test_features_switched_off_are_no_obstacle(change):
    assert make_impl(**change).scale == HEAD_DIM**-0.5


def test_layers_are_built_from_positional_arguments():
    from tilewise.integration.impl import TilewiseImpl

    impl = TilewiseImpl(
        HEADS, HEAD_DIM, 0.25, KV_HEADS, None, None, "auto", None, "decoder", "model.layers.0"
    )
    assert impl.num_kv_heads == KV_HEADS
    assert impl.kv_sharing_target_layer_name == "model.layers.0"


def test_profiling_run_yields_zeros():
    output = torch.full((3, HEADS, HEAD_DIM), float("nan"))
    query = torch.zeros_like(output)
    assert make_impl().forward(None, query, None, None, None, None, output) is output
    assert output.eq(0).all()


def test_outputs_with_scales_of_blocks_are_refused():
    output = torch.zeros(3, HEADS, HEAD_DIM)
    with pytest.raises(NotImplementedError, match="output_block_scale"):
        make_impl().forward(
            None, output, None, None, None, None, output, output_block_scale=torch.ones(1)
        )


@pytest.mark.parametrize("query_lens", [[1, 5], [20, 1]])
def test_write_then_attend(query_lens):
    """Keys written by slot are the ones attended to; padded rows and slots stay untouched."""
    torch.manual_seed(0)
    num_tokens, padded = sum(query_lens), sum(query_lens) + 3
    batch = make_batch(query_lens, context=0, num_tokens=num_tokens)
    slots = torch.cat(
        [
            batch.block_table_tensor[row, torch.arange(length) // PAGE] * PAGE
            + torch.arange(length) % PAGE
            for row, length in enumerate(query_lens)
        ]
    )
    slot_mapping = torch.cat([slots.long(), torch.full((3,), -1)])
    # token-major inside a page, as vLLM lays it out by default
    cache = torch.full((8, PAGE, KV_HEADS, 2 * HEAD_DIM), float("nan")).transpose(1, 2)
    query = torch.randn(padded, HEADS, HEAD_DIM)
    key, value = torch.randn(2, padded, KV_HEADS, HEAD_DIM)
    impl, builder = make_impl(), make_builder()
    impl.do_kv_cache_update(None, key, value, cache, slot_mapping)
    output = torch.full_like(query, float("nan"))
    metadata = builder.build(0, batch)
    assert impl.forward(None, query, key, value, cache, metadata, output) is output
    start = 0
    for length in query_lens:
        rows = slice(start, start + length)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[rows].transpose(0, 1),
            key[rows].transpose(0, 1),
            value[rows].transpose(0, 1),
            is_causal=True,
            enable_gqa=True,
        ).transpose(0, 1)
        torch.testing.assert_close(output[rows], expected, atol=1e-5, rtol=1e-5)
        start += length
    assert output[num_tokens:].isnan().all()
    assert cache.isnan().sum() == cache.numel() - num_tokens * KV_HEADS * 2 * HEAD_DIM


def test_shared_caches_are_not_written():
    cache = torch.zeros(2, KV_HEADS, PAGE, 2 * HEAD_DIM)
    key = torch.ones(1, KV_HEADS, HEAD_DIM)
    impl = make_impl(kv_sharing_target_layer_name="model.layers.0")
    impl.do_kv_cache_update(None, key, key, cache, torch.zeros(1, dtype=torch.int64))
    assert cache.eq(0).all()


# -- shared prefixes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switch", "shared"), [(None, False), ("0", False), ("1", True), ("on", True), ("always", True)]
)
def test_a_setting_lets_decodes_share_prefixes(switch, shared, monkeypatch):
    if switch is not None:
        monkeypatch.setenv("TILEWISE_SHARED_PREFIXES", switch)
    builder = make_builder()
    assert builder.attn.share_always == (switch == "always")
    assert (builder.attn.config.prefixes is not None) == shared
    assert builder.build(0, make_batch([1, 1, 1])).plan.shared == shared
    # Padded requests of a captured shape do not change the kind of plan.
    assert builder.build(0, make_batch([1, 0, 0], num_tokens=3)).plan.shared == shared
    assert not builder.build(0, make_batch([1])).plan.shared


@pytest.mark.parametrize(
    ("invariant", "cached", "why"),
    [(True, True, "batch-invariant mode"), (False, False, "vLLM's prefix cache is off")],
)
def test_what_cannot_share_prefixes_is_said(invariant, cached, why, monkeypatch, caplog):
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.tilewise")
    monkeypatch.setenv("TILEWISE_SHARED_PREFIXES", "1")
    monkeypatch.setattr("tilewise.integration.builder.envs.VLLM_BATCH_INVARIANT", invariant)
    builder = make_builder(caches_prefixes=cached)
    assert builder.attn.batch_invariant is invariant
    assert builder.attn.config.prefixes is None
    assert f"TILEWISE_SHARED_PREFIXES has no effect on 2 layers: {why}" in caplog.text
