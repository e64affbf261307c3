"""Ragged batches over a poisoned paged cache, shared by the interpreter and the GPU tests.

Everything nobody owns is NaN: page tails, unowned pages, scratch, query rows of no request.
Unused block-table entries point far outside the cache.
"""

import itertools
import math
from dataclasses import dataclass, field, replace

import torch
from reference import paged_attention

from tilewise.attention import PagedAttention
from tilewise.binding import CacheBinding

NOWHERE = 2_147_480_000  # an unused block-table entry: reading through it faults or is absurd


@dataclass(frozen=True)
class Case:
    """One batch: ``requests`` are (query tokens, context tokens)."""

    requests: tuple[tuple[int, int], ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 64
    dtype: torch.dtype = torch.float32
    layout: str = "nhd"
    decode_query_len: int = 1
    pad_tokens: int = 3
    pad_requests: int = 0
    window: int | None = None
    softcap: float = 0.0
    sinks: float | None = None  # the sinks' mean; they scatter around it
    alibi: str = ""  # "linear" or "sqrt"
    kv_dtype: torch.dtype | None = None  # of an fp8 cache
    kv_scales: str = ""  # "tensor" or "head"
    causal: bool | tuple[int, ...] = True  # a flag for each request
    # first and last position of bidirectional spans, for each request
    spans: tuple[tuple[tuple[int, int], ...], ...] | None = None
    spans_in_window: bool = False
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.num_q_heads}-{self.num_kv_heads}-{self.head_dim}"
        lengths = "_".join(f"{q}at{q + c}" for q, c in self.requests[:4])
        name = f"{heads}-p{self.page_size}-{dtype}-{self.layout}-{lengths}"
        features = ("window", "softcap", "sinks", "alibi", "kv_scales")
        given = [
            f"{f}{getattr(self, f)}" for f in features if getattr(self, f) not in (None, 0, "")
        ]
        if self.kv_dtype is not None:
            given.insert(0, str(self.kv_dtype).removeprefix("torch.float8_"))
        if self.causal is not True:
            given.append("flags" if self.causal else "bidirectional")
        if self.spans is not None:
            given.append("spans_in_window" if self.spans_in_window else "spans")
        return self.label or "-".join([name, *given])


@dataclass
class Batch:
    """A case's tensors; ``query_start_loc``, ``seq_lens`` also as lists."""

    case: Case
    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    qsl: list[int]
    lens: list[int]
    features: dict  # keyword arguments of run()

    @property
    def query_start_loc(self) -> torch.Tensor:
        return torch.tensor(self.qsl, dtype=torch.int32, device=self.q.device)

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lens, dtype=torch.int32, device=self.q.device)

    @property
    def num_tokens(self) -> int:
        """Rows that belong to a request."""
        return self.qsl[-1]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.case.num_q_heads // self.case.num_kv_heads

    @property
    def k_cache(self) -> torch.Tensor:
        return self.kv_cache[..., : self.case.head_dim]

    @property
    def v_cache(self) -> torch.Tensor:
        return self.kv_cache[..., self.case.head_dim :]


def empty_cache(case: Case, num_pages: int, device: str) -> torch.Tensor:
    """A NaN cache ``[pages, heads, page, 2 D]`` in the case's memory layout."""
    h, n, d2 = case.num_kv_heads, case.page_size, 2 * case.head_dim
    shapes = {
        "nhd": ((num_pages, n, h, d2), (0, 2, 1, 3)),
        "hnd": ((num_pages, h, n, d2), (0, 1, 2, 3)),
        # Two layers' blocks interleaved: the page stride is twice a page.
        "cross_layer": ((num_pages, 2, n, h, d2), None),
    }
    shape, order = shapes[case.layout]
    memory = torch.full(shape, float("nan"), device=device).to(case.kv_dtype or case.dtype)
    return memory[:, 0].permute(0, 2, 1, 3) if order is None else memory.permute(*order)


def first_seen_key(case: Case, request: int) -> int:
    """The first key that a query of the request sees."""
    query_len, context = case.requests[request]
    if case.window is None:
        return 0
    first = max(context - case.window + 1, 0)
    if case.spans is None or case.spans_in_window:
        return first
    met = [s for s, e in case.spans[request] if s < e and s < context + query_len and e >= context]
    return min([first, *met])


def make_features(case: Case, device: str, gen: torch.Generator) -> dict:
    """What ``run`` is given besides the tensors that every case has."""
    features: dict = {"softcap": case.softcap} if case.softcap else {}
    heads = case.num_q_heads
    if case.sinks is not None:
        features["sinks"] = (case.sinks + torch.randn(heads, generator=gen)).to(device)
    if case.alibi:
        # The geometric slopes of the paper, for any number of heads.
        features["alibi_slopes"] = 2.0 ** -(8.0 / heads * (1 + torch.arange(heads))).to(device)
        features["alibi_sqrt"] = case.alibi == "sqrt"
    if case.kv_scales:
        # No powers of two; heads that share a scale by mistake are far off.
        heads = torch.arange(1, (case.num_kv_heads if case.kv_scales == "head" else 1) + 1)
        features["k_scale"], features["v_scale"] = (
            scale.to(device) for scale in (0.0123 * heads, 0.0456 / heads)
        )
    return features


