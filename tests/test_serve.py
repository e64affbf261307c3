"""``vllm serve`` as users start it: spawned engine core, HTTP, bench, metrics, a clean end."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import prometheus_server
import psutil
import pytest
import torch
from agreement import compare, greedy_reference
from prometheus_client.parser import text_string_to_metric_families
from tiny_model import TinyLlama

from tilewise import exporter, plan_rule, policy, side_port
from tilewise.integration.step_metrics import KERNELS
from tilewise.workspace import workspace_bytes

pytestmark = pytest.mark.vllm

START_TIMEOUT = 300
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
PROMPTS = [[1, 5, 6, 7], [1, *range(40, 130)]]
NUM_TOKENS = 8
BENCH_PROMPTS, BENCH_TOKENS = 4, 4
# Asked for at once, so that they share steps; each fits into a step beside the other.
PAIR = [[1, *range(200, 229)], [1, *range(300, 324)]]
LAYERS, MAX_REQS, MAX_TOKENS = 2, 4, 64
# Of the layers, in pages of 64 tokens and fp32.
CONFIG = policy.choose(policy.Geometry(4, 2, 64, 64, 4, 4), policy.INTERPRETER)
WORKSPACE = workspace_bytes(CONFIG, MAX_REQS, MAX_TOKENS)
# What tests/fallback_worker.py builds.
FALLBACKS = {("chunk_lookback", "TRITON_ATTN"): 2, ("rswa", "TRITON_ATTN"): 1}


@dataclass
class Watched:
    """What a Prometheus server has of the server, at the time when `Served.metrics` was read."""

    prometheus: prometheus_server.Prometheus
    at: float


@dataclass
class Served:
    """What one server's life left behind."""

    completions: list[dict]
    chat: dict
    bench: dict
    metrics: str
    exit_code: int
    log: str
    metrics_at_start: str
    metrics_before_bench: str
    metrics_before_pair: str
    side_metrics: str
    watched: Watched | None


