"""The kernels against plain PyTorch, on a server's own KV cache, before it serves.

A few real pages, the last one among them, are borrowed: filled with NaN, written by the cache-write
kernel, read by prefill and decode, compared, and given back as they were. Nothing of it depends on
the model's weights but the sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from tilewise.errors import SelfCheckFailed
from tilewise.kernels.cache_write import write_kv_cache
from tilewise.policy import DECODE_MAX_QUERY_LEN

if TYPE_CHECKING:
    from tilewise.attention import PagedAttention
    from tilewise.integration.impl import TilewiseImpl

# New tokens of the requests: decode, speculative decode, prefill.
QUERY_LENS = (1, 3, DECODE_MAX_QUERY_LEN + 4)
# Standard deviation of the logits: single keys decide, so that none can be missed unseen.
LOGIT_SPREAD = 3.0
# Rounding of the weights and of the output, with room; of fp32, exp2 of the hardware.
SMALLEST_EPSILON = 2.0**-14
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


def make_sequence(attn: PagedAttention, kv_cache: torch.Tensor, row_pad: int = 0) -> Sequence:
    """Choose pages and draw keys and values for them.

    Parameters
    ----------
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
        draw_rows(attn, seq_len, heads, width // 2, row_pad, seed=seed) for seed in (1, 2)
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
    write_kv_cache(k_cache, v_cache, sequence.key, sequence.value, sequence.slots)


def attend(
    impl: TilewiseImpl,
    layer: Any,
    attn: PagedAttention,
    kv_cache: torch.Tensor,
    sequence: Sequence,
    batch: list[tuple[int, int]],
    row_pad: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan and run one batch as a server's step does.

    Returns
    -------
    query, output : Tensor[num_tokens, num_heads, head_size]
    """
    # The builder imports this module.
    from tilewise.integration.builder import TilewiseMetadata

    query_lens, lengths = zip(*batch, strict=True)
    starts = [sum(query_lens[:i]) for i in range(len(batch) + 1)]
    query_start_loc = torch.tensor(starts, dtype=torch.int32, device=attn.device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=attn.device)
    table = sequence.block_table.repeat(len(batch), 1)
    query = draw_rows(attn, starts[-1], impl.num_heads, impl.head_size, row_pad, seed=3)
    query.mul_(LOGIT_SPREAD / (impl.scale * impl.head_size**0.5))
    plan = attn.plan(
        query_start_loc, seq_lens, table, num_tokens=starts[-1], max_query_len=max(query_lens)
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
    )
    shape = (starts[-1], impl.num_heads, impl.head_size)
    output = torch.full(shape, float("nan"), dtype=attn.dtype, device=attn.device)
    impl.forward(layer, query, None, None, kv_cache, metadata, output)
    return query, output


def reference(
    impl: TilewiseImpl, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """What queries, the last tokens of all these keys, should give; fp64."""
    tokens, heads, size = query.shape
    length = len(key)
    keys, values = key.double(), value.double()
    kv_heads = keys.shape[1]
    grouped = query.double().view(tokens, kv_heads, heads // kv_heads, size)
    logits = torch.einsum("tkgd,nkd->tkgn", grouped, keys).flatten(1, 2) * impl.scale
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
    logits = logits.masked_fill(hidden, float("-inf"))
    if impl.sinks is not None:
        sinks = impl.sinks.double()[None, :, None].expand(tokens, heads, 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., :length].view(tokens, kv_heads, heads // kv_heads, length)
    return torch.einsum("tkgn,nkd->tkgd", weights, values).flatten(1, 2)


def check(impl: TilewiseImpl, layer: Any, attn: PagedAttention, kv_cache: torch.Tensor) -> None:
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

    Raises
    ------
    SelfCheckFailed
        Naming the kernel, the layer's geometry, the error and what to do.
    """
    sequence = make_sequence(attn, kv_cache)
    bound = max(torch.finfo(attn.dtype).eps, SMALLEST_EPSILON) * float(sequence.value.abs().max())
    with Borrowed(kv_cache, sequence.pages):
        write(impl, layer, kv_cache, sequence)
        _compare("cache_write", _written_error(kv_cache, sequence), 0.0, attn, kv_cache)
        key, value = sequence.key, sequence.value
        for batch in sequence.batches:
            query, output = attend(impl, layer, attn, kv_cache, sequence, batch)
            begin = 0
            for tokens, length in batch:
                rows = slice(begin, begin + tokens)
                expected = reference(impl, query[rows], key[:length], value[:length])
                error = float((output[rows].double() - expected).abs().max())
                kernel = "decode" if tokens <= DECODE_MAX_QUERY_LEN else "prefill"
                _compare(kernel, error, bound, attn, kv_cache)
                begin += tokens


def _written_error(kv_cache: torch.Tensor, sequence: Sequence) -> float:
    """Largest error of what was written; infinite where a byte was that should not be."""
    page_size = kv_cache.shape[2]
    found = kv_cache[sequence.pages]
    expected = torch.full_like(found, float("nan"))
    # [tokens, heads, 2 * size], by page and place within it
    rows = torch.cat([sequence.key, sequence.value], -1)
    places = torch.arange(len(rows), device=rows.device)
    expected[places // page_size, :, places % page_size] = rows.to(expected.dtype)
    if not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    return float((found.double() - expected.double()).abs().nan_to_num(0.0).max())


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
