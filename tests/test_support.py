"""The support table, and that the README, the backend and the fallback say what it says."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tilewise import support
from tilewise.matrix import BEGIN, END, main, matrix
from tilewise.support import Capability, Request, check, is_native, targets

README = Path(__file__).resolve().parent.parent / "README.md"

# A layer with each feature. The rows that no layer shows are None.
EXAMPLES = {
    "head_size": {}, "dtype": {}, "kv_same": {}, "group_size": {}, "block_size": {},
    "capability": {}, "speculative": None,
    "adaptive": {"use_adaptive_verification": True},
    "output_quant": None,
    "connector": {"use_kv_connector": True},
    "shared_kv": {"shares_kv": True},
    "sliding_window": {"has_sliding_window": True},
    "sinks": {"has_sink": True},
    "soft_cap": {"soft_cap": 30.0},
    "alibi": {"alibi": True},
    "alibi_sqrt": {"alibi": True, "alibi_sqrt": True},
    "chunk_lookback": {"chunk_lookback": 0},
    "chunked_local": {"layer_kind": "ChunkedLocalAttention"},
    "prefix_lm": {"layer_kind": "PrefillPrefixLMAttention"},
    "static_sink": {"layer_kind": "StaticSinkAttention"},
    "block_pooling": {"layer_kind": "WhisperCausalAttentionWithBlockPooling"},
    "rswa": {"use_rswa": True},
    "mm_prefix": {"use_mm_prefix": True},
    "mm_prefix_not_causal": {"use_mm_prefix": True, "use_non_causal": True},
    "non_causal": {"use_non_causal": True},
    "attn_type": {"attn_type": "encoder_only"},
    "alibi_not_causal": {"alibi": True, "attn_type": "encoder_only"},
    "per_head_scales": {"use_per_head_quant_scales": True},
    "head_size_v": {"head_size_v": 64},
    "option": {"option": "mystery"},
    "other_head_size": {"head_size": 84},
    "other_dtype": {"dtype": "float8_e4m3fn"},
    "kv_fp8": {"kv_cache_dtype": "fp8"},
    "kv_fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "kv_per_token_head": {"kv_cache_dtype": "int8_per_token_head"},
    "kv_nvfp4": {"kv_cache_dtype": "nvfp4"},
    "kv_turboquant": {"kv_cache_dtype": "turboquant_k8v4"},
    "kv_other": {"kv_cache_dtype": "fp8_ds_mla"},
    "kv_other_float": {"kv_cache_dtype": "float16"},
    "other_group_size": {"group_size": 129},
    "other_block_size": {"block_size": 24},
    "old_gpu": {"device_capability": (7, 5)},
    "batch_invariant": {"use_batch_invariant": True},
    "dcp": {"use_dcp": True},
    "dcp_places": {"use_dcp": True, "has_sliding_window": True},
    "pcp": {"use_pcp": True},
    "mla": {"use_mla": True},
    "sparse": {"use_sparse": True},
}  # fmt: skip

# Rows of a combination, and those of what it combines.
BESIDES = {
    "alibi_not_causal": {"alibi", "attn_type"},
    "dcp_places": {"dcp", "sliding_window"},
    "mm_prefix_not_causal": {"mm_prefix", "non_causal"},
}

SHOWN = {key: example for key, example in EXAMPLES.items() if example is not None}
LATE = {
    "alibi", "alibi_sqrt", "soft_cap", "chunk_lookback", "layer_kind", "head_size_v", "group_size",
    "shares_kv", "option",
}  # fmt: skip


def by_key(key: str) -> Capability:
    (row,) = (row for row in support.TABLE if row.key == key)
    return row


def set_native(monkeypatch, **native: bool) -> None:
    """Make features native or foreign, as the person does who writes their kernels."""
    table = tuple(replace(r, native=native.get(r.key, r.native)) for r in support.TABLE)
    monkeypatch.setattr(support, "TABLE", table)
    monkeypatch.setattr(support, "_BY_KEY", {row.key: row for row in table})


def test_every_row_has_an_example():
    assert list(EXAMPLES) == [row.key for row in support.TABLE]


@pytest.mark.parametrize("key", SHOWN)
def test_a_row_is_there_when_its_feature_is(key):
    rows = [row.key for row in support.present(Request(**SHOWN[key]))]
    assert key in rows
    plain = {row.key for row in support.present(Request())}
    replaced = {f"other_{row}" for row in plain} | {"kv_other_float", "old_gpu"}
    if key not in plain and key not in replaced and not key.startswith("kv_"):
        assert set(rows) == plain | {key} | BESIDES.get(key, set())


@pytest.mark.parametrize("key", SHOWN)
def test_what_is_not_native_is_refused_for_that_reason_alone(key):
    reasons = check(Request(**SHOWN[key]))
    assert [reason.key for reason in reasons] == ([] if is_native(key) else [key])
    for reason in reasons:
        assert "{" not in reason.text
        assert "not supported" in reason.text or "differs" in reason.text


def test_plain_llama_is_ours():
    assert check(Request()) == ()
    for dtype in support.DTYPES:
        assert check(Request(dtype=dtype)) == ()
        if dtype != "float32":
            assert check(Request(dtype=dtype, kv_cache_dtype=dtype)) == ()


def test_head_sizes():
    for head_size in range(1, 600):
        ours = (head_size % 8 == 0 and 16 <= head_size <= 256) or head_size == 512
        assert (check(Request(head_size=head_size)) == ()) is ours, head_size


def test_all_reasons_not_the_first(monkeypatch):
    set_native(monkeypatch, sliding_window=False, sinks=False, soft_cap=False)
    request = Request(has_sink=True, has_sliding_window=True, soft_cap=30.0, head_size=84)
    assert [reason.key for reason in check(request)] == [
        "sliding_window", "sinks", "soft_cap", "other_head_size",
    ]  # fmt: skip


def test_targets_are_backends_in_order_of_preference():
    for row in support.TABLE:
        if row.targets != support.VLLM_CHOICE:
            assert list(row.targets) == [name for name in support.ORDER if name in row.targets]
    assert targets(Request()) == support.ORDER


@pytest.mark.parametrize("key", ["soft_cap", "alibi", "alibi_sqrt", "mm_prefix", "attn_type"])
def test_flashinfer_is_never_given_what_it_ignores(key):
    for other in SHOWN:
        assert "FLASHINFER" not in targets(Request(**{**SHOWN[other], **SHOWN[key]}))


@pytest.mark.parametrize("key", ["sliding_window", "sinks", "kv_fp8", "dcp"])
def test_flashinfer_is_first_where_it_is_right(key):
    assert targets(Request(**SHOWN[key]))[0] == "FLASHINFER"


def test_a_native_feature_still_narrows_the_choice(monkeypatch):
    """Gemma 2 with our soft cap but not our window: FLASHINFER would drop the cap."""
    set_native(monkeypatch, soft_cap=True, sliding_window=False)
    request = Request(soft_cap=50.0, has_sliding_window=True)
    assert [reason.key for reason in check(request)] == ["sliding_window"]
    assert targets(request) == ("FLASH_ATTN", "TRITON_ATTN")
    assert check(Request(soft_cap=50.0)) == ()


def test_mla_and_sparse_are_left_to_vllm():
    assert targets(Request(use_mla=True, kv_cache_dtype="fp8_ds_mla")) == support.VLLM_CHOICE
    assert targets(Request(use_sparse=True, head_size=576)) == support.VLLM_CHOICE


def test_the_table_needs_no_torch():
    text = "import sys, tilewise.support, tilewise.matrix; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


# -- in step ---------------------------------------------------------------------------------------


def test_the_readme_holds_this_table(capsys):
    assert main(["--readme", str(README), "--check"]) == 0, "run `python -m tilewise.matrix`"
    assert "up to date" in capsys.readouterr().out


def test_the_writer_replaces_what_stands_between_the_markers(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"a\n{BEGIN}\nold\n{END}\nz\n")
    assert main(["--readme", str(readme), "--check"]) == 1
    assert "does not match" in capsys.readouterr().out
    assert main(["--readme", str(readme)]) == main(["--readme", str(readme), "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("a\n")
    assert text.endswith("\nz\n")
    assert text.count("| sliding window |") == 1
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="once each"):
        main(["--readme", str(readme)])


def test_the_matrix_has_a_line_for_every_row():
    lines = matrix().splitlines()[2:]
    assert len(lines) == len(support.TABLE)
    for row in support.TABLE:
        (line,) = (line for line in lines if line.startswith(f"| {row.label} |"))
        assert ("**tilewise**" in line) is row.native


@pytest.fixture
def backend():
    pytest.importorskip("vllm")
    from tilewise.integration.backend import TilewiseBackend

    return TilewiseBackend


def configuration(example: dict) -> dict:
    """The arguments that vLLM's selector passes, without what it does not see."""
    import torch

    request = Request(**{**example, "device_capability": example.get("device_capability", (9, 0))})
    shown = {f.name: getattr(request, f.name) for f in fields(Request) if f.name not in LATE}
    return {**shown, "dtype": getattr(torch, request.dtype)}


