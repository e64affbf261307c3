"""The self-check of layers with an fp8 cache: every format and scale, and what it must find."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from test_start_up import (
    FEATURES,
    HEAD_DIM,
    _fresh,  # noqa: F401  (a fixture)
    broken_attention,
    checks,
    log,  # noqa: F401  (a fixture)
    make_builder,
    make_cache,
    make_layer,
    pytestmark,  # noqa: F401
)

from tilewise.errors import SelfCheckFailed
from tilewise.integration import impl as impl_module
from tilewise.integration import self_check

FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
SCALES = {
    "ones": (1.0, 1.0),
    "unlike": (0.05, 3.0),
    "per_head": ([0.25, 7.0], [11.0, 0.125]),
    "mixed": (0.5, [2.0, 0.01]),
    "beyond_what_is_drawn": (1e-6, 1e6),
}


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_caches_are_compared_and_left_as_before(
    device,
    dtype,
    name,
    scales,
    log,  # noqa: F811
):
    k_scale, v_scale = scales
    layer = make_layer(device, k_scale, v_scale, kv_cache_dtype=name)
    make_builder(device, layer, dtype=dtype)
    cache = make_cache(device, dtype=torch.uint8)
    before = cache.clone()
    layer.bind_kv_cache(cache)
    assert torch.equal(cache, before)
    assert checks() == (1, 0)
    assert not [line for line in log.messages if "does not check" in line]


@pytest.mark.parametrize("name", ["window", "sinks", "soft_cap", "alibi"])
def test_fp8_caches_with_other_features(device, name):
    features = dict(FEATURES[name])
    if "sinks" in features:
        features["sinks"] = features["sinks"].to(device, torch.bfloat16)
    layer = make_layer(device, 0.05, 3.0, kv_cache_dtype="fp8", **features)
    make_builder(device, layer, dtype=torch.bfloat16)
    layer.bind_kv_cache(make_cache(device, dtype=torch.uint8))
    assert checks() == (1, 0)


def test_fp8_caches_in_fp32_models_and_of_layers_that_share(device):
    shared = {"kv_sharing_target_layer_name": "layer.7"}
    for dtype, features in ((torch.float32, {}), (torch.bfloat16, shared)):
        layer = make_layer(device, 0.05, [3.0, 0.5], kv_cache_dtype="fp8", **features)
        make_builder(device, layer, dtype=dtype)
        layer.bind_kv_cache(make_cache(device, dtype=torch.uint8))
    assert checks() == (2, 0)


def test_each_format_and_each_kind_of_scale_is_compared(device):
    """Their caches look alike: bytes of the same shape."""
    for expected, (name, scale) in enumerate(
        [("fp8", 1.0), ("fp8_e5m2", 1.0), ("fp8", [1.0, 2.0]), ("fp8_e4m3", 0.5)], 1
    ):
        layer = make_layer(device, scale, kv_cache_dtype=name)
        make_builder(device, layer)
        layer.bind_kv_cache(make_cache(device, dtype=torch.uint8))
        # A scale's value is read when the kernels run; no other kernel serves it.
        assert checks() == (min(expected, 3), 0)


def expect_fp8_failure(device, kernel, name="fp8", scales=(0.05, 3.0)):
    layer = make_layer(device, *scales, kv_cache_dtype=name)
    make_builder(device, layer)
    cache = make_cache(device, dtype=torch.uint8)
    before = cache.clone()
    with pytest.raises(SelfCheckFailed, match=f"the {kernel} kernel is wrong") as caught:
        layer.bind_kv_cache(cache)
    assert torch.equal(cache, before)
    assert checks() == (0, 1)
    return str(caught.value)


def one_byte_off(kv_cache, change):
    """Change the byte of a key in the middle of the range; steps there are wide."""
    keys = kv_cache[-1, 0, 0, :HEAD_DIM].view(torch.float8_e4m3fn).float()
    at = int((keys.abs() - 1.06).abs().argmin())
    kv_cache[-1, 0, 0, at] += change


@pytest.mark.parametrize("change", [1, -1])
def test_a_byte_that_is_not_the_nearest_is_seen(device, monkeypatch, change):
    original = self_check.write

    def write(impl, layer, kv_cache, sequence):
        original(impl, layer, kv_cache, sequence)
        one_byte_off(kv_cache, change)

    monkeypatch.setattr(self_check, "write", write)
    said = expect_fp8_failure(device, "cache_write")
    assert "accepted 0," not in said


FP8_WRITES = {
    "no_scales": lambda k, v: (None, None),
    "swapped_scales": lambda k, v: (v, k),
    "one_scale_for_all_heads": lambda k, v: (k.reshape(-1)[:1], v.reshape(-1)[:1]),
}


@pytest.mark.parametrize("broken", FP8_WRITES)
def test_a_cache_write_with_wrong_scales_stops_the_server(device, monkeypatch, broken):
    original = impl_module.write_kv_cache

    def write(*args, k_scale, v_scale, **kwargs):
        k_scale, v_scale = FP8_WRITES[broken](k_scale, v_scale)
        original(*args, k_scale=k_scale, v_scale=v_scale, **kwargs)

    monkeypatch.setattr(impl_module, "write_kv_cache", write)
    expect_fp8_failure(device, "cache_write", scales=SCALES["per_head"])


def test_the_other_format_is_seen(device, monkeypatch):
    original = impl_module.write_kv_cache

    def write(*args, fp8_format, **kwargs):
        original(*args, fp8_format="e5m2_bits", **kwargs)

    monkeypatch.setattr(impl_module, "write_kv_cache", write)
    expect_fp8_failure(device, "cache_write")


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
@pytest.mark.parametrize("broken", FP8_WRITES)
def test_attention_with_wrong_scales_stops_the_server(device, monkeypatch, kernel, broken):
    from dataclasses import replace

    from tilewise import launches

    name = f"{kernel}_attention"
    original = getattr(launches, name)

    def call(out, lse, q, kv, *args, **kwargs):
        k_scale, v_scale = FP8_WRITES[broken](kv.k_scale, kv.v_scale)
        original(out, lse, q, replace(kv, k_scale=k_scale, v_scale=v_scale), *args, **kwargs)

    monkeypatch.setattr(launches, name, call)
    expect_fp8_failure(device, kernel, scales=SCALES["per_head"])


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_values_off_by_a_rounding_of_the_model_are_seen(device, monkeypatch, kernel, name):
    """The comparison is as close as without fp8: eight steps of the output are too many."""
    from tilewise import launches

    def spoil(out):
        rows = out[4:] if kernel == "prefill" else out[:4]
        largest = rows.abs().max()
        rows.add_(8 * torch.finfo(out.dtype).eps * largest)

    attribute = f"{kernel}_attention"
    monkeypatch.setattr(launches, attribute, broken_attention(attribute, spoil))
    expect_fp8_failure(device, kernel, name=name)
