"""The kernels against plain PyTorch, on a server's own KV cache, before it serves.

A few real pages, the last one among them, are borrowed: filled with NaN, written by the cache-write
kernel, read by prefill and decode, compared, and given back as they were. Nothing of it depends on
the model's weights but the sinks and the scales of an fp8 cache.

What an fp8 cache holds is compared with what was written within a rounding to fp8; attention is
then compared with that of the keys and values that the cache holds, as closely as in any cache.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import triton

from tilewise.checks import FP8_OUT
from tilewise.device import fp8_format
from tilewise.errors import SelfCheckFailed
from tilewise.integration.metadata import TilewiseMetadata
from tilewise.integration.self_check_groups import group_of
from tilewise.integration.self_check_inputs import (
    LOGIT_SPREAD,
    Sequence,
    batches_of,
    draw_rows,
    drawn_size,
    has_spans,
    make_sequence,
    make_spans,
    newest_rows,
    scales,
)
from tilewise.integration.spans import is_clamped
from tilewise.kernels.cache_write import write_kv_cache
from tilewise.kernels.hadamard import rotate
from tilewise.policy import DECODE_MAX_QUERY_LEN

if TYPE_CHECKING:
    from tilewise.attention import PagedAttention
    from tilewise.integration.context_parallel import ShardedAttention
    from tilewise.integration.impl import TilewiseImpl

# Rounding of the weights and of the output, with room; of fp32, exp2 of the hardware.
SMALLEST_EPSILON = 2.0**-14
# Of products of fp8 operands, relative to the largest value: roundings of queries move logits of
# that spread by a tenth, and those of weights are 2**-4.
FP8_ERROR = 2.0**-2
# The quotients that are rounded to fp8 were themselves rounded to fp32.
FP8_ROOM = 1.0 + 2.0**-16


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
    sizes = drawn_size(scales(impl, layer, attn.device)[0])
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
            newest_rows(rows.to(attn.dtype), batch, pad)
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
