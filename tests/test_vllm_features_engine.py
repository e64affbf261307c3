"""Other features of vLLM with our attention, in a real engine on the CPU.

LoRA, drafters (EAGLE and a draft model), and a KV connector that stores pages on disk. Tokens are
held to Hugging Face's; whether a drafter was attended to right shows in what is accepted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from agreement import compare, greedy_reference
from safetensors.torch import load_file, save_file
from test_engine import SMALL_ENGINE, prompts_of, run_job
from tiny_addons import merge_lora, write_eagle, write_lora, write_mtp
from tiny_model import TinyLlama

pytestmark = pytest.mark.vllm

ENGINE = {**SMALL_ENGINE, "dtype": "float32"}
PROMPTS = prompts_of([1, 17, 40, 90], shared=9)
TOKENS = 6


def check_equal(model: Path, prompts, done: dict, num_tokens: int = TOKENS) -> None:
    """Every row's tokens are Hugging Face's."""
    agreement = compare(greedy_reference(model, prompts, num_tokens), done["tokens"])
    assert agreement.num_equal == len(prompts), str(agreement)


# -- LoRA -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lora_adapters_are_attended_with(tmp_path):
    """With and without, in one engine: the prefix cache must not take one for the other."""
    shape = TinyLlama()
    model = shape.write(tmp_path / "model")
    adapter = write_lora(shape, tmp_path / "adapter")
    plain = {"prompts": PROMPTS, "max_tokens": TOKENS}
    adapted = {**plain, "lora": str(adapter)}
    job = {
        "model": str(model),
        "engine": {**ENGINE, "enable_lora": True, "max_lora_rank": 8},
        "rounds": [plain, adapted, plain, adapted],
    }
    result = run_job(tmp_path, job)
    assert result["impls"] == ["TilewiseImpl"]
    merged = merge_lora(shape, adapter, tmp_path / "merged")
    for done, reference in zip(result["rounds"], (model, merged) * 2, strict=True):
        check_equal(reference, PROMPTS, done)
    assert max(result["rounds"][3]["cached"]) >= 64
    assert result["rounds"][0]["tokens"] != result["rounds"][1]["tokens"]


# -- drafters -------------------------------------------------------------------------------------

DRAFTED = prompts_of([30, 60, 90, 150], shared=9)
DRAFTED_TOKENS = 16


def drafting_job(model: Path, folder: Path, speculative: dict, rounds: list[dict]) -> dict:
    engine = {**ENGINE, "speculative_config": {"num_speculative_tokens": 4, **speculative}}
    base = {"prompts": DRAFTED, "max_tokens": DRAFTED_TOKENS, "fresh": True}
    job = {"model": str(model), "engine": engine, "rounds": [{**base, **r} for r in rounds]}
    return run_job(folder, job)


@pytest.mark.slow
def test_eagle_drafts_are_accepted(tmp_path):
    """A drafter made to say what its target says; one whose attention is broken is not believed."""
    shape = TinyLlama(num_layers=1)
    model = shape.write(tmp_path / "model")
    drafter = write_eagle(shape, model, tmp_path / "eagle")
    rounds = [{}, {"sabotage": "drafter"}]
    result = drafting_job(model, tmp_path, {"method": "eagle", "model": str(drafter)}, rounds)
    good, broken = result["rounds"]
    for done in (good, broken):
        check_equal(model, DRAFTED, done, DRAFTED_TOKENS)
    assert good["accepted"] >= 0.5 * good["drafts"] > 0
    assert broken["accepted"] < 0.25 * broken["drafts"]
    # Draft steps after the first plan again without a new build.
    counts = good["counters"]
    steps = sum(n for name, n in counts.items() if name.startswith("steps{"))
    assert counts["launches{kernel=plan}"] > steps


@pytest.mark.slow
def test_a_draft_model_equal_to_its_target_is_always_right(tmp_path):
    model = TinyLlama(seed=4).write(tmp_path / "model")
    speculative = {"method": "draft_model", "model": str(model)}
    (done,) = drafting_job(model, tmp_path, speculative, [{}])["rounds"]
    check_equal(model, DRAFTED, done, DRAFTED_TOKENS)
    # The last drafts of a row may reach past its end.
    assert done["drafts"] > 0
    assert done["accepted"] >= done["drafts"] - 4 * len(DRAFTED)


@pytest.mark.slow
def test_a_module_for_several_tokens_is_accepted(tmp_path):
    """MTP: a block of the model itself drafts; with its attention broken it is not believed."""
    shape, reference = TinyLlama(num_layers=1, hidden_size=256), tmp_path / "reference"
    model = write_mtp(shape, tmp_path / "model", reference)
    rounds = [{}, {"sabotage": "drafter"}]
    good, broken = drafting_job(model, tmp_path, {"method": "mtp"}, rounds)["rounds"]
    for done in (good, broken):
        check_equal(reference, DRAFTED, done, DRAFTED_TOKENS)
    assert good["accepted"] >= 0.5 * good["drafts"] > 0
    assert broken["accepted"] < 0.25 * broken["drafts"]


# -- KV connectors --------------------------------------------------------------------------------


def connector_job(model: Path, folder: Path, store: Path, rounds: list[dict]) -> dict:
    """vLLM's example connector writes a prompt's pages to files, and reads them for its like."""
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }
    # It knows no chunked prefill: a prompt is stored after its first step.
    engine = {**ENGINE, "max_num_batched_tokens": 512, "kv_transfer_config": transfer}
    base = {"prompts": PROMPTS, "max_tokens": TOKENS, "fresh": True}
    folder.mkdir()
    job = {"model": str(model), "engine": engine, "rounds": [{**base, **r} for r in rounds]}
    return run_job(folder, job)


@pytest.mark.slow
def test_pages_come_back_from_a_connector(tmp_path):
    """Another engine attends to pages that it never computed."""
    model, store = TinyLlama(seed=5).write(tmp_path / "model"), tmp_path / "store"
    store.mkdir()
    first = connector_job(model, tmp_path / "first", store, [{}])
    second = connector_job(model, tmp_path / "second", store, [{}])
    (computed,), (loaded,) = first["rounds"], second["rounds"]
    assert computed["cached"] == [0] * len(PROMPTS)
    assert loaded["cached"] == [0, 0, 0, 64]
    for done in (computed, loaded):
        check_equal(model, PROMPTS, done)
    # What was loaded is attended to: other pages, other tokens.
    pages = list(store.rglob("*.safetensors"))
    assert pages
    for path in pages:
        save_file({name: torch.zeros_like(x) for name, x in load_file(path).items()}, path)
    (emptied,) = connector_job(model, tmp_path / "third", store, [{}])["rounds"]
    assert emptied["cached"] == loaded["cached"]
    assert emptied["tokens"][:3] == loaded["tokens"][:3]
    assert emptied["tokens"][3] != loaded["tokens"][3]
