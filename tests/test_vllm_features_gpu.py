"""Other features of vLLM with our attention on a GPU, under CUDA graphs.

Sleep and wake, CPU offload of the KV cache, drafters, LoRA, fp8 weights, and vLLM's cache of
compiled models across versions of tilewise. Every engine is small and takes a process of its own;
those that need no quiet GPU start side by side, and tests look at what they returned.

Dual batch overlap is in ``test_micro_batches``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tiny_zoo
import torch
from agreement import Reference, compare, greedy_reference
from test_engine import prompts_of
from tiny_addons import merge_lora, write_eagle, write_lora, write_mtp
from tiny_model import TinyLlama

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
JOB_TIMEOUT = 300
SIDE_BY_SIDE = 9
# vLLM compares the free memory of the whole GPU before and after a sleep.
ALONE = ("sleep", "sleep_alibi")

ENGINE = {
    "attention_backend": "TILEWISE",
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.02,
    "compilation_config": {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
    },
}
EXACT = {**ENGINE, "dtype": "float32"}
SHAPE = TinyLlama(8, 2, 128, hidden_size=512, intermediate_size=1024, dtype=torch.bfloat16)
# Many short rows: a random model is unsure often, and each row can end in a tie only once.
PROMPTS = prompts_of([*range(2, 34), 63, 64, 65, 129, 200, 255, 300, 500], shared=70)
TOKENS = 4
DRAFTED = prompts_of([30, 60, 90, 150, 300, 301, 302, 500], shared=9)
DRAFTED_TOKENS = 24
ROUND = {"prompts": PROMPTS, "max_tokens": TOKENS, "fresh": True}


@dataclass
class Job:
    """One engine: its model, its settings and its rounds."""

    model: Path
    engine: dict
    rounds: list[dict]
    script: list[str] = field(default_factory=lambda: [str(HERE / "engine_job.py")])
    cache: Path | None = None

    def run(self, folder: Path) -> dict:
        """Run the engine and return its result."""
        folder.mkdir()
        job = {"model": str(self.model), "engine": self.engine, "rounds": self.rounds}
        (folder / "job.json").write_text(json.dumps(job))
        environ = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_CACHE_ROOT": str(self.cache or folder / "cache"),
        }
        command = [sys.executable, *self.script, str(folder / "job.json"), str(folder / "result")]
        done = subprocess.run(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=JOB_TIMEOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{folder.name} failed:\n{done.stdout[-6000:]}"
        return json.loads((folder / "result").read_text())


# Pages that sleep gave back may come again as they were.
TRAMPLE = ["trample", [8]]


def sleeping(level: int) -> list:
    """Calls that put an engine to sleep and wake it up as vLLM's documentation does."""
    if level == 1:
        return [["sleep", [1]], TRAMPLE, ["wake_up", []], ["reset_prefix_cache", []]]
    return [
        ["sleep", [2]],
        TRAMPLE,
        ["wake_up", [["weights"]]],
        ["collective_rpc", ["reload_weights"]],
        ["wake_up", [["kv_cache"]]],
        ["reset_prefix_cache", []],
    ]


LOST = [["sleep", [2]], TRAMPLE, ["wake_up", []], ["reset_prefix_cache", []]]


