"""Prompts with images as vLLM shows them: spans in the batch, through our builder and layers.

Kinds of field failures: F (windows), J (attention that is not causal).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import Case, check, make_batch, spans_tensor

pytest.importorskip("vllm")

from test_builder import HEADS, engine_config
from test_builder import make_batch as vllm_batch
from test_chunked_local import metadata_of
from test_encoder_layers import Layer
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import compute_mm_prefix_range_tensor
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tilewise.errors import SelfCheckFailed
from tilewise.integration import self_check, spans
from tilewise.integration.builder import TilewiseMetadataBuilder
from tilewise.integration.impl import TilewiseImpl

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

SPANS = (((4, 30), (31, 50)), ((60, 66),), ((2, 9),), ())
CASE = Case(((60, 0), (7, 60), (1, 90), (20, 10)), spans=SPANS)


def make_layers(case: Case, *windows, clamped=False):
    layers = []
    for window in windows:
        impl = TilewiseImpl(
            case.num_q_heads, case.head_dim, case.head_dim**-0.5, case.num_kv_heads,
            sliding_window=window,
        )  # fmt: skip
        layers.append(Layer(impl))
        layers[-1].use_mm_prefix = True
        layers[-1].mm_prefix_clamp_sliding_window = clamped
    return layers


def make_config(layers, window=None, mode="NONE", images=True):
    """Settings of a model whose prompts hold images; ``window`` is the model's own."""
    config = engine_config(mode=mode)
    named = {f"layer.{i}": layer for i, layer in enumerate(layers)}
    config.compilation_config.static_forward_context |= named
    config.model_config = SimpleNamespace(
        get_num_attention_heads=lambda _: HEADS, is_mm_prefix_lm=images,
        get_sliding_window=lambda: window, dtype=torch.float32,
    )  # fmt: skip
    return config


def make_builder(case: Case, device, *layers, **config):
    spec = FullAttentionSpec(
        block_size=case.page_size, num_kv_heads=case.num_kv_heads, head_size=case.head_dim,
        dtype=case.dtype,
    )  # fmt: skip
    config = make_config(layers, **config)
    names = list(config.compilation_config.static_forward_context)
    return TilewiseMetadataBuilder(spec, names, config, device)


def with_spans(batch, ranges=SPANS, exact=True):
    """The batch as vLLM describes it; lengths of decodes on the host may be too large."""
    metadata = metadata_of(batch)
    metadata.mm_req_doc_ranges = {r: list(row) for r, row in enumerate(ranges)}
    bounds = torch.tensor(batch.lens, dtype=torch.int32)
    metadata.seq_lens_cpu_upper_bound = bounds if exact else None
    return metadata


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("window", "clamped"), [(None, False), (64, False), (12, False), (12, True)]
)
def test_layers_see_the_spans_of_the_batch(window, clamped, exact, device):
    case = Case(
        CASE.requests, spans=SPANS, window=window, spans_in_window=clamped and window is not None
    )
    batch = make_batch(case, device)
    (layer,) = make_layers(case, window, clamped=clamped)
    metadata = make_builder(case, device, layer).build(0, with_spans(batch, exact=exact))
    out = torch.full_like(batch.q, 7.0)
    layer.impl.forward(layer, batch.q, None, None, batch.kv_cache, metadata, out)
    check(batch, out)
    assert (out[batch.num_tokens :] == 7.0).all()


def test_spans_are_those_of_vllms_own_backend(device):
    batch = make_batch(CASE, device)
    found = spans.spans_of(with_spans(batch, exact=False), torch.device("cpu"))
    expected = compute_mm_prefix_range_tensor(
        {r: list(row) for r, row in enumerate(SPANS)}, len(SPANS), torch.device("cpu")
    )
    assert torch.equal(found, expected)
    assert torch.equal(found, spans_tensor(batch).cpu())


