"""The kernels against plain PyTorch, on a server's own KV cache, before it serves.

A few real pages, the last one among them, are borrowed: filled with NaN, written by the cache-write
kernel, read by prefill and decode, compared, and given back as they were. Nothing of it depends on
the model's weights but the sinks and the scales of an fp8 cache.

What an fp8 cache holds is compared with what was written within a rounding to fp8; attention is
then compared with that of the keys and values that the cache holds, as closely as in any cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import triton

from tilewise.checks import FP8_OUT
from tilewise.device import fp8_format
from tilewise.errors import SelfCheckFailed
from tilewise.integration.metadata import TilewiseMetadata
from tilewise.integration.spans import is_clamped
from tilewise.kernels.cache_write import write_kv_cache
from tilewise.kernels.hadamard import rotate
from tilewise.policy import DECODE_MAX_QUERY_LEN
from tilewise.prefix_rule import plan_shared

if TYPE_CHECKING:
    from tilewise.attention import PagedAttention
    from tilewise.integration.context_parallel import ShardedAttention
    from tilewise.integration.impl import TilewiseImpl

# New tokens of the requests: decode, speculative decode, prefill.
QUERY_LENS = (1, 3, DECODE_MAX_QUERY_LEN + 4)
# Standard deviation of the logits: single keys decide, so that none can be missed unseen.
LOGIT_SPREAD = 3.0
# Rounding of the weights and of the output, with room; of fp32, exp2 of the hardware.
SMALLEST_EPSILON = 2.0**-14
# Of products of fp8 operands, relative to the largest value: roundings of queries move logits of
# that spread by a tenth, and those of weights are 2**-4.
FP8_ERROR = 2.0**-2
# The quotients that are rounded to fp8 were themselves rounded to fp32.
FP8_ROOM = 1.0 + 2.0**-16
# Scales beyond these are left to saturation or to fp8's subnormal numbers: the rows that are drawn
# have to fit into fp16.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-6, 2.0**6
LARGE_PAGE = 128


@dataclass
class Sequence:
    """One sequence of keys in borrowed pages, and the batches that read it.

    Parameters
    ----------
    key, value : Tensor[seq_len, num_kv_heads, head_size]
    slots : Tensor[seq_len], int64
    block_table : Tensor[1, pages], int32
    batches : list of list of (int, int)
        Query and sequence length of each request.
    """

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    batches: list[list[tuple[int, int]]]

    @property
    def pages(self) -> torch.Tensor:
        """The pages that hold it."""
        return self.block_table[0].long()


def scales(impl: TilewiseImpl, layer: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What the bytes of keys and of values are multiplied with; fp64, one or one a KV head.

    1 for a cache that is not fp8.
    """
    if impl.kv_dtype is None:
        one = torch.ones(1, dtype=torch.float64, device=device)
        return one, one
    return tuple(x.double().reshape(-1) for x in (layer._k_scale, layer._v_scale))


def _drawn(scale: torch.Tensor) -> torch.Tensor:
    """Standard deviation ``[1 or KV heads, 1]`` of what is drawn for such a scale."""
    return scale.clamp(SMALLEST_SCALE, LARGEST_SCALE)[:, None]


