"""Layers that are not ours: who gets them, what is said and counted, and what is left alone.

The layers are vLLM's own, built on its GPU platform with a faked GPU (``fallback_probe.py``);
engines of two backends are in ``test_fallback_engine``.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_engine import CPU_ENGINE
from tiny_model import TinyLlama

from tilewise.errors import UnsupportedConfig
from tilewise.integration import after_import, fallback
from tilewise.settings import load_settings

PROBE = Path(__file__).with_name("fallback_probe.py")

ALWAYS_OURS = "TilewiseImpl"


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    """All scenarios in one process: importing vLLM is what costs."""
    folder = tmp_path_factory.mktemp("fallback")
    model = TinyLlama().write(folder / "model")
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # Here vLLM has to believe in a GPU, and nothing is computed.
    for name in ("TILEWISE_CPU_PLATFORM", "TRITON_INTERPRET", "TILEWISE_FALLBACK"):
        environ.pop(name, None)
    done = subprocess.run(
        [sys.executable, str(PROBE), str(model), str(folder / "out")],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads((folder / "out").read_text())


vllm = pytest.mark.vllm


@vllm
def test_a_model_of_two_backends(seen):
    """Every other layer has a window, as in Gemma or gpt-oss."""
    found = seen["alternating"]
    assert found["impls"] == ["FlashInferImpl", ALWAYS_OURS] * 3
    assert found["counters"] == {"fallback_layers{reason=sliding_window,target=FLASHINFER}": 3}
    assert found["log"] == [
        "tilewise leaves 3 layers to FLASHINFER (sliding window not supported): "
        "model.layers.{0,2,4}.self_attn.attn"
    ]


@vllm
def test_alibi_goes_to_triton(seen):
    found = seen["alibi"]
    assert found["impls"] == [ALWAYS_OURS, "TritonAttentionImpl", "TritonAttentionImpl"]
    assert found["counters"] == {
        "fallback_layers{reason=alibi,target=TRITON_ATTN}": 1,
        "fallback_layers{reason=alibi_sqrt,target=TRITON_ATTN}": 1,
    }


@vllm
def test_layers_that_look_alike_to_the_selector(seen):
    """A window goes to FLASHINFER; with a soft cap, which only the layer shows, it must not."""
    found = seen["alike_to_the_selector"]
    assert found["impls"] == [
        "FlashInferImpl", "FlashAttentionImpl", "FlashInferImpl", "FlashAttentionImpl", ALWAYS_OURS,
    ]  # fmt: skip
    assert found["counters"] == {
        "fallback_layers{reason=sliding_window,target=FLASHINFER}": 2,
        "fallback_layers{reason=sliding_window,target=FLASH_ATTN}": 1,
        "fallback_layers{reason=soft_cap,target=FLASH_ATTN}": 2,
    }
    assert len(found["log"]) == 3
    assert "window not supported; logits soft cap not supported (30.0)" in found["log"][1]


FEATURES = {
    "sinks": (0, "FlashAttentionBackend"),
    "chunk_lookback": (1, "TritonAttentionBackend"),
    "no_chunk_lookback": (2, "TilewiseBackend"),
    "chunked_local": (3, "ChunkedLocalAttention_128_FlashAttentionBackend"),
    "cross": (4, "CrossAttention_FlashAttentionBackend"),
    "encoder_only": (5, "EncoderOnlyAttention_FlashAttentionBackend"),
    "prefix_lm": (6, "EncoderOnlyAttention_FlashAttentionBackend"),
    "shared_kv": (7, "TilewiseBackend"),
    "rswa": (8, "TritonAttentionBackend"),
}


@vllm
@pytest.mark.parametrize("name", FEATURES)
def test_layer_classes_and_options(seen, name):
    """Where vLLM derives a backend for a layer class, it derives it from the substitute."""
    index, backend = FEATURES[name]
    assert seen["features"]["backends"][index] == backend


@vllm
def test_each_feature_is_counted_by_its_own_reason(seen):
    assert seen["features"]["counters"] == {
        "fallback_layers{reason=attn_type,target=FLASH_ATTN}": 2,
        "fallback_layers{reason=chunk_lookback,target=TRITON_ATTN}": 1,
        "fallback_layers{reason=chunked_local,target=FLASH_ATTN}": 1,
        "fallback_layers{reason=prefix_lm,target=FLASH_ATTN}": 1,
        "fallback_layers{reason=rswa,target=TRITON_ATTN}": 1,
        "fallback_layers{reason=sinks,target=FLASH_ATTN}": 1,
    }


@vllm
def test_the_implementation_has_the_last_word(seen):
    found = seen["impl_refuses"]
    assert found["impls"] == ["FlashAttentionImpl", ALWAYS_OURS]
    assert found["counters"] == {"fallback_layers{reason=layer,target=FLASH_ATTN}": 1}
    assert "(no soft cap today)" in found["log"][0]


@vllm
def test_a_layer_that_asks_first_and_tells_later(seen):
    found = seen["late_news"]
    assert found["backends"] == ["Late_FlashAttentionBackend"]
    assert found["counters"] == {"fallback_layers{reason=soft_cap,target=FLASH_ATTN}": 1}


@vllm
def test_selections_without_a_layer_are_said_once(seen):
    found = seen["selected_elsewhere"]
    assert found["names"] == ["FLASHINFER", "FLASH_ATTN_MLA", "CUSTOM"]
    assert found["log"] == [
        "tilewise leaves 1 layer to FLASHINFER (sliding window not supported): "
        "a layer of this model",
        "tilewise leaves 1 layer to FLASH_ATTN_MLA (head_size not supported (576; tilewise "
        "computes multiples of 8 from 16 to 256, and 512); MLA not supported): a layer of this "
        "model",
    ]


@vllm
def test_nobody_is_one_readable_error(seen):
    found = seen["nobody"]
    lines = found["head_size_v"].splitlines()
    assert lines[0] == (
        "UnsupportedConfig: no attention backend computes model.layers.1.self_attn.attn:"
    )
    assert lines[1] == (
        "  TILEWISE: logits soft cap not supported (30.0); "
        "values of another head size not supported (32; keys have 64)"
    )
    assert any("FLASHINFER" in line and "logits soft cap" in line for line in lines[2:])
    assert any("FLASH_ATTN, TRITON_ATTN: not for values" in line for line in lines[2:])
    assert "layer option mystery not supported" in found["option"]
    # What became of the layers before it is said once, before vLLM stops.
    assert found["log"] == [
        "tilewise leaves 1 layer to FLASHINFER (sliding window not supported): "
        "model.layers.0.self_attn.attn"
    ]
    assert found["wrong"].startswith("Attention.__init__() missing")


@vllm
def test_any_fallback_can_be_made_fatal(seen):
    found = seen["fatal"]
    assert found["window"] == (
        "UnsupportedConfig: TILEWISE_FALLBACK=error, and tilewise does not compute "
        "model.layers.1.self_attn.attn: sliding window not supported; "
        "logits soft cap not supported (30.0)"
    )
    assert "ALiBi slopes not supported" in found["alibi"]
    assert found["impls"] == [ALWAYS_OURS]
    assert found["counters"] == {}


@vllm
@pytest.mark.parametrize(
    ("scenario", "impls"),
    [
        ("somebody_elses", ["TritonAttentionImpl"] * 3),
        ("unnamed", ["FlashAttentionImpl"]),
        ("per_kind", ["TritonAttentionImpl", ALWAYS_OURS]),
    ],
)
def test_other_selections_are_untouched(seen, scenario, impls):
    """Even with TILEWISE_FALLBACK=error."""
    assert seen[scenario]["impls"] == impls
    assert seen[scenario]["counters"] == {}
    assert seen[scenario]["log"] == []


@vllm
@pytest.mark.parametrize("size", [None, 64, 128])
@pytest.mark.parametrize(
    ("feature", "target"),
    [
        ("alibi", "TRITON_ATTN"),
        ("soft_cap", "FLASH_ATTN"),
        ("sliding_window", "FLASHINFER"),
        ("sinks", "FLASH_ATTN"),
    ],
)
def test_two_backends_agree_on_pages_layout_and_graphs(seen, feature, target, size):
    found = seen["groups"][f"{feature}-{size}"]
    assert found["block_size"] == (size or 16)
    # FLASHINFER reads pages of 16, 32 and 64; with its own group, it alone gets smaller ones.
    read = 64 if target == "FLASHINFER" and size == 128 else size or 16
    assert sorted(found["kernel_block_sizes"])[0] == read
    assert found["built_for"][0] == read
    layer = "model.layers.{}.self_attn.attn".format
    assert {name: sorted(layers) for name, layers in found["groups"].items()} == {
        "CUSTOM": [layer(0), layer(2)],
        target: [layer(1), layer(3)],
    }
    single = target == "FLASHINFER"
    assert found["graphs"] == ("UNIFORM_SINGLE_TOKEN_DECODE" if single else "ALWAYS")
    assert found["layout"] == "LBNHC"


@vllm
def test_installing_again_changes_nothing(seen):
    assert seen["installed_once"] == {"same": True}


@vllm
def test_spawned_processes_fall_back_too():
    """A new process that loads vLLM's plug-ins has both places wrapped, once they are imported."""
    text = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
