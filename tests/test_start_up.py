"""When a layer gets its KV cache: the self-check runs once a geometry and leaves no trace."""

from __future__ import annotations

import logging
import math
import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tilewise import counters, policy
from tilewise.arch import ARCHITECTURES
from tilewise.errors import SelfCheckFailed, UnsupportedConfig
from tilewise.integration import impl as impl_module
from tilewise.integration import self_check, self_check_inputs, start_up, triton_cache
from tilewise.integration.builder import TilewiseMetadataBuilder
from tilewise.integration.impl import TilewiseImpl

pytestmark = [
    pytest.mark.vllm,
    # numpy, in the interpreter: what keys after the query give before they are masked.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 4, 2, 32, 16, 7


class Layer(AttentionLayerBase):
    """An attention layer as a builder and a cache see it."""

    def __init__(self, impl):
        self.impl = impl
        self.kv_cache = None

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, device):
    """Nothing checked yet."""
    monkeypatch.setattr(start_up, "_checked", set())
    monkeypatch.setattr(start_up, "_compiled", set())
    counters.reset()


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.tilewise")
    return caplog


def make_layer(device, k_scale=1.0, v_scale=1.0, **features):
    features = {"num_heads": HEADS, "head_size": HEAD_DIM, "num_kv_heads": KV_HEADS, **features}
    layer = Layer(TilewiseImpl(scale=features["head_size"] ** -0.5, **features))
    layer._k_scale, layer._v_scale = (
        torch.tensor(x, dtype=torch.float32, device=device) for x in (k_scale, v_scale)
    )
    if layer.impl.alibi_slopes is not None:
        layer.impl.alibi_slopes = layer.impl.alibi_slopes.to(device)
    return layer


def make_builder(device, *layers, page=PAGE, dtype=torch.float16, reqs=8, tokens=256):
    from test_builder import engine_config

    config = engine_config()
    config.scheduler_config = SimpleNamespace(max_num_seqs=reqs, max_num_batched_tokens=tokens)
    named = {f"layer.{i}": layer for i, layer in enumerate(layers)}
    config.compilation_config = SimpleNamespace(
        **(vars(config.compilation_config) | {"static_forward_context": named})
    )
    impl = layers[0].impl
    config.model_config = SimpleNamespace(
        get_num_attention_heads=lambda _: impl.num_heads, dtype=dtype
    )
    spec = FullAttentionSpec(
        block_size=page, num_kv_heads=impl.num_kv_heads, head_size=impl.head_size,
        dtype=dtype if impl.kv_dtype is None else torch.uint8,
    )  # fmt: skip
    for layer in layers:
        layer.num_heads = impl.num_heads
    return TilewiseMetadataBuilder(spec, list(named), config, device)


def make_cache(device, *, pages=PAGES, heads=KV_HEADS, page=PAGE, size=HEAD_DIM,
               dtype=torch.float16):  # fmt: skip
    """As vLLM lays it out: token-major within a page."""
    cache = torch.randn(pages, page, heads, 2 * size, device=device)
    return (cache.mul(30) if dtype == torch.uint8 else cache).to(dtype).transpose(1, 2)


def checks():
    found = counters.snapshot()
    return found.get("self_checks{result=passed}", 0), found.get("self_checks{result=failed}", 0)


# -- what passes ----------------------------------------------------------------------------------

