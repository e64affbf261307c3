"""The kinds of abuse, one function each; every one returns its figures and its problems."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from abuse_checks import check_answers, check_memory, check_metrics, folder_mib, scrape, settle
from abuse_run import LIVE
from abuse_server import VLLM, Server, engine_environment
from abuse_traffic import REFUSED, Answer, Limits, Outcome, send
from prometheus_client.parser import text_string_to_metric_families

SEGMENTS = 10
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


@dataclass(frozen=True)
class Setup:
    """What every case needs: the model, where to write, how to serve, what to ask for."""

    model: Path
    folder: Path
    gpu: bool
    dtype: torch.dtype
    arguments: list[str]
    limits: Limits
    num_requests: int
    sample: int
    compared_tokens: int
    start_timeout: float
    load_seconds: float = float("inf")
    alone: bool = True

    def server(self, name: str, **environ: str) -> Server:
        """Start a server; nobody has waited for it."""
        return Server(self.model, self.folder / name, self.arguments, self.gpu, environ, self.alone)


def _summary(outcome: Outcome) -> dict[str, Any]:
    ordered = sorted(outcome.latencies)
    return {
        "counts": dict(sorted(outcome.counts.items())),
        "seconds": round(outcome.seconds, 1),
        "latency_p50_s": round(ordered[len(ordered) // 2], 3) if ordered else None,
        "latency_max_s": round(ordered[-1], 3) if ordered else None,
    }


def _check_alone(setup: Setup, tokens: list[list[int]]) -> list[str]:
    """Problems of the answers to ``PROMPT``, each of which was given alone."""
    answers = [Answer(PROMPT, row, len(row)) for row in tokens]
    return list(
        check_answers(setup.model, answers, setup.dtype, setup.gpu, setup.compared_tokens)[
            "problems"
        ]
    )


def load(setup: Setup) -> dict[str, Any]:
    """Requests of all kinds, a part after the other; memory is read between the parts."""
    server = setup.server("load")
    problems: list[str] = []
    merged, samples = Outcome(), []
    try:
        start_seconds = server.wait_until_up(setup.start_timeout)
        share = -(-setup.num_requests // SEGMENTS)
        for part in range(SEGMENTS):
            outcome = asyncio.run(send(server.url, share, setup.limits, seed=part))
            merged.counts += outcome.counts
            merged.problems += outcome.problems
            merged.answers += outcome.answers
            merged.latencies += outcome.latencies
            merged.seconds += outcome.seconds
            found = settle(server, setup.limits.timeout)
            samples.append(server.memory())
            print(f"  {(part + 1) * share} requests, {samples[-1]}", flush=True)
            if merged.seconds > setup.load_seconds:
                break
        files = folder_mib(server.metrics_folder)
        served = sum(merged.counts[kind] for kind in ("answered", "streamed"))
        left = merged.counts["left"] + merged.counts["left_at_once"]
        metrics = check_metrics(found, served - merged.counts["errors"], left)
        exit_code = server.stop()
    finally:
        server.kill()
    step = max(1, len(merged.answers) // setup.sample)
    answers = check_answers(
        setup.model, merged.answers[::step], setup.dtype, setup.gpu, setup.compared_tokens
    )
    memory = check_memory(samples)
    if len(samples) < SEGMENTS:
        problems.append(f"{len(samples) * share} of {setup.num_requests} requests in the time")
    if exit_code != 0:
        problems.append(f"SIGTERM: exit code {exit_code}")
    refused = sum(n for name, n in merged.counts.items() if name.startswith("status 4"))
    if refused != sum(merged.counts[kind] for kind in REFUSED):
        problems.append(f"{refused} requests were refused, of {merged.counts}")
    if files > 1:
        problems.append(f"metrics files of {files:.1f} MiB")
    problems += merged.problems[:20]
    for part in (answers, memory, metrics):
        problems += part.pop("problems")
    return {
        "requests": len(samples) * share, "start_seconds": round(start_seconds, 1),
        **_summary(merged), "answers": answers, "memory": memory, "metrics": metrics,
        "problems": problems,
    }  # fmt: skip


def killed(setup: Setup) -> dict[str, Any]:
    """SIGKILL of the worker under load: clients get an end, the server ends, another one serves."""
    problems: list[str] = []
    server = setup.server("killed")
    try:
        server.wait_until_up(setup.start_timeout)
        worker = server.worker()
        before = scrape(server)["tilewise_build_info"]
        killer = threading.Timer(3.0, worker.kill)
        killer.start()
        number = max(20 * setup.limits.concurrency, 40)
        outcome = asyncio.run(send(server.url, number, setup.limits, seed=99, until_dead=True))
        killer.join()
        started = time.monotonic()
        try:
            exit_code = server.process.wait(120)
        except subprocess.TimeoutExpired:
            exit_code = None
            problems.append("the server outlives its worker by 120 s")
        ended = time.monotonic() - started
    finally:
        server.kill()
    if not outcome.counts["errors"]:
        problems.append("no client noticed that the worker was killed")
    problems += outcome.problems[:10]
    # The metrics folder of the dead one is taken over, with its files.
    again = setup.server("killed")
    try:
        restart = again.wait_until_up(setup.start_timeout)
        tokens = again.complete(PROMPT, 6)
        found = settle(again, 60)
        if found["tilewise_build_info"] != before:
            problems.append(f"{found['tilewise_build_info']} workers on /metrics after a restart")
        code = again.stop()
        if code != 0:
            problems.append(f"SIGTERM: exit code {code}")
    finally:
        again.kill()
    problems += _check_alone(setup, [tokens])
    return {
        **_summary(outcome), "exit_code": exit_code, "ended_after_s": round(ended, 1),
        "restart_seconds": round(restart, 1), "problems": problems,
    }  # fmt: skip


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a file system of a few pages on ``folder``; False where this process must not."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            # Lazily: a process that is being killed may still have a file open.
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Append to a file until its disk has no page left."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@contextlib.contextmanager
def nothing_written(folder: Path, mounted: bool, worker: int) -> Iterator[None]:
    """Fill the disk of ``folder``; without one, forbid the worker to write any file.

    The latter hits whatever vLLM writes as well, such as Triton's cache.
    """
    if mounted:
        filler = folder / "filler"
        fill(filler)
        # A worker that was replacing a file has given its pages back by now: these too.
        time.sleep(1.5)
        fill(filler)
        try:
            yield
        finally:
            filler.unlink()
        return
    soft, hard = resource.prlimit(worker, resource.RLIMIT_FSIZE)
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (soft, hard))


def full_disk(setup: Setup) -> dict[str, Any]:
    """The metrics files' disk is full for a while: serving and /metrics go on, then catch up."""
    with small_disk(setup.folder / "full_disk" / "metrics") as mounted:
        return _full_disk(setup, mounted)


