"""Outputs quantised to fp8 (e4m3) with a static scale, inside both kernels."""

import dataclasses

import pytest
import torch
from cases import Case, make_attention, make_batch, plan_batch, reference

from tilewise import counters
from tilewise.errors import PlanMismatch

# numpy's remarks on poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
REQUESTS = ((20, 130), (1, 300), (5, 64), (0, 0), (40, 0))


def scale_of(value, device):
    return torch.tensor([value], dtype=FP32, device=device)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def quantised(x: torch.Tensor, scale: float) -> torch.Tensor:
    """As PyTorch rounds, after saturating."""
    return (x.float() / torch.tensor(scale, dtype=FP32, device=x.device)).clamp(-448, 448).to(FP8)


def run(case: Case, device, out_scale=None, **overrides):
    """``(batch, out)`` of one run into rows that are not ours to write beyond the requests'."""
    batch = make_batch(case, device)
    attn = make_attention(case, device, **overrides)
    plan_batch(attn, batch)
    out = torch.full(batch.q.shape, 7.0, dtype=case.dtype if out_scale is None else FP8)
    features = batch.features
    if out_scale is not None:
        features = features | {"out_scale": out_scale}
    attn.run(batch.q, batch.kv_cache, out=(out := out.to(device)), **features)
    return batch, out


@pytest.mark.parametrize("scale", [0.0031, 0.05, 1.0])
@pytest.mark.parametrize("page_size", [16, 64])
def test_bytes_are_those_of_the_unquantised_output(scale, page_size, device):
    """The fp32 output, divided and rounded as PyTorch does; some saturate, some are subnormal."""
    case = Case(REQUESTS, page_size=page_size)
    batch, plain = run(case, device)
    _, out = run(case, device, scale_of(scale, device))
    rows = slice(batch.num_tokens)
    assert torch.equal(bytes_of(out[rows]), bytes_of(quantised(plain[rows], scale)))
    assert (out[batch.num_tokens :].float() == 7.0).all(), "rows of no request were written"


@pytest.mark.parametrize(
    "case",
    [
        Case(REQUESTS, dtype=BF16, pad_requests=2),
        Case(REQUESTS, 9, 3, 96, page_size=48, dtype=FP16, layout="hnd"),
        Case(REQUESTS, 8, 1, 128, dtype=BF16, window=70, sinks=1.0),
        Case(REQUESTS, 4, 2, 256, dtype=BF16, softcap=5.0),
        Case(REQUESTS, 4, 2, 512, dtype=BF16),
        Case(REQUESTS, dtype=FP16, causal=False),
        Case(REQUESTS, dtype=BF16, spans=(((140, 148),), (), ((65, 68),), (), ((0, 30),))),
        Case(REQUESTS, head_dim=128, dtype=BF16, kv_dtype=FP8, kv_scales="head"),
    ],
    ids=str,
)
def test_matches_reference(case, device):
    """Within a rounding to fp8, and what the kernels may err by."""
    scale = 0.01
    batch, out = run(case, device, scale_of(scale, device))
    rows = slice(batch.num_tokens)
    expected = reference(batch, FP32)[0][rows]
    error = (out[rows].float() * scale - expected).abs()
    # Half a step of 3 bits, or of the subnormal numbers; then four roundings of the kernels.
    rounding = (expected.abs() * 2.0**-4).clamp(min=scale * 2.0**-10)
    kernel = 8 * torch.finfo(case.dtype).eps * expected.abs().max()
    assert (expected.abs() < 448 * scale).all()
    assert (error <= rounding + kernel).all()
    assert (out[batch.num_tokens :].float() == 7.0).all()


@pytest.mark.parametrize("num_workers", [1, 3, 13])
def test_pieces_are_quantised_once_merged(num_workers, device):
    case = Case(((1, 0), (3, 250), (1, 429), (1, 63)))
    config = dataclasses.replace(make_attention(case, device).config, num_workers=num_workers)
    batch, plain = run(case, device, config=config)
    _, out = run(case, device, scale_of(0.02, device), config=config)
    rows = slice(batch.num_tokens)
    assert torch.equal(bytes_of(out[rows]), bytes_of(quantised(plain[rows], 0.02)))


