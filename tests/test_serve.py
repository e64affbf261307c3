"""``vllm serve`` as users start it: spawned engine core, HTTP, bench, metrics, a clean end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from agreement import compare, greedy_reference
from tiny_model import TinyLlama

from tilewise import exporter

pytestmark = pytest.mark.vllm

START_TIMEOUT = 300
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
PROMPTS = [[1, 5, 6, 7], [1, *range(40, 130)]]
NUM_TOKENS = 8
BENCH_PROMPTS = 4


@dataclass
class Served:
    """What one server's life left behind."""

    completions: list[dict]
    chat: dict
    bench: dict
    metrics: str
    exit_code: int
    log: str


def engine_environment() -> dict[str, str]:
    environ = {
        **os.environ,
        "TILEWISE_CPU_PLATFORM": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return environ


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fetch(url: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def wait_until_up(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            fetch(f"{url}/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    pytest.fail(f"the server did not come up:\n{log.read_text()[-6000:]}")


def run_bench(url: str, model: Path, folder: Path) -> dict:
    command = [
        *VLLM, "bench", "serve", "--backend", "openai", "--base-url", url, "--model", "tiny",
        "--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", "24",
        "--random-output-len", "4", "--num-prompts", str(BENCH_PROMPTS), "--max-concurrency", "2",
        "--ignore-eos", "--temperature", "0", "--save-result", "--result-dir", str(folder),
        "--result-filename", "bench.json",
    ]  # fmt: skip
    done = subprocess.run(
        command, env=engine_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "bench.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return TinyLlama().write(tmp_path_factory.mktemp("serve_model"))


@pytest.fixture(scope="module")
def served(model, tmp_path_factory) -> Served:
    folder = tmp_path_factory.mktemp("serve")
    port, log = free_port(), folder / "server.log"
    url = f"http://127.0.0.1:{port}"
    command = [
        *VLLM, "serve", str(model), "--served-model-name", "tiny",
        "--attention-backend", "TILEWISE", "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64",
        "--kv-cache-memory-bytes", str(32 << 20), "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=engine_environment(), stdout=out, stderr=subprocess.STDOUT
        )
    try:
        wait_until_up(url, server, log)
        asked = {
            "model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        completions = [
            json.loads(fetch(f"{url}/v1/completions", {**asked, "prompt": prompt}))
            for prompt in PROMPTS
        ]
        chat = {**asked, "messages": [{"role": "user", "content": "hello"}]}
        chat_answer = json.loads(fetch(f"{url}/v1/chat/completions", chat))
        bench = run_bench(url, model, folder)
        metrics = settled_metrics(f"{url}/metrics")
        server.send_signal(signal.SIGTERM)
        exit_code = server.wait(timeout=60)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    return Served(completions, chat_answer, bench, metrics, exit_code, log.read_text())


def settled_metrics(url: str) -> str:
    """``/metrics`` once ours, which workers write once a period, have stopped moving."""
    deadline = time.monotonic() + 20 * exporter.PERIOD_SECONDS
    last, since = "", time.monotonic()
    while time.monotonic() < deadline:
        text = fetch(url)
        ours = "".join(line for line in text.splitlines() if line.startswith("tilewise_"))
        if ours != last:
            last, since = ours, time.monotonic()
        elif time.monotonic() - since > 2 * exporter.PERIOD_SECONDS:
            return text
        time.sleep(0.1)
    raise AssertionError(f"metrics of an idle server still move: {last}")


def metric(text: str, name: str, label: str = "") -> float:
    """Sum of one metric over its label sets, or over those that hold ``label``."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    lines = [line for line in lines if label in line]
    assert lines, f"no metric {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_log_names_our_backend(served):
    assert "tilewise attends in 2 layers: 4 query and 2 KV heads of size 64" in served.log
    assert "pages of 64 tokens" in served.log


def test_completions_equal_hugging_face(served, model):
    tokens = [answer["choices"][0]["token_ids"] for answer in served.completions]
    agreement = compare(greedy_reference(model, PROMPTS, NUM_TOKENS), tokens)
    assert agreement.num_equal == len(PROMPTS), str(agreement)


def test_chat_answers(served):
    (choice,) = served.chat["choices"]
    assert choice["message"]["role"] == "assistant"
    assert served.chat["usage"]["completion_tokens"] == NUM_TOKENS


def test_bench_serve_completes(served):
    assert served.bench["completed"] == BENCH_PROMPTS
    assert served.bench["failed"] == 0
    assert served.bench["output_throughput"] > 0


def test_metrics_are_up(served):
    assert metric(served.metrics, "vllm:generation_tokens_total") >= 3 * NUM_TOKENS
    assert metric(served.metrics, "vllm:prompt_tokens_total") >= sum(map(len, PROMPTS))
    # vLLM's bench sends one request more, to see that the server answers
    assert metric(served.metrics, "vllm:request_success_total") >= 3 + BENCH_PROMPTS


def test_metrics_show_what_tilewise_ran(served):
    """A worker's counters reach the API server's /metrics with no flag set."""
    steps = metric(served.metrics, "tilewise_steps_total")
    assert steps > 0
    launches = {
        kernel: metric(served.metrics, "tilewise_kernel_launches_total", f'kernel="{kernel}"')
        for kernel in ("plan", "prefill", "decode", "cache_write")
    }
    assert launches["plan"] == steps
    # Two layers; no graphs on the CPU, so every layer of every step is launched from Python.
    assert launches["cache_write"] == 2 * steps
    assert 0 < launches["prefill"] <= 2 * steps
    assert 0 < launches["decode"] <= 2 * steps
    assert metric(served.metrics, "tilewise_build_seconds_count") == steps
    assert metric(served.metrics, "tilewise_workspace_bytes") > 0
    tokens = metric(served.metrics, "tilewise_tokens_total")
    assert tokens >= metric(served.metrics, "vllm:generation_tokens_total")


def test_sigterm_ends_the_server_cleanly(served):
    assert served.exit_code == 0, served.log[-3000:]
    # vLLM itself may log that its engine went first; no frame of ours may be on any stack.
    folders = {
        str(Path(importlib.util.find_spec(name).origin).parent)
        for name in ("tilewise", "tilewise.kernels", "tilewise.integration")
    }
    frames = [line for line in served.log.splitlines() if 'File "' in line]
    assert not [line for line in frames if any(f'"{folder}/' in line for folder in folders)]