@pytest.mark.vllm
@pytest.mark.parametrize("key", [key for key, example in SHOWN.items() if not LATE & set(example)])
def test_validate_configuration_says_what_the_table_says(backend, key):
    reasons = check(Request(**SHOWN[key]))
    assert backend.validate_configuration(**configuration(SHOWN[key])) == [r.text for r in reasons]


@pytest.mark.vllm
@pytest.mark.parametrize(
    "key", ["sliding_window", "sinks", "mm_prefix", "non_causal", "rswa", "batch_invariant",
            "attn_type", "per_head_scales"],
)  # fmt: skip
def test_one_edit_makes_a_feature_native(backend, monkeypatch, key):
    set_native(monkeypatch, **{key: False})
    assert backend.validate_configuration(**configuration(SHOWN[key])) != []
    set_native(monkeypatch, **{key: True})
    assert backend.validate_configuration(**configuration(SHOWN[key])) == []


@pytest.mark.vllm
def test_a_reason_of_vllm_that_the_table_lacks_is_kept(backend, monkeypatch):
    set_native(monkeypatch, sinks=False)
    monkeypatch.setattr(backend, "supports_kv_connector", classmethod(lambda cls: False))
    config = configuration({"use_kv_connector": True, "has_sink": True})
    texts = backend.validate_configuration(**config)
    assert texts == ["attention sinks not supported", "KV connector not supported"]
    assert [reason.key for reason in backend.reasons(config)] == ["sinks", "other"]


