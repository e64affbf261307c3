"""The abuse's own parts must fail when something is wrong; short runs of the abuse itself.

``python tests/abuse/abuse.py`` is the whole of it, ``docs/robustness.md`` what came out.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_model import TinyLlama

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("psutil")

ABUSE = Path(__file__).resolve().parent / "abuse"


@pytest.fixture(scope="module")
def abuse():
    """The abuse's modules, which are scripts beside each other."""
    sys.path.insert(0, str(ABUSE))
    try:
        names = ("abuse_server", "abuse_traffic", "abuse_checks")
        yield {name.removeprefix("abuse_"): importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(ABUSE))


# -- traffic, against servers that misbehave ------------------------------------------------------


def completion(request: dict, extra: int = 0) -> dict:
    return {"choices": [{"token_ids": [7] * (request["max_tokens"] + extra)}]}


async def right(request: dict):
    from aiohttp import web

    prompt = request.get("prompt")
    fits = isinstance(prompt, list) and prompt and all(0 <= token < 512 for token in prompt)
    sensible = request.get("max_tokens", 1) > 0 and request.get("temperature", 0) >= 0
    if not fits or not sensible or len(prompt) + request.get("max_tokens", 16) > 64:
        return web.json_response({"error": "no"}, status=400)
    if request.get("stream"):
        line = f"data: {json.dumps(completion(request))}\n\ndata: [DONE]\n\n"
        return web.Response(text=line, content_type="text/event-stream")
    return web.json_response(completion(request))


async def short(request: dict):
    from aiohttp import web

    answer = await right(request)
    return answer if answer.status != 200 else web.json_response(completion(request, extra=-1))


async def failing(request: dict):
    from aiohttp import web

    answer = await right(request)
    return answer if answer.status != 200 else web.Response(status=500, text="EngineDeadError")


async def hanging(request: dict):
    await asyncio.sleep(3600)


async def taking_all(request: dict):
    from aiohttp import web

    return web.json_response(completion({"max_tokens": max(request.get("max_tokens", 1), 0)}))


def send_to(abuse, answer, num_requests: int = 60, timeout: float = 20.0, **options):
    """Send requests to a server that answers in one way."""
    from aiohttp import web

    traffic = abuse["traffic"]
    limits = traffic.Limits(max_len=64, max_tokens=4, concurrency=10, timeout=timeout)

    async def handle(request):
        try:
            body = json.loads(await request.text())
        except ValueError:
            return web.Response(status=400)
        return await answer(body)

    async def whole():
        app = web.Application()
        app.router.add_post("/v1/completions", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        (sockets,) = (site._server.sockets,)
        url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        try:
            return await traffic.send(url, num_requests, limits, seed=1, **options)
        finally:
            await runner.cleanup()

    return asyncio.run(whole())


def test_a_server_that_answers_is_found_fine(abuse):
    outcome = send_to(abuse, right)
    assert outcome.problems == []
    assert set(abuse["traffic"].KINDS) <= set(outcome.counts)
    assert outcome.counts["status 400"] == outcome.counts["too_long"] + outcome.counts["nonsense"]
    assert len(outcome.answers) > 10
    assert all(len(answer.tokens) == answer.expected for answer in outcome.answers)


@pytest.mark.parametrize(
    ("answer", "said"),
    [(short, "tokens of"), (failing, "status 500"), (taking_all, "status 200 for")],
)
def test_wrong_answers_are_problems(abuse, answer, said):
    assert any(said in problem for problem in send_to(abuse, answer).problems)


def test_a_server_that_hangs_is_a_problem_even_when_it_may_die(abuse):
    outcome = send_to(abuse, hanging, num_requests=10, timeout=0.5, until_dead=True)
    assert any("no end after 0.5 s" in problem for problem in outcome.problems)


def test_errors_of_a_server_that_is_killed_are_expected(abuse):
    outcome = send_to(abuse, failing, until_dead=True)
    assert outcome.counts["errors"] > 0
    assert outcome.problems == []


def test_prompts_fit_and_vary(abuse):
    rng, shared = random.Random(0), list(range(10, 40))
    prompts = [abuse["traffic"].make_prompt(rng, 60, shared) for _ in range(300)]
    assert all(1 <= len(prompt) <= 60 for prompt in prompts)
    assert len({len(prompt) for prompt in prompts}) > 30
    assert any(prompt[:10] == shared[:10] for prompt in prompts)


# -- checks ---------------------------------------------------------------------------------------


def memory(*values: float) -> list[dict[str, float]]:
    gpu = {"gpu_allocated_mib": 700.0, "gpu_reserved_mib": 800.0, "gpu_mib": 900.0}
    return [{"api_mib": 400.0, "worker_mib": value, **gpu} for value in values]


def test_memory_that_grows_is_a_problem(abuse):
    check = abuse["checks"].check_memory
    assert check(memory(500, *[600] * 9))["problems"] == []
    (problem,) = check(memory(*range(500, 700, 20)))["problems"]
    assert "worker_mib grew" in problem


@pytest.mark.parametrize(
    ("name", "step", "grew"),
    [("gpu_allocated_mib", 5, True), ("gpu_reserved_mib", 5, False), ("gpu_mib", 20, True)],
)
def test_memory_of_the_gpu_may_grow_less(abuse, name, step, grew):
    samples = memory(*[500] * 10)
    for index, sample in enumerate(samples):
        sample[name] += step * index
    problems = abuse["checks"].check_memory(samples)["problems"]
    assert [f"{name} grew" in problem for problem in problems] == [True] * grew


GOOD_METRICS = {
    "tilewise_steps_total": 50.0,
    "tilewise_kernel_launches_total{engine=0,kernel=plan,rank=0}": 50.0,
    "tilewise_build_seconds_count": 50.0,
    "tilewise_graph_steps_total": 49.0,
    "tilewise_tokens_total": 900.0,
    "vllm:generation_tokens_total": 300.0,
    "vllm:prompt_tokens_total": 700.0,
    "vllm:request_success_total{finished_reason=length}": 40.0,
    "vllm:kv_cache_usage_perc": 0.0,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tilewise_kernel_launches_total{engine=0,kernel=plan,rank=0}": 49.0}, "a plan a step"),
        ({"tilewise_build_seconds_count": 51.0}, "a build a step"),
        ({"tilewise_graph_steps_total": 40.0}, "graph mode"),
        ({"tilewise_tokens_total": 100.0}, "no fewer tokens"),
        ({"vllm:request_success_total{finished_reason=length}": 39.0}, "every client's answer"),
        ({"vllm:request_success_total{finished_reason=length}": 54.0}, "were given up"),
        ({"vllm:kv_cache_usage_perc": 0.1}, "no page"),
        ({"tilewise_fallback_layers_total": 1.0}, "no layer"),
        ({"tilewise_kernel_compilations_total{phase=serving}": 1.0}, "nothing was compiled"),
    ],
)
def test_counters_that_do_not_add_up_are_problems(abuse, change, said):
    check = abuse["checks"].check_metrics
    assert check(GOOD_METRICS, 40, left=15)["problems"] == []
    (problem,) = check(GOOD_METRICS | change, 40, left=15)["problems"]
    assert said in problem