def _full_disk(setup: Setup, mounted: bool) -> dict[str, Any]:
    problems: list[str] = []
    server = setup.server("full_disk")
    try:
        server.wait_until_up(setup.start_timeout)
        worker = server.worker().pid
        server.complete(PROMPT, 6)
        before = settle(server, 60)["tilewise_steps_total"]
        limits = replace(setup.limits, concurrency=max(2, setup.limits.concurrency // 2))
        with nothing_written(server.metrics_folder, mounted, worker):
            outcome = asyncio.run(send(server.url, 3 * limits.concurrency, limits, seed=7))
            time.sleep(2.5)  # workers write once a second: what could be written would be there
            during = scrape(server)["tilewise_steps_total"]
            said = server.text().count("metrics cannot be written")
        tokens = server.complete(PROMPT, 6)
        after = settle(server, 60)
        steps = after["tilewise_steps_total"]
        code = server.stop()
    finally:
        server.kill()
    if during != before:
        problems.append(f"steps moved from {before} to {during} while nothing could be written")
    if said != 1:
        problems.append(f"the log says {said} times that metrics cannot be written; expected: once")
    if steps <= before or after["tilewise_build_seconds_count"] != steps:
        problems.append(f"after {before} steps and a full disk /metrics says {steps}")
    if code != 0:
        problems.append(f"SIGTERM: exit code {code}")
    problems += outcome.problems[:10] + _check_alone(setup, [tokens])
    return {
        **_summary(outcome), "steps_before": before, "steps_during": during, "steps_after": steps,
        "disk": "a file system of its own" if mounted else "a limit on the worker's files",
        "problems": problems,
    }  # fmt: skip


def two_servers(setup: Setup) -> dict[str, Any]:
    """Two servers of one user on one host, both under load; one is killed, the other stays."""
    problems: list[str] = []
    servers = [setup.server("first"), setup.server("second")]
    try:
        for server in servers:
            server.wait_until_up(2 * setup.start_timeout)
        limits = replace(setup.limits, concurrency=max(2, setup.limits.concurrency // 2))
        numbers = (4 * limits.concurrency, 2 * limits.concurrency)

        def one(index: int) -> Outcome:
            return asyncio.run(send(servers[index].url, numbers[index], limits, seed=20 + index))

        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(one, (0, 1)))
        found = [settle(server, 60) for server in servers]
        for index, metrics in enumerate(found):
            outcome = outcomes[index]
            served = sum(outcome.counts[kind] for kind in ("answered", "streamed"))
            problems += check_metrics(metrics, served - outcome.counts["errors"])["problems"]
            problems += outcome.problems[:10]
            if metrics["tilewise_build_info"] != 1:
                problems.append(f"{metrics['tilewise_build_info']} workers on one /metrics")
        os.killpg(servers[0].process.pid, signal.SIGKILL)
        tokens = servers[1].complete(PROMPT, 6)
        after = settle(servers[1], 60)
        if after["tilewise_steps_total"] <= found[1]["tilewise_steps_total"]:
            problems.append("the other server's metrics stand still")
        code = servers[1].stop()
        if code != 0:
            problems.append(f"SIGTERM: exit code {code}")
    finally:
        for server in servers:
            server.kill()
    answers = outcomes[0].answers[:100] + outcomes[1].answers[:100]
    checked = check_answers(setup.model, answers, setup.dtype, setup.gpu, setup.compared_tokens)
    problems += checked.pop("problems") + _check_alone(setup, [tokens])
    return {
        "servers": [_summary(outcome) for outcome in outcomes], "answers": checked,
        "problems": problems,
    }  # fmt: skip


# -- starts that must fail, or must not -----------------------------------------------------------

GARBAGE = ("maybe", "-1", "\udcff\udcfe", "x" * 100_000)
# A start with each, and what its log must name.
ATTENTION_CONFIGS = {
    '{"backend": "NOPE"}': "NOPE",
    '{"backend": 7}': "backend",
    "not json": "not json",
    '{"nope": 1}': "nope",
    '{"backend_per_kind": {"nope": "TILEWISE"}}': "nope",
    '{"backend": "TILEWISE"}': "mutually exclusive",
}


def _start(setup: Setup, name: str, arguments: list[str], **environ: str) -> tuple[int, str]:
    """Run a server that should not come up; exit code, or -1 if it did, and what it said."""
    command = [*VLLM, "serve", str(setup.model), "--port", "0", *setup.arguments, *arguments]
    process = subprocess.Popen(
        command, env=engine_environment(setup.gpu, environ), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    LIVE.add(process.pid)
    try:
        said, _ = process.communicate(timeout=setup.start_timeout)
    except subprocess.TimeoutExpired:
        return -1, f"{name}: still there after {setup.start_timeout:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        LIVE.discard(process.pid)
    return process.returncode, said.decode(errors="replace")


def _judge(name: str, code: int, text: str, must_say: str) -> list[str]:
    problems = []
    if code <= 0:
        problems.append(f"{name}: exit code {code}; expected: a failure")
    if must_say not in text:
        problems.append(f"{name}: the log does not name {must_say!r}: …{text[-300:]}")
    if "Segmentation fault" in text or "core dumped" in text:
        problems.append(f"{name}: crashed")
    return problems


def settings(setup: Setup) -> dict[str, Any]:
    """Garbage in every variable: a start fails by name, or serves where any text will do."""
    from tilewise.settings import defaults

    problems, figures = [], {}
    # Any text is a folder; that one cannot be made. The platform's own switch ends the CPU tests.
    text_only = {"TILEWISE_METRICS_DIR", "TILEWISE_CPU_PLATFORM"}
    names = [name for name in defaults() if name not in text_only]
    cases = [(name, value) for name in names for value in GARBAGE[:1]]
    cases += [(names[0], value) for value in GARBAGE[1:]]
    with ThreadPoolExecutor(4 if setup.gpu else 2) as pool:
        started = pool.map(lambda c: _start(setup, c[0], [], **{c[0]: c[1]}), cases)
        for (name, value), (code, text) in zip(cases, started, strict=True):
            label = f"{name}={value[:12]!r}"
            problems += _judge(label, code, text, name)
            figures[label] = code
    server = setup.server(
        "settings", TILEWISE_METRICS_DIR="/proc/no/such/folder", TILEWISE_NO_SUCH="1"
    )
    try:
        server.wait_until_up(setup.start_timeout)
        tokens = [server.complete(PROMPT, 6) for _ in range(2)]
        list(text_string_to_metric_families(server.get("/metrics")))
        log = server.text()
        code = server.stop()
    finally:
        server.kill()
    for text in ("unknown setting TILEWISE_NO_SUCH", "/proc/no/such/folder"):
        if text not in log:
            problems.append(f"the log of a server that came up does not say {text!r}")
    if code != 0:
        problems.append(f"SIGTERM: exit code {code}")
    problems += _check_alone(setup, tokens)
    return {"exit_codes": figures, "problems": problems}


def attention_config(setup: Setup) -> dict[str, Any]:
    """Bad ``--attention-config`` and page sizes: every start fails and says why."""
    cases: list[tuple[str, list[str], str]] = [
        (text, ["--attention-config", text], said) for text, said in ATTENTION_CONFIGS.items()
    ]
    cases.append(("--block-size 17", ["--block-size", "17"], "17"))
    problems, figures = [], {}
    with ThreadPoolExecutor(4 if setup.gpu else 2) as pool:
        started = pool.map(lambda case: _start(setup, case[0], case[1]), cases)
        for (name, _, said), (code, text) in zip(cases, started, strict=True):
            problems += _judge(name, code, text, said)
            figures[name] = code
    return {"exit_codes": figures, "problems": problems}


def oversized(setup: Setup) -> dict[str, Any]:
    """Prompts at the limit and beyond it, one by one; a server that refused them answers on."""
    problems, outcomes = [], {}
    longest = setup.limits.max_len
    server = setup.server("oversized")
    try:
        server.wait_until_up(setup.start_timeout)
        for length, tokens, expected in (
            (longest - 1, 1, 1), (longest, 1, 400), (longest + 1, 1, 400),
            # vLLM cuts an answer that would pass the limit.
            (longest - 4, 5, 4), (100 * longest, 1, 400), (1, longest + 1, 400),
        ):  # fmt: skip
            name = f"{length} + {tokens}"
            try:
                got = len(server.complete([7] * length, tokens, setup.limits.timeout))
            except urllib.error.HTTPError as error:
                got = error.code
            outcomes[name] = got
            if got != expected:
                problems.append(f"{name} tokens: {got}; expected: {expected} (tokens, or a status)")
        alone = server.complete(PROMPT, 6)
        code = server.stop()
    finally:
        server.kill()
    if code != 0:
        problems.append(f"SIGTERM: exit code {code}")
    problems += _check_alone(setup, [alone])
    return {"tokens_or_status": outcomes, "problems": problems}


CASES: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "load": load,
    "killed": killed,
    "full_disk": full_disk,
    "two_servers": two_servers,
    "oversized": oversized,
    "settings": settings,
    "attention_config": attention_config,
}
