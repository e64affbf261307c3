"""Two GPUs of one host: tokens agree with one GPU however vLLM spreads a model over them.

Each case is one engine with an empty Triton cache that its ranks share, so that they compile the
same kernels at the same time. Tokens are held to those of the same backend on one GPU, piece by
piece as in ``test_gpu_engine``; every case has a round in which one rank's attention is broken.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from agreement import Agreement, Reference, compare, greedy_reference
from parallel_engines import run_jobs
from tiny_model import TinyLlama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs 2 GPUs of one host, torch sees {torch.cuda.device_count()}",
    ),
]

SIDE_BY_SIDE = 3
PIECE, NUM_PIECES = 4, 4
LENGTHS = [1, 2, 15, 16, 17, 40, 63, 64, 65, 129, 300, 511, 1000, 1023, 1024, 1500, 2047, 3000]
# Longer than the largest graph, so that a broken attention is called in the prefill.
CONTROL_LENGTHS = [70, 80, 90, 100, 110, 120, 130, 140]

COMMON = {
    "attention_backend": "TILEWISE",
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.02,
    # Not ours to test, and NCCL's is there on every host.
    "disable_custom_all_reduce": True,
}
EAGER = {"enforce_eager": True}


def graphs(mode: str) -> dict:
    """Full graphs without a compiled model, whose compilation takes most of a start."""
    sizes = [1, 2, 4, 8, 16, 32]
    settings = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}
    return {"compilation_config": settings}


TP = {"tensor_parallel_size": 2}
DCP = {**TP, "decode_context_parallel_size": 2}


@dataclass(frozen=True)
class Case:
    """One way to spread a model, and what it should look like."""

    model: str
    engine: dict
    # Index of the engine and rank in it, of every worker.
    places: tuple[tuple[int, int], ...]
    # Layers of each of them.
    num_layers: int = 4
    start: str = "fork"


TWO_RANKS, TWO_ENGINES = ((0, 0), (0, 1)), ((0, 0), (1, 0))
CASES = {
    # Spawned workers inherit nothing: each loads the plug-in by itself.
    "tp2": Case("llama", {**TP, **graphs("FULL")}, TWO_RANKS, start="spawn"),
    "pp2": Case("llama", {"pipeline_parallel_size": 2, **EAGER}, TWO_RANKS, num_layers=2),
    "dp2": Case("llama", {"data_parallel_size": 2, **EAGER}, TWO_ENGINES),
    # Decodes count their own key in the shards; in graphs of mixed batches nobody does.
    "dcp2": Case("one_kv_head", {**DCP, **graphs("FULL_DECODE_ONLY")}, TWO_RANKS),
    "dcp2_mixed_graphs": Case("one_kv_head", {**DCP, **graphs("FULL")}, TWO_RANKS),
    "dcp2_interleaved": Case(
        "one_kv_head",
        {**DCP, **EAGER, "cp_kv_cache_interleave_size": 16, "dcp_comm_backend": "a2a"},
        TWO_RANKS,
        start="spawn",
    ),
}

SHAPES = {
    "llama": TinyLlama(
        num_heads=32, num_kv_heads=8, head_dim=128, num_layers=4, hidden_size=1024,
        intermediate_size=2048, dtype=torch.bfloat16,
    ),
    "one_kv_head": TinyLlama(
        num_heads=16, num_kv_heads=1, head_dim=128, num_layers=4, hidden_size=1024,
        intermediate_size=2048, dtype=torch.bfloat16, seed=1,
    ),
}  # fmt: skip


@dataclass
class Model:
    """A checkpoint, the rounds every engine is given, and what one GPU answers."""

    folder: Path
    rounds: list[dict]
    logit_error: float
    answers: list[dict]

    def agreement(self, answers: list[dict]) -> Agreement:
        """All pieces of all rows, as one comparison."""
        merged, tokens = Reference([], [], self.logit_error), []
        for ours, theirs in zip(self.answers, answers, strict=True):
            merged.tokens.extend(ours["tokens"])
            merged.gaps.extend(ours["gaps"])
            tokens.extend(theirs["tokens"])
        return compare(merged, tokens)


def rounds_of(folder: Path) -> tuple[list[dict], float]:
    """Pieces of a text that HF writes, and a control; with the logit error of bf16."""
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 260) for _ in range(length)] for length in LENGTHS]
    text = greedy_reference(folder, prompts, PIECE * NUM_PIECES, torch.bfloat16, "cuda")
    torch.cuda.empty_cache()
    rounds = [
        {
            "prompts": [p + t[:start] for p, t in zip(prompts, text.tokens, strict=True)],
            "max_tokens": PIECE,
        }
        for start in range(0, PIECE * NUM_PIECES, PIECE)
    ]
    rounds.append({"prompts": [prompts[-1][:n] for n in CONTROL_LENGTHS], "max_tokens": 1})
    return rounds, text.logit_error


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Model]:
    """The checkpoints, and the answers of one GPU."""
    folder = tmp_path_factory.mktemp("one_gpu")
    written = {name: shape.write(folder / "models" / name) for name, shape in SHAPES.items()}
    rounds = {name: rounds_of(model) for name, model in written.items()}
    jobs = {
        name: {
            "model": str(model),
            "engine": {**COMMON, **EAGER},
            "rounds": [{**spec, "logprobs": True} for spec in rounds[name][0]],
        }
        for name, model in written.items()
    }
    done = run_jobs(jobs, folder)
    for name, result in done.items():
        assert [rank["backends"] for rank in result["ranks"]] == [["TilewiseBackend"]], name
    return {
        name: Model(written[name], *rounds[name], answers=done[name]["rounds"]) for name in written
    }


@dataclass
class Done:
    """A case, what its engine returned, and the folder it ran in."""

    case: Case
    model: Model
    result: dict
    place: Path


def run_case(name: str, model: Model, folder: Path) -> Done:
    """Start the engine of one case, and wait for what it returns."""
    case = CASES[name]
    broken = {**model.rounds[-1], "broken": list(case.places[1])}
    engine = {**COMMON, **case.engine}
    job = {"model": str(model.folder), "engine": engine, "rounds": [*model.rounds, broken]}
    began = time.monotonic()
    result = run_jobs({name: job}, folder, case.start)[name]
    print(f"{name}: {time.monotonic() - began:.0f} s")
    return Done(case, model, result, folder / name)


@pytest.fixture(scope="module")
def started(request, models, tmp_path_factory) -> Iterator[dict[str, Future[Done]]]:
    """The cases asked for, some side by side: a start is mostly Python's imports and compiling.

    Not all: collectives of several processes wait for each other's time on the GPUs.
    """
    ours = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["done"] for item in ours}
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {
            name: pool.submit(run_case, name, models[case.model], tmp_path_factory.mktemp(name))
            for name, case in CASES.items()
            if name in asked
        }


@pytest.fixture(scope="module", params=list(CASES))
def done(request, started) -> Done:
    return started[request.param].result()


def test_tokens_agree_with_one_gpu(done):
    agreement = done.model.agreement(done.result["rounds"][:-1])
    assert agreement.agrees, str(agreement)


def test_one_broken_rank_is_noticed(done):
    control = Model(done.model.folder, [], done.model.logit_error, done.model.answers[-1:])
    agreement = control.agreement(done.result["rounds"][-1:])
    assert not agreement.agrees, str(agreement)


def test_the_plugin_runs_in_every_worker(done):
    ranks = sorted(done.result["ranks"], key=lambda rank: rank["place"])
    assert [tuple(rank["place"]) for rank in ranks] == list(done.case.places)
    assert len({rank["pid"] for rank in ranks}) == 2
    for rank in ranks:
        assert rank["backends"] == ["TilewiseBackend"]
        assert len(rank["layers"]) == done.case.num_layers
        assert rank["counters"]["launches{kernel=plan}"] > 0
        assert rank["counters"]["launches{kernel=cache_write}"] > 0
        replayed = rank["counters"].get("graph_steps{mode=full}", 0)
        compiled = [n for name, n in rank["counters"].items() if "phase=serving" in name]
        assert not any(compiled), rank["counters"]
        assert (replayed > 0) is ("compilation_config" in done.case.engine), rank["cudagraph_mode"]


def test_ranks_share_a_triton_cache_without_harm(done):
    """Both compiled into the same empty folder; what lies there is whole, and each was checked."""
    for rank in done.result["ranks"]:
        assert rank["triton_cache"] == str(done.place / "triton")
        assert rank["counters"]["self_checks{result=passed}"] > 0
        assert "self_checks{result=failed}" not in rank["counters"]
    described = list((done.place / "triton").glob("*/*.json"))
    assert described
    for path in described:
        json.loads(path.read_text())
    binaries = list((done.place / "triton").glob("*/*.cubin"))
    assert binaries
    assert all(path.stat().st_size for path in binaries)


def test_every_rank_has_metrics_of_its_own(done):
    written = [json.loads(path.read_text()) for path in (done.place / "metrics").glob("*.json")]
    places = sorted((int(w["labels"]["engine"]), int(w["labels"]["rank"])) for w in written)
    assert places == list(done.case.places)