@pytest.mark.parametrize(
    ("window", "clamped"), [(None, False), (64, False), (30, False), (12, True)]
)
def test_spans_mean_what_triton_attn_makes_of_them(window, clamped, device):
    """Its kernel on the same batch; it reads all of a page, so nothing is NaN here.

    Without a clamp no span is longer than the window: vLLM leaves those out, and its kernel would
    weigh keys left of the window whose values it has set to 0.
    """
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    case = Case(CASE.requests, page_size=16, pad_tokens=0)
    batch = make_batch(case, device)
    batch.kv_cache.nan_to_num_(nan=0.25)
    batch.block_table.clamp_(max=batch.kv_cache.shape[0] - 1)
    (layer,) = make_layers(case, window, clamped=clamped)
    metadata = make_builder(case, device, layer).build(0, with_spans(batch))
    out = torch.empty_like(batch.q)
    layer.impl.forward(layer, batch.q, None, None, batch.kv_cache, metadata, out)
    expected = torch.empty_like(batch.q)
    scales = torch.ones(len(batch.lens), case.num_kv_heads, device=device)
    unified_attention(
        q=batch.q, k=batch.k_cache.transpose(1, 2), v=batch.v_cache.transpose(1, 2), out=expected,
        cu_seqlens_q=batch.query_start_loc, max_seqlen_q=60, seqused_k=batch.seq_lens,
        max_seqlen_k=max(batch.lens), softmax_scale=case.head_dim**-0.5, causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0), softcap=0.0,
        block_table=batch.block_table, q_descale=None, k_descale=scales, v_descale=scales,
        mm_prefix_range=compute_mm_prefix_range_tensor(
            {r: list(row) for r, row in enumerate(SPANS)}, len(SPANS), device
        ),
        mm_prefix_clamp_sliding_window=clamped,
    )  # fmt: skip
    tolerance = 1e-5 if device.type == "cpu" else 5e-3  # its products are in tf32
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def test_a_model_may_take_spans_off_a_layers_metadata(device):
    """As Gemma 4 does for its global layers, after the step was planned with them."""
    batch = make_batch(CASE, device)
    (layer,) = make_layers(CASE, None)
    metadata = make_builder(CASE, device, layer).build(0, with_spans(batch))
    assert metadata.mm_prefix_range_tensor is not None
    metadata.mm_prefix_range_tensor = None
    out = layer.impl.forward(
        layer, batch.q, None, None, batch.kv_cache, metadata, torch.empty_like(batch.q)
    )
    batch.case = Case(CASE.requests)
    check(batch, out)


QUIET = {
    "text": {0: [], 1: []},
    "none": None,
    "before": {0: [(0, 19)], 1: [(3, 9)]},
    "after": {0: [(60, 80)], 1: [(25, 30)]},
    "empty": {0: [(25, 25)], 1: [(22, 21)]},
}


@pytest.mark.parametrize("name", QUIET)
def test_steps_without_a_query_in_an_image_are_planned_as_ever(name, device):
    """Here 40 tokens at 20 to 59 and five at 20 to 24."""
    batch = vllm_batch([40, 5], mm_req_doc_ranges=QUIET[name])
    batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
    assert spans.spans_of(batch, torch.device("cpu")) is None
    met = vllm_batch([40, 5], mm_req_doc_ranges={0: [(3, 9)], 1: [(3, 9), (24, 40)]})
    met.seq_lens_cpu_upper_bound = met.seq_lens.clone()
    assert spans.spans_of(met, torch.device("cpu")).tolist() == [[[0, 0]], [[24, 40]]]


def test_models_without_images_are_asked_nothing(device):
    case = Case(CASE.requests, num_q_heads=HEADS)
    batch = make_batch(case, device)
    builder = make_builder(case, device, *make_layers(case, None), images=False)
    metadata = builder.build(0, with_spans(batch))
    assert metadata.plan.spans is None
    assert metadata.mm_prefix_range_tensor is None


# -- CUDA graphs ----------------------------------------------------------------------------------

