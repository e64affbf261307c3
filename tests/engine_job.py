"""Runs one vLLM engine in this process and reports what it did: ``engine_job.py JOB RESULT``.

An engine start costs seconds on the CPU and minutes on a GPU, so one job carries several rounds of
prompts, and tests look at the rounds of one result. The job is a JSON object:

``model``, ``engine``
    Folder of the checkpoint; keyword arguments of ``vllm.LLM``.
``broken``
    ``prefill``, ``decode`` or ``prefix_decode``: that kernel computes nothing from the start.
``watch_groups``
    Note the most groups of requests that shared pages in one plan, as ``groups`` of the result.
``spans``
    Bidirectional spans that vLLM's runner V1 shall find in every prompt of a model with
    ``is_mm_prefix_lm``, instead of those of its images.
``linear_by_row``
    Whether linear layers take one row at a time: torch's products of several rows on a CPU round
    differently from those of one.
``rounds``
    A list of ``{"prompts", "max_tokens", "sabotage", "fresh", "logprobs"}``. ``sabotage`` breaks
    attention on purpose (see ``SABOTAGE``), ``fresh`` empties the prefix cache first. ``lora`` is
    the folder of an adapter. ``images`` lists the files of each prompt's pictures; the round then
    says as ``prompts`` what vLLM made of these. ``before`` is a list of ``[method, arguments]``
    called on the ``LLM``, or ``["trample", [GiB]]``.

The result holds, for every round, ``tokens``, ``cached`` (prompt tokens found in the prefix cache),
``gaps`` (with ``logprobs``: distance of the two best), ``counters`` (what that round added),
``drafts`` and ``accepted`` (tokens of a drafter) and ``seconds``; and for the engine
``start_counters``, ``block_size``, ``backend``, ``runner`` and ``preemptions``, and ``layers``:
page size, window, soft cap, sinks, ALiBi and a shared cache of each of our layers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch


def attend_plainly(impl, query, kv_cache, metadata, output, unseen=0):
    """Causal attention without window, soft cap, sinks and ALiBi; the oldest keys may be unseen."""
    k_cache, v_cache = kv_cache.split(impl.head_size, dim=-1)
    group = impl.num_heads // impl.num_kv_heads
    starts = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if end == begin:
            continue
        pages = metadata.block_table[row, : -(-seq_len // k_cache.shape[2])].long()
        # [keys, KV heads, head size], one KV head for each query head
        keys, values = (
            cache[pages].transpose(1, 2).flatten(0, 1)[:seq_len].float().repeat_interleave(group, 1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), keys) * impl.scale
        last = torch.arange(seq_len - (end - begin), seq_len, device=query.device)
        place = torch.arange(seq_len, device=query.device)
        visible = (place <= last[:, None]) & ((place >= unseen) | (last[:, None] < unseen))
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        output[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(output.dtype)
    return output


def attend_without_oldest_key(*args):
    """Attention whose window is one key too short: the oldest key is never seen."""
    return attend_plainly(*args, unseen=1)


DRAFTS = {
    "drafts": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}

SABOTAGE: dict[str, Callable] = {
    "zeros": lambda impl, query, kv_cache, metadata, output: output.zero_(),
    "window": attend_without_oldest_key,
    "plain": attend_plainly,
    # Layers of a drafter only; the target has one.
    "drafter": lambda impl, query, kv_cache, metadata, output: output.zero_(),
}


@contextmanager
def sabotaged(kind: str | None):
    """Replace our attention by a broken one for a while."""
    if kind is None:
        yield
        return
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed

    from tilewise.integration.impl import TilewiseImpl

    broken, forward = SABOTAGE[kind], TilewiseImpl.forward

    def forward_broken(self, layer, query, key, value, kv_cache, metadata, output, *rest, **named):
        if kind == "drafter" and ".layers.0." in f".{layer.layer_name}":
            return forward(
                self, layer, query, key, value, kv_cache, metadata, output, *rest, **named
            )
        with gpu_sync_allowed():
            return broken(self, query, kv_cache, metadata, output)

    TilewiseImpl.forward = forward_broken
    try:
        yield
    finally:
        TilewiseImpl.forward = forward


def break_kernel(name: str | None) -> None:
    """Replace a kernel by one that computes nothing, before anything is started."""
    if name is None:
        return
    from tilewise import launches

    attribute = f"{name}_attention"
    if not hasattr(launches, attribute):
        raise ValueError(f"broken={name!r}; accepted: prefill, decode, prefix_decode")
    setattr(launches, attribute, lambda *_, **__: None)


def watch_groups() -> list[int]:
    """Groups of requests that share pages, in every launch from now on; on a CPU only."""
    from tilewise import launches

    launch, seen = launches.prefix_decode_attention, [0]

    def watched(*args, **named):
        seen.append(int(args[10][1]))  # the header of what is shared
        launch(*args, **named)

    launches.prefix_decode_attention = watched
    return seen


def trample(gib: int) -> None:
    """Fill memory of the GPU that is free now with NaN, or a sleeping engine may find its own."""
    torch.full((gib << 28,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def show_spans(spans: list[list[int]]) -> None:
    """Let every prompt have these spans; before an engine is made."""
    from vllm.v1.worker import gpu_model_runner

    found = [(first, last) for first, last in spans]
    gpu_model_runner.compute_mm_prefix_ranges = lambda features, **_: {
        row: found for row in range(len(features))
    }


def run_round(llm, spec: dict) -> dict:
    """Generate greedily for one round's prompts."""
    from vllm import SamplingParams

    from tilewise import counters

    if spec.get("fresh"):
        llm.reset_prefix_cache()
    for method, arguments in spec.get("before", ()):
        (trample if method == "trample" else getattr(llm, method))(*arguments)
    sampling = SamplingParams(
        temperature=0,
        max_tokens=spec["max_tokens"],
        ignore_eos=True,
        logprobs=2 if spec.get("logprobs") else None,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in spec["prompts"]]
    for prompt, files in zip(prompts, spec.get("images", ()), strict=False):
        prompt |= _pictures(files)
    before, started = counters.snapshot(), time.monotonic()
    drafts = {name: _metric(llm, metric) for name, metric in DRAFTS.items()}
    with sabotaged(spec.get("sabotage")):
        answers = llm.generate(prompts, sampling, use_tqdm=False, lora_request=_adapter(spec))
    after = counters.snapshot()
    return {
        "tokens": [list(a.outputs[0].token_ids) for a in answers],
        "prompts": [a.prompt_token_ids for a in answers] if spec.get("images") else None,
        "cached": [a.num_cached_tokens for a in answers],
        "gaps": [_gaps(a.outputs[0].logprobs) for a in answers] if spec.get("logprobs") else None,
        "counters": {name: n - before.get(name, 0) for name, n in after.items()},
        "seconds": round(time.monotonic() - started, 2),
        **{name: _metric(llm, metric) - drafts[name] for name, metric in DRAFTS.items()},
    }