def engine_environment() -> dict[str, str]:
    environ = {
        **os.environ,
        "TILEWISE_CPU_PLATFORM": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # Tests before this one may have made a metrics folder for their own process.
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", exporter.FOLDER_VARIABLE,
                 exporter.NATIVE_VARIABLE, exporter.SINCE_VARIABLE,
                 side_port.LISTENER_VARIABLE):  # fmt: skip
        environ.pop(name, None)
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
        "--random-output-len", str(BENCH_TOKENS), "--num-prompts", str(BENCH_PROMPTS),
        # One after the other, so that every step of the server is known.
        "--max-concurrency", "1",
        "--ignore-eos", "--temperature", "0", "--save-result", "--save-detailed",
        "--result-dir", str(folder), "--result-filename", "bench.json",
    ]  # fmt: skip
    done = subprocess.run(
        command, env=engine_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "bench.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return TinyLlama().write(tmp_path_factory.mktemp("serve_model"))


def serve_command(model: Path, port: int, *options: str) -> list[str]:
    return [
        *VLLM, "serve", str(model), "--served-model-name", "tiny",
        "--attention-backend", "TILEWISE", "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "256", "--max-num-seqs", str(MAX_REQS),
        "--max-num-batched-tokens", str(MAX_TOKENS),
        "--kv-cache-memory-bytes", str(32 << 20), "--host", "127.0.0.1", "--port", str(port),
        *options,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def served(model, tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    port, side, log = free_port(), free_port(), folder / "server.log"
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        server = subprocess.Popen(
            serve_command(model, port),
            env=engine_environment() | {"TILEWISE_METRICS_PORT": str(side)},
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    prometheus = None
    # Imports while the server does.
    foreign = start_fallback_worker(model)
    try:
        wait_until_up(url, server, log)
        join_server(foreign, server, f"{url}/metrics")
        if prometheus_server.BINARY is not None:
            prometheus = prometheus_server.Prometheus(folder, port)
            # `rate` needs a sample from before the traffic.
            prometheus.wait_for("tilewise_build_info", 1)
        at_start = settled_metrics(f"{url}/metrics")
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
        before_bench = settled_metrics(f"{url}/metrics")
        bench = run_bench(url, model, folder)
        before_pair = settled_metrics(f"{url}/metrics")
        fetch(f"{url}/v1/completions", {**asked, "prompt": PAIR})
        metrics = settled_metrics(f"{url}/metrics")
        side_metrics = fetch(f"http://127.0.0.1:{side}/metrics")
        watched = None
        if prometheus is not None:
            steps = metric(metrics, "tilewise_steps_total")
            prometheus.wait_for("tilewise_steps_total", steps)
            watched = Watched(prometheus, time.time())
        foreign.communicate(timeout=60)
        assert foreign.returncode == 0
        server.send_signal(signal.SIGTERM)
        exit_code = server.wait(timeout=60)
    finally:
        for process in (foreign, server):
            if process.poll() is None:
                process.kill()
                process.wait()
    yield Served(
        completions, chat_answer, bench, metrics, exit_code, log.read_text(), at_start,
        before_bench, before_pair, side_metrics, watched,
    )  # fmt: skip
    if prometheus is not None:
        prometheus.stop()


def start_fallback_worker(model: Path) -> subprocess.Popen:
    """A worker with layers of another backend; it joins a server when it is told which."""
    environ = engine_environment()
    # In it vLLM has to believe in a GPU.
    for name in ("TILEWISE_CPU_PLATFORM", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
        del environ[name]
    script = Path(__file__).with_name("fallback_worker.py")
    return subprocess.Popen(
        [sys.executable, str(script), str(model)], env=environ, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def join_server(worker: subprocess.Popen, server: subprocess.Popen, url: str) -> None:
    """Give a worker what the server's own inherit, and wait until its metrics are there."""
    names = (exporter.FOLDER_VARIABLE, exporter.SINCE_VARIABLE)
    children = psutil.Process(server.pid).children(recursive=True)
    inherited = next(e for e in (c.environ() for c in children) if all(n in e for n in names))
    worker.stdin.write(json.dumps({name: inherited[name] for name in names}) + "\n")
    worker.stdin.flush()
    deadline = time.monotonic() + 120
    while "tilewise_fallback_layers_total{" not in fetch(url):
        assert worker.poll() is None, "the worker with foreign layers ended"
        assert time.monotonic() < deadline, "no metrics of the worker with foreign layers"
        time.sleep(0.2)


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
    assert f"{WORKSPACE / 2**20:.1f} MiB of workspace" in served.log


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
    paths = {
        path: metric(served.metrics, "tilewise_steps_total", f'path="{path}"')
        for path in ("decode", "prefill", "mixed")
    }
    # No graphs on the CPU, so every layer of every step is launched from Python.
    expected = dict.fromkeys(KERNELS, 0) | {
        "plan": steps,
        "cache_write": LAYERS * steps,
        "prefill": LAYERS * (paths["prefill"] + paths["mixed"]),
        "decode": LAYERS * (paths["decode"] + paths["mixed"]),
    }
    found = {
        kernel: metric(served.metrics, "tilewise_kernel_launches_total", f'kernel="{kernel}"')
        for kernel in KERNELS
    }
    assert found == expected
    assert metric(served.metrics, "tilewise_kernel_launches_total") == sum(expected.values())
    assert metric(served.metrics, "tilewise_build_seconds_count", 'engine="0"') == steps
    assert metric(served.metrics, "tilewise_workspace_bytes") == WORKSPACE
    # Both layers are of one geometry.
    assert metric(served.metrics, "tilewise_self_checks_total") == 1
    assert metric(served.metrics, "tilewise_self_checks_total", 'result="passed"') == 1


def moved(before: str, after: str, name: str, label: str = "") -> float:
    """How much a counter grew; one that was not there yet stood at 0."""
    return total(after, name, label) - total(before, name, label)


def total(text: str, name: str, label: str = "") -> float:
    return metric(text, name, label) if f"{name}{{" in text and label in text else 0.0


@dataclass
class Expected:
    """What requests that run one after the other add to the counters."""

    decodes: int
    prefills: int
    tokens: int
    kv_splits: list[int]


def expect(lengths: list[int], answers: list[int], decodes_before: float) -> Expected:
    """Every step of requests of these prompts and answers, after so many steps with decodes."""
    expected = Expected(0, 0, 0, [])
    for length, answer in zip(lengths, answers, strict=True):
        # Chunks of the prompt, then a token at a time; the last one is never fed back.
        ends = [*range(MAX_TOKENS, length, MAX_TOKENS), *range(length, length + answer)]
        for end, start in zip(ends, [0, *ends], strict=False):
            expected.tokens += end - start
            # Up to 16 tokens take the decode kernel.
            if end - start > policy.DECODE_MAX_QUERY_LEN:
                expected.prefills += 1
                continue
            expected.decodes += 1
            if is_sampled(int(decodes_before) + expected.decodes):
                plan = plan_rule.plan_batch([end - start], [end], CONFIG)
                splits = plan_rule.kv_splits(plan, 0, end - start, CONFIG)
                expected.kv_splits.append(max(splits))
    return expected


def is_sampled(step: int) -> bool:
    """Whether splits are estimated in this one of the steps with decodes."""
    return step in (1, 2, 4, 8, 16, 32, 64, 128) or step % 256 == 0


def steps_with_decodes(text: str) -> float:
    return sum(metric(text, "tilewise_steps_total", f'path="{p}"') for p in ("decode", "mixed"))


def check_moves(before: str, after: str, expected: Expected) -> None:
    """Every counter of ours that steps move, moved by exactly what was computed."""

    def grew(name: str, label: str = "") -> float:
        return moved(before, after, f"tilewise_{name}", label)

    steps = expected.decodes + expected.prefills
    assert grew("steps_total", 'path="decode"') == expected.decodes
    assert grew("steps_total", 'path="prefill"') == expected.prefills
    assert grew("steps_total") == steps
    assert grew("tokens_total") == expected.tokens
    check_launches(before, after, steps, expected.decodes, expected.prefills)
    assert grew("build_seconds_count") == steps
    assert grew("kv_splits_count") == len(expected.kv_splits)
    assert grew("kv_splits_sum") == sum(expected.kv_splits)
    # No graphs here; a server's newest step is counted when there is a next one.
    ran = steps - (metric(before, "tilewise_steps_total") == 0)
    assert grew("graph_steps_total", 'mode="none"') == grew("graph_steps_total") == ran
    for still in ("fallback_layers_total", "kernel_compilations_total", "self_checks_total",
                  "build_info", "workspace_bytes"):  # fmt: skip
        assert grew(still) == 0, still


def check_launches(
    before: str, after: str, steps: float, with_decodes: float, with_prefills: float
) -> None:
    expected = dict.fromkeys(KERNELS, 0) | {
        "plan": steps, "cache_write": LAYERS * steps,
        "decode": LAYERS * with_decodes, "prefill": LAYERS * with_prefills,
    }  # fmt: skip
    name = "tilewise_kernel_launches_total"
    assert {k: moved(before, after, name, f'kernel="{k}"') for k in KERNELS} == expected


def test_counters_move_as_the_requests_say(served):
    """Three requests, one after the other: every step, token and launch is known."""
    before, after = served.metrics_at_start, served.metrics_before_bench
    lengths = [*map(len, PROMPTS), served.chat["usage"]["prompt_tokens"]]
    expected = expect(lengths, [NUM_TOKENS] * len(lengths), steps_with_decodes(before))
    assert expected.prefills > 0
    assert expected.kv_splits
    check_moves(before, after, expected)


def test_counters_move_as_the_bench_says(served):
    before, after = served.metrics_before_bench, served.metrics_before_pair
    lengths, answers = served.bench["input_lens"], served.bench["output_lens"]
    assert len(lengths) == BENCH_PROMPTS
    assert answers == [BENCH_TOKENS] * BENCH_PROMPTS
    requests = moved(before, after, "vllm:request_success_total")
    if requests > BENCH_PROMPTS:
        # Some versions of the bench send the first one once before, to see that there is a server.
        lengths, answers = [lengths[0], *lengths], [answers[0], *answers]
    assert requests == len(lengths)
    assert moved(before, after, "vllm:prompt_tokens_total") == sum(lengths)
    assert moved(before, after, "vllm:prefix_cache_hits_total") == 0, "prompts of less than a page"
    expected = expect(lengths, answers, steps_with_decodes(before))
    assert expected.kv_splits, "choose a number of prompts whose steps are sampled"
    check_moves(before, after, expected)


def test_counters_move_as_shared_steps_say(served):
    """Two prompts at once: how they share steps is the scheduler's, and vLLM counts these too."""
    before, after = served.metrics_before_pair, served.metrics
    iterations = "vllm:iteration_tokens_total"
    steps = moved(before, after, f"{iterations}_count")
    # A step of decodes alone has a token or two, one with a prompt more than 16.
    decodes = moved(before, after, f"{iterations}_bucket", 'le="16.0"')
    mixed = moved(before, after, "tilewise_steps_total", 'path="mixed"')
    assert NUM_TOKENS <= steps < 2 * NUM_TOKENS, "they share steps"
    assert moved(before, after, "tilewise_steps_total") == steps
    assert moved(before, after, "tilewise_steps_total", 'path="decode"') == decodes
    check_launches(before, after, steps, decodes + mixed, steps - decodes)
    fed = sum(map(len, PAIR)) + len(PAIR) * (NUM_TOKENS - 1)
    assert moved(before, after, "tilewise_tokens_total") == fed
    assert moved(before, after, "tilewise_build_seconds_count") == steps
    numbers = range(int(steps_with_decodes(before)), int(steps_with_decodes(after)))
    sampled = sum(is_sampled(n + 1) for n in numbers)
    assert sampled <= moved(before, after, "tilewise_kv_splits_count") <= len(PAIR) * sampled


def test_layers_of_other_backends_are_told_apart(served):
    found = {
        key: metric(
            served.metrics, "tilewise_fallback_layers_total",
            f'engine="1",rank="0",reason="{key[0]}",target="{key[1]}"',
        )
        for key in FALLBACKS
    }  # fmt: skip
    assert found == FALLBACKS
    assert metric(served.metrics, "tilewise_fallback_layers_total") == sum(FALLBACKS.values())


def test_the_side_port_shows_the_same(served):
    assert dict(samples(served.side_metrics)) == dict(samples(served.metrics))
    assert "vllm:" not in served.side_metrics


def test_the_server_says_what_it_is(served):
    assert metric(served.metrics, "tilewise_build_info") == 1
    (line,) = [t for t in served.metrics.splitlines() if t.startswith("tilewise_build_info{")]
    assert f'torch="{torch.__version__}"' in line
    # The interpreter compiles nothing.
    assert metric(served.metrics, "tilewise_kernel_compilations_total") == 0


needs_prometheus = pytest.mark.skipif(
    prometheus_server.BINARY is None, reason=prometheus_server.MISSING
)


@needs_prometheus
def test_prometheus_has_every_sample_of_ours(served):
    watched = served.watched
    found = watched.prometheus.query('{__name__=~"tilewise_.*"}', watched.at)
    scraped = {}
    for labels, value in found:
        name = labels.pop("__name__")
        own = {k: v for k, v in labels.items() if k not in ("instance", "job")}
        scraped[name, tuple(sorted(own.items()))] = value
    assert scraped == dict(samples(served.metrics))


def samples(text: str) -> Iterator[tuple[tuple[str, tuple], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("tilewise_"):
                yield (sample.name, tuple(sorted(sample.labels.items()))), sample.value


DASHBOARD = json.loads(
    (Path(__file__).resolve().parent.parent / "docs/monitoring/grafana.json").read_text()
)
TARGETS = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]


def filled_in(expression: str) -> str:
    """An expression as Grafana sends it, with all instances and engines chosen."""
    for name, value in (("$__rate_interval", "5m"), ("$instance", ".*"), ("$engine", ".*")):
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


@needs_prometheus
@pytest.mark.parametrize("expression", TARGETS)
def test_every_panel_has_data(served, expression):
    # What a panel shows in place of data is none.
    expression = filled_in(expression).removesuffix(" or on() vector(0)")
    found = served.watched.prometheus.query(expression, served.watched.at)
    assert found
    assert not [labels for labels, value in found if math.isnan(value)]


@needs_prometheus
def test_the_panel_of_fallbacks_shows_each_reason(served):
    (expression,) = (
        target["expr"]
        for panel in DASHBOARD["panels"]
        if panel["title"] == "Fallback layers"
        for target in panel["targets"]
    )
    found = served.watched.prometheus.query(filled_in(expression), served.watched.at)
    # And not the 0 that stands for no such layer.
    assert {(x["reason"], x["target"]): value for x, value in found} == FALLBACKS
    here = filled_in(expression).replace('engine=~".*"', 'engine="0"')
    assert served.watched.prometheus.query(here, served.watched.at) == [({}, 0.0)]


@needs_prometheus
def test_prometheus_agrees_with_the_traffic(served):
    """Prometheus saw the counters move by as much as the two readings of /metrics differ."""
    watched = served.watched
    (steps,) = watched.prometheus.query("sum(tilewise_steps_total)", watched.at)
    assert steps[1] == metric(served.metrics, "tilewise_steps_total")
    for name in ("tokens", "steps", "kernel_launches"):
        metric_name = f"tilewise_{name}_total"
        (grew,) = watched.prometheus.query(
            f"sum({metric_name}) - sum(min_over_time({metric_name}[30m]))", watched.at
        )
        assert grew[1] == moved(served.metrics_at_start, served.metrics, metric_name) > 0
    (up,) = watched.prometheus.query("min_over_time(up[30m])", watched.at)
    assert up[1] == 1, "a scrape failed"


def test_sigterm_ends_the_server_cleanly(served):
    assert served.exit_code == 0, served.log[-3000:]
    # vLLM itself may log that its engine went first; no frame of ours may be on any stack.
    folders = {
        str(Path(importlib.util.find_spec(name).origin).parent)
        for name in ("tilewise", "tilewise.kernels", "tilewise.integration")
    }
    frames = [line for line in served.log.splitlines() if 'File "' in line]
    assert not [line for line in frames if any(f'"{folder}/' in line for folder in folders)]


@pytest.mark.slow
def test_several_api_servers_show_the_same(model, tmp_path):
    """Whichever of them answers, all counts of the engine that they share are there."""
    port, log = free_port(), tmp_path / "server.log"
    url = f"http://127.0.0.1:{port}"
    command = serve_command(model, port, "--api-server-count", "2")
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=engine_environment(), stdout=out, stderr=subprocess.STDOUT
        )
    try:
        wait_until_up(url, server, log)
        at_start = settled_metrics(f"{url}/metrics")
        asked = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        for prompt in PROMPTS:
            fetch(f"{url}/v1/completions", {**asked, "prompt": prompt})
        settled = settled_metrics(f"{url}/metrics")
        # Every request is a connection of its own, which either server may accept.
        scrapes = [fetch(f"{url}/metrics") for _ in range(20)]
        server.send_signal(signal.SIGTERM)
        exit_code = server.wait(timeout=60)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    assert "ApiServer_1" in log.read_text()
    assert {frozenset(samples(text)) for text in scrapes} == {frozenset(samples(settled))}
    assert metric(settled, "tilewise_build_info") == 1
    assert metric(settled, "tilewise_workspace_bytes") > 0
    tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (NUM_TOKENS - 1)
    assert moved(at_start, settled, "tilewise_tokens_total") == tokens
    steps = metric(settled, "tilewise_steps_total")
    assert metric(settled, "tilewise_kernel_launches_total", 'kernel="plan"') == steps
    assert metric(settled, "tilewise_build_seconds_count") == steps
    assert exit_code == 0, log.read_text()[-3000:]