def make_jobs(folder: Path) -> dict[str, Job]:
    """Every engine, by name; models are written here."""
    model = SHAPE.write(folder / "model")
    adapter = write_lora(SHAPE, folder / "adapter")
    merge_lora(SHAPE, adapter, folder / "merged")
    single = TinyLlama(num_layers=1)
    target = single.write(folder / "target")
    drafter = write_eagle(single, target, folder / "eagle")
    wide = TinyLlama(num_layers=1, hidden_size=256)
    mtp = write_mtp(wide, folder / "mtp", reference=folder / "mtp_target")
    bloom = tiny_zoo.write("bloom", folder / "bloom")

    # Full graphs hold whole requests of five tokens; 40 are those of all prompts.
    sizes = sorted([*ENGINE["compilation_config"]["cudagraph_capture_sizes"], 5 * len(DRAFTED)])
    graphs = {**ENGINE["compilation_config"], "cudagraph_capture_sizes": sizes}

    def drafting(**settings: object) -> dict:
        drafts = {"num_speculative_tokens": 4, **settings}
        return {**EXACT, "compilation_config": graphs, "speculative_config": drafts}

    drafted = {"prompts": DRAFTED, "max_tokens": DRAFTED_TOKENS, "fresh": True}
    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 48 << 20},
    }
    fused = {**ENGINE["compilation_config"], "pass_config": {"fuse_attn_quant": True}}
    first = {**ROUND, "max_tokens": 1, "logprobs": True}
    fp8 = {**ENGINE, "quantization": "fp8"}
    return {
        "lora": Job(
            model,
            {**ENGINE, "enable_lora": True, "max_lora_rank": 8},
            [ROUND, {**ROUND, "lora": str(adapter)}],
        ),
        "eagle": Job(target, drafting(method="eagle", model=str(drafter)), [drafted, drafted]),
        "draft_model": Job(target, drafting(method="draft_model", model=str(target)), [drafted]),
        "mtp": Job(mtp, drafting(method="mtp"), [drafted, drafted]),
        "offload": Job(model, {**ENGINE, "kv_transfer_config": offload}, [ROUND, ROUND]),
        "fp8": Job(model, fp8, [first, {**first, "sabotage": "zeros"}]),
        "fp8_fused": Job(model, {**fp8, "compilation_config": fused}, [first]),
        "fp8_flash": Job(model, {**fp8, "attention_backend": "FLASH_ATTN"}, [first]),
        "fp8_triton": Job(model, {**fp8, "attention_backend": "TRITON_ATTN"}, [first]),
        "sleep": Job(
            model,
            {**ENGINE, "enable_sleep_mode": True},
            [ROUND, *({**ROUND, "before": sleeping(level)} for level in (1, 2, 1))],
        ),
        "sleep_alibi": Job(
            bloom,
            {**EXACT, "enable_sleep_mode": True},
            [ROUND, {**ROUND, "before": LOST}, {**ROUND, "before": sleeping(2)}],
        ),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def finished(folder) -> Iterator[Callable[[str], dict]]:
    """Give the result of an engine by name, waiting for it: the first who asks starts it."""
    jobs = make_jobs(folder)
    results: dict[str, Future] = {}
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:

        def start(name: str) -> None:
            results[name] = pool.submit(jobs[name].run, folder / f"{name}_job")

        def result(name: str) -> dict:
            if name not in results:
                for other in (name,) if name in ALONE else jobs.keys() - ALONE:
                    start(other)
            return results[name].result()

        yield result


@pytest.fixture(scope="module")
def reference(folder, finished) -> Reference:
    made = greedy_reference(folder / "model", PROMPTS, TOKENS, torch.bfloat16, "cuda")
    torch.cuda.empty_cache()
    return made


def check_graphs(result: dict) -> None:
    """Ours in every layer, and decodes replayed from full graphs."""
    assert result["impls"] == ["TilewiseImpl"]
    assert "FULL" in result["cudagraph_mode"]
    replayed = sum(r["counters"].get("graph_steps{mode=full}", 0) for r in result["rounds"])
    assert replayed > 0, [r["counters"] for r in result["rounds"]]


# -- sleep and wake -------------------------------------------------------------------------------


@pytest.mark.alone
def test_an_engine_that_slept_goes_on(finished, reference):
    """Levels 1, 2 and 1 again: graphs captured before are replayed on memory mapped anew."""
    result = finished("sleep")
    check_graphs(result)
    before, *after = result["rounds"]
    agreement = compare(reference, before["tokens"])
    print(f"before sleep: {agreement}")
    assert agreement.agrees, str(agreement)
    for done in after:
        assert done["tokens"] == before["tokens"]
        counts = done["counters"]
        assert counts["graph_steps{mode=full}"] > 0
        if torch.cuda.get_device_capability()[0] == 9:
            assert counts["launches{kernel=hopper_prefill}"] > 0


@pytest.mark.alone
def test_slopes_survive_sleep(finished, folder):
    """Level 2 loses the weights, as the second round shows; ALiBi's slopes are not among them."""
    result = finished("sleep_alibi")
    assert all(layer["alibi"] for layer in result["layers"])
    before, lost, after = result["rounds"]
    agreement = compare(greedy_reference(folder / "bloom", PROMPTS, TOKENS), before["tokens"])
    assert agreement.num_equal == len(PROMPTS), str(agreement)
    assert lost["tokens"] != before["tokens"]
    assert after["tokens"] == before["tokens"]


# -- KV connectors --------------------------------------------------------------------------------


def test_pages_come_back_from_the_cpu(finished, reference):
    """The GPU's prefix cache is emptied between the rounds; the CPU's is not."""
    result = finished("offload")
    check_graphs(result)
    computed, loaded = result["rounds"]
    # Rows of 7 pages and more leave some on the CPU, whatever is still under way at the end.
    assert max(loaded["cached"]) >= 256
    for done in (computed, loaded):
        agreement = compare(reference, done["tokens"])
        print(f"cached {sum(done['cached'])}: {agreement}")
        assert agreement.agrees, str(agreement)


# -- drafters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target", "share"),
    [("eagle", "target", 0.5), ("mtp", "mtp_target", 0.5), ("draft_model", "target", 0.8)],
)
def test_drafters_draft_right_and_change_no_token(finished, folder, name, target, share):
    """Drafts that graphs attend to wrongly are rejected; EAGLE's are right but for the start."""
    result = finished(name)
    check_graphs(result)
    expected = greedy_reference(folder / target, DRAFTED, DRAFTED_TOKENS)
    for done in result["rounds"]:
        agreement = compare(expected, done["tokens"])
        print(f"{name}: {done['accepted']} of {done['drafts']} drafts accepted; {agreement}")
        assert agreement.num_equal == len(DRAFTED), str(agreement)
        assert done["accepted"] >= share * done["drafts"] > 0


