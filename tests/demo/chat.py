"""Chat with a real model through tilewise in a real vLLM engine, in this process.

Two rounds of conversations run as two batches. The answers must be the tokens that Hugging
Face's greedy decoding gives, and tilewise's kernels must have been the ones that ran.
"""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from demo_common import (
    BACKEND,
    FIRST_QUESTION,
    ROOT,
    Checks,
    engine_environment,
    pick_device,
    say,
    write_report,
)

# The questions of each conversation, each with a word that a right answer holds. Answers are
# short: in the interpreter, a token of a batch takes seconds.
CONVERSATIONS = (
    ((FIRST_QUESTION, "Paris"), ("Which river runs through it? Answer in one sentence.", "Seine")),
    (
        ("What is 2 plus 2? Answer with one number.", "4"),
        ("Add 3 to that. Answer with one number.", "7"),
    ),
    (("What is the opposite of hot? Answer with one word.", "cold"),),
)
# A GPU has time for more. That also keeps one tie between two tokens, which bf16 may bring,
# below the share that the agreement rule allows.
GPU_CONVERSATIONS = (
    *CONVERSATIONS,
    (("How many legs does a spider have? Answer in one sentence.", "8"),),
    (
        ("What is the capital of Italy? Answer in one sentence.", "Rome"),
        ("And of Spain? Answer in one sentence.", "Madrid"),
    ),
    (
        ("What is the opposite of day? Answer with one word.", "night"),
        ("And of big? Answer with one word.", "small"),
    ),
    (("How do you say hello in French?", ""), ("And in Spanish?", "")),
)
MAX_ANSWER_TOKENS = 14

Messages = list[dict[str, str]]


def engine_arguments(device: str) -> dict[str, Any]:
    """Return the arguments of vllm.LLM: small on a CPU, vLLM's defaults on a GPU."""
    common = {
        "max_model_len": 512,
        "max_num_seqs": 4 if device == "cpu" else 16,
        "enable_prefix_caching": True,
        "seed": 0,
        "disable_log_stats": False,
    }
    if device == "cpu":
        return common | {
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_batched_tokens": 256,
            "kv_cache_memory_bytes": 128 << 20,
        }
    # The cache's size is given; the rest of a shared GPU is not asked for.
    sizes = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
    return common | sizes | {"dtype": "bfloat16"}


def run_chats(model: str, device: str) -> dict[str, Any]:
    """Run the conversations and return what was said and what ran."""
    started = time.monotonic()
    from vllm import LLM, SamplingParams

    from tilewise import counters

    # The backend's name is a plain argument: inside an attention_config dictionary it would be
    # read before plugins are loaded, when vLLM does not know it yet.
    llm = LLM(model=model, attention_backend=BACKEND, **engine_arguments(device))
    say(f"  engine up after {time.monotonic() - started:.0f} s")
    config = llm.llm_engine.vllm_config
    layers = attention_layers(config)
    sampling = SamplingParams(temperature=0, max_tokens=MAX_ANSWER_TOKENS)

    conversations = CONVERSATIONS if device == "cpu" else GPU_CONVERSATIONS
    chats: list[Messages] = [[] for _ in conversations]
    turns: list[dict[str, Any]] = []
    before = counters.snapshot()
    chatting = time.monotonic()
    for number in range(max(map(len, conversations))):
        asked = [
            (chat, *questions[number])
            for chat, questions in zip(chats, conversations, strict=True)
            if number < len(questions)
        ]
        for chat, question, _ in asked:
            chat.append({"role": "user", "content": question})
        outputs = llm.chat([list(chat) for chat, *_ in asked], sampling, use_tqdm=False)
        for (chat, question, expected_word), output in zip(asked, outputs, strict=True):
            answer = output.outputs[0]
            turns.append(
                {
                    "messages": list(chat),
                    "question": question,
                    "expected_word": expected_word,
                    "answer": answer.text.strip(),
                    "prompt_ids": list(output.prompt_token_ids),
                    "ids": list(answer.token_ids),
                }
            )
            chat.append({"role": "assistant", "content": answer.text})
            say(f"    user:  {question}")
            say(f"    model: {answer.text.strip()}")
    seconds = time.monotonic() - chatting
    after = counters.snapshot()
    tokens = sum(len(turn["ids"]) for turn in turns)
    say(f"  {len(turns)} answers, {tokens} tokens, {seconds:.0f} s")
    return {
        "turns": turns,
        "layers": layers,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "counters": {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)},
        "chat_seconds": round(seconds, 1),
    }


def attention_layers(config: Any) -> dict[str, int]:
    """Count the model's attention layers by the class that computes them."""
    found: dict[str, int] = {}
    for layer in config.compilation_config.static_forward_context.values():
        impl = getattr(layer, "impl", None)
        if impl is not None:
            name = f"{type(impl).__module__}.{type(impl).__qualname__}"
            found[name] = found.get(name, 0) + 1
    return found


