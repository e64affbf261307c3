"""Engines on the GPU: tokens of TILEWISE and FLASH_ATTN agree, in both graph modes and runners.

An engine takes a minute or two to start there, so a model's engines start side by side on one
GPU, each in its own process, and every test looks at what they returned. The bf16 rule of
``agreement`` counts ties by row, and a random model is often unsure: rows are cut into pieces of
``PIECE`` tokens, each continuing the same fp32 text, so that one tie does not end the comparison.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from agreement import Agreement, Reference, compare, greedy_reference
from test_engine import PREEMPTED_ROUND, RATIO3, check_preemption, preemption_engine, run_job
from test_model_zoo import GPU_ENGINE
from tiny_model import TinyLlama

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(1500)]

JOB_SCRIPT = Path(__file__).with_name("engine_job.py")
JOB_TIMEOUT = 480
SMOLLM2 = os.environ.get("TILEWISE_SMOLLM2")

PIECE, NUM_PIECES = 4, 4
CONTROLS = (None, "zeros", "window")
CONTROL_LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12)
LENGTHS = [
    1, 2, 15, 16, 17, 40, 63, 64, 65, 100, 128, 129, 255, 300, 511, 700, 1000, 1023, 1024, 1500,
    2000, 2047, 2500, 3000,
]  # fmt: skip

ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 4 << 30,
    "gpu_memory_utilization": 0.02,
}
# Few sizes, or capturing them is most of the start.
CAPTURE_SIZES = [1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512]
# Backend, graph mode, model runner.
ENGINES = {
    "flash": ("FLASH_ATTN", "FULL_AND_PIECEWISE", "v2"),
    "piecewise": ("TILEWISE", "FULL_AND_PIECEWISE", "v2"),
    "full": ("TILEWISE", "FULL", "v2"),
    "v1": ("TILEWISE", "FULL_AND_PIECEWISE", "v1"),
}
OURS = ("piecewise", "full", "v1")

SENTENCES = (
    "The river rises in the hills north of the town and runs south past two mills. ",
    "In spring the water is high, and the ferry does not cross after dark. ",
    "Most of the people who live here work on the railway or in the glass works. ",
    "A letter posted in the morning reaches the coast on the evening of the next day. ",
    "The school has forty pupils, three teachers and a garden with old apple trees. ",
)


@dataclass
class Compared:
    """One model's engines, and what their tokens are held to."""

    references: list[Reference]
    control_reference: Reference
    jobs: dict[str, dict]
    num_layers: int

    def agreement(self, engine: str) -> Agreement:
        """All pieces of all rows, as one comparison."""
        merged = Reference([], [], self.references[0].logit_error)
        tokens: list[list[int]] = []
        for reference, done in zip(self.references, self.jobs[engine]["rounds"], strict=False):
            merged.tokens.extend(reference.tokens)
            merged.gaps.extend(reference.gaps)
            tokens.extend(done["tokens"])
        return compare(merged, tokens)


def run_engines(model: Path, rounds: dict[str, list[dict]], folder: Path) -> dict[str, dict]:
    """Run the engines side by side and return their results."""
    processes = {}
    for name, (backend, mode, runner) in ENGINES.items():
        place = folder / name
        place.mkdir()
        graphs = {"cudagraph_mode": mode, "cudagraph_capture_sizes": CAPTURE_SIZES}
        engine = {**ENGINE, "attention_backend": backend, "compilation_config": graphs}
        job = {"model": str(model), "engine": engine, "rounds": rounds[name]}
        (place / "job.json").write_text(json.dumps(job))
        environ = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2")),
            "VLLM_CACHE_ROOT": str(place / "cache"),
            "HF_HUB_OFFLINE": "1",
        }
        if backend == "TILEWISE":
            environ["VLLM_GPU_SYNC_CHECK"] = "error"
        command = [sys.executable, str(JOB_SCRIPT), str(place / "job.json"), str(place / "result")]
        with (place / "log").open("w") as log:
            processes[name] = subprocess.Popen(
                command, env=environ, stdout=log, stderr=subprocess.STDOUT
            )
    try:
        deadline = time.monotonic() + JOB_TIMEOUT
        for process in processes.values():
            process.wait(timeout=max(deadline - time.monotonic(), 1))
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
    failed = {name: p.returncode for name, p in processes.items() if p.returncode}
    logs = [f"{name}: {(folder / name / 'log').read_text()[-5000:]}" for name in failed]
    assert not failed, "\n\n".join(logs)
    return {name: json.loads((folder / name / "result").read_text()) for name in ENGINES}


