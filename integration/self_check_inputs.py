"""What the self-check and the warm-up write into a cache and ask of it.

One sequence of keys and values in a few real pages, and batches of requests that read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from tilewise.geometry import cdiv
from tilewise.integration.self_check_groups import fewest_that_share
from tilewise.policy import DECODE_MAX_QUERY_LEN, Config

if TYPE_CHECKING:
    from tilewise.attention import PagedAttention
    from tilewise.integration.context_parallel import ShardedAttention
    from tilewise.integration.impl import TilewiseImpl

# New tokens of the requests: decode, speculative decode, prefill.
QUERY_LENS = (1, 3, DECODE_MAX_QUERY_LEN + 4)
# Standard deviation of the logits: single keys decide, so that none can be missed unseen.
LOGIT_SPREAD = 3.0
# Scales beyond these are left to saturation or to fp8's subnormal numbers: the rows that are drawn
# have to fit into fp16.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-6, 2.0**6
LARGE_PAGE = 128
# Key blocks of a Gluon prefill that no query is to mask.
LOOSE_BLOCKS = 5


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


def drawn_size(scale: torch.Tensor) -> torch.Tensor:
    """Standard deviation ``[1 or KV heads, 1]`` of what is drawn for such a scale."""
    return scale.clamp(SMALLEST_SCALE, LARGEST_SCALE)[:, None]


def enough_pages(config: Config, page_size: int) -> int:
    """Pages that have an edge between them, and where there is a Gluon prefill, its main loop.

    Such a kernel masks the key blocks that hold the newest tokens, and walks others without.  The
    loop for logits that are all far below zero is left to the tests.
    """
    count = 3 if page_size <= LARGE_PAGE else 2
    hopper = config.hopper_prefill_fp8 if config.fp8_dot else config.hopper_prefill
    if hopper is None:
        return count
    keys = (LOOSE_BLOCKS + 1) * hopper.block_n + max(QUERY_LENS)
    return max(count, cdiv(keys, page_size) + 1)


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
    wanted = enough_pages(attn.config, page_size)
    count = min(num_pages, wanted)
    # The last page has the largest address; the order is not that of memory.
    ids = [num_pages - 1, 0, *(num_pages * i // count for i in range(1, count - 1))][:count]
    # A last page that is neither empty nor full.
    seq_len = (count - 1) * page_size + 5 if count > 1 else page_size - 3
    table = torch.tensor([ids], dtype=torch.int32, device=attn.device)
    places = torch.arange(seq_len, device=attn.device)
    slots = table[0].long()[places // page_size] * page_size + places % page_size
    key, value = (
        draw_rows(attn, seq_len, heads, width // 2, row_pad, seed=seed).mul_(drawn_size(scale))
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


def newest_rows(rows: torch.Tensor, batch: list[tuple[int, int]], row_pad: int) -> torch.Tensor:
    """The new tokens' rows ``[num_tokens, heads, size]`` of each request, one after another."""
    picked = torch.cat([rows[length - n : length] for n, length in batch])
    tokens, heads, size = picked.shape
    wide = picked.new_empty(tokens, heads * size + row_pad)
    # Strides by hand: PyTorch drops the padding of a single row.
    padded = wide.as_strided(picked.shape, (heads * size + row_pad, size, 1))
    return padded.copy_(picked)


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


def has_spans(impl: TilewiseImpl, layer: Any) -> bool:
    """Whether a layer's prompts may hold bidirectional spans."""
    spanned = bool(getattr(layer, "use_mm_prefix", False)) and impl.attn_type == "decoder"
    return spanned and impl.alibi_slopes is None


def make_spans(batch: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """One bidirectional span ``[requests, 1, 2]`` for each request, with half of its queries."""
    rows = [[[length - tokens, length - tokens // 2 - 1]] for tokens, length in batch]
    return torch.tensor(rows, dtype=torch.int32, device=device)