def make_sequence(
    impl: TilewiseImpl,
    layer: Any,
    attn: PagedAttention,
    kv_cache: torch.Tensor,
    row_pad: int = 0,
) -> Sequence:
    """Choose pages and draw keys and values for them, of a size that suits the cache's scales.

    Parameters
    ----------
    impl, layer
        The layer and its implementation.
    attn : PagedAttention
        Its bounds limit the batches.
    kv_cache : Tensor[num_pages, num_kv_heads, page_size, 2 * head_size]
        Only its shape is used.
    row_pad : int
        Elements between the rows of keys and of values, as where they are parts of a wider matrix.
    """
    num_pages, heads, page_size, width = kv_cache.shape
    count = min(num_pages, 3 if page_size <= LARGE_PAGE else 2)
    # The last page has the largest address; the order is not that of memory.
    ids = [num_pages - 1, 0, num_pages // 2][:count]
    # A last page that is neither empty nor full.
    seq_len = (count - 1) * page_size + 5 if count > 1 else page_size - 3
    table = torch.tensor([ids], dtype=torch.int32, device=attn.device)
    places = torch.arange(seq_len, device=attn.device)
    slots = table[0].long()[places // page_size] * page_size + places % page_size
    key, value = (
        draw_rows(attn, seq_len, heads, width // 2, row_pad, seed=seed).mul_(_drawn(scale))
        for seed, scale in enumerate(scales(impl, layer, attn.device), 1)
    )
    return Sequence(key, value, slots, table, _batches(attn, seq_len))


def _batches(attn: PagedAttention, seq_len: int) -> list[list[tuple[int, int]]]:
    """One batch of all requests where the bounds allow it, else one each."""
    longest = min(seq_len, attn.max_num_tokens)
    requests = [(min(n, longest), seq_len - i) for i, n in enumerate(QUERY_LENS)]
    requests = [(n, max(length, n)) for n, length in requests]
    total = sum(n for n, _ in requests)
    if len(requests) <= attn.max_num_reqs and total <= attn.max_num_tokens:
        return [requests]
    return [[request] for request in requests]


def draw_rows(
    attn: PagedAttention, rows: int, heads: int, size: int, row_pad: int, seed: int
) -> torch.Tensor:
    """Return normal values ``[rows, heads, size]`` of the layer's dtype; repeatable."""
    generator = torch.Generator(attn.device).manual_seed(seed)
    wide = torch.randn(
        rows, heads * size + row_pad, generator=generator, device=attn.device, dtype=torch.float32
    ).to(attn.dtype)
    # Strides by hand: PyTorch drops the padding of a single row.
    strides = (heads * size + row_pad, size, 1)
    return wide.as_strided((rows, heads, size), strides)


def batches_of(
    sequence: Sequence, attn: PagedAttention, sharded: ShardedAttention | None
) -> list[tuple[list[tuple[int, int]], dict[str, Any]]]:
    """Batches that launch everything, and what ``attend`` is to be told of each.

    ``many``: treat it as one of many requests; ``has_decode``: promise nothing of its lengths.
    """
    if sharded is not None:
        # Single queries go another way where ranks share keys.
        return [(batch, {}) for batch in (*sequence.batches, [(1, len(sequence.key))])]
    kernels = (False, True) if attn.config.decodes_few(1) else (False,)
    batches = list(sequence.batches)
    if attn.config.prefixes is not None:
        # A single request goes another way, and bounds may have left nothing but such.
        batches += [[(1, len(sequence.key))] * count for count in (1, fewest_that_share(attn))]
    found: list[tuple[Any, dict[str, Any]]] = [
        (batch, {"many": many}) for batch, many in product(batches, kernels)
    ]
    if attn.config.side_by_side:
        # The prefill is launched otherwise where there may be a decode beside it.
        last = sequence.batches[-1][-1:]
        found.append((last, {"has_decode": len(sequence.batches) > 1}))
    return found


class Borrowed:
    """Pages of a cache that hold NaN meanwhile and what they held afterwards."""

    def __init__(self, kv_cache: torch.Tensor, pages: torch.Tensor) -> None:
        self.kv_cache, self.pages = kv_cache, pages

    def __enter__(self) -> None:
        self._held = self.kv_cache[self.pages].clone()
        # NaN in every floating-point format, those of one byte as well.
        self.kv_cache.view(torch.uint8)[self.pages] = 0xFF

    def __exit__(self, *_: object) -> None:
        self.kv_cache[self.pages] = self._held


def write(impl: TilewiseImpl, layer: Any, kv_cache: torch.Tensor, sequence: Sequence) -> None:
    """Put the sequence into the cache as the layer would."""
    if impl.kv_sharing_target_layer_name is None:
        impl.do_kv_cache_update(layer, sequence.key, sequence.value, kv_cache, sequence.slots)
        return
    # It never writes what it reads.
    k_cache, v_cache = kv_cache.split(impl.head_size, dim=-1)
    fp8: dict[str, Any] = {}
    if impl.kv_dtype is not None:
        fp8 = {"fp8_format": fp8_format(impl.kv_dtype, kv_cache.device, write=True)}
        fp8 |= {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        fp8 |= {"rotated": impl.rotated_keys}
    write_kv_cache(k_cache, v_cache, sequence.key, sequence.value, sequence.slots, **fp8)


def read(
    impl: TilewiseImpl, layer: Any, kv_cache: torch.Tensor, sequence: Sequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that the borrowed pages hold: fp64, NaN where nothing was written.

    Returns
    -------
    key, value : Tensor[pages * page_size, num_kv_heads, head_size]
        By place in the sequence, to the end of its last page.
    """
    held = kv_cache[sequence.pages].transpose(1, 2).flatten(0, 1)
    if impl.kv_dtype is not None:
        held = held.view(impl.kv_dtype)
    # PyTorch converts fp8 by way of fp32, and exactly.
    parts = held.float().double().split(impl.head_size, dim=-1)
    by_head = (scale[:, None] for scale in scales(impl, layer, kv_cache.device))
    key, value = (part * scale for part, scale in zip(parts, by_head, strict=True))
    return key, value


def attend(
    impl: TilewiseImpl,
    layer: Any,
    attn: PagedAttention,
    kv_cache: torch.Tensor,
    sequence: Sequence,
    batch: list[tuple[int, int]],
    row_pad: int = 0,
    causal: bool | str = True,
    sharded: ShardedAttention | None = None,
    new_pads: tuple[int, int] = (0, 0),
    many: bool = False,
    has_decode: bool = False,
    has_context: bool = True,
    spans: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan and run one batch as a server's step does.

    With ``sharded`` it runs as under decode context parallelism, on a rank that holds all keys;
    ``new_pads`` are elements between the rows of its new keys and of their values, and without
    ``has_context`` only those are seen.  With ``many`` the decode kernel for many requests runs,
    however few there are; with ``has_decode`` it is launched even for none.  ``causal`` may be
    "tensor": every request is causal, but a tensor says so.

    Returns
    -------
    query, output : Tensor[num_tokens, num_heads, head_size]
    """
    query_lens, lengths = zip(*batch, strict=True)
    starts = [sum(query_lens[:i]) for i in range(len(batch) + 1)]
    query_start_loc = torch.tensor(starts, dtype=torch.int32, device=attn.device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=attn.device)
    table = sequence.block_table.repeat(len(batch), 1)
    query = draw_rows(attn, starts[-1], impl.num_heads, impl.head_size, row_pad, seed=3)
    # [1 or KV heads, 1], then one for each query head
    sizes = _drawn(scales(impl, layer, attn.device)[0])
    if len(sizes) > 1:
        sizes = sizes.repeat_interleave(impl.num_heads // impl.num_kv_heads, 0)
    query.mul_(LOGIT_SPREAD / (impl.scale * impl.head_size**0.5) / sizes)
    bounds: dict[str, Any] = {
        "num_tokens": starts[-1], "max_query_len": max(query_lens), "causal": causal,
        "has_decode": has_decode or min(query_lens) <= DECODE_MAX_QUERY_LEN,
    }  # fmt: skip
    if causal == "tensor":
        bounds["causal"] = torch.ones_like(seq_lens)
    key = value = step = None
    if sharded is None:
        plan = attn.plan(query_start_loc, seq_lens, table, **bounds, spans=spans)
        if many:
            plan = replace(plan, decodes_few=False, side_by_side=False)
    else:
        step = sharded.plan(query_start_loc, seq_lens, table, **bounds, has_context=has_context)
        plan = step.plan
        # What an fp8 cache has made of them, or they would differ from the reference's.
        held = (sequence.key, sequence.value)
        if impl.kv_dtype is not None:
            held = read(impl, layer, kv_cache, sequence)
        key, value = (
            _newest(rows.to(attn.dtype), batch, pad)
            for rows, pad in zip(held, new_pads, strict=True)
        )
    metadata = TilewiseMetadata(
        num_actual_tokens=starts[-1],
        num_reqs=len(batch),
        max_query_len=max(query_lens),
        max_seq_len=max(lengths),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=table,
        slot_mapping=sequence.slots[: starts[-1]],
        attn=attn,
        plan=plan,
        sharded=step,
        mm_prefix_range_tensor=spans,
    )
    shape = (starts[-1], impl.num_heads, impl.head_size)
    output = torch.full(shape, float("nan"), dtype=attn.dtype, device=attn.device)
    if output_scale is not None:
        output = output.to(FP8_OUT)
    impl.forward(layer, query, key, value, kv_cache, metadata, output, output_scale)
    return query, output


def _newest(rows: torch.Tensor, batch: list[tuple[int, int]], row_pad: int) -> torch.Tensor:
    """The new tokens' rows ``[num_tokens, heads, size]`` of each request, one after another."""
    picked = torch.cat([rows[length - n : length] for n, length in batch])
    tokens, heads, size = picked.shape
    wide = picked.new_empty(tokens, heads * size + row_pad)
    # Strides by hand: PyTorch drops the padding of a single row.
    padded = wide.as_strided(picked.shape, (heads * size + row_pad, size, 1))
    return padded.copy_(picked)


def make_spans(batch: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """One bidirectional span ``[requests, 1, 2]`` for each request, with half of its queries."""
    rows = [[[length - tokens, length - tokens // 2 - 1]] for tokens, length in batch]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def reference(
    impl: TilewiseImpl,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    span: tuple[int, int] | None = None,
    clamped: bool = False,
) -> torch.Tensor:
    """What queries, the last tokens of all these keys, should give; fp64.

    ``span`` is bidirectional; where ``clamped``, a window hides what is left of it in the span too.

    Without matrix products and softmax: vLLM replaces torch's in its batch-invariant mode, by some
    that know no fp64.
    """
    tokens, heads, _ = query.shape
    length = len(key)
    keys, values = key.double(), value.double()
    queries = query.double()
    group = heads // keys.shape[1]
    logits = torch.stack(
        [(queries[:, h, None] * keys[None, :, h // group]).sum(-1) for h in range(heads)], 1
    )
    logits *= impl.scale
    if impl.soft_cap:
        logits = impl.soft_cap * torch.tanh(logits / impl.soft_cap)
    last = torch.arange(length - tokens, length, device=query.device)
    # [tokens, 1, keys]
    distance = last[:, None, None] - torch.arange(length, device=query.device)
    if impl.alibi_slopes is not None:
        away = distance.clamp(min=0).double()
        away = away.sqrt() if impl.alibi_sqrt else away
        logits = logits - impl.alibi_slopes.double()[:, None] * away
    hidden = distance < 0
    if impl.window is not None:
        hidden = hidden | (distance >= impl.window)
    if span is not None and span[0] < span[1]:
        place = torch.arange(length, device=query.device)
        inside = (span[0] <= place) & (place <= span[1])
        together = inside[last][:, None, None] & inside
        if clamped and impl.window is not None:
            together = together & (distance < impl.window)
        hidden = hidden & ~together
    logits = logits.masked_fill(hidden, float("-inf"))
    if impl.sinks is not None:
        sinks = impl.sinks.double()[None, :, None].expand(tokens, heads, 1)
        logits = torch.cat([logits, sinks], -1)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    weights = (weights / weights.sum(-1, keepdim=True))[..., :length]
    return torch.stack(
        [(weights[:, h, :, None] * values[None, :, h // group]).sum(1) for h in range(heads)], 1
    )


def check(
    impl: TilewiseImpl,
    layer: Any,
    attn: PagedAttention,
    kv_cache: torch.Tensor,
    sharded: ShardedAttention | None = None,
) -> None:
    """Compare cache write, decode and prefill with what they should give.

    Parameters
    ----------
    impl : TilewiseImpl
        The layer's implementation.
    layer : torch.nn.Module
        The layer.
    attn : PagedAttention
        The one that will serve it.
    kv_cache : Tensor[num_pages, num_kv_heads, page_size, 2 * head_size]
        The layer's cache; as before when this returns or raises.
    sharded : ShardedAttention, optional
        Under decode context parallelism, for a rank that holds all keys.

    Raises
    ------
    SelfCheckFailed
        Naming the kernel, the layer's geometry, the error and what to do.
    """
    sequence = make_sequence(impl, layer, attn, kv_cache)
    seq_len = len(sequence.key)
    with Borrowed(kv_cache, sequence.pages):
        write(impl, layer, kv_cache, sequence)
        key, value = read(impl, layer, kv_cache, sequence)
        wrong = _written_errors(impl, layer, sequence, (key, value))
        _compare("cache_write", *wrong, attn, kv_cache)
        if sharded is None and attn.config.prefixes is not None:
            _check_group(impl, layer, attn, kv_cache, sequence, (key, value))
        largest = float(value[:seq_len].abs().max())
        bound = max(torch.finfo(attn.dtype).eps, SMALLEST_EPSILON) * largest
        kinds = (False, True) if has_spans(impl, layer) else (False,)
        for (batch, told), spanned in product(batches_of(sequence, attn, sharded), kinds):
            spans = make_spans(batch, attn.device) if spanned else None
            query, output = attend(
                impl, layer, attn, kv_cache, sequence, batch, spans=spans, sharded=sharded, **told
            )
            begin = 0
            for r, (tokens, length) in enumerate(batch):
                rows = slice(begin, begin + tokens)
                span = None if spans is None else tuple(spans[r, 0].tolist())
                keys, values = key[:length], value[:length]
                asked = rotate(query[rows]) if impl.rotated_keys else query[rows]
                expected = reference(impl, asked, keys, values, span, is_clamped(layer))
                error = float((output[rows].double() - expected).abs().max())
                decoded = tokens <= DECODE_MAX_QUERY_LEN and not (span and span[0] < span[1])
                kernel = "decode" if decoded else "prefill"
                accepted = bound if decoded or not impl.fp8_matmul else FP8_ERROR * largest
                _compare(kernel, error, accepted, attn, kv_cache)
                begin += tokens


def fewest_that_share(attn: PagedAttention) -> int:
    """Requests of the smallest batch of decodes that may share pages; 1 if bounds allow none."""
    most = min(attn.max_num_reqs, attn.max_num_tokens)
    return next((n for n in range(2, most + 1) if attn.shares(n)), 1)


def group_of(sequence: Sequence, attn: PagedAttention) -> tuple[Sequence, torch.Tensor] | None:
    """A batch of single queries that begin with the same pages, enough of both to be a group.

    With two members a long prefix pays, with more of them a shorter one.  The borrowed pages that
    are full come again and again in its table, so that a few of them make a long sequence; its tail
    is the last one.

    Returns
    -------
    grouped : Sequence
        With that table and one batch.
    places : Tensor[keys], int64
        Where in the sequence each of its keys is.
    """
    page_size = attn.geometry.page_size
    pages = sequence.block_table[0].tolist()
    full, tail = pages[:-1], len(sequence.key) - (len(pages) - 1) * page_size
    if not full:
        return None
    prefixes = attn.config.prefixes
    assert prefixes is not None
    fewest, most = fewest_that_share(attn), min(attn.max_num_reqs, attn.max_num_tokens)
    if fewest < 2:
        return None
    for rounds, doublings in product(range(1, 4), range(4)):
        members = min(fewest << doublings, most)
        shared = rounds * max(prefixes.min_pages, len(full))
        order = [i % len(full) for i in range(shared)] + [len(full)]
        row = [pages[i] for i in order]
        lengths = [shared * page_size + tail - i % 3 for i in range(members)]
        if plan_shared([1] * members, lengths, [row] * members, attn.config).groups:
            table = torch.tensor([row], dtype=torch.int32, device=attn.device)
            start = torch.tensor(order, device=attn.device) * page_size
            within = torch.arange(page_size, device=attn.device)
            batch = [(1, length) for length in lengths]
            grouped = replace(sequence, block_table=table, batches=[batch])
            return grouped, (start[:, None] + within).flatten()
    return None


def _check_group(
    impl: TilewiseImpl,
    layer: Any,
    attn: PagedAttention,
    kv_cache: torch.Tensor,
    sequence: Sequence,
    held: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Compare decodes that read their common pages once; bounds may leave no such batch."""
    made = group_of(sequence, attn)
    if made is None:
        return
    grouped, places = made
    (batch,) = grouped.batches
    query, output = attend(impl, layer, attn, kv_cache, grouped, batch)
    key, value = (rows[places] for rows in held)
    largest = float(held[1][: len(sequence.key)].abs().max())
    bound = max(torch.finfo(attn.dtype).eps, SMALLEST_EPSILON) * largest
    for r, (_, length) in enumerate(batch):
        expected = reference(impl, query[r : r + 1], key[:length], value[:length])
        error = float((output[r : r + 1].double() - expected).abs().max())
        _compare("prefix_decode", error, bound, attn, kv_cache)


def has_spans(impl: TilewiseImpl, layer: Any) -> bool:
    """Whether a layer's prompts may hold bidirectional spans."""
    spanned = bool(getattr(layer, "use_mm_prefix", False)) and impl.attn_type == "decoder"
    return spanned and impl.alibi_slopes is None


def _written_errors(
    impl: TilewiseImpl, layer: Any, sequence: Sequence, found: tuple[torch.Tensor, torch.Tensor]
) -> tuple[float, float]:
    """Error of the element that is most wrong, and its bound.

    The error is infinite where something was written that should not be, or was not.
    """
    worst = (0.0, 0.0)
    key = rotate(sequence.key) if impl.rotated_keys else sequence.key
    written = (key, sequence.value)
    for rows, held, scale in zip(
        written, found, scales(impl, layer, sequence.slots.device), strict=True
    ):
        rows, there = rows.double(), held[: len(rows)]
        if there.isnan().any() or not held[len(rows) :].isnan().all():
            return float("inf"), 0.0
        bounds = torch.zeros_like(rows)
        if impl.kv_dtype is not None:
            limits = torch.finfo(impl.kv_dtype)
            by_head = scale[:, None]
            rows = rows.clamp(-limits.max * by_head, limits.max * by_head)
            # Half a step: of the number's binade, or of the subnormal numbers.
            _, exponents = torch.frexp(rows / by_head)
            binades = torch.ldexp(torch.full_like(rows, 0.5), exponents)
            sizes = binades.clamp(min=limits.smallest_normal) * by_head
            bounds = sizes * (limits.eps / 2 * FP8_ROOM)
            if impl.rotated_keys:
                # Sums in fp32 may come out on the other side of a tie.
                bounds = bounds + rows.abs().amax(-1, keepdim=True) * 2.0**-18
        errors = (there - rows).abs()
        at = int((errors - bounds).argmax())
        error, bound = float(errors.flatten()[at]), float(bounds.flatten()[at])
        if error - bound > worst[0] - worst[1]:
            worst = error, bound
    return worst


def _compare(
    kernel: str, error: float, bound: float, attn: PagedAttention, kv_cache: torch.Tensor
) -> None:
    # NaN compares false, so it does not pass.
    if error <= bound:
        return
    g = attn.geometry
    gpu = "Triton's interpreter"
    if attn.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(attn.device)
        gpu = f"{torch.cuda.get_device_name(attn.device)} (sm_{major}{minor})"
    raise SelfCheckFailed(
        f"tilewise's self-check failed: the {kernel} kernel is wrong for layers of {g.num_q_heads} "
        f"query and {g.num_kv_heads} KV heads of size {g.head_dim}, {attn.dtype}, sliding window "
        f"{attn.window}, {kv_cache.shape[0]} pages of {g.page_size} tokens with strides "
        f"{tuple(kv_cache.stride())}, on {gpu} with Triton {triton.__version__}: largest error "
        f"{error:.3g}, accepted {bound:.3g}. This server's answers would be wrong. Start it with "
        "another --attention-backend and report this line; TILEWISE_SELF_CHECK=0 starts it all "
        "the same."
    )