FEATURES = {
    "plain": {},
    "window": {"sliding_window": 9},
    "wide_window": {"sliding_window": 4096},
    "sinks": {"sinks": torch.tensor([2.0, -1.0, 0.5, 3.0])},
    "soft_cap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "alibi_sqrt": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "use_alibi_sqrt": True},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_right_kernels_pass_and_the_cache_is_as_before(device, features, dtype):
    features = dict(features)
    if "sinks" in features:
        features["sinks"] = features["sinks"].to(device, dtype)
    layer = make_layer(device, **features)
    make_builder(device, layer, dtype=dtype)
    cache = make_cache(device, dtype=dtype)
    before = cache.clone()
    layer.bind_kv_cache(cache)
    assert layer.kv_cache is cache
    assert torch.equal(cache, before)
    assert checks() == (1, 0)


@pytest.mark.parametrize(
    ("pages", "page", "reqs", "tokens"),
    [(1, 16, 8, 256), (2, 16, 8, 256), (7, 16, 1, 256), (7, 16, 8, 4), (3, 144, 8, 256),
     (1, 32, 1, 1)],
)  # fmt: skip
def test_small_caches_and_bounds(device, pages, page, reqs, tokens):
    layer = make_layer(device)
    make_builder(device, layer, page=page, reqs=reqs, tokens=tokens)
    layer.bind_kv_cache(make_cache(device, pages=pages, page=page))
    assert checks() == (1, 0)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(5, 5, 24), (9, 3, 64), (8, 1, 80)])
def test_other_geometries(device, heads, kv_heads, size):
    layer = make_layer(device, num_heads=heads, num_kv_heads=kv_heads, head_size=size)
    make_builder(device, layer)
    layer.bind_kv_cache(make_cache(device, heads=kv_heads, size=size))
    assert checks() == (1, 0)


def test_a_cache_without_pages_is_left_alone(device):
    layer = make_layer(device)
    make_builder(device, layer)
    layer.bind_kv_cache(make_cache(device, pages=0))
    assert checks() == (0, 0)