def _pictures(files: list[str]) -> dict:
    """What a prompt with these pictures has besides its tokens."""
    from PIL import Image

    return {"multi_modal_data": {"image": [Image.open(file) for file in files]}} if files else {}


def _adapter(spec: dict):
    """The round's LoRA adapter, if it names one."""
    if "lora" not in spec:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, spec["lora"])


def _gaps(logprobs) -> list[float]:
    """Distance of the two best log probabilities at every step."""
    gaps = []
    for step in logprobs:
        best = sorted((entry.logprob for entry in step.values()), reverse=True)
        gaps.append(best[0] - best[1])
    return gaps


def describe_engine(llm) -> dict:
    """What the engine chose; the worker's part only when the engine core runs in this process."""
    from vllm.model_executor.layers.attention import Attention as AttentionLayer

    config = llm.llm_engine.vllm_config
    described = {
        "block_size": config.cache_config.block_size,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "preemptions": _metric(llm, "vllm:num_preemptions"),
        "drafts": _metric(llm, "vllm:spec_decode_num_draft_tokens"),
    }
    worker = llm.llm_engine.model_executor.driver_worker.worker
    # Experts and states of other kinds stand there as well.
    context = config.compilation_config.static_forward_context
    layers = {name: x for name, x in context.items() if isinstance(x, AttentionLayer)}
    modules = {cls.__module__ for cls in type(worker.model_runner).__mro__}
    described["runner"] = "v2" if "vllm.v1.worker.gpu.model_runner" in modules else "v1"
    described["impls"] = sorted({type(layer.impl).__name__ for layer in layers.values()})
    described["backends"] = sorted({layer.attn_backend.__name__ for layer in layers.values()})
    described["layers"] = [describe_layer(layer) for layer in layers.values()]
    return described


def describe_layer(layer) -> dict:
    """What one layer of ours computes besides plain attention; nothing of others' layers."""
    impl = layer.impl
    if type(impl).__name__ != "TilewiseImpl":
        return {}
    return {
        "page_size": layer.kv_cache.shape[2],
        "window": impl.window,
        "soft_cap": impl.soft_cap,
        "sinks": impl.sinks is not None,
        "alibi": impl.alibi_slopes is not None,
        "shares_kv": layer.kv_sharing_target_layer_name is not None,
    }


def take_linear_layers_by_row() -> None:
    """Give each row of a linear layer the bits that it has alone; before vLLM is imported."""
    linear = torch.nn.functional.linear

    def by_row(x, weight, bias=None):
        rows = [linear(row[None], weight, bias) for row in x.reshape(-1, x.shape[-1])]
        if not rows:
            return linear(x, weight, bias)
        return torch.cat(rows).reshape(*x.shape[:-1], weight.shape[0])

    torch.nn.functional.linear = by_row


def _metric(llm, name: str) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == name)


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    if job.get("linear_by_row"):
        take_linear_layers_by_row()
    from vllm import LLM

    from tilewise import counters

    break_kernel(job.get("broken"))
    groups = watch_groups() if job.get("watch_groups") else []
    if job.get("spans"):
        show_spans(job["spans"])
    started = time.monotonic()
    llm = LLM(model=job["model"], seed=0, disable_log_stats=False, **job["engine"])
    result = {"start_seconds": round(time.monotonic() - started, 2)}
    result["start_counters"] = counters.snapshot()
    result["rounds"] = [run_round(llm, spec) for spec in job["rounds"]]
    result["groups"] = max(groups, default=None)
    result |= describe_engine(llm)
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
