"""Masks that a batch brings along: by element, or as a tree of drafts.

``PagedAttention.plan(mask=…)`` takes them; ``tilewise.kernels.masks`` says how kernels read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewise import counters
from tilewise.errors import PlanMismatch
from tilewise.kernels.masks import TREE_TOKENS, KeyMask, find_mask_starts, find_tree_words


@dataclass(frozen=True)
class CustomMask:
    """Which keys each query sees, element by element, instead of the causal rule.

    The tensor is read when layers run: another mask may be written into it without a new plan,
    as long as lengths stay.

    Parameters
    ----------
    values : Tensor[sum(query_len * seq_len)], bool, or Tensor[bytes], uint8
        True where a query sees a key.  Requests follow each other, each ``[query_len, seq_len]``
        and flattened (FlashInfer's ``custom_mask``).  As uint8, eight elements a byte, the least
        significant bit first; each request starts a byte (``packed_custom_mask``).  Of a
        tensor that ends too early, keys past its end are not seen.
    """

    values: torch.Tensor


@dataclass(frozen=True)
class TreeMask:
    """What the drafts of a speculative decoder see: all keys before the drafts, and ancestors.

    One of ``parents`` and ``visible`` is given, for every query row.  It speaks for requests of at
    most 16 query tokens, which are the drafts (the root, already accepted, is usually the first);
    longer ones are causal.  It is read by ``plan``.

    Parameters
    ----------
    parents : Tensor[num_tokens], int32, optional
        Number of each draft's parent among the drafts of its request; -1, or whatever is no such
        number, where its parent is the context.  A draft sees itself and its ancestors.
    visible : Tensor[num_tokens, 1 to 16], bool, optional
        Whether a query sees each draft of its request.  Its own bit is not implied.
    """

    parents: torch.Tensor | None = None
    visible: torch.Tensor | None = None


@dataclass(frozen=True)
class BlockMask:
    """Elements of the blocks of a block-sparse matrix; of ``tilewise.sparse``.

    Parameters
    ----------
    values : Tensor[blocks, rows, columns], bool, contiguous
    """

    values: torch.Tensor


Mask = CustomMask | TreeMask | BlockMask


def flatten_masks(masks: Sequence[torch.Tensor], packed: bool = False) -> torch.Tensor:
    """Put the masks of requests one after another, as ``CustomMask`` takes them.

    Parameters
    ----------
    masks : sequence of Tensor[query_len, seq_len], bool
        One for each request, in their order.
    packed : bool
        Eight elements a byte.

    Returns
    -------
    Tensor[elements], bool, or Tensor[bytes], uint8
        On the device of ``masks``.
    """
    if not masks:
        raise PlanMismatch("no masks; accepted: one of each request")
    for i, mask in enumerate(masks):
        if mask.dim() != 2 or mask.dtype != torch.bool:
            raise PlanMismatch(
                f"masks[{i}] is {mask.dtype} {tuple(mask.shape)}; accepted: torch.bool "
                "[query_len, seq_len]"
            )
    flat = [mask.flatten() for mask in masks]
    if not packed:
        return torch.cat(flat)
    weights = 1 << torch.arange(8, device=flat[0].device)
    padded = (torch.nn.functional.pad(x, (0, -x.numel() % 8)) for x in flat)
    bits = torch.cat(list(padded)).view(-1, 8)
    return (bits * weights).sum(1).to(torch.uint8)


class MaskBuffers:
    """What a ``PagedAttention`` keeps for its masks; allocated with the first that needs it.

    Parameters
    ----------
    max_num_reqs, max_num_tokens : int
    device : torch.device
    """

    def __init__(self, max_num_reqs: int, max_num_tokens: int, device: torch.device) -> None:
        self.sizes = max_num_reqs, max_num_tokens
        self.device = device
        self._starts: torch.Tensor | None = None
        self._words: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Device memory of the buffers there are."""
        buffers = (self._starts, self._words)
        return sum(x.numel() * x.element_size() for x in buffers if x is not None)

    def plan(
        self,
        mask: Mask | None,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        kv_starts: torch.Tensor | None,
        num_tokens: int,
    ) -> KeyMask | None:
        """Check a mask and find what the kernels need of it; no host sync.

        Parameters
        ----------
        mask : Mask or None
        query_start_loc, seq_lens, kv_starts : Tensor, int32
            The batch's, checked.
        num_tokens : int
            Rows the batch may have.

        Raises
        ------
        PlanMismatch
            With what the mask has and what is accepted.
        """
        num_reqs = seq_lens.shape[0]
        if mask is None:
            return None
        if isinstance(mask, TreeMask):
            return self._tree(mask, query_start_loc, num_reqs, num_tokens)
        if not isinstance(mask, CustomMask | BlockMask):
            raise PlanMismatch(
                f"mask is a {type(mask).__name__}; accepted: CustomMask, TreeMask or None"
            )
        if self._starts is None:
            self._starts = torch.zeros(1 + self.sizes[0], dtype=torch.int64, device=self.device)
        values = mask.values
        if isinstance(mask, BlockMask):
            _, rows, columns = values.shape
            find_mask_starts(
                self._starts, query_start_loc, seq_lens, values.numel(), num_reqs,
                kv_starts=kv_starts, block=rows * columns,
            )  # fmt: skip
            counters.add("launches", kernel="mask_starts")
            return KeyMask("blocks", values.view(torch.uint8), self._starts, rows)
        self._check_custom(values)
        packed = values.dtype == torch.uint8
        elements = values.numel() * (8 if packed else 1)
        find_mask_starts(
            self._starts, query_start_loc, seq_lens, elements, num_reqs, packed=packed
        )  # fmt: skip
        counters.add("launches", kernel="mask_starts")
        return KeyMask("bits" if packed else "bytes", values.view(torch.uint8), self._starts)

    def _check_custom(self, values: torch.Tensor) -> None:
        if not isinstance(values, torch.Tensor):
            raise PlanMismatch(f"CustomMask.values={values!r}; accepted: a tensor")
        if (
            values.dim() != 1
            or values.dtype not in (torch.bool, torch.uint8)
            or values.device != self.device
            or not values.is_contiguous()
        ):
            raise PlanMismatch(
                f"CustomMask.values is {values.dtype} {tuple(values.shape)} on {values.device}; "
                f"accepted: contiguous torch.bool [elements], or torch.uint8 [bytes] of eight "
                f"elements, on {self.device}"
            )

    def _tree(
        self, mask: TreeMask, query_start_loc: torch.Tensor, num_reqs: int, num_tokens: int
    ) -> KeyMask:
        parents, visible = mask.parents, mask.visible
        if (parents is None) == (visible is None):
            given = "neither" if parents is None else "both"
            raise PlanMismatch(f"TreeMask has {given} of parents and visible; accepted: one")
        name, x = ("parents", parents) if visible is None else ("visible", visible)
        if not isinstance(x, torch.Tensor):
            raise PlanMismatch(f"TreeMask.{name}={x!r}; accepted: a tensor")
        dtype = torch.int32 if visible is None else torch.bool
        if visible is None:
            shape = f"[>= {num_tokens}]"
            fits = x.dim() == 1 and x.is_contiguous()
        else:
            shape = f"[>= {num_tokens}, 1 to {TREE_TOKENS}]"
            fits = x.dim() == 2 and 1 <= x.shape[1] <= TREE_TOKENS
            fits = fits and (x.stride(1) == 1 or x.shape[1] == 1)
        if not fits or x.shape[0] < num_tokens or x.dtype != dtype or x.device != self.device:
            raise PlanMismatch(
                f"TreeMask.{name} is {x.dtype} {tuple(x.shape)} on {x.device}; accepted: {dtype} "
                f"{shape} with unit last stride on {self.device}"
            )
        if self._words is None:
            self._words = torch.zeros(self.sizes[1], dtype=torch.int32, device=self.device)
        if num_reqs:
            seen = None if visible is None else visible.view(torch.uint8)
            find_tree_words(self._words, query_start_loc, num_reqs, parents=parents, visible=seen)
            counters.add("launches", kernel="tree_words")
        return KeyMask("tree", self._words)


def check_alone(
    mask: Mask | None, window: int | None, causal: bool | torch.Tensor, spans: torch.Tensor | None
) -> None:
    """See that nothing else says what queries see.

    Raises
    ------
    PlanMismatch
        With what is given beside the mask and what is accepted.
    """
    if mask is None:
        return
    kind = type(mask).__name__
    if window is not None:
        raise PlanMismatch(f"{kind} with window={window}; accepted: an object without a window")
    if spans is not None:
        raise PlanMismatch(f"{kind} with spans; accepted: None")
    if isinstance(causal, torch.Tensor):
        raise PlanMismatch(f"{kind} with flags of causal requests; accepted: causal=True")
    if isinstance(mask, TreeMask) and causal is False:
        raise PlanMismatch(
            "TreeMask with causal=False; accepted: True, for requests without drafts"
        )
