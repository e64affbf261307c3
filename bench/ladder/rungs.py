"""The rungs in order, with the problem that each is measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tilewise.bench.ladder import flash1, flash2, flash3, naive, rmsnorm, softmax, split_kv
from tilewise.bench.ladder.problem import Built, Bytes, Matrix, Memory, Problem
from tilewise.bench.ladder.softmax import CHUNK

ONE_QUERY = flash2.Tiles(block_m=16, block_n=128)


@dataclass(frozen=True)
class Rung:
    """One kernel on one problem.

    Parameters
    ----------
    name : str
    kind : str
        What it is compared with: rungs of one kind take turns on the clock.
    problem : Problem or Matrix
    formula, source : str
        Of the predicted bytes, and of the idea.
    count : callable
        Returns the predicted bytes.
    build : callable
        Puts it into memory.
    """

    name: str
    kind: str
    problem: Problem | Matrix
    formula: str
    source: str
    count: Callable[[], Bytes]
    build: Callable[[Memory], Built]


@dataclass(frozen=True)
class Sizes:
    """Problems of one run."""

    softmax: Matrix
    full: Problem
    causal: Problem
    one_query: Problem
    splits: int
    rmsnorm: Matrix
    long: Problem
    chunk: int = CHUNK


MEASURED = Sizes(
    Matrix(16384, 8192),
    Problem(32, 8192, 8192),
    Problem(32, 8192, 8192, causal=True),
    Problem(8, 1, 65536),
    32,
    Matrix(16384, 4096),
    Problem(1, 65536, 65536),
)
# For Triton's interpreter: nothing divides a tile.
SMOKE = Sizes(
    Matrix(5, 300),
    Problem(2, 150, 150, 32),
    Problem(2, 150, 150, 32, causal=True),
    Problem(2, 1, 700, 32),
    3,
    Matrix(5, 200),
    Problem(1, 300, 300, 32),
    chunk=128,
)


def rungs(sizes: Sizes, device: str | torch.device) -> list[Rung]:
    """Return all rungs; `device` decides the product's tiles."""
    return [*_softmaxes(sizes), *_prompts(sizes, device), *_others(sizes)]


def _softmaxes(sizes: Sizes) -> list[Rung]:
    names = {3: "three passes", 2: "online: two passes", 1: "one pass, on chip"}
    return [
        Rung(
            f"softmax, {name}", "softmax", sizes.softmax, softmax.FORMULA, "Milakov 2018",
            partial(softmax.count, sizes.softmax, passes),
            partial(_softmax, sizes.softmax, passes, sizes.chunk),
        )
        for passes, name in names.items()
    ]  # fmt: skip


def _softmax(matrix: Matrix, passes: int, chunk: int, memory: Memory) -> Built:
    return softmax.build(matrix, memory, passes, chunk)


def _prompts(sizes: Sizes, device: str | torch.device) -> list[Rung]:
    found = []
    for problem, suffix in ((sizes.full, ""), (sizes.causal, ", causal")):
        kind = "causal" if problem.causal else "full"
        for name, module, source in (
            ("naive", naive, "textbook"),
            ("FlashAttention-1", flash1, "Dao 2022"),
            ("FlashAttention-2", flash2, "Dao 2023"),
        ):
            found.append(
                Rung(
                    name + suffix, kind, problem, module.FORMULA, source,
                    partial(module.count, problem), partial(module.build, problem),
                )
            )  # fmt: skip
    found.append(
        Rung(
            "FlashAttention-3 style, causal", "causal", sizes.causal, flash3.FORMULA, "Shah 2024",
            partial(flash3.count, sizes.causal, device), partial(flash3.build, sizes.causal),
        )
    )  # fmt: skip
    return found


def _others(sizes: Sizes) -> list[Rung]:
    one, splits = sizes.one_query, sizes.splits
    return [
        Rung(
            "FlashAttention-2, one query", "one query", one, flash2.FORMULA, "Dao 2023",
            partial(flash2.count, one, ONE_QUERY),
            lambda memory: flash2.build(one, memory, ONE_QUERY),
        ),
        Rung(
            f"split-KV, {splits} splits", "one query", one, split_kv.FORMULA, "flash-decoding 2023",
            partial(split_kv.count, one, splits),
            lambda memory: split_kv.build(one, memory, splits),
        ),
        Rung(
            "RMSNorm + residual", "rmsnorm", sizes.rmsnorm, rmsnorm.FORMULA, "",
            partial(rmsnorm.count, sizes.rmsnorm), partial(rmsnorm.build, sizes.rmsnorm),
        ),
    ]  # fmt: skip
