"""What the rungs compute, the memory they do it in, and what they are compared with.

Bytes of a rung are counted twice. ``traffic`` is what its programs ask of memory beyond their own
SM, tile by tile: the count of the papers, in which on-chip memory is fast and all else is slow.
``least`` is what must cross to DRAM even if the L2 cache held everything in between: every operand
of every launch, once. DRAM's counter lies between the two where L2 is small, at the second where it
is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

HALF, SINGLE = 2, 4  # bytes of an fp16 and of an fp32 element


@dataclass(frozen=True)
class Problem:
    """Attention of ``queries`` rows over ``keys`` rows in ``heads`` independent heads, in fp16.

    A causal mask is aligned at the end: query ``i`` sees the keys up to ``keys - queries + i``.

    Raises
    ------
    ValueError
        For sizes that the kernels of the ladder do not take.
    """

    heads: int
    queries: int
    keys: int
    dim: int = 64
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "queries", "keys"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; accepted: 1 or more")
        if self.dim not in (16, 32, 64, 128):
            raise ValueError(f"dim={self.dim}; accepted: 16, 32, 64, 128")

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.heads} x {self.queries} x {self.keys}, D {self.dim}, {mask}"

    @property
    def shift(self) -> int:
        """Keys before the first query's own, under a causal mask."""
        return self.keys - self.queries

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one head that the mask lets through."""
        if not self.causal:
            return self.queries * self.keys
        return sum(min(max(self.shift + i + 1, 0), self.keys) for i in range(self.queries))

    @property
    def flops(self) -> int:
        """Useful operations: two products of ``2 D`` operations a pair."""
        return 4 * self.dim * self.heads * self.pairs

    @property
    def io_bytes(self) -> int:
        """Q, K and V read once and O written once, in fp16."""
        return self.heads * HALF * self.dim * 2 * (self.queries + self.keys)

    @property
    def score_bytes(self) -> int:
        """The score matrix of all heads in fp16."""
        return self.heads * HALF * self.queries * self.keys

    def tiles(self, block_m: int) -> Iterator[tuple[int, int]]:
        """Yield ``(rows, end)`` of each query tile: its rows, the first key that none sees."""
        for first in range(0, self.queries, block_m):
            rows = min(block_m, self.queries - first)
            end = self.keys
            if self.causal:
                end = min(max(first + block_m + self.shift, 0), self.keys)
            yield rows, end

    def visited_tiles(self, block_m: int, block_n: int) -> int:
        """Key tiles that the programs of all heads visit when those behind the mask are skipped."""
        return self.heads * sum(cdiv(end, block_n) for _, end in self.tiles(block_m))

    def all_tiles(self, block_m: int, block_n: int) -> int:
        """Key tiles without skipping."""
        return self.heads * cdiv(self.queries, block_m) * cdiv(self.keys, block_n)

    def walked_keys(self, block_m: int, block_n: int, whole: bool = False) -> int:
        """Rows of K (and of V) that the query tiles of one head read, together.

        With ``whole`` tiles at the end of the keys count as if they were full.
        """
        ends = (cdiv(end, block_n) * block_n for _, end in self.tiles(block_m))
        return sum(end if whole else min(end, self.keys) for end in ends)


@dataclass(frozen=True)
class Matrix:
    """Rows and columns of an fp16 matrix that is worked on row by row.

    Parameters
    ----------
    rows, columns : int
    operations : int
        Useful operations an element.
    """

    rows: int
    columns: int
    operations: int = 5

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; accepted: 1 or more")

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}"

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def flops(self) -> int:
        """Useful operations."""
        return self.operations * self.elements


@dataclass(frozen=True)
class Bytes:
    """What a rung moves and holds, by its formula: see the module."""

    traffic: int
    least: int
    held: int


def cdiv(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)


class Memory:
    """Tensors of one rung, each inside a larger buffer of NaN.

    Parameters
    ----------
    device : str or torch.device
    pad : int
        Rows and columns of NaN behind the ends of every tensor; a read past an end shows in the
        result, a write past it in `untouched`.
    seed : int
        Of the data.
    """

    def __init__(self, device: str | torch.device, pad: int = 0, seed: int = 0) -> None:
        self.device = torch.device(device)
        self.pad = pad
        self.tensors: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def new(self, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        """Return a tensor full of NaN, of two dimensions or more; the last has stride 1."""
        lead, rows, columns = shape[:-2], shape[-2], shape[-1]
        buffer = torch.full(
            (*lead, rows + self.pad, columns + self.pad), math.nan, dtype=dtype, device=self.device
        )
        tensor = buffer[..., :rows, :columns]
        self._buffers.append(buffer)
        self.tensors.append(tensor)
        return tensor

    def randn(self, *shape: int) -> torch.Tensor:
        """Return normally distributed data in fp16."""
        tensor = self.new(*shape)
        tensor.normal_(generator=self._generator)
        return tensor

    @property
    def held(self) -> int:
        """Bytes of all tensors without what pads them."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def untouched(self) -> bool:
        """Whether everything behind the ends still is NaN."""
        for tensor, buffer in zip(self.tensors, self._buffers, strict=True):
            rows, columns = tensor.shape[-2:]
            for rest in (buffer[..., rows:, :], buffer[..., columns:]):
                if not bool(rest.isnan().all()):
                    return False
        return True


@dataclass(eq=False)
class Built:
    """A rung in memory, ready to run.

    Parameters
    ----------
    call : callable
        Computes everything once; allocates nothing. Returns what Triton compiled, if it says.
    out : Tensor
        Where the result is.
    expected : callable
        Returns ``(got, want)``: result and fp32 reference on the same sampled rows.
    memory : Memory
    path : str
        Which kernels ran, where that is chosen elsewhere.
    """

    call: Callable[[], object]
    out: torch.Tensor
    expected: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    memory: Memory
    path: str = ""
    extra: dict[str, torch.Tensor] = field(default_factory=dict)

    def error(self) -> float:
        """Return the relative error (Frobenius) on the sampled rows; NaN if one is not finite."""
        got, want = self.expected()
        return float((got.float() - want).norm() / want.norm().clamp_min(1e-30))


def attention_inputs(
    problem: Problem, memory: Memory
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return Q Tensor[heads, queries, dim] and K, V Tensor[heads, keys, dim], fp16."""
    q = memory.randn(problem.heads, problem.queries, problem.dim)
    k, v = (memory.randn(problem.heads, problem.keys, problem.dim) for _ in range(2))
    return q, k, v


def attention_rows(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int, rows: list[int]
) -> torch.Tensor:
    """Return rows of one head's attention in fp32; a row that sees no key is 0."""
    index = torch.tensor(rows, device=q.device)
    s = q[head, index].float() @ k[head].float().T * problem.dim**-0.5
    if problem.causal:
        key = torch.arange(problem.keys, device=q.device)
        s = s.masked_fill(key[None] > (index + problem.shift)[:, None], -math.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v[head].float()


def attention_check(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return what compares ``out`` [heads, queries, dim]: ends and tile edges of two heads."""
    from tilewise.bench.inputs import sampled_rows

    rows = sampled_rows(problem.queries)

    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        heads = sorted({0, problem.heads - 1})
        want = [attention_rows(problem, q, k, v, head, rows) for head in heads]
        return torch.stack([out[head, rows] for head in heads]), torch.stack(want)

    return expected
