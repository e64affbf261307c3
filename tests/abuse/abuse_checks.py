"""What has to hold after the abuse: right answers, flat memory, counters that add up."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from abuse_server import MIB, Server
from abuse_traffic import Answer
from agreement import Reference, compare, greedy_reference
from prometheus_client.parser import text_string_to_metric_families

# Growth from the first part of a run to its end, MiB: that much, or that share of what was held.
ALLOWED_MIB, ALLOWED_SHARE = 32.0, 0.03
# What PyTorch has given out must come back; what it reserves for that comes in large blocks.
GPU_ALLOWED_MIB = {"gpu_allocated_mib": 16.0, "gpu_reserved_mib": 64.0, "gpu_mib": 64.0}
MIN_ROWS_FOR_SHARE = 50
# Builders whose newest step waits for a next one: the one that serves, and those that vLLM made
# before it to estimate memory.
PENDING_STEPS = range(1, 4)


def check_answers(
    model: Path, answers: list[Answer], dtype: torch.dtype, gpu: bool, num_tokens: int
) -> dict[str, Any]:
    """Compare answers given under load with those of the same model alone, in Hugging Face.

    Parameters
    ----------
    model : Path
        The checkpoint.
    answers : list of Answer
        The sample.
    dtype : torch.dtype
        Of the server; in fp32 tokens must be equal, else they may part at a tie.
    gpu : bool
        Where to compute.
    num_tokens : int
        So many tokens of each answer are compared: a row can end in a tie only once.
    """
    rows = [answer.tokens[:num_tokens] for answer in answers]
    prompts = [answer.prompt for answer in answers]
    longest = max(map(len, rows))
    whole = greedy_reference(model, prompts, longest, dtype, "cuda" if gpu else "cpu")
    tokens = [full[: len(row)] for full, row in zip(whole.tokens, rows, strict=True)]
    result = compare(Reference(tokens, whole.gaps, whole.logit_error), rows)
    # Of a few rows a tie is a large share.
    wrong = result.mismatches or (len(rows) >= MIN_ROWS_FOR_SHARE and not result.agrees)
    problems = [f"answers: {result}"] if wrong else []
    return {
        "compared": len(rows), "tokens": sum(map(len, rows)), "equal": result.num_equal,
        "ties": len(result.ties), "mismatches": len(result.mismatches), "problems": problems,
    }  # fmt: skip


def check_memory(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Whether memory stands still after the first part of a run.

    Parameters
    ----------
    samples : list of dict
        MiB by process, taken after equal shares of the requests; ten or so.
    """
    problems, growth = [], {}
    third = max(1, len(samples) // 3)
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        before, after = statistics.median(values[1 : third + 1]), statistics.median(values[-third:])
        growth[name] = round(after - before, 1)
        allowed = GPU_ALLOWED_MIB.get(name, max(ALLOWED_MIB, ALLOWED_SHARE * before))
        if after - before > allowed:
            problems.append(f"{name} grew from {before:.0f} to {after:.0f}, allowed {allowed:.0f}")
    return {
        "samples": [{name: round(value, 1) for name, value in s.items()} for s in samples],
        "growth_mib": growth, "problems": problems,
    }  # fmt: skip


def scrape(server: Server) -> dict[str, float]:
    """Every sample of ``/metrics`` by name and labels, and sums over labels by name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def settle(server: Server, timeout: float) -> dict[str, float]:
    """Metrics of a server that has nothing left to do; raises when it never comes to rest."""
    deadline = time.monotonic() + timeout
    last: dict[str, float] = {}
    since = time.monotonic()
    while time.monotonic() < deadline:
        now = scrape(server)
        idle = now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == 0
        ours = {name: v for name, v in now.items() if name.startswith("tilewise_")}
        if not idle or ours != last:
            last, since = ours, time.monotonic()
        elif time.monotonic() - since > 2.5:  # workers write once a second
            return now
        time.sleep(0.25)
    raise RuntimeError(f"requests are still running after {timeout:g} s without clients")


def check_metrics(found: dict[str, float], answered: int, left: int = 0) -> dict[str, Any]:
    """Whether counters fit each other and the clients' own count.

    Parameters
    ----------
    found : dict
        From ``settle``.
    answered : int
        Requests that came to their end in the eyes of their clients.
    left : int
        Requests whose clients hung up; some of those may have come to their end first.
    """
    steps = found["tilewise_steps_total"]
    prompt = found["vllm:prompt_tokens_total"] - found.get("vllm:prefix_cache_hits_total", 0.0)
    ends = {
        reason: sum(
            v for n, v in found.items()
            if n.startswith("vllm:request_success_total{") and f"finished_reason={reason}" in n
        )
        for reason in ("length", "stop", "abort")
    }  # fmt: skip
    launches = sum(
        value for name, value in found.items()
        if name.startswith("tilewise_kernel_launches_total{") and "kernel=plan" in name
    )  # fmt: skip
    rules = {
        "a plan a step": launches == steps,
        "a build a step": found["tilewise_build_seconds_count"] == steps,
        "every step but the newest has a graph mode": (
            steps - found["tilewise_graph_steps_total"] in PENDING_STEPS
        ),
        "no fewer tokens than were computed for answers": (
            found["tilewise_tokens_total"] >= found["vllm:generation_tokens_total"] - ends["length"]
        ),
        "every client's answer was counted": ends["length"] + ends["stop"] >= answered,
        "requests of clients that hung up were given up": (
            left == 0 or ends["length"] + ends["stop"] - answered < 0.9 * left
        ),
        "no page is kept for nobody": found["vllm:kv_cache_usage_perc"] == 0,
        "no layer went elsewhere": found.get("tilewise_fallback_layers_total", 0) == 0,
        "nothing was compiled while serving": (
            sum(v for n, v in found.items()
                if n.startswith("tilewise_kernel_compilations_total{") and "phase=serving" in n)
            == 0
        ),
    }  # fmt: skip
    return {
        "steps": steps, "tokens": found["tilewise_tokens_total"], "prompt_tokens": prompt,
        "generation_tokens": found["vllm:generation_tokens_total"], "ends": ends,
        "preemptions": found.get("vllm:num_preemptions_total", 0.0),
        "problems": [f"metrics: not so: {rule}" for rule, holds in rules.items() if not holds],
    }  # fmt: skip


def folder_mib(folder: Path) -> float:
    """MiB of the files in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*")) / MIB
