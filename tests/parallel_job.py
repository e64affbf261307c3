"""Runs one vLLM engine of several ranks and reports what each did: ``parallel_job.py JOB RESULT``.

The engine is the one of ``vllm serve`` (``AsyncLLM``), the only one that runs data parallel for
dense models. The job is a JSON object:

``model``, ``engine``
    Folder of the checkpoint; keyword arguments of ``AsyncEngineArgs``.
``rounds``
    A list of ``{"prompts", "max_tokens", "logprobs", "broken"}``. ``broken`` is a pair: the
    index of an engine and a rank in it, whose attention gives zeros during this round.

The result holds, for every round, ``tokens`` and ``gaps`` (with ``logprobs``: distance of the two
best), and ``ranks``: what every worker says of itself, see ``RankProbe.describe_rank``.

Under data parallelism the prompts take turns among the engines.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path


class RankProbe:
    """Mixed into vLLM's worker, and called in every rank."""

    def _place(self) -> list[int]:
        return [self.vllm_config.parallel_config.data_parallel_index, self.rank]

    def describe_rank(self) -> dict:
        """Who this rank is, which backend its layers have, and what it counted."""
        import triton

        from tilewise import counters

        context = self.vllm_config.compilation_config.static_forward_context
        layers = {name: x for name, x in context.items() if hasattr(x, "attn_backend")}
        return {
            "place": self._place(),
            "pid": os.getpid(),
            "device": str(self.device),
            "layers": sorted(layers),
            "backends": sorted({x.attn_backend.__name__ for x in layers.values()}),
            "cudagraph_mode": str(self.vllm_config.compilation_config.cudagraph_mode),
            "triton_cache": triton.knobs.cache.dir,
            "counters": counters.snapshot(),
        }

    def break_attention(self, place: list[int] | None) -> bool:
        """Let attention give zeros in one rank, or in none; whether it is this one.

        The right result is computed first: other ranks may wait for its part of an exchange.
        """
        from tilewise.integration.impl import TilewiseImpl

        forward = getattr(TilewiseImpl.forward, "unbroken", TilewiseImpl.forward)

        def zeros(impl, *args, **kwargs):
            return forward(impl, *args, **kwargs).zero_()

        zeros.unbroken = forward
        broken = place == self._place()
        TilewiseImpl.forward = zeros if broken else forward
        return broken


async def ask_ranks(engine, method: str, *args) -> list:
    """Call a method of every worker of every engine."""
    answers = await engine.engine_core.call_utility_all_async(
        "collective_rpc", method, None, args, {}
    )
    return [answer for ranks in answers for answer in ranks]


async def run_round(engine, spec: dict, num_engines: int, number: int) -> dict:
    """Generate greedily for one round's prompts, all at once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    broken = await ask_ranks(engine, "break_attention", spec.get("broken"))
    assert sum(broken) == (spec.get("broken") is not None), broken
    # Or a broken round would read keys of a sound one.
    await engine.reset_prefix_cache()
    sampling = SamplingParams(
        temperature=0,
        max_tokens=spec["max_tokens"],
        ignore_eos=True,
        logprobs=2 if spec.get("logprobs") else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def answer(index: int, prompt: list[int]):
        rank = index % num_engines if num_engines > 1 else None
        request = engine.generate(
            {"prompt_token_ids": prompt}, sampling, f"{number}-{index}", data_parallel_rank=rank
        )
        async for done in request:
            last = done.outputs[0]
        return last

    answers = await asyncio.gather(*(answer(i, p) for i, p in enumerate(spec["prompts"])))
    gaps = None
    if spec.get("logprobs"):
        best = [[sorted(x.logprob for x in s.values())[-2:] for s in a.logprobs] for a in answers]
        gaps = [[high - low for low, high in row] for row in best]
    return {"tokens": [list(a.token_ids) for a in answers], "gaps": gaps}


async def run(job: dict) -> dict:
    """Start the engine, run all rounds, ask the ranks, stop."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=job["model"], seed=0, worker_extension_cls="parallel_job.RankProbe", **job["engine"]
    )
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        engines = job["engine"].get("data_parallel_size", 1)
        rounds = [
            await run_round(engine, spec, engines, number)
            for number, spec in enumerate(job["rounds"])
        ]
        return {"rounds": rounds, "ranks": await ask_ranks(engine, "describe_rank")}
    finally:
        engine.shutdown()


def main(job_path: str, result_path: str) -> None:
    result = asyncio.run(run(json.loads(Path(job_path).read_text())))
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
