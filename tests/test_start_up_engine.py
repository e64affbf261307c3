"""An engine checks its kernels before it serves, and does not start with a wrong one.

That a right one passes the check, `test_engine.py` sees on its engines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from test_engine import CPU_ENGINE, JOB_SCRIPT, JOB_TIMEOUT, SMALL_ENGINE, prompts_of
from tiny_model import TinyLlama

pytestmark = pytest.mark.vllm

RUNNERS = {"v1": "0", "v2": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TinyLlama(num_heads=2, num_kv_heads=1, head_dim=32, hidden_size=64).write(
        tmp_path_factory.mktemp("model")
    )


def job_of(model, kv_cache_dtype="auto", **extra):
    rounds = [{"prompts": prompts_of([3, 20]), "max_tokens": 2}]
    return {
        "model": str(model),
        "engine": {**SMALL_ENGINE, "dtype": "float32", "kv_cache_dtype": kv_cache_dtype},
        "rounds": rounds,
        **extra,
    }


@pytest.mark.parametrize(
    ("kernel", "runner", "cache"),
    [
        ("prefill", "v1", "auto"),
        ("decode", "v2", "auto"),
        pytest.param("decode", "v2", "fp8", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_kernel_stops_the_start(model, kernel, runner, cache, tmp_path):
    job = job_of(model, cache, broken=kernel)
    said, code = start(job, tmp_path, VLLM_USE_V2_MODEL_RUNNER=RUNNERS[runner])
    assert code != 0
    assert "SelfCheckFailed: tilewise's self-check failed" in said
    assert f"the {kernel} kernel is wrong for layers of 2 query and 1 KV heads of size 32" in said
    assert "TILEWISE_SELF_CHECK=0 starts it all the same" in said


@pytest.mark.slow
def test_a_wrong_kernel_serves_when_nobody_looks(model, tmp_path):
    """Hence it was the check that stopped the others."""
    job = job_of(model, broken="decode")
    said, code = start(job, tmp_path, TILEWISE_SELF_CHECK="0")
    assert code == 0, said
    result = json.loads((tmp_path / "result.json").read_text())
    assert not any("self_checks" in name for name in result["start_counters"])


def start(job, folder, **environ):
    """Run a job's engine; what it printed, and its exit status."""
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(JOB_SCRIPT), str(folder / "job.json"), str(folder / "result.json")],
        env={**os.environ, **CPU_ENGINE, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=JOB_TIMEOUT,
        check=False,
    )
    return done.stdout, done.returncode