def test_wrong_tokens_are_a_problem(abuse, tmp_path):
    from agreement import greedy_reference

    model = TinyLlama().write(tmp_path / "model")
    prompts = [[5, 6, 7], [8, 9]]
    tokens = greedy_reference(model, prompts, 4).tokens
    answers = [
        abuse["traffic"].Answer(p, row[:n], n)
        for p, row, n in zip(prompts, tokens, (4, 2), strict=True)
    ]
    check = abuse["checks"].check_answers
    fine = check(model, answers, torch.float32, gpu=False, num_tokens=10)
    assert (fine["equal"], fine["tokens"], fine["problems"]) == (2, 6, [])
    answers[1].tokens[1] += 1
    assert check(model, answers, torch.float32, gpu=False, num_tokens=10)["problems"]
    assert check(model, answers, torch.float32, gpu=False, num_tokens=1)["problems"] == []


def test_the_page_shows_the_published_figures():
    command = [sys.executable, str(ABUSE / "abuse_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"run {ABUSE.name}/abuse_page.py\n{done.stderr}"


# -- short runs -----------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", ["load,full_disk", "killed,oversized"])
def test_a_server_bears_it(cases, tmp_path):
    out = tmp_path / "result.json"
    command = [
        sys.executable, str(ABUSE / "abuse.py"), "--cases", cases, "--requests", "40",
        "--out", str(out), "--folder", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())["cases"]
    assert list(found) == cases.split(",")
    if "load" in found:
        assert found["load"]["answers"]["equal"] >= 10
        assert found["load"]["metrics"]["steps"] > 0


def test_unknown_cases_are_refused(tmp_path):
    command = [sys.executable, str(ABUSE / "abuse.py"), "--cases", "noise", "--out", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "unknown cases noise; known are load, killed" in done.stderr


def test_a_small_disk_fills_up_and_goes_away(abuse, tmp_path):
    from abuse_cases import fill, nothing_written, small_disk

    folder = tmp_path / "metrics"
    with small_disk(folder) as mounted:
        if not mounted:
            pytest.skip("this process may not mount a file system")
        (folder / "before").write_text("kept")
        with nothing_written(folder, mounted, worker=0):
            with pytest.raises(OSError, match="No space left"):
                (folder / "more").write_bytes(bytes(4096))
            assert (folder / "before").read_text() == "kept"
        (folder / "after").write_bytes(bytes(4096))
        fill(folder / "filler")
    assert not list(folder.iterdir())