@pytest.mark.parametrize("query_len", [1, 20])
def test_large_outputs_saturate_and_nan_stays(query_len, device):
    case = Case(((query_len, 50), (query_len, 20)), num_q_heads=2, num_kv_heads=1)
    batch = make_batch(case, device)
    first = batch.block_table[0, 0]
    batch.v_cache[first][..., 0] = 1e6  # every key of the first page: the mean is large
    batch.v_cache[first][..., 1] = -1e6
    batch.v_cache[first, :, 0, 2] = float("nan")
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    out = attn.run(batch.q, batch.kv_cache, out_scale=scale_of(1.0, device))
    assert out.dtype == FP8
    mine = bytes_of(out[:query_len])
    assert (mine[..., 0] == 0x7E).all()  # 448
    assert (mine[..., 1] == 0xFE).all()
    assert ((mine[..., 2] & 0x7F) == 0x7F).all()
    assert out[query_len : 2 * query_len].float().isfinite().all()


def test_scales_are_read_when_the_kernels_run(device):
    """As a replayed graph does; and scales of any address and both shapes."""
    case = Case(((20, 30), (1, 90)))
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    buffer = torch.tensor([0.0, 0.01], dtype=FP32, device=device)
    one = attn.run(batch.q, batch.kv_cache, out_scale=buffer[1])
    other = attn.run(batch.q, batch.kv_cache, out_scale=buffer[1:])
    rows = slice(batch.num_tokens)
    assert torch.equal(bytes_of(one[rows]), bytes_of(other[rows]))
    buffer[1] = 0.04
    last = attn.run(batch.q, batch.kv_cache, out_scale=buffer[1:])
    plain = attn.run(batch.q, batch.kv_cache)
    assert torch.equal(bytes_of(last[rows]), bytes_of(quantised(plain[rows], 0.04)))


def test_output_strides_and_lse(device):
    """Inside a wider buffer whose other bytes stay; the log-sum-exp is not scaled."""
    case = Case(REQUESTS)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    plain, lse = attn.run(batch.q, batch.kv_cache, return_lse=True)
    tokens, heads, dim = batch.q.shape
    wide = torch.full((tokens, heads, 2 * dim), 5.0, device=device).to(FP8)
    _, quantised_lse = attn.run(
        batch.q, batch.kv_cache, out=wide[..., :dim], out_scale=scale_of(0.02, device),
        return_lse=True,
    )  # fmt: skip
    rows = slice(batch.num_tokens)
    assert torch.equal(bytes_of(wide[rows, :, :dim]), bytes_of(quantised(plain[rows], 0.02)))
    assert (wide[..., dim:].float() == 5.0).all()
    assert torch.equal(lse[rows], quantised_lse[rows])


def test_quantised_outputs_take_the_plain_kernel(device):
    """And are counted there, whatever serves the others."""
    counters.reset()
    run(Case(((40, 0),), head_dim=128, dtype=BF16), device, scale_of(0.1, device))
    counts = counters.snapshot()
    assert counts["launches{kernel=prefill}"] == 1
    assert "launches{kernel=hopper_prefill}" not in counts


@pytest.mark.parametrize(
    ("out", "scale", "named"),
    [
        (FP8, None, "out is torch.float8_e4m3fn without out_scale; accepted: torch.float32"),
        (FP32, torch.ones(1), "out is torch.float32 with out_scale; accepted: torch.float8_e4m3fn"),
        (torch.float8_e5m2, torch.ones(1), "out is torch.float8_e5m2 with out_scale"),
        (FP8, torch.ones(2), r"out_scale is torch.float32 \(2,\)"),
        (FP8, torch.ones(1, dtype=BF16), r"out_scale is torch.bfloat16 \(1,\)"),
        (None, torch.ones(1, 1), r"out_scale is torch.float32 \(1, 1\)"),
        (FP8, 0.5, "out_scale=0.5; accepted: a tensor or None"),
    ],
)
def test_outputs_and_scales_that_do_not_fit_are_named(out, scale, named, device):
    batch = make_batch(Case(((1, 20),)), device)
    attn = make_attention(batch.case, device)
    plan_batch(attn, batch)
    out = out if out is None else torch.zeros(batch.q.shape, device=device).to(out)
    scale = scale.to(device) if isinstance(scale, torch.Tensor) else scale
    with pytest.raises(PlanMismatch, match=named):
        attn.run(batch.q, batch.kv_cache, out=out, out_scale=scale)


