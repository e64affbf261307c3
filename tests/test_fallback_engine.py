"""Engines in which some layers are ours and some another backend's, tokens against Hugging Face.

The sliding window is taken for a feature that we lack, and every other layer has one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import agreement
import pytest
import torch
from agreement import Agreement, compare, greedy_reference
from test_engine import CPU_ENGINE, SMALL_ENGINE, prompts_of
from test_model_zoo import GPU_ENGINE
from tiny_model import TinyLlama

pytestmark = pytest.mark.vllm

OURS = "TilewiseImpl"
WINDOW = 24
ENGINE_JOB = """
import sys
from dataclasses import replace
import torch
sys.path.insert(0, sys.argv[1])
if not torch.cuda.is_available():
    # The one question that TRITON_ATTN asks of CUDA itself.
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
from tilewise import support
support.TABLE = tuple(
    replace(row, native=row.native and row.key != "sliding_window") for row in support.TABLE
)
import engine_job
engine_job.main(*sys.argv[2:])
"""


def write_models(shape: TinyLlama, folder: Path) -> tuple[Path, Path]:
    """The same weights twice: without windows, and with one in every other layer."""
    plain, model = shape.write(folder / "plain"), shape.write(folder / "model")
    config = json.loads((model / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"] * (shape.num_layers // 2)
    config |= {"sliding_window": WINDOW, "layer_types": kinds}
    (model / "config.json").write_text(json.dumps(config))
    return plain, model


def run(folder: Path, model: Path, engine: dict, rounds: list[dict], environ: dict):
    """Run the engine; its result, and the one line that says who takes the windowed layers."""
    job = {"model": str(model), "engine": engine, "rounds": rounds}
    (folder / "job.json").write_text(json.dumps(job))
    files = [Path(__file__).parent, folder / "job.json", folder / "result.json"]
    done = subprocess.run(
        [sys.executable, "-c", ENGINE_JOB, *map(str, files)],
        env={**os.environ, **CPU_ENGINE, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    (said,) = (line for line in done.stdout.splitlines() if "tilewise leaves" in line)
    return json.loads((folder / "result.json").read_text()), said


def windowed_layers(model, layers) -> None:
    """Give some layers of a Hugging Face model a sliding window."""

    def narrow(module, args, kwargs):
        mask = kwargs["attention_mask"]
        queries, keys = mask.shape[-2:]
        last = torch.arange(keys - queries, keys)[:, None]
        left = torch.arange(keys) <= last - WINDOW
        low = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        kwargs["attention_mask"] = mask.masked_fill(left, low)
        return args, kwargs

    for index in layers:
        model.model.layers[index].register_forward_pre_hook(narrow, with_kwargs=True)


def compare_windowed(
    monkeypatch, plain: Path, prompts, tokens, dtype: torch.dtype = torch.float32
) -> Agreement:
    """Hold tokens to Hugging Face with windows in layers 0 and 2; without them they differ."""
    num_tokens = len(tokens[0])
    assert not compare(greedy_reference(plain, prompts, num_tokens, dtype), tokens).agrees
    load = agreement._load

    def load_windowed(*args):
        loaded = load(*args)
        windowed_layers(loaded, (0, 2))
        return loaded

    monkeypatch.setattr(agreement, "_load", load_windowed)
    return compare(greedy_reference(plain, prompts, num_tokens, dtype), tokens)


@pytest.mark.slow
def test_tokens_of_a_model_whose_alternate_layers_fall_back(tmp_path, monkeypatch, device):
    """Layers 0 and 2 by TRITON_ATTN: in fp32, which FLASHINFER and FLASH_ATTN do not take."""
    plain, model = write_models(TinyLlama(num_layers=4), tmp_path)
    prompts = prompts_of([3, 40, 90], seed=11)
    engine = {**SMALL_ENGINE, "dtype": "float32"}
    rounds = [{"prompts": prompts, "max_tokens": 6}]
    environ = GPU_ENGINE if device.type == "cuda" else {}
    result, said = run(tmp_path, model, engine, rounds, environ)
    assert result["impls"] == [OURS, "TritonAttentionImpl"]
    assert "2 layers to TRITON_ATTN (sliding window not supported): model.layers.{0,2}." in said
    counts = result["rounds"][0]["counters"]
    steps = sum(n for name, n in counts.items() if name.startswith("steps{"))
    assert counts["launches{kernel=cache_write}"] == 2 * steps
    found = compare_windowed(monkeypatch, plain, prompts, result["rounds"][0]["tokens"])
    assert found.num_equal == len(prompts), str(found)


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_two_backends_share_the_cuda_graphs(tmp_path, monkeypatch):
    """In bf16 with vLLM's first choice for the window, and graphs at the level of the less able."""
    shape = TinyLlama(8, 2, 128, 4, hidden_size=512, intermediate_size=1024, dtype=torch.bfloat16)
    plain, model = write_models(shape, tmp_path)
    # Many short rows: each can end in a tie only once.
    prompts = prompts_of([*range(2, 34), 63, 64, 65, 129, 200, 255, 300, 500], shared=30, seed=3)
    graphs = {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
    }
    engine = {
        "attention_backend": "TILEWISE", "dtype": "bfloat16", "max_model_len": 1024,
        "max_num_seqs": 64, "max_num_batched_tokens": 1024, "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.02, "compilation_config": graphs,
    }  # fmt: skip
    rounds = [{"prompts": prompts, "max_tokens": 4}]
    environ = {**GPU_ENGINE, "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    result, said = run(tmp_path, model, engine, rounds, environ)
    assert OURS in result["impls"]
    assert len(result["impls"]) == 2
    assert "2 layers to FLASH" in said, said
    assert result["rounds"][0]["counters"]["graph_steps{mode=full}"] > 0
    tokens = result["rounds"][0]["tokens"]
    found = compare_windowed(monkeypatch, plain, prompts, tokens, torch.bfloat16)
    print(f"{said}: {found}")
    assert found.agrees, str(found)
