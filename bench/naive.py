"""Attention as a textbook writes it, on torch's matmuls: the whole score matrix in memory."""

from __future__ import annotations

from functools import partial

import torch

from tilewise.bench.cases import Case
from tilewise.bench.inputs import CaseInputs
from tilewise.bench.providers import Candidate, Provider, Runner

BF16_BYTES = 2


def naive_bytes(case: Case) -> int:
    """Return the bytes that `Naive` moves at least, in closed form.

    With ``T`` new tokens, ``H`` query heads of size ``D`` and ``S`` scores (a request's tokens
    squared, times the heads), in bf16: Q, K and V are read and O is written, read and written
    (the last two to order it by token), ``6 T H D`` elements; scores are written by the first
    matmul, read and written by the mask, read and written by the softmax and read by the second
    matmul, ``6 S`` elements.
    """
    rows = case.num_tokens * case.num_q_heads * case.head_dim
    scores = case.num_q_heads * sum(length * length for length in case.q_lens)
    return BF16_BYTES * 6 * (rows + scores)


class Naive(Provider):
    """``softmax(mask(Q K^T)) V`` in three torch calls and a mask, for prompts of one length.

    K and V are given to it dense and repeated for every query head, the scale is in Q, and the
    buffers are there: what it is timed for is the passes over the score matrix.
    """

    name = "naive"

    def unsupported(self, case: Case) -> str | None:
        """Only whole prompts of equal lengths, causal and in bf16."""
        if case.q_lens != case.kv_lens or len(set(case.q_lens)) != 1:
            return "naive attention takes whole prompts of one length"
        shaped = case.sinks or case.softcap or case.window is not None
        if shaped or case.kv_itemsize == 1:
            return "naive attention takes neither sinks, soft caps, windows nor fp8"
        return None

    def candidates(self, case: Case, inputs: CaseInputs) -> dict[str, Candidate]:
        """There is one."""
        return {"torch": partial(self._build, case, inputs)}

    def _build(self, case: Case, inputs: CaseInputs) -> Runner:
        batch, length = case.num_reqs, case.q_lens[0]
        heads, dim = case.num_q_heads, case.head_dim
        shape = (batch, length, heads, dim)
        group = heads // case.num_kv_heads

        def by_head(x: torch.Tensor) -> torch.Tensor:
            return x.view(shape).transpose(1, 2).contiguous().view(batch * heads, length, dim)

        queries = [by_head(q * inputs.scale) for q in inputs.q]
        keys, values = [], []
        for copy in range(inputs.copies):
            k, v = (x.repeat_interleave(group, 1) for x in inputs.keys_values(copy))
            keys.append(by_head(k).transpose(1, 2))
            values.append(by_head(v))
        scores = torch.empty(
            (batch * heads, length, length), dtype=torch.bfloat16, device=inputs.device
        )
        weights, out = torch.empty_like(scores), torch.empty_like(queries[0])
        hidden = torch.ones((length, length), dtype=torch.bool, device=inputs.device).triu(1)

        def call(copy: int) -> None:
            torch.matmul(queries[copy], keys[copy], out=scores)
            scores.masked_fill_(hidden, float("-inf"))
            torch.softmax(scores, -1, out=weights)
            torch.matmul(weights, values[copy], out=out)
            by_token = out.view(batch, heads, length, dim).transpose(1, 2)
            inputs.out[copy].view(shape).copy_(by_token)

        return Runner([partial(call, copy) for copy in range(inputs.copies)], lambda: "torch")