# -- the layer that vLLM calls --------------------------------------------------------------------


@pytest.mark.vllm
def test_layers_take_what_vllm_fuses():
    pytest.importorskip("vllm")
    from test_builder import make_impl
    from vllm.model_executor.layers.quantization.utils import quant_utils

    impl = make_impl()
    assert impl.fused_output_quant_supported(quant_utils.kFp8StaticTensorSym)
    for name in ("kFp8DynamicTensorSym", "kFp8DynamicTokenSym", "kNvfp4Dynamic"):
        assert not impl.fused_output_quant_supported(getattr(quant_utils, name)), name


@pytest.mark.vllm
def test_a_layer_with_the_gluon_prefill_is_not_fused(monkeypatch):
    """The plain kernel would take its place, for the sake of one small kernel less."""
    pytest.importorskip("vllm")
    from test_builder import HEADS, KV_HEADS
    from vllm.model_executor.layers.quantization.utils import quant_utils

    from tilewise import policy
    from tilewise.integration import impl as module

    key = quant_utils.kFp8StaticTensorSym
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for arch, head_size, fused in ((90, 128, False), (90, 32, True), (100, 128, True)):
        device = policy.Device(arch, 132, 227 * 1024)
        monkeypatch.setattr(module, "describe", lambda _, device=device: device)
        layer = module.TilewiseImpl(HEADS, head_size, 0.1, KV_HEADS, None, None, "auto")
        assert layer.fused_output_quant_supported(key) is fused, (arch, head_size)


@pytest.mark.vllm
@pytest.mark.parametrize("query_lens", [[1, 5], [20, 1]])
def test_the_layer_passes_its_scale_on(query_lens, device):
    pytest.importorskip("vllm")
    if device.type != "cpu":
        pytest.skip("runs on CPU tensors, in the interpreter")
    from test_builder import HEAD_DIM, HEADS, KV_HEADS, PAGE, make_builder, make_impl
    from test_builder import make_batch as vllm_batch

    torch.manual_seed(0)
    impl, builder = make_impl(), make_builder()
    cache = torch.randn(8, KV_HEADS, PAGE, 2 * HEAD_DIM)
    query = torch.randn(sum(query_lens), HEADS, HEAD_DIM)
    metadata = builder.build(0, vllm_batch(query_lens, context=3))
    args = (None, query, None, None, cache, metadata)
    plain = impl.forward(*args, torch.empty_like(query))
    output = torch.empty_like(query, dtype=FP8)
    assert impl.forward(*args, output, torch.tensor([0.03])) is output
    assert torch.equal(bytes_of(output), bytes_of(quantised(plain, 0.03)))
    # The profiling run has no batch.
    assert (impl.forward(*args[:-1], None, output, torch.tensor([0.03])).float() == 0).all()


@pytest.mark.vllm
@pytest.mark.parametrize("fuses", [None, False, True])
def test_builders_know_whether_vllm_fuses(fuses):
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from test_builder import engine_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from tilewise.integration.builder import TilewiseMetadataBuilder

    if torch.cuda.is_available():
        pytest.skip("runs on CPU tensors, in the interpreter")
    config = engine_config()
    if fuses is not None:
        config.compilation_config.pass_config = SimpleNamespace(fuse_attn_quant=fuses)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=FP32)
    builder = TilewiseMetadataBuilder(spec, ["layer.0"], config, torch.device("cpu"))
    assert builder.quantises_output is bool(fuses)
