"""Encoder and cross-attention layers through the builders that vLLM derives from ours.

Kinds of field failures: F (windows of layers that are not causal), J (encoders, cross attention).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from reference import paged_attention

pytest.importorskip("vllm")

from test_builder import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    engine_config,
    launches,
    make_batch,
    make_impl,
)
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.model_executor.layers.attention.encoder_only_attention import (
    create_encoder_only_attention_backend,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
)

from tilewise.errors import UnsupportedConfig, UnsupportedFeature
from tilewise.integration.backend import TilewiseBackend

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("interpreted")]

SCALE = HEAD_DIM**-0.5


@pytest.fixture
def interpreted(device):
    if device.type != "cpu":
        pytest.skip("runs on CPU tensors, in the interpreter")


class Layer(AttentionLayerBase):
    """As much of a layer as a builder asks for."""

    kv_sharing_target_layer_name = None

    def __init__(self, impl):
        self.impl = impl

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


def build(backend, impls, spec_cls, spec_dtype=torch.float32, **config):
    """The backend's builder for a group of such layers."""
    config = engine_config(**config)
    config.model_config.dtype = torch.float32
    layers = {f"layer.{i}": Layer(impl) for i, impl in enumerate(impls)}
    config.compilation_config.static_forward_context |= layers
    spec = spec_cls(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=spec_dtype)
    return backend.get_builder_cls()(spec, list(layers), config, torch.device("cpu"))


# -- encoders: no cache ---------------------------------------------------------------------------

ENCODER_ONLY = create_encoder_only_attention_backend(TilewiseBackend)


def encoder_batch(query_lens, **fields):
    """As vLLM makes it: a table and slots that nobody may read."""
    batch = make_batch(query_lens, context=0, **fields)
    batch.block_table_tensor = torch.full((len(query_lens), 1), 2_147_480_000, dtype=torch.int32)
    batch.slot_mapping = torch.zeros(batch.num_actual_tokens, dtype=torch.int64)
    return batch


def projections(num_tokens, rows):
    """Queries, keys and values of whom only ``num_tokens`` rows are somebody's."""
    torch.manual_seed(0)
    tensors = [torch.full((rows, n, HEAD_DIM), float("nan")) for n in (HEADS, KV_HEADS, KV_HEADS)]
    for x in tensors:
        x[:num_tokens] = torch.randn(num_tokens, *x.shape[1:])
    return tensors