def load_agreement() -> ModuleType:
    """Load the agreement rule that the tests use, tests/agreement.py."""
    spec = importlib.util.spec_from_file_location("agreement", ROOT / "tests" / "agreement.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name while it is being run.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cut_at_end(reference: Any, end_ids: Sequence[int]) -> None:
    """Shorten the reference's rows to the first end-of-text token, where vLLM stops."""
    for row, gaps in zip(reference.tokens, reference.gaps, strict=True):
        length = next((n for n, token in enumerate(row, 1) if token in end_ids), len(row))
        del row[length:], gaps[length:]


def check_tokens(checks: Checks, result: dict[str, Any], model: str, device: str) -> None:
    """Compare every answer with Hugging Face's: equal in fp32, by the agreement rule in bf16."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig

    # vLLM's CPU worker leaves torch with one thread.
    torch.set_num_threads(os.cpu_count() or 1)
    agreement = load_agreement()
    turns = result["turns"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    checks.add(
        "the engine saw the prompts that the chat template makes",
        all(
            turn["prompt_ids"]
            == tokenizer.apply_chat_template(
                turn["messages"], add_generation_prompt=True, return_dict=False
            )
            for turn in turns
        ),
    )
    reference = agreement.greedy_reference(
        Path(model),
        [turn["prompt_ids"] for turn in turns],
        MAX_ANSWER_TOKENS,
        getattr(torch, result["dtype"]),
        "cuda" if device == "gpu" else "cpu",
    )
    end = GenerationConfig.from_pretrained(model).eos_token_id
    cut_at_end(reference, end if isinstance(end, list) else [end])
    for turn, row in zip(turns, reference.tokens, strict=True):
        turn["reference"] = tokenizer.decode(row, skip_special_tokens=True).strip()
    outcome = agreement.compare(reference, [turn["ids"] for turn in turns])
    rule = "equal" if result["dtype"] == "float32" else f"in {result['dtype']} agree with"
    checks.add(
        f"tokens {rule} Hugging Face's greedy decoding in fp32", outcome.agrees, str(outcome)
    )


# What computes each phase; the counters have them by these names.
KERNELS = {
    "prefill": ("prefill", "hopper_prefill", "hopper_prefill_kv8", "hopper_prefill_fp8"),
    "decode": ("decode", "hopper_decode", "prefix_decode"),
}


def check_run(checks: Checks, result: dict[str, Any], known_model: bool) -> None:
    """Check what ran: our layers, both phases of our kernels, and sensible answers."""
    ours = {name: n for name, n in result["layers"].items() if name.startswith("tilewise.")}
    checks.add(
        "every attention layer is tilewise's",
        bool(ours) and ours == result["layers"],
        ", ".join(f"{n} x {name}" for name, n in result["layers"].items()),
    )
    counts = result["counters"]
    # A step that is replayed whole launches nothing from Python.
    whole = counts.get("graph_steps{mode=full}", 0)
    for phase, kernels in KERNELS.items():
        steps = sum(counts.get(f"steps{{path={path}}}", 0) for path in (phase, "mixed"))
        launches = {name: counts.get(f"launches{{kernel={name}}}", 0) for name in kernels}
        # Of prefills only vLLM's mode FULL makes whole graphs.
        replayed = whole if phase == "decode" or result["cudagraph_mode"] == "FULL" else 0
        told = [f"{n} launches of {name}" for name, n in launches.items() if n]
        told += [f"{replayed} steps replayed whole"] * bool(replayed)
        checks.add(
            f"a {phase} kernel ran",
            steps > 0 and bool(told),
            f"{steps} steps, " + (", ".join(told) or "nothing launched"),
        )
    if known_model:
        wrong = [t["answer"] for t in result["turns"] if t["expected_word"] not in t["answer"]]
        checks.add("the answers hold the expected words", not wrong, "; ".join(wrong))


def main() -> int:
    """Run the chats, check them, and leave a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder that convert.py made")
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    parser.add_argument("--report", type=Path, default=ROOT / ".demo" / "chat.json")
    parser.add_argument("--any-model", action="store_true", help="expect no certain answers")
    args = parser.parse_args()
    device = pick_device(args.device)
    # Before anything imports triton or vLLM.
    os.environ.update(engine_environment(device), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    started = time.monotonic()
    checks = Checks()
    result = run_chats(args.model, device)
    say(f"  backend {BACKEND}, {result['dtype']}, CUDA graphs: {result['cudagraph_mode']}")
    for name, count in sorted(result["counters"].items()):
        say(f"    {name} {count}")
    check_run(checks, result, known_model=not args.any_model)
    check_tokens(checks, result, args.model, device)
    write_report(args.report, checks, started, **result)
    return 0 if checks.passed else 1


if __name__ == "__main__":
    sys.exit(main())