@pytest.mark.parametrize(("arch", "page", "size"), [(90, 64, 128), (90, 128, 64), (80, 64, 128)])
def test_the_check_reaches_blocks_that_a_gluon_prefill_does_not_mask(arch, page, size):
    geometry = policy.Geometry(32, 8, size, page, 2)
    config = policy.choose(geometry, ARCHITECTURES[arch])
    assert (config.hopper_prefill is not None) == (arch == 90)
    keys = (self_check_inputs.enough_pages(config, page) - 1) * page + 5
    if arch != 90:
        assert keys == 2 * page + 5
        return
    # As in ``hopper_roles.consumer``: blocks at the newest tokens are masked, those below are not.
    first = keys - max(self_check_inputs.QUERY_LENS)
    block_n = config.hopper_prefill.block_n
    assert (first + 1) // block_n >= self_check_inputs.LOOSE_BLOCKS
    assert -(-keys // block_n) > (first + 1) // block_n


@pytest.mark.parametrize("pages", [2, 11, 12, 13, 40])
def test_many_pages_are_checked_where_there_are_as_many(device, monkeypatch, pages):
    monkeypatch.setattr(self_check_inputs, "enough_pages", lambda *_: 12)
    layer = make_layer(device)
    builder = make_builder(device, layer)
    cache = make_cache(device, pages=pages)
    sequence = self_check_inputs.make_sequence(layer.impl, layer, builder.attn, cache)
    used = sequence.pages.tolist()
    assert len(set(used)) == len(used) == min(pages, 12)
    assert {0, pages - 1} <= set(used) <= set(range(pages))
    layer.bind_kv_cache(cache)
    assert checks() == (1, 0)


def test_a_layer_that_shares_a_cache_is_checked_too(device):
    layer = make_layer(device, kv_sharing_target_layer_name="layer.7")
    make_builder(device, layer)
    layer.bind_kv_cache(make_cache(device))
    assert checks() == (1, 0)


# -- once, and without traces ---------------------------------------------------------------------


def test_once_a_geometry(device, monkeypatch):
    seen = []
    check = self_check.check
    monkeypatch.setattr(self_check, "check", lambda *args: (seen.append(args[1]), check(*args)))
    layers = [make_layer(device) for _ in range(3)]
    make_builder(device, *layers)
    caches = [make_cache(device) for _ in layers]
    for layer, cache in zip(layers, caches, strict=True):
        layer.bind_kv_cache(cache)
        layer.bind_kv_cache(cache)  # woken from sleep
    assert seen == layers[:1]
    # Another builder of the same layers, and a cache of the real size after an estimate's.
    make_builder(device, *layers)
    layers[0].bind_kv_cache(caches[0])
    assert seen == layers[:1]
    make_builder(device, *layers)
    layers[1].bind_kv_cache(make_cache(device, pages=PAGES + 1))
    assert seen == layers[:2]
    # Of one group, with other features.
    other = make_layer(device, logits_soft_cap=30.0)
    make_builder(device, layers[2], other)
    other.bind_kv_cache(caches[0])
    assert seen == [*layers[:2], other]


def test_the_last_builder_prepares_a_layer_and_lets_it_go(device, monkeypatch):
    used = []
    monkeypatch.setattr(self_check, "check", lambda impl, layer, attn, cache: used.append(attn))
    layer = make_layer(device)
    make_builder(device, layer)
    builder = make_builder(device, layer)
    layer.bind_kv_cache(make_cache(device))
    assert used == [builder.attn]
    assert builder.is_warm
    assert "bind_kv_cache" not in vars(layer)


def test_layers_of_others_are_left_alone(device):
    stranger, layer = Layer(SimpleNamespace()), make_layer(device)
    make_builder(device, layer, *[])
    start_up.watch(SimpleNamespace(), {"stranger": stranger})
    assert "bind_kv_cache" not in vars(stranger)
    assert "bind_kv_cache" in vars(layer)


def test_a_cache_of_another_dtype_is_refused(device):
    layer = make_layer(device)
    make_builder(device, layer)
    with pytest.raises(
        UnsupportedConfig, match=r"KV cache is of torch.float8_e4m3fn; tilewise was"
    ):
        layer.bind_kv_cache(make_cache(device).to(torch.float8_e4m3fn))
    assert checks() == (0, 0)


def test_nothing_happens_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    builder = SimpleNamespace(attn=SimpleNamespace(device=torch.device("cuda")))
    start_up.prepare(builder, make_layer("cpu"), make_cache("cpu"))
    assert checks() == (0, 0)


def test_kernels_are_kept_where_the_next_start_looks(tmp_path, monkeypatch):
    """A start that finds the model compiled is not pointed to the model's own folder."""
    from vllm.compilation import compiler_interface

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    monkeypatch.setattr(compiler_interface, "_last_inductor_triton_cache_dir", None)
    point_to = getattr(compiler_interface, "initialize_inductor_cache", None)
    if point_to is None:  # vLLM 0.32
        point_to = compiler_interface.InductorAdaptor().initialize_cache
    seen = []
    with triton_cache.kept():
        seen.append(os.environ["TRITON_CACHE_DIR"])
    assert "TRITON_CACHE_DIR" not in os.environ
    for root in (tmp_path / "torch_compile_cache" / "0123", tmp_path / "named_in_the_config"):
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        point_to(str(root))
        assigned = os.environ["TRITON_CACHE_DIR"]
        with triton_cache.kept():
            seen.append(os.environ["TRITON_CACHE_DIR"])
        assert os.environ["TRITON_CACHE_DIR"] == assigned
    assert seen == [str(tmp_path / "tilewise" / "triton_cache")] * 3
    with pytest.raises(KeyError, match="lost"), triton_cache.kept():
        raise KeyError("lost")
    assert os.environ["TRITON_CACHE_DIR"] == assigned


def test_triton_looks_there(tmp_path, monkeypatch):
    from triton import knobs

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    before = knobs.cache.dir
    with triton_cache.kept():
        assert knobs.cache.dir == str(tmp_path / "tilewise" / "triton_cache")
    assert knobs.cache.dir == before


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "vllm/tilewise/triton_cache"),
        ({"TRITON_CACHE_DIR": "{0}/own"}, None),
        ({"TRITON_HOME": "{0}/home"}, "home/.triton/cache"),
        ({"TRITON_CACHE_DIR": "{0}/vllm/torch_compile_cache/ab/triton_cache"},
         "vllm/tilewise/triton_cache"),
    ],
)  # fmt: skip
def test_folders_that_users_name_are_theirs(tmp_path, environ, expected):
    environ = {name: text.format(tmp_path) for name, text in environ.items()}
    found = triton_cache.choose(environ, tmp_path / "vllm", None)
    assert found == (None if expected is None else tmp_path / expected)
    assert found is None or found.is_dir()