def compare_engines(model: Path, prompts: list[list[int]], folder: Path) -> Compared:
    """Run all pieces on all engines; FLASH_ATTN's tokens and gaps are the reference."""
    text = greedy_reference(model, prompts, PIECE * NUM_PIECES, torch.bfloat16, "cuda")
    torch.cuda.empty_cache()
    pieces = [
        {
            "prompts": [p + t[:start] for p, t in zip(prompts, text.tokens, strict=True)],
            "max_tokens": PIECE,
        }
        for start in range(0, PIECE * NUM_PIECES, PIECE)
    ]
    # Attention can be exchanged outside a graph only: here in the prefill, hence one token.
    starts = [prompts[-1][:length] for length in CONTROL_LENGTHS]
    control = {"prompts": starts, "max_tokens": 1, "fresh": True}
    rounds = {
        "flash": [{**spec, "logprobs": True} for spec in (*pieces, control)],
        "piecewise": [*pieces, *({**control, "sabotage": kind} for kind in CONTROLS)],
        "full": pieces,
        "v1": pieces,
    }
    jobs = run_engines(model, rounds, folder)
    *references, control_reference = (
        Reference(done["tokens"], done["gaps"], text.logit_error)
        for done in jobs["flash"]["rounds"]
    )
    config = json.loads((model / "config.json").read_text())
    return Compared(references, control_reference, jobs, config["num_hidden_layers"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Compared:
    shape = TinyLlama(
        num_heads=32, num_kv_heads=8, head_dim=128, num_layers=4, hidden_size=1024,
        intermediate_size=2048, dtype=torch.bfloat16,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 260) for _ in range(length)] for length in LENGTHS]
    return compare_engines(shape.write(folder / "model"), prompts, folder)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Compared:
    if not SMOLLM2:
        pytest.skip("TILEWISE_SMOLLM2 does not name the folder of a SmolLM2 checkpoint")
    from transformers import AutoTokenizer

    rng = random.Random(0)
    text = "".join(rng.choice(SENTENCES) for _ in range(400))
    ids = AutoTokenizer.from_pretrained(SMOLLM2).encode(text)
    prompts = [ids[:length] for length in LENGTHS]
    return compare_engines(Path(SMOLLM2), prompts, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(params=["llama", "smollm2"])
def compared(request) -> Compared:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("engine", OURS)
def test_tokens_agree_with_flash_attn(compared, engine):
    agreement = compared.agreement(engine)
    print(f"{engine}: {agreement}")
    assert agreement.agrees, str(agreement)


@pytest.mark.parametrize("engine", OURS)
def test_our_backend_ran_under_its_graphs(compared, engine):
    job = compared.jobs[engine]
    assert job["backends"] == ["TilewiseBackend"]
    assert job["block_size"] == 64
    _, mode, runner = ENGINES[engine]
    assert job["runner"] == runner
    assert job["cudagraph_mode"].endswith(mode)
    counts = job["rounds"][0]["counters"]
    steps = {name: n for name, n in counts.items() if name.startswith("steps{")}
    print(f"{engine}: {counts}")
    assert counts["launches{kernel=plan}"] == sum(steps.values())
    # Replayed steps plan outside the graph and launch their layers inside it.
    assert counts["launches{kernel=cache_write}"] < compared.num_layers * sum(steps.values())


@pytest.mark.parametrize("engine", OURS)
def test_steps_are_counted_by_graph_mode(compared, engine):
    """Decodes are replayed whole; the rest as vLLM's mode says."""
    for done in compared.jobs[engine]["rounds"][1:NUM_PIECES]:
        counts = done["counters"]
        modes = {n: c for n, c in counts.items() if n.startswith("graph_steps{") and c}
        steps = sum(c for n, c in counts.items() if n.startswith("steps{"))
        # The round's last step is counted in the next round, its first one is of the round before.
        assert sum(modes.values()) == steps
        assert modes["graph_steps{mode=full}"] >= PIECE - 2
        assert "graph_steps{mode=capture}" not in modes
        # Each layer of a step that is not replayed writes the cache from Python.
        launched = steps - modes["graph_steps{mode=full}"]
        writes = counts["launches{kernel=cache_write}"]
        assert abs(writes - compared.num_layers * launched) <= compared.num_layers


def test_flash_attn_was_the_reference(compared):
    assert compared.jobs["flash"]["backends"] == ["FlashAttentionBackend"]


@pytest.mark.parametrize("kind", CONTROLS)
def test_broken_attention_is_noticed(compared, kind):
    done = compared.jobs["piecewise"]["rounds"][NUM_PIECES + CONTROLS.index(kind)]
    agreement = compare(compared.control_reference, done["tokens"])
    print(f"{kind}: {agreement}")
    assert agreement.agrees is (kind is None), f"{kind}: {agreement}"


# -- preemption -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("runner", "mode"), [("v2", "FULL"), ("v1", "FULL_AND_PIECEWISE")])
def test_preempted_requests_keep_their_tokens_in_graphs(runner, mode, tmp_path):
    """A cache of 14 pages, and requests that come to need 17; fp32, so tokens are equal."""
    model = RATIO3.write(tmp_path / "model")
    engine = preemption_engine(enforce_eager=False) | {
        "compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 32]},
    }
    job = {"model": str(model), "engine": engine, "rounds": [PREEMPTED_ROUND]}
    environ = GPU_ENGINE | {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2")), "VLLM_GPU_SYNC_CHECK": "error",
    }  # fmt: skip
    result = run_job(tmp_path, job, **environ)
    assert result["runner"] == runner
    assert result["cudagraph_mode"].endswith(mode)
    assert result["rounds"][0]["counters"]["graph_steps{mode=full}"] > 0
    check_preemption(result, model)
