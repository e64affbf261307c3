"""A real vLLM engine on the CPU, our kernels in Triton's interpreter, tokens against Hugging Face.

Each job is one engine in its own process; the tests below it look at what it returned.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agreement import Reference, compare, greedy_reference
from tiny_model import TinyLlama

pytestmark = pytest.mark.vllm

JOB_SCRIPT = Path(__file__).with_name("engine_job.py")
JOB_TIMEOUT = 600

CPU_ENGINE = {
    "TILEWISE_CPU_PLATFORM": "1",
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

SMALL_ENGINE = {
    "attention_backend": "TILEWISE",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 64 << 20,
    # With the cache's size given, all it means is what has to be free: many engines share a GPU.
    "gpu_memory_utilization": 0.02,
}


def prompts_of(lengths: list[int], seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Random byte tokens; every prompt starts with the same ``shared`` tokens."""
    rng = random.Random(seed)
    prefix = [rng.randrange(4, 260) for _ in range(shared)]
    return [prefix + [rng.randrange(4, 260) for _ in range(length)] for length in lengths]


def run_job(folder: Path, job: dict, script: Path = JOB_SCRIPT, **environ: str) -> dict:
    """Run ``engine_job.py``, or a script like it, on ``job`` and return its result."""
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "job.json"), str(folder / "result.json")],
        env={**os.environ, **CPU_ENGINE, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=JOB_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, f"engine job failed:\n{done.stdout[-6000:]}"
    return json.loads((folder / "result.json").read_text())


# -- Model Runner V2, fp32, default page size -----------------------------------------------------

MAIN_TOKENS = 10
MAIN_PROMPTS = prompts_of([1, 17, 90, 130], shared=70) + prompts_of([3, 16, 200], seed=1)
CONTROL_PROMPTS = prompts_of([3, 5, 9, 20], seed=2)


@pytest.fixture(scope="module")
def main_model(tmp_path_factory) -> Path:
    return TinyLlama().write(tmp_path_factory.mktemp("main_model"))


@pytest.fixture(scope="module")
def main_job(main_model, tmp_path_factory) -> dict:
    normal = {"prompts": MAIN_PROMPTS, "max_tokens": MAIN_TOKENS}
    control = {"prompts": CONTROL_PROMPTS, "max_tokens": 6, "fresh": True}
    job = {
        "model": str(main_model),
        "engine": {**SMALL_ENGINE, "dtype": "float32"},
        "rounds": [
            normal,
            normal,
            control,
            {**control, "sabotage": "zeros"},
            {**control, "sabotage": "window"},
        ],
    }
    return run_job(tmp_path_factory.mktemp("main_job"), job)


@pytest.fixture(scope="module")
def main_reference(main_model) -> Reference:
    return greedy_reference(main_model, MAIN_PROMPTS, MAIN_TOKENS)


@pytest.fixture(scope="module")
def control_reference(main_model) -> Reference:
    return greedy_reference(main_model, CONTROL_PROMPTS, 6)


def test_our_backend_ran_every_layer(main_job):
    assert main_job["backends"] == ["TilewiseBackend"]
    assert main_job["impls"] == ["TilewiseImpl"]
    counts = main_job["rounds"][0]["counters"]
    steps = sum(n for name, n in counts.items() if name.startswith("steps{"))
    assert counts["launches{kernel=plan}"] == steps > 0
    # two layers, each one write a step
    assert counts["launches{kernel=cache_write}"] == 2 * steps
    assert counts["launches{kernel=prefill}"] > 0
    assert counts["launches{kernel=decode}"] > 0


def test_pages_of_64_are_chosen_when_the_user_names_none(main_job):
    assert main_job["block_size"] == 64


def test_default_runner_is_v2(main_job):
    assert main_job["runner"] == "v2"


def test_the_kernels_were_checked_once_for_layers_alike(main_job):
    counts = main_job["start_counters"]
    assert counts["self_checks{result=passed}"] == 1
    assert "self_checks{result=failed}" not in counts


def test_tokens_equal_hugging_face(main_job, main_reference):
    agreement = compare(main_reference, main_job["rounds"][0]["tokens"])
    assert agreement.agrees, str(agreement)
    assert agreement.num_equal == len(MAIN_PROMPTS)


def test_prompts_were_chunked_and_batched(main_job):
    """200 tokens do not fit a step of 64, and decodes ran beside prefills."""
    counts = main_job["rounds"][0]["counters"]
    assert counts["steps{path=mixed}"] >= 4
    assert counts["steps{path=decode}"] >= MAIN_TOKENS - 1


def test_prefix_cache_hits_leave_tokens_equal(main_job, main_reference):
    again = main_job["rounds"][1]
    assert sum(cached > 0 for cached in again["cached"]) >= 5
    assert max(again["cached"]) >= 192
    agreement = compare(main_reference, again["tokens"])
    assert agreement.num_equal == len(MAIN_PROMPTS), str(agreement)


def test_controls_agree_when_nothing_is_broken(main_job, control_reference):
    agreement = compare(control_reference, main_job["rounds"][2]["tokens"])
    assert agreement.num_equal == len(CONTROL_PROMPTS), str(agreement)


@pytest.mark.parametrize(("round_index", "kind"), [(3, "zeros"), (4, "window")])
def test_broken_attention_is_noticed(main_job, control_reference, round_index, kind):
    agreement = compare(control_reference, main_job["rounds"][round_index]["tokens"])
    assert not agreement.agrees, f"{kind}: {agreement}"


# -- preemption, three query heads a KV head, pages of 16 -----------------------------------------

PREEMPTED_PROMPTS = prompts_of([70, 75, 40], seed=3)
PREEMPTED_TOKENS = 24
PREEMPTED_ROUND = {"prompts": PREEMPTED_PROMPTS, "max_tokens": PREEMPTED_TOKENS}


RATIO3 = TinyLlama(num_heads=6, num_kv_heads=2, head_dim=32, hidden_size=96, seed=1)


@pytest.fixture(scope="module")
def ratio3_model(tmp_path_factory) -> Path:
    return RATIO3.write(tmp_path_factory.mktemp("ratio3_model"))


def preemption_engine(**changes: object) -> dict:
    """An engine whose cache is too small for the round above."""
    return {
        **SMALL_ENGINE,
        "dtype": "float32",
        "block_size": 16,
        "max_model_len": 128,
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 15,
        "enable_prefix_caching": False,
        **changes,
    }


def preemption_job(model: Path, folder: Path, **environ: str) -> dict:
    job = {"model": str(model), "engine": preemption_engine(), "rounds": [PREEMPTED_ROUND]}
    return run_job(folder, job, **environ)


def check_preemption(result: dict, model: Path) -> None:
    assert result["block_size"] == 16
    assert result["preemptions"] > 0
    reference = greedy_reference(model, PREEMPTED_PROMPTS, PREEMPTED_TOKENS)
    agreement = compare(reference, result["rounds"][0]["tokens"])
    assert agreement.num_equal == len(PREEMPTED_PROMPTS), str(agreement)


def test_preempted_requests_keep_their_tokens(ratio3_model, tmp_path):
    result = preemption_job(ratio3_model, tmp_path)
    assert result["runner"] == "v2"
    check_preemption(result, ratio3_model)


@pytest.mark.slow
def test_preempted_requests_keep_their_tokens_on_v1(ratio3_model, tmp_path):
    result = preemption_job(ratio3_model, tmp_path, VLLM_USE_V2_MODEL_RUNNER="0")
    check_preemption(result, ratio3_model)


# -- Model Runner V1 ------------------------------------------------------------------------------


def test_v1_runner_serves_the_same_tokens(ratio3_model, tmp_path):
    """Selected by our other name."""
    prompts = prompts_of([2, 30, 100], seed=4)
    job = {
        "model": str(ratio3_model),
        "engine": {**SMALL_ENGINE, "dtype": "float32", "attention_backend": "CUSTOM"},
        "rounds": [{"prompts": prompts, "max_tokens": 6}, {"prompts": prompts, "max_tokens": 6}],
    }
    result = run_job(tmp_path, job, VLLM_USE_V2_MODEL_RUNNER="0")
    assert result["runner"] == "v1"
    assert result["start_counters"]["self_checks{result=passed}"] == 1
    assert result["backends"] == ["TilewiseBackend"]
    reference = greedy_reference(ratio3_model, prompts, 6)
    for done in result["rounds"]:
        agreement = compare(reference, done["tokens"])
        assert agreement.num_equal == len(prompts), str(agreement)
    assert result["rounds"][1]["cached"][2] >= 64


# -- half precision: the agreement rule -----------------------------------------------------------

# Many short rows: a random model is unsure often, and each row can end in a tie only once.
HALF_PROMPTS = prompts_of([*range(2, 18), 20, 25, 31, 40, 49, 66], seed=5)
HALF_TOKENS = 4


def half_precision_job(shape: TinyLlama, folder: Path) -> tuple[dict, Reference]:
    model = shape.write(folder / "model")
    spec = {"prompts": HALF_PROMPTS, "max_tokens": HALF_TOKENS, "fresh": True}
    job = {
        "model": str(model),
        "engine": {**SMALL_ENGINE, "max_num_seqs": 32, "dtype": str(shape.dtype)[6:]},
        "rounds": [spec, {**spec, "sabotage": "zeros"}, {**spec, "sabotage": "window"}],
    }
    reference = greedy_reference(model, HALF_PROMPTS, HALF_TOKENS, shape.dtype)
    return run_job(folder, job), reference


def check_half_precision(result: dict, reference: Reference) -> None:
    good, zeros, window = (compare(reference, done["tokens"]) for done in result["rounds"])
    assert good.agrees, str(good)
    assert not zeros.agrees, str(zeros)
    assert not window.agrees, str(window)


@pytest.mark.slow
def test_bf16_tokens_agree(tmp_path):
    shape = TinyLlama(head_dim=128, dtype=torch.bfloat16, seed=2)
    result, reference = half_precision_job(shape, tmp_path)
    check_half_precision(result, reference)


@pytest.mark.slow
def test_fp16_tokens_agree(tmp_path):
    shape = TinyLlama(dtype=torch.float16, seed=3)
    result, reference = half_precision_job(shape, tmp_path)
    check_half_precision(result, reference)


# -- further head sizes ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 96), (2, 1, 256), (5, 1, 40), (8, 1, 16)]
)
def test_head_sizes_and_ratios(heads, kv_heads, head_dim, tmp_path):
    shape = TinyLlama(heads, kv_heads, head_dim, hidden_size=32 * heads, seed=heads)
    model = shape.write(tmp_path / "model")
    prompts = prompts_of([1, 33, 80], seed=6)
    job = {
        "model": str(model),
        "engine": {**SMALL_ENGINE, "dtype": "float32"},
        "rounds": [{"prompts": prompts, "max_tokens": 6}],
    }
    result = run_job(tmp_path, job)
    agreement = compare(greedy_reference(model, prompts, 6), result["rounds"][0]["tokens"])
    assert agreement.num_equal == len(prompts), str(agreement)


# -- speculative decoding -------------------------------------------------------------------------


@pytest.mark.slow
def test_drafts_are_verified(main_model, tmp_path):
    """Drafts from the prompt: several query tokens a decode, accepted or not."""
    phrase = prompts_of([6], seed=7)[0]
    prompts = [phrase * 4, phrase * 3 + [9], [9, 8, 7] * 5]
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    job = {
        "model": str(main_model),
        "engine": {
            **SMALL_ENGINE,
            "dtype": "float32",
            "speculative_config": {**drafting, "prompt_lookup_min": 1},
        },
        "rounds": [{"prompts": prompts, "max_tokens": 12}],
    }
    result = run_job(tmp_path, job)
    assert result["drafts"] > 0
    agreement = compare(greedy_reference(main_model, prompts, 12), result["rounds"][0]["tokens"])
    assert agreement.num_equal == len(prompts), str(agreement)
