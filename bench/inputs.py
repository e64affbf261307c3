"""Tensors of one case: seeded data, its paged and dense layouts, and the correctness gate."""

from __future__ import annotations

import itertools
import math
import weakref
import zlib
from dataclasses import dataclass, field

import torch

from tilewise.bench.cases import Case

L2_BYTES = 60 << 20
# Copies of one layout together stay below this, so that several layouts fit one GPU.
LAYOUT_BYTES = 20 << 30
SPARE_PAGES = 5
FP8 = torch.float8_e4m3fn


@dataclass(eq=False)
class PagedCache:
    """One page size's caches.

    Parameters
    ----------
    page_size : int
        Tokens of one page.
    kv : list of Tensor[num_pages, num_kv_heads, page_size, 2 * head_dim]
        One cache per rotation copy, K then V in the last dimension; in memory tokens lie outside
        heads (NHD), or heads outside tokens where they were asked for so (HND).
    block_table : Tensor[num_reqs, max_pages], int32
        Random permutation of pages; unused entries name a page that belongs to no request.
    page_counts : list of int
        Pages owned by each request.
    """

    page_size: int
    kv: list[torch.Tensor]
    block_table: torch.Tensor
    page_counts: list[int]


@dataclass(eq=False)
class DenseCache:
    """Unpaged K and V of every copy: Tensor[sum(kv_lens), num_kv_heads, head_dim]."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    kv_start_loc: torch.Tensor


@dataclass(frozen=True)
class GateResult:
    """Error of one output against the fp64 reference on sampled rows and heads."""

    rel_error: float
    worst_row: float
    passed: bool
    reason: str = ""


@dataclass
class Reference:
    """Sampled rows of the exact result: `expected[i]` belongs to `(tokens[i], heads[i])`."""

    tokens: list[int] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    expected: list[torch.Tensor] = field(default_factory=list)


def copies_for(case: Case, layers: int) -> int:
    """Rotation copies after which the data read since is more than the L2 holds."""
    moved = case.bytes_moved
    wanted = 1 if moved >= 8 * L2_BYTES else max(2, math.ceil(3 * L2_BYTES / moved))
    affordable = max(1, LAYOUT_BYTES // max(1, case.cache_bytes))
    return max(1, min(wanted, layers, affordable))


class CaseInputs:
    """Lazily built tensors of one case; equal data in every layout.

    Parameters
    ----------
    case : Case
        The batch shape.
    device : str
        ``cuda`` or ``cpu``.
    layers : int
        Launches of one graph, an upper bound for the number of copies.
    """

    def __init__(self, case: Case, device: str, layers: int) -> None:
        self.case = case
        self.device = torch.device(device)
        self.copies = copies_for(case, layers)
        self.scale = case.head_dim**-0.5
        q_lens = torch.tensor(case.q_lens, dtype=torch.int32)
        kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32)
        zero = torch.zeros(1, dtype=torch.int32)
        self.query_start_loc_cpu = torch.cat([zero, q_lens.cumsum(0, dtype=torch.int32)])
        self.query_start_loc = self.query_start_loc_cpu.to(self.device)
        self.seq_lens_cpu = kv_lens
        self.seq_lens = kv_lens.to(self.device)
        self.kv_start_loc = torch.cat([zero, kv_lens.cumsum(0, dtype=torch.int32)]).to(self.device)
        shape = (case.num_tokens, case.num_q_heads, case.head_dim)
        self.q = [self._randn(shape, copy, "q") for copy in range(self.copies)]
        self.out = [torch.empty_like(q) for q in self.q]
        self.sinks = self._randn((case.num_q_heads,), 0, "s") if case.sinks else None
        self._paged: weakref.WeakValueDictionary[tuple[int, bool], PagedCache] = (
            weakref.WeakValueDictionary()
        )
        self._reference: Reference | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        """Element type of the cache."""
        return FP8 if self.case.kv_itemsize == 1 else torch.bfloat16

    def _randn(self, shape: tuple[int, ...], copy: int, what: str) -> torch.Tensor:
        seed = zlib.crc32(f"{self.case.name}/{copy}/{what}".encode())
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)

    def keys_values(self, copy: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one copy, Tensor[sum(kv_lens), num_kv_heads, head_dim]."""
        shape = (sum(self.case.kv_lens), self.case.num_kv_heads, self.case.head_dim)
        k, v = (self._randn(shape, copy, what).to(self.kv_dtype) for what in "kv")
        starts = [0, *itertools.accumulate(self.case.kv_lens)]
        for req in range(self.case.num_reqs if self.case.prefix else 0):
            own, first = starts[req], starts[self.case.leader(req)]
            for x in (k, v):
                x[own : own + self.case.prefix] = x[first : first + self.case.prefix]
        return k, v

    def dense(self) -> DenseCache:
        """Return the unpaged layout of every copy."""
        pairs = [self.keys_values(copy) for copy in range(self.copies)]
        return DenseCache([k for k, _ in pairs], [v for _, v in pairs], self.kv_start_loc)

    def paged(self, page_size: int, hnd: bool = False) -> PagedCache:
        """Return the caches for one page size and layout, shared by all that still hold them."""
        cache = self._paged.get((page_size, hnd))
        if cache is None:
            cache = self._build_paged(page_size, hnd)
            self._paged[page_size, hnd] = cache
        return cache

    def _build_paged(self, page_size: int, hnd: bool) -> PagedCache:
        case = self.case
        counts = [-(-kv_len // page_size) for kv_len in case.kv_lens]
        owned = sum(counts)
        seed = zlib.crc32(f"{case.name}/{page_size}".encode())
        order = torch.randperm(owned + SPARE_PAGES, generator=torch.Generator().manual_seed(seed))
        pages, unowned = order[:owned], order[owned:]
        table = torch.full((case.num_reqs, max(counts)), int(unowned[0]), dtype=torch.int32)
        for row, ids in enumerate(pages.split(counts)):
            table[row, : len(ids)] = ids.to(torch.int32)
            first = case.leader(row)
            if case.prefix and first != row:
                shared = case.prefix // page_size
                unowned = torch.cat([unowned, ids[:shared]])
                table[row, :shared] = table[first, :shared]
        table = table.to(self.device)

        lens = self.seq_lens.long()
        req = torch.repeat_interleave(torch.arange(case.num_reqs, device=self.device), lens)
        pos = torch.arange(len(req), device=self.device) - self.kv_start_loc[:-1].long()[req]
        slots = table[req, pos // page_size].long() * page_size + pos % page_size
        caches = [
            self._scatter(
                self.keys_values(copy), slots, unowned, owned + SPARE_PAGES, page_size, hnd
            )
            for copy in range(self.copies)
        ]
        return PagedCache(page_size, caches, table, counts)

    def _scatter(
        self,
        keys_values: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        unowned: torch.Tensor,
        num_pages: int,
        page_size: int,
        hnd: bool,
    ) -> torch.Tensor:
        heads, dim = self.case.num_kv_heads, self.case.head_dim
        outer = (heads, page_size) if hnd else (page_size, heads)
        storage = torch.zeros(num_pages, *outer, 2 * dim, dtype=self.kv_dtype, device=self.device)
        raw, k, v = storage, *keys_values
        poison: float = float("nan")
        if self.kv_dtype == FP8:  # indexing is not implemented for fp8: move its bytes
            raw, k, v, poison = (*(x.view(torch.uint8) for x in (storage, k, v)), 0x7F)
        raw[unowned.to(self.device)] = poison
        tokens = raw.transpose(1, 2) if hnd else raw
        page, place = slots // page_size, slots % page_size
        tokens[page, place, :, :dim] = k
        tokens[page, place, :, dim:] = v
        return storage if hnd else storage.transpose(1, 2)

    def poison_outputs(self) -> None:
        """Fill every output with NaN, so that a row left unwritten fails the gate."""
        for out in self.out:
            out.fill_(float("nan"))

    def check(self) -> GateResult:
        """Compare the first copy's output with the reference."""
        if self._reference is None:
            self._reference = build_reference(self)
        ref, out = self._reference, self.out[0]
        if not bool(torch.isfinite(out).all()):
            bad = int((~torch.isfinite(out)).any(-1).sum())
            return GateResult(math.nan, math.nan, False, f"{bad} (row, head) pairs not finite")
        want = torch.stack(ref.expected)
        got = out[ref.tokens, ref.heads].double()
        diff = (got - want).norm(dim=-1)
        rel = float((got - want).norm() / want.norm())
        worst = float((diff / want.norm(dim=-1).clamp_min(1e-30)).max())
        rel_limit, row_limit = (0.12, 0.4) if self.kv_dtype == FP8 else (8e-3, 5e-2)
        if rel > rel_limit or worst > row_limit:
            return GateResult(rel, worst, False, f"error {rel:.2e}, worst row {worst:.2e}")
        return GateResult(rel, worst, True)


def sampled_rows(q_len: int) -> list[int]:
    """Return rows of a request that a tiling mistake would hit: ends and tile edges."""
    edges = [e + d for e in (0, 16, 64, 128, 256, q_len // 2, q_len) for d in (-2, -1, 0, 1)]
    return sorted({row for row in edges if 0 <= row < q_len})


def sampled_requests(case: Case) -> list[int]:
    """Return first, last, longest, shortest and middle requests, and the first prefill."""
    order = sorted(range(case.num_reqs), key=lambda i: case.kv_lens[i])
    first_long = max(range(case.num_reqs), key=lambda i: case.q_lens[i])
    middle = case.num_reqs // 2
    return sorted({0, case.num_reqs - 1, order[0], order[-1], order[middle], middle, first_long})


def build_reference(inputs: CaseInputs) -> Reference:
    """Compute sampled rows in fp64: softmax(cap(q K^T * scale), sink) V under the causal mask."""
    case = inputs.case
    k_all, v_all = inputs.keys_values(0)
    group = case.num_q_heads // case.num_kv_heads
    heads = sorted({0, group - 1, case.num_q_heads // 2, case.num_q_heads - 1})
    ref = Reference()
    starts = inputs.kv_start_loc.tolist()
    tokens = inputs.query_start_loc_cpu.tolist()
    for req in sampled_requests(case):
        rows = sampled_rows(case.q_lens[req])
        index = torch.tensor(rows, device=inputs.device)
        span = slice(starts[req], starts[req + 1])
        position = index + case.kv_lens[req] - case.q_lens[req]
        key = torch.arange(case.kv_lens[req], device=inputs.device)
        hidden = key[None] > position[:, None]
        if case.window is not None:
            hidden |= key[None] <= position[:, None] - case.window
        for head in heads:
            k = k_all[span, head // group].to(torch.bfloat16).double()
            v = v_all[span, head // group].to(torch.bfloat16).double()
            scores = inputs.q[0][tokens[req] + index, head].double() @ k.T * inputs.scale
            if case.softcap:
                scores = case.softcap * (scores / case.softcap).tanh()
            scores = scores.masked_fill(hidden, -math.inf)
            norm = scores.logsumexp(-1, keepdim=True)
            if inputs.sinks is not None:
                norm = torch.logaddexp(norm, inputs.sinks[head].double().expand_as(norm))
            result = (scores - norm).exp() @ v
            ref.tokens += [tokens[req] + row for row in rows]
            ref.heads += [head] * len(rows)
            ref.expected += list(result)
    return ref