def attend_rows(query, key, value, lengths, window=None):
    """What encoders compute, by the reference over pages of one token."""
    starts = [0, *itertools.accumulate(lengths)]
    table = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        table[row, :length] = torch.arange(starts[row], starts[row + 1])
    out, _ = paged_attention(
        query, key[:, :, None], value[:, :, None], starts, lengths, table, SCALE, window=window,
        causal=False,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("attn_type", ["encoder_only", "encoder"])
@pytest.mark.parametrize("query_lens", [[5], [40, 1, 17, 3], [20, 30]])
def test_j_encoders_read_their_own_keys(attn_type, query_lens):
    impl = make_impl(attn_type=attn_type)
    builder = build(ENCODER_ONLY, [impl], EncoderOnlyAttentionSpec)
    num_tokens = sum(query_lens)
    metadata = builder.build(0, encoder_batch(query_lens))
    assert metadata.causal is False
    query, key, value = projections(num_tokens, num_tokens + 3)
    cache = torch.empty(0)
    impl.do_kv_cache_update(None, key, value, cache, torch.zeros(num_tokens, dtype=torch.int64))
    output = torch.full_like(query, 7.0)
    assert impl.forward(None, query, key, value, cache, metadata, output) is output
    expected = attend_rows(query, key, value, query_lens)
    torch.testing.assert_close(output[:num_tokens], expected[:num_tokens], atol=1e-5, rtol=1e-5)
    assert (output[num_tokens:] == 7.0).all()


def test_f_encoders_of_several_windows_are_one_group():
    """As in ModernBERT, whose local and global layers vLLM plans together."""
    impls = [make_impl(attn_type="encoder_only", sliding_window=w) for w in (9, None, 9, 4)]
    builder = build(ENCODER_ONLY, impls, EncoderOnlyAttentionSpec)
    lengths = [40, 6]
    metadata = builder.build(0, encoder_batch(lengths))
    query, key, value = projections(46, 46)
    for impl in impls:
        output = torch.full_like(query, float("nan"))
        impl.forward(None, query, key, value, torch.empty(0), metadata, output)
        expected = attend_rows(query, key, value, lengths, impl.window)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    stranger = make_impl(attn_type="encoder_only", sliding_window=5)
    with pytest.raises(UnsupportedConfig, match="window of 9, the layer's is 5"):
        stranger.forward(None, query, key, value, torch.empty(0), metadata, output)


def test_encoders_do_not_mind_the_dtype_of_a_cache():
    """An fp8 cache is for decoders: encoders have none, whatever their spec says."""
    impl = make_impl(attn_type="encoder_only", kv_cache_dtype="fp8")
    builder = build(ENCODER_ONLY, [impl], EncoderOnlyAttentionSpec, torch.float8_e4m3fn)
    assert (builder.attn.dtype, builder.attn.kv_dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_d_captured_encoders_see_every_key(mode):
    """vLLM's derived builder says that a batch is not causal in `build` only."""
    impl = make_impl(attn_type="encoder_only")
    builder = build(ENCODER_ONLY, [impl], EncoderOnlyAttentionSpec, mode=mode)
    metadata = builder.build_for_cudagraph_capture(encoder_batch([20, 5]))
    assert metadata.causal is False
    assert launches(metadata) == (True, True)
    query, key, value = projections(25, 25)
    output = torch.empty_like(query)
    impl.forward(None, query, key, value, torch.empty(0), metadata, output)
    expected = attend_rows(query, key, value, [20, 5])
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_encoders_and_decoders_share_no_plan():
    impls = [make_impl(attn_type="encoder_only"), make_impl()]
    with pytest.raises(UnsupportedConfig, match="with a cache and without"):
        build(ENCODER_ONLY, impls, EncoderOnlyAttentionSpec)


def test_encoders_without_keys_are_refused():
    impl = make_impl(attn_type="encoder_only")
    metadata = build(ENCODER_ONLY, [impl], EncoderOnlyAttentionSpec).build(0, encoder_batch([2]))
    query = torch.zeros(2, HEADS, HEAD_DIM)
    with pytest.raises(UnsupportedConfig, match="without keys or values"):
        impl.forward(None, query, None, None, torch.empty(0), metadata, query.clone())


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only", "encoder_decoder"])
def test_alibi_goes_elsewhere(attn_type):
    with pytest.raises(UnsupportedFeature, match=f"ALiBi slopes with attention type {attn_type!r}"):
        make_impl(attn_type=attn_type, alibi_slopes=[0.5] * HEADS)


# -- cross attention: the encoder's keys in a cache -----------------------------------------------

CROSS = create_cross_attention_backend(TilewiseBackend)


class Cross:
    """One cross-attention layer with its builder, its cache and what was written to it."""

    def __init__(self, encoder_lens, **config):
        self.impl = CROSS.get_impl_cls()(
            HEADS, HEAD_DIM, SCALE, KV_HEADS, None, None, "auto", attn_type="encoder_decoder"
        )
        self.builder = build(CROSS, [self.impl], CrossAttentionSpec, **config)
        self.layer = Layer(self.impl)
        self.lens = encoder_lens
        width = -(-max(encoder_lens) // PAGE)
        self.table = torch.arange(1, 1 + len(encoder_lens) * width, dtype=torch.int32)
        self.table = self.table.view(len(encoder_lens), width).flip(0)
        shape = (2 + len(encoder_lens) * width, KV_HEADS, PAGE, 2 * HEAD_DIM)
        self.cache = torch.full(shape, float("nan"))

    def batch(self, query_lens, context=0):
        starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return make_batch(
            query_lens, context=context, query_start_loc=starts, query_start_loc_cpu=starts.clone(),
            block_table_tensor=self.table,
            encoder_seq_lens=torch.tensor(self.lens, dtype=torch.int32),
            encoder_seq_lens_cpu=np.array(self.lens, dtype=np.int32),
            seq_lens_cpu_upper_bound=torch.tensor([n + context for n in query_lens]),
        )  # fmt: skip

    def step(self, metadata, query_lens, key=None, value=None):
        """Run the layer and compare with all of each encoder's keys."""
        query = torch.randn(sum(query_lens), HEADS, HEAD_DIM)
        output = torch.full_like(query, float("nan"))
        self.impl.forward(self.layer, query, key, value, self.cache, metadata, output)
        expected, _ = paged_attention(
            query, self.cache[..., :HEAD_DIM], self.cache[..., HEAD_DIM:],
            [0, *itertools.accumulate(query_lens)], self.lens, self.table, SCALE, causal=False,
        )  # fmt: skip
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prompt", [[4, 1, 3], [20, 1, 3]])
def test_j_cross_attention_from_prompt_to_decode(prompt):
    """The encoder's keys are written in the first step, and read whole in all."""
    torch.manual_seed(0)
    cross = Cross([37, 5, 16])
    metadata = cross.builder.build(0, cross.batch(prompt))
    assert metadata.causal is False
    assert metadata.seq_lens.tolist() == cross.lens
    key, value = torch.randn(2, sum(cross.lens), KV_HEADS, HEAD_DIM)
    cross.step(metadata, prompt, key, value)
    written = ~cross.cache.isnan()
    assert written.sum() == sum(cross.lens) * KV_HEADS * 2 * HEAD_DIM
    first = cross.cache[cross.table[0, 0], :, :, :HEAD_DIM].transpose(0, 1)
    assert torch.equal(first, key[:PAGE])
    before = cross.cache.clone()
    for context in (20, 21):
        metadata = cross.builder.build(0, cross.batch([1, 1, 1], context=context))
        cross.step(metadata, [1, 1, 1])
    assert torch.equal(cross.cache.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_d_captured_cross_attention_sees_every_key(mode):
    torch.manual_seed(0)
    cross = Cross([37, 5], mode=mode)
    cross.cache.normal_()
    batch = cross.batch([1, 1], context=3)
    metadata = cross.builder.build_for_cudagraph_capture(batch)
    assert metadata.causal is False
    cross.step(metadata, [1, 1])


# -- decoders that are not causal -----------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, [0, 1, 0], [1, 1, 1]])
@pytest.mark.parametrize("window", [None, 12])
def test_decoders_whose_batch_is_not_causal(causal, window):
    """Block diffusion and drafters: for the whole batch, or a flag for each request."""
    torch.manual_seed(0)
    impl = make_impl(sliding_window=window)
    builder = build(TilewiseBackend, [impl], FullAttentionSpec)
    query_lens = [20, 4, 1]
    flags = causal if causal is False else torch.tensor(causal, dtype=torch.int32)
    batch = make_batch(query_lens, causal=flags)
    cache = torch.randn(16, KV_HEADS, PAGE, 2 * HEAD_DIM)
    query = torch.randn(25, HEADS, HEAD_DIM)
    expected, _ = paged_attention(
        query, cache[..., :HEAD_DIM], cache[..., HEAD_DIM:], batch.query_start_loc.tolist(),
        batch.seq_lens.tolist(), batch.block_table_tensor, SCALE, window=window,
        causal=causal if causal is False else tuple(causal),
    )  # fmt: skip
    for plan in (lambda batch: builder.build(0, batch), builder.build_for_cudagraph_capture):
        planned = plan(batch)
        assert planned.causal is flags  # drafters look at it
        output = torch.full_like(query, float("nan"))
        impl.forward(None, query, None, None, cache, planned, output)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