def test_a_cache_that_cannot_be_made_leaves_triton_alone(tmp_path):
    (tmp_path / "vllm").write_text("a file")
    assert triton_cache.choose({}, tmp_path / "vllm", None) is None


def test_the_warm_up_keeps_its_kernels_there(device, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    seen = []
    monkeypatch.setattr(
        start_up, "warm_up", lambda *_: seen.append(os.environ.get("TRITON_CACHE_DIR"))
    )
    monkeypatch.setattr(start_up, "_is_cuda", lambda attn: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    layer = make_layer(device)
    make_builder(device, layer)
    layer.bind_kv_cache(make_cache(device))
    assert seen == [str(tmp_path / "tilewise" / "triton_cache")]


@pytest.mark.parametrize(
    ("spec", "config", "is_cross", "expected"),
    [
        ({}, {}, False, (True,)),
        ({}, {"attention_config": SimpleNamespace(use_non_causal=False)}, False, (True,)),
        ({}, {}, True, (False,)),
        ({"non_causal": True}, {}, False, (False,)),  # prefix language models
        ({}, {"attention_config": SimpleNamespace(use_non_causal=True)}, False,
         (True, False, "tensor")),
        ({}, {"speculative_config": SimpleNamespace(method="dflash")}, False,
         (True, False, "tensor")),
        ({}, {"speculative_config": SimpleNamespace(method="eagle")}, False, (True,)),
    ],
)  # fmt: skip
def test_causal_kinds_of_a_group(spec, config, is_cross, expected):
    config = SimpleNamespace(**({"speculative_config": None} | config))
    assert start_up.causal_kinds(SimpleNamespace(**spec), config, is_cross) == expected


def test_encoders_are_prepared_when_their_builder_is_made(device, monkeypatch):
    """They have no cache, so nothing is bound later."""
    launched = []
    monkeypatch.setattr(start_up, "prepare_encoder", lambda *pair: launched.append(pair))
    layer = make_layer(device, attn_type="encoder_only")
    builder = make_builder(device, layer)
    assert launched == [(builder, layer)]
    assert "bind_kv_cache" not in vars(layer)


def test_every_kernel_of_an_encoder_is_launched(device):
    layer = make_layer(device, attn_type="encoder_only")
    builder = make_builder(device, layer)
    counters.reset()
    start_up.warm_up_encoder(builder, layer, builder.attn)
    launches = counters.snapshot()
    assert {f"launches{{kernel={name}}}" for name in ("plan", "prefill", "decode")} <= set(launches)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_borrowed_pages_hold_nan_and_come_back(dtype):
    cache = torch.randn(5, 2, 4, 8).to(dtype)
    before = cache.clone()
    with self_check.Borrowed(cache, torch.tensor([4, 1])):
        assert cache[[1, 4]].float().isnan().all()
        assert not cache[[0, 2, 3]].float().isnan().any()
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))


def test_launches_of_the_check_are_not_counted(device, log):
    layer = make_layer(device)
    make_builder(device, layer)
    layer.bind_kv_cache(make_cache(device))
    assert not [name for name in counters.snapshot() if name.startswith(("launches", "steps"))]
    assert any("agree with PyTorch on the KV cache" in line for line in log.messages)
    counters.add("steps", path="decode")
    assert counters.snapshot()["steps{path=decode}"] == 1


def test_it_can_be_turned_off(device, monkeypatch):
    monkeypatch.setenv("TILEWISE_SELF_CHECK", "0")
    layer = make_layer(device)
    make_builder(device, layer)
    layer.bind_kv_cache(make_cache(device))
    assert checks() == (0, 0)
    monkeypatch.setenv("TILEWISE_SELF_CHECK", "perhaps")
    with pytest.raises(UnsupportedConfig, match="'perhaps' is not a switch"):
        make_builder(device, make_layer(device))


