"""vLLM's own GPU selection logic, asked about our backend on a faked sm_90 platform."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import TinyLlama

pytestmark = pytest.mark.vllm

PATH = "tilewise.integration.backend.TilewiseBackend"

ACCEPTED = {
    "llama_d128_bf16": {},
    "custom_name": {"backend": "CUSTOM"},
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    "named_kv_dtype": {"kv_cache_dtype": "bfloat16"},
    "fp8_kv": {"kv_cache_dtype": "fp8"},
    "fp8_e4m3_kv": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2_kv": {"kv_cache_dtype": "fp8_e5m2"},
    "fp8_kv_d96_ampere": {"kv_cache_dtype": "fp8", "head_size": 96, "capability": [8, 0]},
    "per_head_scales": {"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True},
    "d64": {"head_size": 64},
    "d80": {"head_size": 80},
    "d96": {"head_size": 96},
    "d256": {"head_size": 256},
    "d512": {"head_size": 512},
    "pages_of_16": {"block_size": 16},
    "pages_of_48": {"block_size": 48},
    "pages_of_528": {"block_size": 528},
    "sliding_window": {"has_sliding_window": True},
    "window_d80_pages_of_48": {"has_sliding_window": True, "head_size": 80, "block_size": 48},
    "sinks": {"has_sink": True},
    "sinks_window_fp8": {"has_sink": True, "has_sliding_window": True, "kv_cache_dtype": "fp8"},
    "kv_connector": {"use_kv_connector": True},
    "adaptive_verification": {"use_adaptive_verification": True},
    "ampere": {"capability": [8, 0]},
    "non_causal": {"use_non_causal": True},
    "encoder": {"attn_type": "encoder"},
    "encoder_only": {"attn_type": "encoder_only"},
    "cross": {"attn_type": "encoder_decoder"},
    "invariant": {"use_batch_invariant": True},
    "blackwell": {"capability": [10, 0]},
    "dcp": {"use_dcp": True},
    "dcp_d96": {"use_dcp": True, "head_size": 96},
    "dcp_sinks": {"use_dcp": True, "has_sink": True},
    "dcp_adaptive": {"use_dcp": True, "use_adaptive_verification": True},
    "dcp_pages_of_48": {"use_dcp": True, "block_size": 48},
    "mm_prefix": {"use_mm_prefix": True},
    "mm_prefix_window_d256": {"use_mm_prefix": True, "head_size": 256, "has_sliding_window": True},
}

# Case, who takes it, and the reason that tilewise gives.
FALLBACK = {
    # A feature of ours is still asked of whoever takes the layer for another one.
    "sinks_d8_offline": ({"has_sink": True, "head_size": 8}, "FLASH_ATTN", "(8; tilewise"),
    "int8_kv": ({"kv_cache_dtype": "int8_per_token_head"}, "TRITON_ATTN", "supported (int8"),
    "turboquant": ({"kv_cache_dtype": "turboquant_k8v4"}, "TURBOQUANT", "supported (turboq"),
    "mm_prefix_not_causal": (
        {"use_mm_prefix": True, "use_non_causal": True}, "TRITON_ATTN", "multimodal prefixes in",
    ),
    "mla": ({"use_mla": True, "head_size": 576}, "FLASH_ATTN_MLA", "MLA not supported"),
    "sparse": (
        {"use_mla": True, "use_sparse": True, "head_size": 576},
        "FLASH_ATTN_MLA_SPARSE",
        "sparse not supported",
    ),
    "rswa": ({"use_rswa": True}, "TRITON_ATTN", "R-SWA not supported"),
    "turing": ({"capability": [7, 5]}, "TRITON_ATTN", "capability not supported ((7, 5);"),
    "d8": ({"head_size": 8}, "FLASH_ATTN", "(8; tilewise computes multiples of 8"),
    "d84": ({"head_size": 84}, "TRITON_ATTN", "head_size not supported (84;"),
    "d320": ({"head_size": 320}, "TRITON_ATTN", "head_size not supported (320;"),
    "d504": ({"head_size": 504}, "TRITON_ATTN", "head_size not supported (504;"),
}  # fmt: skip

NOBODY = {
    "other_kv_dtype": ({"kv_cache_dtype": "float16"}, "float16 differs from the model's dtype"),
    "fp8_model": ({"dtype": "float8_e4m3fn"}, "dtype not supported (float8_e4m3fn;"),
    "pcp": ({"use_pcp": True}, "PCP not supported"),
    "pages_of_8": ({"block_size": 8}, "block_size not supported (8;"),
    "turing_with_fp8": ({"capability": [7, 5], "kv_cache_dtype": "fp8_e5m2", "use_dcp": True},
        "capability not supported ((7, 5);"),
    "dcp_window": ({"use_dcp": True, "has_sliding_window": True}, "DCP with a sliding window"),
    "sinks_dcp_d84": ({"has_sink": True, "use_dcp": True, "head_size": 84}, "(84;"),
}  # fmt: skip

# Another backend named, ours not asked: vLLM's own answer, whatever tilewise thinks of the layer.
OTHERS = {
    "flash_attn": ({"backend": "FLASH_ATTN", "has_sliding_window": True}, "FLASH_ATTN"),
    "flashinfer": ({"backend": "FLASHINFER", "has_sink": True}, None),
    "triton_attn": ({"backend": "TRITON_ATTN", "head_size": 84}, "TRITON_ATTN"),
    "none": ({"backend": None, "has_sink": True}, "FLASH_ATTN"),
}

SEVERAL = {"use_mm_prefix": True, "use_non_causal": True, "use_rswa": True, "head_size": 84}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict:
    """All cases in one process: importing vLLM is what costs."""
    folder = tmp_path_factory.mktemp("selection")
    model = TinyLlama().write(folder / "model")
    cases = dict(ACCEPTED)
    for table in (FALLBACK, NOBODY):
        cases |= {name: case for name, (case, *_) in table.items()}
    cases |= {f"{name}_named": case for name, (case, _) in OTHERS.items()}
    (folder / "cases.json").write_text(json.dumps({**cases, "several": SEVERAL}))
    script = Path(__file__).with_name("selection_probe.py")
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # Here vLLM has to believe in a GPU, and nothing is computed.
    for name in ("TILEWISE_CPU_PLATFORM", "TRITON_INTERPRET"):
        environ.pop(name, None)
    done = subprocess.run(
        [sys.executable, str(script), str(model), str(folder / "cases.json"), str(folder / "out")],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads((folder / "out").read_text())


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(answers, name):
    assert answers[name] == {"path": PATH, "name": "CUSTOM", "reasons": []}


@pytest.mark.parametrize("name", FALLBACK)
def test_who_takes_it_and_why(answers, name):
    _, target, reason = FALLBACK[name]
    assert answers[name].get("name") == target, answers[name]
    assert any(reason in text for text in answers[name]["reasons"])


@pytest.mark.parametrize("name", NOBODY)
def test_nobody_takes_it_and_why(answers, name):
    refusal = answers[name].get("refused", "accepted")
    assert "no attention backend computes a layer of this model" in refusal
    assert NOBODY[name][1] in refusal.splitlines()[1]
    for backend in ("TILEWISE", "FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"):
        assert backend in refusal


@pytest.mark.parametrize("name", OTHERS)
def test_other_backends_are_left_alone(answers, name):
    answer, expected = answers[f"{name}_named"], OTHERS[name][1]
    assert answer.get("name") == expected
    if expected is None:
        assert "Selected backend AttentionBackendEnum.FLASHINFER" in answer["refused"]


def test_every_reason_is_given(answers):
    assert answers["several"]["name"] == "TRITON_ATTN"
    reasons = " ".join(answers["several"]["reasons"])
    for text in ("head_size", "multimodal prefixes", "R-SWA"):
        assert text in reasons


def test_pages_of_64_unless_the_user_says_otherwise(answers):
    pages = answers["pages"]
    assert pages["before"] == 16
    assert pages["chosen"] == pages["spec"] == pages["kernel"] == 64
    assert (pages["backend"], pages["impl"]) == ("TilewiseBackend", "TilewiseImpl")


@pytest.mark.parametrize("size", [16, 48])
def test_the_users_page_size_is_kept(answers, size):
    pages = answers[f"pages_of_{size}_engine"]
    assert pages["chosen"] == pages["spec"] == pages["kernel"] == size