name = "vllm.model_executor.layers.attention.attention"
assert name not in sys.modules, "registration must not import the layers"
from vllm.v1.attention import selector
from vllm.model_executor.layers.attention import Attention, CrossAttention, MLAAttention
for wrapped in (selector._cached_get_attn_backend, Attention.__init__, CrossAttention.__init__,
                MLAAttention.__init__):
    assert hasattr(wrapped, "tilewise_original"), wrapped
selector._cached_get_attn_backend.cache_clear()
"""
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, **CPU_ENGINE, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# -- the parts that need no vLLM -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a.0.attn"], "a.0.attn"),
        (["a.0.attn", "a.2.attn"], "a.{0,2}.attn"),
        (["a.0.attn", "b.0.attn", "a.1.attn"], "a.{0,1}.attn, b.0.attn"),
        (["attn", "a.1"], "attn, a.1"),
        (["m.1.e.2.x", "m.1.e.3.x"], "m.1.e.2.x, m.1.e.3.x"),
    ],
)
def test_layer_names_are_abridged(names, text):
    assert fallback.abridged(names) == text


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), (" ERROR ", "error"), ("", "auto"), ("Auto", "auto")]
)
def test_the_setting(text, value):
    assert load_settings({"TILEWISE_FALLBACK": text}).fallback == value


@pytest.mark.parametrize("text", ["0", "fatal", "auto,error"])
def test_the_setting_says_what_it_accepts(text):
    with pytest.raises(UnsupportedConfig, match="use auto or error") as caught:
        load_settings({"TILEWISE_FALLBACK": text})
    assert repr(text) in str(caught.value)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A module that nobody has imported yet, and the finders as they were."""
    (tmp_path / "late_module.py").write_text("import json\nvalue = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not _watches(f)])
    monkeypatch.delitem(sys.modules, "late_module", raising=False)
    yield "late_module"
    sys.modules.pop("late_module", None)


def _watches(finder) -> bool:
    return isinstance(finder, after_import.AfterImport)


def test_modules_are_wrapped_after_their_import(watched):
    done = []
    after_import.when_imported(watched, lambda module: done.append(module.value))
    after_import.when_imported(watched, lambda module: done.append(module.value))
    assert sum(map(_watches, sys.meta_path)) == 1
    assert importlib.util.find_spec(watched) is not None
    assert done == []
    importlib.import_module(watched)
    assert done == [1]
    importlib.import_module(watched)
    assert done == [1]


def test_modules_that_are_there_are_wrapped_at_once():
    done = []
    after_import.when_imported("json", done.append)
    assert done == [json]


def test_a_module_that_fails_to_import_is_wrapped_when_it_works(watched, tmp_path):
    done = []
    (tmp_path / "late_module.py").write_text("raise ImportError('not yet')\n")
    after_import.when_imported(watched, done.append)
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(watched)
    (tmp_path / "late_module.py").write_text("value = 22\n")
    importlib.invalidate_caches()
    importlib.import_module(watched)
    assert [module.value for module in done] == [22]


def test_a_selector_we_do_not_know_is_left_alone(monkeypatch, caplog):
    from types import ModuleType

    module = ModuleType("selector")
    fallback._wrap_selector(module)
    module._cached_get_attn_backend = unknown = lambda backend: backend
    fallback._wrap_selector(module)
    assert module._cached_get_attn_backend is unknown