def test_random_numbers_of_the_server_are_not_used_up(device):
    torch.manual_seed(0)
    expected = torch.randn(3, device=device)
    torch.manual_seed(0)
    layer, cache = make_layer(device), make_cache(device)
    torch.manual_seed(0)
    make_builder(device, layer)
    layer.bind_kv_cache(cache)
    assert torch.equal(torch.randn(3, device=device), expected)


# -- what does not pass ---------------------------------------------------------------------------


def shifted_write(k_cache, v_cache, key, value, slots):
    """Every token one slot late."""
    original = self_check.write_kv_cache
    original(k_cache, v_cache, key, value, (slots + 1) % (k_cache.shape[0] * k_cache.shape[2]))


def values_swapped(k_cache, v_cache, key, value, slots):
    self_check.write_kv_cache(v_cache, k_cache, key, value, slots)


@pytest.mark.parametrize("broken", [shifted_write, values_swapped])
def test_a_broken_cache_write_stops_the_server(device, monkeypatch, broken):
    monkeypatch.setattr(impl_module, "write_kv_cache", broken)
    expect_failure(device, "cache_write")


def broken_attention(name, spoil):
    from tilewise import launches

    original = getattr(launches, name)

    def call(out, *args, **kwargs):
        original(out, *args, **kwargs)
        spoil(out)

    return call


SPOILS = {
    "zeros": lambda out: out.zero_(),
    "nan": lambda out: out[-1, -1].fill_(math.nan),
    "one_head": lambda out: out[:, 1].add_(0.2),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_a_broken_kernel_stops_the_server(device, monkeypatch, kernel, spoil):
    from tilewise import launches

    name = f"{kernel}_attention"

    def rows(out):
        # The other kernel's rows are right: decode owns the first four, prefill the rest.
        spoil(out[4:] if kernel == "prefill" else out[:4])

    monkeypatch.setattr(launches, name, broken_attention(name, rows))
    expect_failure(device, kernel)


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_a_key_too_few_is_seen(device, monkeypatch, kernel):
    """The smallest mistake of a mask: a sequence that ends one key early."""
    from tilewise import attention, launches

    name = f"{kernel}_attention"
    original = getattr(launches, name)

    def call(out, lse, q, kv, starts, lengths, *args, **kwargs):
        original(out, lse, q, kv, starts, lengths - 1, *args, **kwargs)

    def record_only(*args, **kwargs):
        original(*args, **kwargs)

    if kernel == "decode":  # its lengths come from the plan
        plan = attention.plan_on_device

        def short_plan(*args, **kwargs):
            args = list(args)
            args[8] = args[8] - 1
            plan(*args, **kwargs)

        monkeypatch.setattr(attention, "plan_on_device", short_plan)
    monkeypatch.setattr(launches, name, call)
    expect_failure(device, kernel)


def expect_failure(device, kernel):
    layer = make_layer(device)
    make_builder(device, layer)
    cache = make_cache(device)
    before = cache.clone()
    with pytest.raises(SelfCheckFailed) as caught:
        layer.bind_kv_cache(cache)
    said = str(caught.value)
    assert f"the {kernel} kernel is wrong for layers of 4 query and 2 KV heads of size 32" in said
    for part in ("float16", "7 pages of 16 tokens", "largest error", "--attention-backend",
                 "TILEWISE_SELF_CHECK=0"):  # fmt: skip
        assert part in said
    # Whoever writes to wrong places may have written to any.
    assert kernel == "cache_write" or torch.equal(cache, before)
    assert checks() == (0, 1)


def test_a_window_that_is_ignored_is_seen(device, monkeypatch):
    layer = make_layer(device, sliding_window=9)
    make_builder(device, layer)
    layer.impl.window = None
    forward = TilewiseImpl.forward
    layer.impl.forward = lambda *args: (
        setattr(layer.impl, "window", 9), forward(layer.impl, *args),
        setattr(layer.impl, "window", None),
    )  # fmt: skip
    with pytest.raises(SelfCheckFailed, match="decode kernel is wrong"):
        layer.bind_kv_cache(make_cache(device))
