"""Which keys a query sees where no rule says it: masks by element, and trees of drafts.

``MASK`` says how a mask is kept; it is "" where there is none:

* "bytes": a byte for each element, 0 where the key is hidden.  Requests lie one after another,
  [query tokens, keys] each, without gaps.
* "bits": the same in bits, the least significant first; each request starts at a byte.
* "blocks": bytes of the blocks of a block-sparse matrix, [blocks, MASK_ROWS, PAGE_SIZE], in the
  order of the block table.
* "tree": a word for each query of a request of at most 16.  Such a query sees all keys before the
  request's new ones, and the new key ``i`` where bit ``i`` is set.

A mask by element is read with every key tile; of a tree, only the tiles with new keys are masked.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilewise.geometry import next_power_of_2
from tilewise.kernels.launch import Launcher

TREE_TOKENS = 16


@dataclass(frozen=True)
class KeyMask:
    """A mask as the kernels read it.

    Parameters
    ----------
    kind : str
        "bytes", "bits", "blocks" or "tree".
    values : Tensor, uint8; of a tree int32, one for each query row
    starts : Tensor[1 + num_reqs], int64, or None for a tree
        Elements there are, then the first element of each request.
    block_rows : int
        Rows of a block, of "blocks" only.
    """

    kind: str
    values: torch.Tensor
    starts: torch.Tensor | None = None
    block_rows: int = 0

    @property
    def is_tree(self) -> bool:
        """Whether only keys of drafts are masked."""
        return self.kind == "tree"


def mask_arguments(mask: KeyMask | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``mask_ptr`` and ``mask_start_ptr`` of the kernels."""
    return (None, None) if mask is None else (mask.values, mask.starts)


def mask_constants(mask: KeyMask | None) -> dict[str, str | int]:
    """``MASK`` and ``MASK_ROWS`` of the kernels."""
    if mask is None:
        return {"MASK": "", "MASK_ROWS": 0}
    return {"MASK": mask.kind, "MASK_ROWS": mask.block_rows}


