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
    "d64": {"head_size": 64},
    "d80": {"head_size": 80},
    "d96": {"head_size": 96},
    "d256": {"head_size": 256},
    "pages_of_16": {"block_size": 16},
    "pages_of_48": {"block_size": 48},
    "pages_of_528": {"block_size": 528},
    "kv_connector": {"use_kv_connector": True},
    "adaptive_verification": {"use_adaptive_verification": True},
    "ampere": {"capability": [8, 0]},
    "blackwell": {"capability": [10, 0]},
}

REFUSED = {
    "sliding_window": ({"has_sliding_window": True}, "sliding window not supported"),
    "sinks": ({"has_sink": True}, "attention sinks not supported"),
    "fp8_kv": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported (fp8;"),
    "int8_kv": ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype not supported (int8"),
    "other_kv_dtype": ({"kv_cache_dtype": "float16"}, "float16 differs from the model's dtype"),
    "fp8_model": ({"dtype": "float8_e4m3fn"}, "dtype not supported (torch.float8_e4m3fn;"),
    "mm_prefix": ({"use_mm_prefix": True}, "partial multimodal token full attention"),
    "non_causal": ({"use_non_causal": True}, "non-causal attention not supported"),
    "encoder": ({"attn_type": "encoder"}, "attention type encoder not supported"),
    "encoder_only": ({"attn_type": "encoder_only"}, "attention type encoder_only not"),
    "cross": ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not"),
    "mla": ({"use_mla": True}, "MLA not supported"),
    "sparse": ({"use_sparse": True}, "sparse not supported"),
    "dcp": ({"use_dcp": True}, "DCP not supported"),
    "pcp": ({"use_pcp": True}, "PCP not supported"),
    "per_head_scales": ({"use_per_head_quant_scales": True}, "per-head quant scales not"),
    "rswa": ({"use_rswa": True}, "R-SWA not supported"),
    "batch_invariant": ({"use_batch_invariant": True}, "batch invariance not supported"),
    "turing": ({"capability": [7, 5]}, "compute capability not supported ((7, 5);"),
    "d8": ({"head_size": 8}, "head_size not supported (8; tilewise computes multiples of 8"),
    "d84": ({"head_size": 84}, "head_size not supported (84;"),
    "d320": ({"head_size": 320}, "head_size not supported (320;"),
    "pages_of_8": ({"block_size": 8}, "block_size not supported (8;"),
}

SEVERAL = {"has_sink": True, "has_sliding_window": True, "head_size": 84}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict:
    """All cases in one process: importing vLLM is what costs."""
    folder = tmp_path_factory.mktemp("selection")
    model = TinyLlama().write(folder / "model")
    cases = {**ACCEPTED, **{name: case for name, (case, _) in REFUSED.items()}}
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
    assert answers[name] == {"path": PATH}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(answers, name):
    assert REFUSED[name][1] in answers[name].get("refused", "accepted")


def test_every_reason_is_given(answers):
    refusal = answers["several"]["refused"]
    for text in ("head_size", "attention sinks", "sliding window"):
        assert text in refusal


def test_pages_of_64_unless_the_user_says_otherwise(answers):
    pages = answers["pages"]
    assert pages["before"] == 16
    assert pages["chosen"] == pages["spec"] == pages["kernel"] == 64
    assert (pages["backend"], pages["impl"]) == ("TilewiseBackend", "TilewiseImpl")


@pytest.mark.parametrize("size", [16, 48])
def test_the_users_page_size_is_kept(answers, size):
    pages = answers[f"pages_of_{size}_engine"]
    assert pages["chosen"] == pages["spec"] == pages["kernel"] == size