@pytest.mark.vllm
def test_positional_arguments_are_understood(backend, monkeypatch):
    import torch

    set_native(monkeypatch, sinks=False)
    given = (84, torch.bfloat16, "auto", None, False, True, False, False, False, (9, 0), "decoder")
    assert len(backend.validate_configuration(*given)) == 2


@pytest.mark.vllm
def test_the_table_knows_what_vllm_shows_a_selector(backend):
    import inspect

    from vllm.v1.attention.selector import AttentionSelectorConfig

    known = {field.name for field in fields(Request)}
    shown = set(AttentionSelectorConfig._fields) | {"device_capability"}
    assert shown == known - LATE
    assert set(inspect.signature(backend.validate_configuration).parameters) == {"args", "kwargs"}


@pytest.mark.vllm
@pytest.mark.parametrize("kind", sorted(support.LAYER_KINDS))
def test_the_layer_classes_exist(kind):
    pytest.importorskip("vllm")
    import vllm

    sources = Path(vllm.__file__).parent / "model_executor"
    places = [*sources.glob("layers/attention/*.py"), sources / "models" / "whisper_causal.py"]
    assert any(f"class {kind}(" in path.read_text() for path in places)


@pytest.mark.vllm
def test_the_implementation_refuses_what_the_table_refuses():
    """And nothing that the table calls native, of what both of them see."""
    pytest.importorskip("vllm")
    from tilewise.errors import TilewiseError, UnsupportedFeature
    from tilewise.integration.impl import TilewiseImpl

    plain = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    for key, change in {
        "alibi": {"alibi_slopes": [0.5] * 4},
        "sliding_window": {"sliding_window": 128},
        "soft_cap": {"logits_soft_cap": 30.0},
        "attn_type": {"attn_type": "encoder"},
        "kv_fp8": {"kv_cache_dtype": "fp8"},
        "chunk_lookback": {"chunk_lookback": 2},
        "shared_kv": {"kv_sharing_target_layer_name": "model.layers.0.attn"},
    }.items():
        if is_native(key):
            TilewiseImpl(4, 64, 0.125, 2, **{**plain, **change})
            continue
        with pytest.raises(UnsupportedFeature) as caught:
            TilewiseImpl(4, 64, 0.125, 2, **{**plain, **change})
        assert isinstance(caught.value, NotImplementedError)
        assert isinstance(caught.value, TilewiseError)
