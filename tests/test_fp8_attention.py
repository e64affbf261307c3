"""``TILEWISE_FP8_ATTENTION``: what vLLM's layers, their caches and the self-check make of it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from test_start_up import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    checks,
    make_builder,
    make_cache,
    make_layer,
)

from tilewise import counters
from tilewise.errors import SelfCheckFailed, UnsupportedConfig
from tilewise.integration import self_check, start_up
from tilewise.kernels.hadamard import rotate
from tilewise.settings import load_settings

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
VARIABLE = "TILEWISE_FP8_ATTENTION"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, device):
    monkeypatch.setattr(start_up, "_checked", set())
    monkeypatch.setattr(start_up, "_compiled", set())
    counters.reset()


@pytest.mark.parametrize(
    ("value", "kind", "made"),
    [
        ("off", "fp8", (False, False)),
        ("fp8", "fp8", (True, False)),
        ("rotated", "fp8_e4m3", (True, True)),
        ("rotated", "fp8_e5m2", (False, False)),
        ("rotated", "auto", (False, False)),
    ],
)
def test_layers_with_an_e4m3_cache_heed_it(value, kind, made, device, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    layer = make_layer(device, 0.25, 0.5, kv_cache_dtype=kind)
    assert (layer.impl.fp8_matmul, layer.impl.rotated_keys) == made
    builder = make_builder(device, layer)
    assert bool(builder.attn.config.fp8_dot) == made[0]
    assert builder.attn._checks.rotated == made[1]


@pytest.mark.parametrize("value", ["fp8", "rotated"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales", [(1.0, 1.0), ([0.25, 7.0], [11.0, 0.125])])
def test_the_self_check_passes(value, dtype, scales, device, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    layer = make_layer(device, *scales, kv_cache_dtype="fp8")
    make_builder(device, layer, dtype=dtype)
    cache = make_cache(device, dtype=torch.uint8)
    before = cache.clone()
    layer.bind_kv_cache(cache)
    assert torch.equal(cache, before)
    assert checks() == (1, 0)


@pytest.mark.parametrize(("lost", "kernel"), [("write", "cache_write"), ("query", "decode")])
def test_a_lost_rotation_fails_it(lost, kernel, device, monkeypatch):
    monkeypatch.setenv(VARIABLE, "rotated")
    layer = make_layer(device, kv_cache_dtype="fp8")
    builder = make_builder(device, layer)
    if lost == "write":
        layer.impl.rotated_keys = False
        monkeypatch.setattr(self_check, "_written_errors", _as_if_rotated)
    else:
        checks_of = builder.attn._checks
        object.__setattr__(checks_of, "rotated", False)
    with pytest.raises(SelfCheckFailed, match=f"the {kernel} kernel is wrong"):
        layer.bind_kv_cache(make_cache(device, dtype=torch.uint8))


_original_errors = self_check._written_errors


def _as_if_rotated(impl, *args):
    impl.rotated_keys = True
    return _original_errors(impl, *args)


def test_keys_come_into_the_cache_rotated(device, monkeypatch):
    monkeypatch.setenv(VARIABLE, "rotated")
    layer = make_layer(device, 0.05, 0.05, kv_cache_dtype="fp8")
    key, value = torch.randn(2, 20, KV_HEADS, HEAD_DIM, device=device).to(torch.float16)
    cache = torch.zeros(3, KV_HEADS, PAGE, 2 * HEAD_DIM, dtype=torch.uint8, device=device)
    layer.impl.do_kv_cache_update(layer, key, value, cache, torch.arange(20, device=device))
    held = cache.transpose(1, 2).flatten(0, 1)[:20].view(torch.float8_e4m3fn).float() * 0.05
    for found, written in zip(held.split(HEAD_DIM, -1), (rotate(key), value), strict=True):
        bound = written.abs().float() * 2**-4 * 1.01 + 0.05 * 2**-10
        assert ((found - written).abs() <= bound).all()


@pytest.mark.parametrize(
    ("value", "head_size", "why"),
    [
        ("rotated", 96, "rotated_keys with head_dim=96; accepted: powers of two"),
        ("fp8", 512, "fp8_matmul with head_dim=512; accepted: 17 to 256"),
    ],
)
def test_layers_that_cannot_heed_it_are_named(value, head_size, why, device, monkeypatch):
    """By the variable: nobody wrote the names of our options."""
    monkeypatch.setenv(VARIABLE, value)
    layer = make_layer(device, kv_cache_dtype="fp8", head_size=head_size)
    with pytest.raises(UnsupportedConfig, match=rf"{VARIABLE}={value} with layer\.0: {why} \(off"):
        make_builder(device, layer)


def test_layers_that_cannot_be_without_it_either_are_not_sent_to_it(device, monkeypatch):
    """Switching it off would not help them."""
    monkeypatch.setenv(VARIABLE, "rotated")
    layer = make_layer(device, kv_cache_dtype="fp8")
    with pytest.raises(UnsupportedConfig, match=r"^page_size=24; accepted"):
        make_builder(device, layer, page=24)


@pytest.mark.parametrize("reader", ["layer.0", "layer.1"])
@pytest.mark.parametrize(("value", "backends", "refused"), [
    ("rotated", 2, True), ("rotated", 1, False), ("fp8", 2, False),
])  # fmt: skip
def test_a_shared_cache_is_rotated_for_all_or_none(
    reader, value, backends, refused, device, monkeypatch
):
    """A drafter's layer of another backend reads the target's cache, or the other way round."""
    monkeypatch.setenv(VARIABLE, value)
    ours, other = (make_layer(device, kv_cache_dtype="fp8") for _ in range(2))
    if backends == 2:
        other.impl = SimpleNamespace(num_heads=HEADS)
    named = {"layer.0": ours, "layer.1": other}
    named[reader].kv_sharing_target_layer_name = next(n for n in named if n != reader)
    if not refused:
        make_builder(device, ours, other)
        return
    with pytest.raises(
        UnsupportedConfig, match=rf"{reader} reads .* rotates keys in layer\.0, and layer\.1"
    ):
        make_builder(device, ours, other)


@pytest.mark.parametrize(("kind", "dtype"), [("fp8_e5m2", "float8_e5m2"), ("auto", "float16")])
def test_layers_that_do_not_heed_it_are_logged(kind, dtype, device, monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, "rotated")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.tilewise")
    make_builder(device, make_layer(device, kv_cache_dtype=kind))
    text = f"{VARIABLE} has no effect on 1 layers: a cache of torch.{dtype} (accepted: an e4m3"
    assert text in caplog.text


def test_a_value_that_is_none_is_refused():
    with pytest.raises(UnsupportedConfig, match="use off, fp8 or rotated"):
        load_settings({VARIABLE: "on"})