def test_a_graph_plans_its_draft_steps():
    """A replay attends to the keys of its own time, which neither build nor capture knew."""
    from test_builder import HEAD_DIM, HEADS, KV_HEADS, PAGE, engine_config, make_batch, make_impl
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from tilewise.integration.builder import TilewiseMetadataBuilder

    device, num_reqs = torch.device("cuda", torch.cuda.current_device()), 8
    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.float32
    )
    config = engine_config(mode="FULL_AND_PIECEWISE", draft_tokens=3)
    recorded, fresh = (TilewiseMetadataBuilder(spec, ["layer.0"], config, device) for _ in range(2))
    batch = make_batch([1] * num_reqs, context=1999)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        setattr(batch, name, getattr(batch, name).to(device))
    width = batch.block_table_tensor.shape[1]
    cache = torch.randn(num_reqs * width + 1, PAGE, KV_HEADS, 2 * HEAD_DIM, device=device)
    cache, query = cache.transpose(1, 2), torch.randn(num_reqs, HEADS, HEAD_DIM, device=device)
    impl, output = make_impl(), torch.empty_like(query)
    batch.seq_lens.fill_(1)
    metadata = recorded.build_for_cudagraph_capture(batch)
    impl.forward(None, query, None, None, cache, metadata, output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded.update_draft_decode_metadata(metadata)
        impl.forward(None, query, None, None, cache, metadata, output)
    for lengths in ([2000] * 8, [1, 17, 300, 2000, 64, 65, 1023, 0], [5] * 8):
        batch.seq_lens.copy_(torch.tensor(lengths))
        output.fill_(float("nan"))
        graph.replay()
        expected = torch.full_like(query, float("nan"))
        impl.forward(None, query, None, None, cache, fresh.build(0, batch), expected)
        torch.testing.assert_close(output, expected, atol=0, rtol=0)
        assert output.isfinite().all()


# -- LoRA -----------------------------------------------------------------------------------------


def test_lora_adapters_are_attended_with(finished, folder, reference):
    result = finished("lora")
    check_graphs(result)
    plain, adapted = result["rounds"]
    merged = greedy_reference(folder / "merged", PROMPTS, TOKENS, torch.bfloat16, "cuda")
    for expected, done in ((reference, plain), (merged, adapted)):
        agreement = compare(expected, done["tokens"])
        print(f"lora: {agreement}")
        assert agreement.agrees, str(agreement)
    assert not compare(reference, adapted["tokens"]).agrees


# -- quantised weights ----------------------------------------------------------------------------


def fp8_reference(finished) -> Reference:
    """FLASH_ATTN's first tokens; what counts as a tie is how far TRITON_ATTN is from it.

    Quantised activations amplify differences of rounding, so torch's error in bf16 says too little.
    """
    flash, triton = (finished(f"fp8_{name}")["rounds"][0] for name in ("flash", "triton"))
    apart = [
        abs(a[0] - b[0])
        for a, b, one, other in zip(
            flash["gaps"], triton["gaps"], flash["tokens"], triton["tokens"], strict=True
        )
        if one == other
    ]
    assert len(apart) > len(PROMPTS) // 2
    return Reference(flash["tokens"], flash["gaps"], max(apart))


@pytest.mark.parametrize("name", ["fp8", "fp8_fused"])
def test_weights_quantised_online_agree_with_flash_attn(finished, name):
    """Also where vLLM may fuse attention's output with its quantisation, and splits no graph."""
    result = finished(name)
    assert result["impls"] == ["TilewiseImpl"]
    expected = fp8_reference(finished)
    agreement = compare(expected, result["rounds"][0]["tokens"])
    print(f"{name}: {agreement}")
    assert agreement.agrees, str(agreement)
    if name == "fp8":
        assert not compare(expected, result["rounds"][1]["tokens"]).agrees


# -- vLLM's cache of compiled models --------------------------------------------------------------


def compiled(cache: Path) -> set[str]:
    """Keys under which vLLM has stored compiled models."""
    return {str(path.parent.relative_to(cache)) for path in cache.rglob("rank_*") if path.is_dir()}


def test_an_upgrade_never_runs_its_predecessors_graphs(folder, reference):
    """A former version whose attention writes the cache itself: its graphs have no such operator.

    The control takes the former version's fingerprint for this one's: then they are reused, and
    nothing is ever written to the cache.
    """
    cache = folder / "shared_cache"

    def run(name: str, version: str, writes: str) -> dict:
        script = [str(HERE / "former_job.py"), version, writes]
        return Job(folder / "model", ENGINE, [ROUND], script, cache).run(folder / name)

    keys = [compiled(cache)]
    for name, version, writes in (("former", "1", "1"), ("current", "2", "0")):
        agreement = compare(reference, run(name, version, writes)["rounds"][0]["tokens"])
        print(f"{name}: {agreement}")
        assert agreement.agrees, str(agreement)
        keys.append(compiled(cache))
        assert keys[-1] > keys[-2], f"{name} compiled nothing of its own"
    stale = run("control", "1", "0")["rounds"][0]["tokens"]
    assert compiled(cache) == keys[-1]
    assert not compare(reference, stale).agrees
