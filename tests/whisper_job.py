"""Runs a Whisper model through vLLM in this process: ``whisper_job.py JOB RESULT``.

The job is a JSON object: ``model`` and ``engine`` as in ``engine_job``, ``prompts`` (token ids of
the decoder), ``max_tokens``, and ``audio``, a file of samples [prompts, samples] at 16 kHz that
torch saved. The result holds ``tokens``, those of every prompt, ``broken``, the same where cross
attention returns zeros, ``counters``, and ``impls`` (base classes, by the name of a layer).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import torch


def main(job_path: str, result_path: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.attention import Attention

    from tilewise import counters
    from tilewise.integration.impl import TilewiseImpl

    job = json.loads(Path(job_path).read_text())
    llm = LLM(model=job["model"], seed=0, limit_mm_per_prompt={"audio": 1}, **job["engine"])
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    prompts = [
        {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (audio, 16000)}},
            "decoder_prompt": {"prompt_token_ids": prompt},
        }
        for prompt, audio in zip(job["prompts"], torch.load(job["audio"]).numpy(), strict=True)
    ]

    def tokens() -> list[list[int]]:
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    forward = TilewiseImpl.forward

    def forget_the_audio(self, layer, query, key, value, kv_cache, metadata, output, *rest, **more):
        if self.is_cross:
            return output.zero_()
        return forward(self, layer, query, key, value, kv_cache, metadata, output, *rest, **more)

    before = counters.snapshot()
    good = tokens()
    after = counters.snapshot()
    with mock.patch.object(TilewiseImpl, "forward", forget_the_audio):
        broken = tokens()
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    result = {
        "tokens": good,
        "broken": broken,
        "counters": {name: n - before.get(name, 0) for name, n in after.items()},
        "impls": {
            name: [cls.__name__ for cls in type(layer.impl).__mro__]
            for name, layer in context.items()
            if isinstance(layer, Attention)
        },
    }
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