def quantise(rows: torch.Tensor, case: Case, features: dict) -> torch.Tensor:
    """Keys and values ``[heads, keys, 2 D]`` as the case's cache holds them."""
    if case.kv_dtype is None:
        return rows.to(case.dtype)
    largest = torch.finfo(case.kv_dtype).max
    halves = [
        (x.to(rows) / head_scales(features.get(name), case)[:, None, None].to(rows))
        for name, x in zip(("k_scale", "v_scale"), rows.split(case.head_dim, -1), strict=True)
    ]
    return torch.cat(halves, -1).clamp(-largest, largest).to(case.kv_dtype)


def head_scales(scale: torch.Tensor | None, case: Case) -> torch.Tensor:
    """One scale for each KV head, fp32."""
    if scale is None:
        return torch.ones(case.num_kv_heads)
    return scale.float().cpu().expand(case.num_kv_heads)


def make_batch(case: Case, device: str, seed: int = 0) -> Batch:
    """Random queries, keys and values in permuted pages, NaN elsewhere.

    Under a window, everything left of the first query's is nobody's too.
    """
    gen = torch.Generator().manual_seed(seed)
    lens = [q + c for q, c in case.requests]
    num_pages = [-(-n // case.page_size) for n in lens]
    order = torch.randperm(sum(num_pages) + 3, generator=gen)
    cache = empty_cache(case, len(order), device)
    width = max(num_pages) + 2
    features = make_features(case, device, torch.Generator().manual_seed(seed + 1))
    table = torch.full((len(lens) + case.pad_requests, width), NOWHERE, dtype=torch.int32)
    taken = 0
    for r, n in enumerate(lens):
        pages = order[taken : taken + num_pages[r]]
        taken += num_pages[r]
        first_key = first_seen_key(case, r)
        first_page = first_key // case.page_size
        table[r, first_page : len(pages)] = pages[first_page:].int()
        for i, page in enumerate(pages.tolist()):
            used = min(case.page_size, n - i * case.page_size)
            rows = torch.randn(case.num_kv_heads, used, 2 * case.head_dim, generator=gen)
            begin = min(max(first_key - i * case.page_size, 0), used)
            rows = quantise(rows, case, features)
            cache[page, :, begin:used] = rows[:, begin:].to(device)
    qsl = [0]
    for q_len, _ in case.requests:
        qsl.append(qsl[-1] + q_len)
    shape = (qsl[-1] + case.pad_tokens, case.num_q_heads, case.head_dim)
    q = torch.randn(shape, generator=gen).to(device=device, dtype=case.dtype)
    q[qsl[-1] :] = float("nan")
    qsl += [qsl[-1]] * case.pad_requests
    lens += [0] * case.pad_requests
    return Batch(case, q, cache, table.to(device), qsl, lens, features)


def make_attention(case: Case, device: str, **overrides) -> PagedAttention:
    """A ``PagedAttention`` with room to spare and NaN scratch."""
    reqs = len(case.requests) + case.pad_requests
    tokens = sum(q for q, _ in case.requests) + case.pad_tokens
    kwargs = {"max_num_reqs": reqs + 2, "max_num_tokens": tokens + 7, "window": case.window}
    kwargs["kv_dtype"] = case.kv_dtype
    kwargs |= overrides
    attn = PagedAttention(
        case.num_q_heads, case.num_kv_heads, case.head_dim, page_size=case.page_size,
        dtype=case.dtype, device=device, decode_query_len=case.decode_query_len, **kwargs,
    )  # fmt: skip
    poison_scratch(attn)
    return attn


def poison_scratch(attn: PagedAttention) -> None:
    """NaN in every scratch byte that a kernel may only read after writing it."""
    held = attn._buffers
    for buffer in (held.partial_acc, held.partial_m, held.partial_l):
        buffer.fill_(float("nan"))
    for buffer in (held.tile_req, held.tile_token, held.worker_record):
        buffer.fill_(NOWHERE)


def convert_by_arithmetic(attn: PagedAttention) -> None:
    """Read an fp8 cache from now on as GPUs do that have no instruction for it."""
    instruction = attn._checks.fp8_format
    assert instruction
    assert not instruction.endswith("_bits")
    checks = replace(attn._checks, fp8_format=f"{instruction}_bits")
    attn._use(CacheBinding(checks, attn.config))


def plan_batch(attn: PagedAttention, batch: Batch, **overrides):
    """Plan with the batch's own bounds."""
    kwargs = {
        "num_tokens": batch.q.shape[0],
        "max_query_len": max(q for q, _ in batch.case.requests),
        "causal": batch.case.causal,
    } | overrides
    if batch.case.spans is not None:
        kwargs.setdefault("spans", spans_tensor(batch))
    if isinstance(kwargs["causal"], tuple):
        flags = [*kwargs["causal"], *[1] * batch.case.pad_requests]
        kwargs["causal"] = torch.tensor(flags, dtype=torch.int32, device=batch.q.device)
    return attn.plan(batch.query_start_loc, batch.seq_lens, batch.block_table, **kwargs)


def spans_tensor(batch: Batch) -> torch.Tensor:
    """The case's spans as ``plan`` takes them, those of a request filled up with none."""
    spans = [*batch.case.spans, *[()] * batch.case.pad_requests]
    most = max(1, *map(len, spans))
    rows = [[*row, *[(0, 0)] * (most - len(row))] for row in spans]
    return torch.tensor(rows, dtype=torch.int32, device=batch.q.device)


def reference(batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of the batch by torch in ``dtype``.

    Of an fp8 cache: in fp32 over dequantised keys and values; in other dtypes, which would round
    these once more, scales go to logits and outputs as in the kernels.
    """
    case, scale = batch.case, batch.case.head_dim**-0.5
    features = batch.features | {"window": case.window, "causal": case.causal}
    if case.spans is not None:
        padded = (*case.spans, *[()] * case.pad_requests)
        features |= {"spans": padded, "spans_in_window": case.spans_in_window}
    scales = [features.pop(name, None) for name in ("k_scale", "v_scale")]
    k, v = batch.k_cache, batch.v_cache
    if case.kv_dtype is None:
        args = (batch.q, k, v, batch.qsl, batch.lens, batch.block_table, scale)
        return paged_attention(*args, dtype=dtype, **features)
    k_scale, v_scale = (head_scales(x, case).to(batch.q.device) for x in scales)
    if dtype == torch.float32:
        k, v = (x.float() * s[:, None, None] for x, s in ((k, k_scale), (v, v_scale)))
        args = (batch.q, k, v, batch.qsl, batch.lens, batch.block_table, scale)
        return paged_attention(*args, dtype=dtype, **features)
    k_scale, v_scale = (s.repeat_interleave(batch.group) for s in (k_scale, v_scale))
    scale = scale * k_scale[:, None, None]
    k, v = k.to(dtype), v.to(dtype)  # exact
    args = (batch.q, k, v, batch.qsl, batch.lens, batch.block_table, scale)
    out, lse = paged_attention(*args, dtype=dtype, **features)
    return out * v_scale[:, None], lse


def check(batch: Batch, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """Assert that ``out`` (and ``lse``) is right where rows are owned.

    Allowed, for each request by itself: four times the error that the same maths makes in torch
    at the batch's dtype, or a few roundings of its largest output.  Outputs shrink with the
    square root of the keys, so a bound over the whole batch would not see a long request.  In
    fp32 the base-2 exponents, up to 2**6 in size, are rounded before they are raised: 2**x then
    errs by up to 64 ln(2) roundings, which no other dtype's output would show.
    """
    case = batch.case
    expected, expected_lse = reference(batch, torch.float32)
    same_dtype, _ = reference(batch, case.dtype)
    eps = torch.finfo(case.dtype).eps
    roundings = 64 * math.log(2) if case.dtype == torch.float32 else 4
    for r, (begin, end) in enumerate(itertools.pairwise(batch.qsl)):
        if begin == end:
            continue
        rows = slice(begin, end)
        torch_error = (same_dtype[rows].float() - expected[rows]).abs().max().item()
        error = (out[rows].float() - expected[rows]).abs().max().item()
        allowed = max(4 * torch_error, roundings * eps * expected[rows].abs().max().item())
        assert error <= allowed, f"request {r}: error {error:.3g}, allowed {allowed:.3g} ({case})"
        if lse is not None:
            assert lse.dtype == torch.float32
            torch.testing.assert_close(
                lse[rows], expected_lse[rows], rtol=1e-4,
                atol=1e-5 if case.dtype == torch.float32 else 1e-3,
            )  # fmt: skip


def run_and_check(case: Case, device: str, seed: int = 0, **overrides) -> None:
    """Plan, run and compare one case; rows of no request must come back untouched."""
    batch = make_batch(case, device, seed)
    attn = make_attention(case, device, **overrides)
    plan_batch(attn, batch)
    out = torch.full_like(batch.q, 7.0)
    features = batch.features
    if case.spans is not None and case.spans_in_window:
        features = features | {"spans": "windowed"}
    out, lse = attn.run(batch.q, batch.kv_cache, out=out, return_lse=True, **features)
    check(batch, out, lse)
    assert (out[batch.num_tokens :] == 7.0).all(), "rows of no request were written"
    assert not attn._buffers.arrivals.any(), "arrival counters must be zero between launches"