GRAPHS = {
    "text": ((64,), 64, False, False, "ALWAYS"),
    "no_window": ((None,), None, False, True, "UNIFORM_SINGLE_TOKEN_DECODE"),
    "the_models_window": ((None, 64), 64, False, True, "UNIFORM_SINGLE_TOKEN_DECODE"),
    # A span may reach left of this window, even for a single token.
    "a_narrower_window": ((None, 32), 64, False, True, "NEVER"),
    "a_window_the_model_does_not_name": ((32,), None, False, True, "NEVER"),
    "spans_stay_in_the_window": ((32,), 64, True, True, "UNIFORM_SINGLE_TOKEN_DECODE"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_full_graphs_hold_no_batch_that_spans_change(name):
    windows, window, clamped, images, expected = GRAPHS[name]
    layers = make_layers(CASE, *windows, clamped=clamped)
    config = make_config(layers, window=window, images=images)
    support = TilewiseMetadataBuilder.get_cudagraph_support(config, None)
    assert support is AttentionCGSupport[expected]


@pytest.mark.parametrize("window", [None, 32])
def test_decodes_inside_a_span_run_as_captured(window, device):
    """A single token at the end of a chunk: it sees nothing new, unless left of a narrow window."""
    case = Case(((1, 40),), spans=(((5, 60),),), window=window)
    batch = make_batch(case, device)
    (layer,) = make_layers(case, window)
    builder = make_builder(case, device, layer, window=64, mode="FULL_AND_PIECEWISE")
    metadata = builder.build(0, with_spans(batch, case.spans))
    assert (metadata.plan.spans is None) == (window is None)
    assert (metadata.plan.max_prefill_tiles == 0) == (window is None)
    out = torch.full_like(batch.q, 7.0)
    layer.impl.forward(layer, batch.q, None, None, batch.kv_cache, metadata, out)
    check(batch, out)


def test_mixed_graphs_are_not_planned_for(device):
    """vLLM lowers the mode after builders are made."""
    (layer,) = make_layers(CASE, None)
    builder = make_builder(CASE, device, layer, mode="FULL")
    metadata = builder.build(0, metadata_of(make_batch(Case(((1, 5), (2, 9))), device)))
    assert metadata.plan.max_prefill_tiles == 0


# -- start-up -------------------------------------------------------------------------------------


def prepared(device, window, clamped=False):
    (layer,) = make_layers(CASE, window, clamped=clamped)
    attn = make_builder(CASE, device, layer, window=window).attn
    cache = torch.zeros(5, CASE.num_kv_heads, CASE.page_size, 2 * CASE.head_dim, device=device)
    return layer, attn, cache


@pytest.mark.parametrize(
    ("window", "clamped"), [(None, False), (100, False), (4, False), (4, True)]
)
def test_the_self_check_knows_spans(window, clamped, device):
    layer, attn, cache = prepared(device, window, clamped)
    self_check.check(layer.impl, layer, attn, cache)


@pytest.mark.parametrize("window", [None, 4])
def test_the_self_check_finds_ignored_spans(window, device, monkeypatch):
    layer, attn, cache = prepared(device, window)
    run = attn.run
    monkeypatch.setattr(attn, "run", lambda *a, **k: run(*a, **(k | {"spans": "off"})))
    with pytest.raises(SelfCheckFailed, match="the prefill kernel is wrong"):
        self_check.check(layer.impl, layer, attn, cache)


# -- selection ------------------------------------------------------------------------------------


def test_a_vllm_that_shows_no_spans_is_refused_such_models(monkeypatch):
    """It would keep them to itself, and images would be causal in silence."""
    from tilewise.integration.backend import TilewiseBackend

    assert spans.shows_spans()
    assert TilewiseBackend.supports_mm_prefix()
    request = dict(
        head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False,
        has_sink=False, use_sparse=False, use_mm_prefix=True, use_per_head_quant_scales=False,
        device_capability=None, attn_type="decoder",
    )  # fmt: skip
    assert TilewiseBackend.validate_configuration(**request) == []
    fields = dict(CommonAttentionMetadata.__dataclass_fields__)
    del fields["mm_req_doc_ranges"]
    monkeypatch.setattr(CommonAttentionMetadata, "__dataclass_fields__", fields)
    assert not TilewiseBackend.supports_mm_prefix()
    (reason,) = TilewiseBackend.validate_configuration(**request)
    assert reason.startswith("partial multimodal token full attention not supported")