@triton.jit
def mask_rows(
    mask_ptr, mask_start_ptr, req, query_start, token, query_len, seq_len,
    PAGE_SIZE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """``(row, bound)`` for ``seen``: each row's first element or word, and the elements there are.

    Of a tree the second is the number of keys that all queries see.
    """
    if MASK == "":
        return 0, 0
    else:
        # Rows of no token read as the last one.
        token = tl.maximum(tl.minimum(token, query_len - 1), 0)
        if MASK == "tree":
            return tl.load(mask_ptr + query_start + token), seq_len - query_len
        else:
            length = PAGE_SIZE if MASK == "blocks" else seq_len
            row = tl.load(mask_start_ptr + 1 + req) + token.to(tl.int64) * length
            return row, tl.load(mask_start_ptr)


@triton.jit
def whole_tiles(full, context_len, MASK: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key tiles that need no mask: ``full`` of them where there is none by element."""
    if MASK == "":
        return full
    elif MASK == "tree":
        return tl.maximum(context_len, 0) // BLOCK_N
    else:
        return 0


@triton.jit
def _row_words(
    mask_ptr, row, bound, start, seq_len,
    PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """A word a row, whose bit ``i`` says whether it sees the key ``start + i``, of ``KEYS``."""
    if MASK == "bits":
        at = row + start
        left = tl.minimum(tl.maximum(tl.minimum(bound - at, seq_len - start), 0), KEYS)
        left = left.to(tl.int32)
        # Keys may start anywhere in a byte: each eight of them are parts of two.
        shift = (at & 7).to(tl.int32)[:, None]
        key = 8 * tl.arange(0, KEYS // 8)[None, :]
        ptrs = (mask_ptr + (at >> 3))[:, None] + key // 8
        low = tl.load(ptrs, mask=key < left[:, None], other=0).to(tl.int32)
        high = tl.load(ptrs + 1, mask=key + 8 - shift < left[:, None], other=0).to(tl.int32)
        byte = ((low | (high << 8)) >> shift) & 255
        word = tl.sum(byte.to(tl.int64) << key, 1)
        few = (tl.full(left.shape, 1, tl.int64) << tl.minimum(left, 63)) - 1
        return tl.where(left >= 64, word, word & few)
    else:
        word = tl.zeros(row.shape, tl.int64)
        for i in tl.static_range(0, KEYS, 16):  # a part at a time: few addresses are kept
            key = tl.arange(0, 16)
            column = key.to(tl.int64) + start + i
            if MASK == "blocks":
                column = column // PAGE_SIZE * (MASK_ROWS * PAGE_SIZE) + column % PAGE_SIZE
            ok = (key < seq_len - start - i)[None, :] & (column[None, :] < (bound - row)[:, None])
            byte = tl.load((mask_ptr + row)[:, None] + column[None, :], mask=ok, other=0)
            bits = tl.sum((byte != 0).to(tl.int32) << key[None, :], 1)
            word = word | (bits.to(tl.int64) << i)
        return word


@triton.jit
def seen(
    mask_ptr, row, bound, start, seq_len,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """Whether each row sees each of ``BLOCK_N`` keys from ``start`` on, [BLOCK_M, BLOCK_N].

    What lies past a mask's end is hidden.
    """
    key = tl.arange(0, BLOCK_N)
    if MASK == "tree":
        draft = start + key - bound
        word = row[:, None] >> tl.minimum(tl.maximum(draft, 0), 31)[None, :]
        return (draft < 0)[None, :] | ((word & 1) != 0)
    else:
        # A word a row and not an element each, whose addresses would spill.
        tl.static_assert(BLOCK_N <= 128)
        KEYS: tl.constexpr = BLOCK_N if BLOCK_N < 64 else 64
        word = _row_words(mask_ptr, row, bound, start, seq_len, PAGE_SIZE, KEYS, MASK, MASK_ROWS)
        word = word[:, None]
        if BLOCK_N > 64:
            more = _row_words(
                mask_ptr, row, bound, start + 64, seq_len, PAGE_SIZE, KEYS, MASK, MASK_ROWS
            )
            word = tl.where(key[None, :] < 64, word, more[:, None])
        return ((word >> (key % 64)[None, :]) & 1) != 0


_STARTS = ["query_start_loc_ptr", "seq_lens_ptr", "kv_start_ptr"]


@triton.jit(
    do_not_specialize=["num_elements", "num_reqs", "block"], do_not_specialize_on_alignment=_STARTS
)
def _mask_starts_kernel(
    starts_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    kv_start_ptr,
    num_elements,
    num_reqs,
    block,
    PACKED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """starts[1 + r] = elements before request r; of blocks, block * kv_start[r]; grid = (1,)."""
    before = tl.zeros([], tl.int64)
    tl.store(starts_ptr, num_elements)
    for base in range(0, num_reqs, BLOCK_R):
        r = base + tl.arange(0, BLOCK_R)
        ok = r < num_reqs
        if kv_start_ptr is not None:
            start = tl.load(kv_start_ptr + r, mask=ok, other=0).to(tl.int64) * block
        else:
            query_end = tl.load(query_start_loc_ptr + r + 1, mask=ok, other=0)
            query_len = query_end - tl.load(query_start_loc_ptr + r, mask=ok, other=0)
            seq_len = tl.load(seq_lens_ptr + r, mask=ok, other=0)
            size = query_len.to(tl.int64) * seq_len
            if PACKED:
                size = (size + 7) // 8 * 8
            start = before + tl.cumsum(size, 0) - size
            before += tl.sum(size, 0)
        tl.store(starts_ptr + 1 + r, start, mask=ok)


@triton.jit(
    do_not_specialize=["stride_t"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "parents_ptr", "visible_ptr"],
)
def _tree_words_kernel(
    words_ptr,
    parents_ptr,
    visible_ptr,
    query_start_loc_ptr,
    stride_t,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """words[t] = bits of the drafts that query t sees; grid = (requests,).

    From parents, a draft's own bit and those on its way to the root; from ``visible`` its columns.
    """
    req = tl.program_id(0)
    start = tl.load(query_start_loc_ptr + req)
    query_len = tl.load(query_start_loc_ptr + req + 1) - start
    if query_len > TOKENS:
        return
    token = tl.arange(0, TOKENS)
    ok = token < query_len
    row = start.to(tl.int64) + token
    if parents_ptr is not None:
        one = tl.full([TOKENS], 1, tl.int32)
        word = one << token
        draft = token
        for _ in range(TOKENS):  # a path is no longer, even where parents go round in a circle
            draft = tl.load(parents_ptr + start + draft, mask=ok & (draft >= 0), other=-1)
            draft = tl.where((draft >= 0) & (draft < query_len), draft, -1)
            word = word | tl.where(draft >= 0, one << tl.maximum(draft, 0), 0)
    else:
        column = tl.arange(0, TOKENS)
        mask = ok[:, None] & (column < WIDTH)[None, :]
        bit = tl.load(visible_ptr + row[:, None] * stride_t + column[None, :], mask=mask, other=0)
        word = tl.sum((bit != 0).to(tl.int32) << column[None, :], 1)
    tl.store(words_ptr + row, word, mask=ok)


_launch_mask_starts = Launcher(_mask_starts_kernel)
_launch_tree_words = Launcher(_tree_words_kernel)


def find_mask_starts(
    starts: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_elements: int,
    num_reqs: int,
    *,
    packed: bool = False,
    kv_starts: torch.Tensor | None = None,
    block: int = 0,
) -> None:
    """Write where each request's mask starts; no host sync.

    Parameters
    ----------
    starts : Tensor[>= 1 + num_reqs], int64
        Written: ``num_elements``, then the first element of each request.
    query_start_loc : Tensor[num_reqs + 1], int32
    seq_lens : Tensor[num_reqs], int32
    num_elements : int
        Elements the mask has; those of a last byte of bits count.
    packed : bool
        Whether each request starts at a multiple of 8.
    kv_starts : Tensor[num_reqs + 1], int32, or None
        Of a mask of blocks: blocks before each request.
    block : int
        Elements of a block.
    """
    args = (starts, query_start_loc, seq_lens, kv_starts, num_elements, num_reqs, block)
    block_r = min(next_power_of_2(max(starts.shape[0] - 1, 1)), 1024)
    _launch_mask_starts((1, 1, 1), args, {"PACKED": packed, "BLOCK_R": block_r}, num_warps=4)


def find_tree_words(
    words: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_reqs: int,
    *,
    parents: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
) -> None:
    """Write the word of each query of a request of at most 16 tokens; no host sync.

    Parameters
    ----------
    words : Tensor[num_tokens], int32
    query_start_loc : Tensor[num_reqs + 1], int32
    parents : Tensor[num_tokens], int32, contiguous, or None
        Number of each draft's parent within its request; anything else ends the path.
    visible : Tensor[num_tokens, width], uint8, unit last stride, or None
        Instead: whether a query sees each draft of its request; ``width`` at most 16.
    """
    stride, width = (0, 0) if visible is None else (visible.stride(0), visible.shape[1])
    constants = {"WIDTH": width, "TOKENS": TREE_TOKENS}
    args = (words, parents, visible, query_start_loc, stride)
    _launch_tree_words((num_reqs, 1, 1), args, constants, num_warps=1)
