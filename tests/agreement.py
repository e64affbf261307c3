"""When two engines' tokens agree.

In fp32 they are equal. In fp16 and bf16 they are equal up to the first step where the reference's
two best logits lie closer than ``TIE_FACTOR`` times the logit error that torch itself makes in
that dtype: there either token is right, and the texts part. A row whose tokens part at such a step
is a tie; the share of ties is reported and must stay below ``MAX_TIE_SHARE``, or the comparison
says nothing. Tokens that part anywhere else are a mismatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

TIE_FACTOR = 4.0
MAX_TIE_SHARE = 0.20


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of a trusted model, and how sure it was of each.

    Attributes
    ----------
    tokens : list of list of int
        New tokens of every row.
    gaps : list of list of float
        Distance of the two best logits, for every row and step.
    logit_error : float
        Error of torch's logits in the compared dtype; 0 for fp32.
    """

    tokens: list[list[int]]
    gaps: list[list[float]]
    logit_error: float = 0.0


@dataclass
class Agreement:
    """Outcome of a comparison; ``agrees`` is the verdict, ``str()`` the report."""

    num_rows: int = 0
    num_equal: int = 0
    ties: list[tuple[int, int, float]] = field(default_factory=list)
    mismatches: list[tuple[int, int, float]] = field(default_factory=list)
    threshold: float = 0.0

    @property
    def tie_share(self) -> float:
        """Share of the rows that ended in a tie."""
        return len(self.ties) / max(self.num_rows, 1)

    @property
    def agrees(self) -> bool:
        """No row parts outside a tie, and ties are few."""
        return self.num_rows > 0 and not self.mismatches and self.tie_share < MAX_TIE_SHARE

    def __str__(self) -> str:
        text = (
            f"{self.num_equal} of {self.num_rows} rows equal, {len(self.ties)} ended in a tie "
            f"({self.tie_share:.0%}; a gap below {self.threshold:.3g} is a tie)"
        )
        for row, step, gap in self.mismatches:
            text += f"; row {row} differs at step {step}, where the gap is {gap:.3g}"
        return text


def compare(reference: Reference, tokens: Sequence[Sequence[int]]) -> Agreement:
    """Compare an engine's tokens with the reference's.

    Parameters
    ----------
    reference : Reference
        From ``greedy_reference``, or from another engine.
    tokens : sequence of sequence of int
        New tokens of the same rows; a row of another length is a mismatch where it ends.

    Returns
    -------
    Agreement
        The verdict and what it rests on.
    """
    if len(tokens) != len(reference.tokens):
        raise ValueError(f"{len(tokens)} rows given, the reference has {len(reference.tokens)}")
    result = Agreement(num_rows=len(tokens), threshold=TIE_FACTOR * reference.logit_error)
    for row, (expected, got) in enumerate(zip(reference.tokens, tokens, strict=True)):
        step = _first_difference(expected, got)
        if step is None:
            result.num_equal += 1
            continue
        inside = step < min(len(expected), len(got))
        gap = reference.gaps[row][step] if step < len(expected) else float("nan")
        parted = result.ties if inside and gap < result.threshold else result.mismatches
        parted.append((row, step, gap))
    print("tokens:", result)  # JUnit's report keeps it: how many rows ended in a tie
    return result


def _first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """First step at which two rows differ, in a token or in length; None if they are equal."""
    for step, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return step
    return None if len(expected) == len(got) else min(len(expected), len(got))


@torch.inference_mode()
def greedy_reference(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Reference:
    """Decode greedily with Hugging Face in fp32, and measure torch's logit error in ``dtype``.

    Parameters
    ----------
    folder : Path
        A checkpoint; its weights are rounded to ``dtype`` first, so that only arithmetic differs.
    prompts : sequence of sequence of int
        Token ids.
    num_tokens : int
        New tokens a row; an end-of-text token does not stop it.
    dtype : torch.dtype
        The dtype of the engine that will be compared.
    device : str
        Where to compute.
    """
    model = _load(folder, dtype, device).float()
    tokens = [_decode(model, prompt, num_tokens) for prompt in prompts]
    exact = _all_forced_logits(model, prompts, tokens)
    best = [logits.topk(2, dim=-1).values for logits in exact]
    gaps = [(pair[:, 0] - pair[:, 1]).tolist() for pair in best]
    if dtype == torch.float32:
        return Reference(tokens, gaps)
    # Loaded anew: narrowing the wide model would narrow its rotary tables too.
    rounded = _all_forced_logits(_load(folder, dtype, device), prompts, tokens)
    return Reference(tokens, gaps, logit_error(exact, rounded))


def _load(folder: Path, dtype: torch.dtype, device: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    attention = "eager" if device == "cpu" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.to(device).eval()


def logit_error(exact: Sequence[torch.Tensor], rounded: Sequence[torch.Tensor]) -> float:
    """Error of one dtype's logits: root mean square over the vocabulary, worst step of all rows.

    Parameters
    ----------
    exact, rounded : sequence of Tensor[num_steps, vocab_size]
        Logits of the same rows and steps.
    """
    return max(
        float((low.float() - full.float()).square().mean(dim=-1).sqrt().max())
        for full, low in zip(exact, rounded, strict=True)
    )


def _decode(model: torch.nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens of one row, one step at a time over Hugging Face's own cache."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(prompt)], device=device)
    cache, row = None, []
    for _ in range(num_tokens):
        step = model(ids, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        ids = step.logits[:, -1].argmax(dim=-1, keepdim=True)
        row.append(int(ids))
    return row


def _all_forced_logits(
    model: torch.nn.Module, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Logits ``[steps, vocab_size]`` from which each token of each row is chosen, on the CPU."""
    device = next(model.parameters()).device
    logits = []
    for prompt, row in zip(prompts, tokens, strict=True):
        ids = torch.tensor([[*prompt, *row[:-1]]], device=device)
        logits.append(model(ids, logits_to_keep=len(row)).logits[0].float().cpu())
    return logits
