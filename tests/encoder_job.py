"""Runs one encoder model through vLLM in this process: ``encoder_job.py JOB RESULT``.

The job is a JSON object: ``model`` and ``engine`` as in ``engine_job``, ``prompts`` (token ids).
The result holds ``vectors``, those of every token of every prompt, ``broken``, the same where
attention returns zeros, and ``counters``, ``impls`` and ``windows`` (one for each layer).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import torch


def attend_to_nothing(self, layer, query, key, value, kv_cache, metadata, output, **_):
    return output.zero_()


def main(job_path: str, result_path: str) -> None:
    from vllm import LLM
    from vllm.config import PoolerConfig
    from vllm.model_executor.layers.attention import Attention

    from tilewise import counters
    from tilewise.integration.impl import TilewiseImpl

    job = json.loads(Path(job_path).read_text())
    pooler = PoolerConfig(task="token_embed", use_activation=False)
    llm = LLM(model=job["model"], runner="pooling", pooler_config=pooler, seed=0, **job["engine"])
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]

    def vectors() -> list:
        answers = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
        return [torch.as_tensor(answer.outputs.data).tolist() for answer in answers]

    before = counters.snapshot()
    good = vectors()
    after = counters.snapshot()
    with mock.patch.object(TilewiseImpl, "forward", attend_to_nothing):
        broken = vectors()
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    layers = [layer for layer in context.values() if isinstance(layer, Attention)]
    result = {
        "vectors": good,
        "broken": broken,
        "counters": {name: n - before.get(name, 0) for name, n in after.items()},
        "impls": sorted({type(layer.impl).__name__ for layer in layers}),
        "windows": [getattr(layer.impl, "window", None) for layer in layers],
    }
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
