"""Block-sparse attention: a BSR matrix says which blocks of keys each block of queries sees.

Such a matrix is a paged cache (FlashInfer's view): blocks of columns are pages, a row of blocks is
a request, and its column indices are its block table.  So the kernels are those of the cache, and a
plan counts, and they read, the blocks that are there and no others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewise import plan_rule, policy
from tilewise.attention import PagedAttention
from tilewise.binding import Binding
from tilewise.checks import SUPPORTED_DTYPES, Checks, names_of
from tilewise.device import describe, resolve
from tilewise.errors import PlanMismatch, UnsupportedConfig
from tilewise.kernels.launch import KvCache, tma_strides
from tilewise.masks import BlockMask, CustomMask, Mask
from tilewise.plan import Plan


class BlockSparseAttention:
    """Attention of ``q`` over the keys that lie in the blocks of a BSR matrix.

    One object serves one stream at a time; a change of ``indptr`` needs a new ``plan``.  Neither
    ``plan`` nor ``run`` waits for the device, and both can be captured in a CUDA graph.

    Parameters
    ----------
    num_q_heads, num_kv_heads, head_dim : int
        As of ``PagedAttention``.  All heads share the matrix.
    block_size : (int, int)
        Rows and columns of a block, 1 or more.  Blocks of up to 16 rows take the split-KV kernel.
        Columns that are a multiple of 64 are read fastest on Hopper.
    dtype : torch.dtype
        float16, bfloat16 or float32.
    max_block_rows : int
        Bound on the rows of blocks of every later matrix.
    device : str or torch.device
    batch_invariant : bool
        As of ``PagedAttention``.
    config : policy.Config, optional
        Tiles and worker count, instead of the policy's choice.

    Raises
    ------
    UnsupportedConfig
        With the offending value and what is accepted.

    Examples
    --------
    >>> attn = BlockSparseAttention(32, 8, 128, block_size=(16, 64), dtype=torch.bfloat16,
    ...                             max_block_rows=256)
    >>> attn.plan(indptr, indices, num_rows=4096, num_cols=4096)
    >>> out = attn.run(q, k, v)
    """

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        block_size: tuple[int, int],
        dtype: torch.dtype,
        max_block_rows: int,
        device: str | torch.device = "cuda",
        batch_invariant: bool = False,
        config: policy.Config | None = None,
    ) -> None:
        if not _is_block_size(block_size):
            raise UnsupportedConfig(
                f"block_size={block_size!r}; accepted: (rows, columns), each an int of 1 or more"
            )
        if dtype not in SUPPORTED_DTYPES:
            raise UnsupportedConfig(f"dtype={dtype}; accepted: {names_of(SUPPORTED_DTYPES)}")
        if max_block_rows < 1:
            raise UnsupportedConfig(f"max_block_rows={max_block_rows}; accepted: 1 or more")
        self.block_size = block_size
        self.max_block_rows = max_block_rows
        rows, columns = block_size
        self.device = resolve(device)
        # Any other number of columns is walked key by key, as small pages are.
        whole = columns % policy.PAGE_SIZE_STEP == 0
        page_size = columns if whole else policy.PAGE_SIZE_STEP
        if config is None:
            geometry = policy.Geometry(
                num_q_heads, num_kv_heads, head_dim, page_size, dtype.itemsize
            )
            tokens = min(rows, policy.DECODE_MAX_QUERY_LEN)
            config = policy.choose(geometry, describe(self.device), tokens, plain=True)
        if not whole:
            config = replace(
                config,
                prefill=replace(config.prefill, use_tma=False),
                decode=replace(config.decode, use_tma=False),
            )
        self._attn = _BlockRows(
            num_q_heads, num_kv_heads, head_dim, page_size=page_size, dtype=dtype,
            max_num_reqs=max_block_rows, max_num_tokens=max_block_rows * rows, device=self.device,
            batch_invariant=batch_invariant, config=config,
        )  # fmt: skip
        self._attn.take_blocks_of(columns)
        steps = torch.arange(max_block_rows + 1, dtype=torch.int64, device=self.device) * rows
        self._row_starts = steps.to(torch.int32)
        self._query_start_loc = torch.zeros_like(self._row_starts)
        self._seq_lens = torch.zeros_like(self._row_starts)

    @property
    def config(self) -> policy.Config:
        """Tiles and worker count."""
        return self._attn.config

    @property
    def workspace_bytes(self) -> int:
        """Device memory held by the persistent buffers; those of masks come with the first."""
        own = (self._row_starts, self._query_start_loc, self._seq_lens)
        return sum(x.numel() * x.element_size() for x in own) + self._attn.workspace_bytes

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        *,
        num_rows: int,
        num_cols: int,
        mask: torch.Tensor | None = None,
    ) -> Plan:
        """Turn a block-sparse matrix into tiles and splits; no host sync.

        Parameters
        ----------
        indptr : Tensor[block_rows + 1], int32
            Blocks before each row of blocks.
        indices : Tensor[blocks], int32
            Column of each block, counted in blocks and below ``num_cols / columns``; any order,
            none twice in a row.
        num_rows, num_cols : int
            Rows and columns of the matrix: queries, and keys, which are whole blocks.  The last row
            of blocks may have fewer queries than others.
        mask : Tensor[blocks, rows, columns], bool, or Tensor[bytes], uint8, optional
            Which elements of its blocks a query sees; None for all.  The second form has eight
            elements a byte, the least significant bit first: for each row of blocks, from a byte of
            its own, ``[its queries, its blocks * columns]``.  Read when layers run.

        Returns
        -------
        Plan
            Also kept, as the default of ``run``.

        Raises
        ------
        PlanMismatch
            When the matrix exceeds the bounds given at construction, or a tensor does not fit.
        """
        rows, columns = self.block_size
        self._check_matrix(indptr, indices, num_rows, num_cols)
        key_mask = self._mask(mask, indices.shape[0])  # refused before anything is written
        block_rows = indptr.shape[0] - 1
        starts = self._query_start_loc[: block_rows + 1]
        torch.clamp(self._row_starts[: block_rows + 1], max=num_rows, out=starts)
        lengths = self._seq_lens[:block_rows]
        torch.sub(indptr[1:], indptr[:-1], out=lengths).mul_(columns)
        shortest = num_rows % rows or rows
        return self._attn.plan(
            starts, lengths, indices, num_tokens=num_rows, max_query_len=min(rows, num_rows),
            has_decode=shortest <= policy.DECODE_MAX_QUERY_LEN, causal=False, kv_start_loc=indptr,
            num_keys=num_cols, mask=key_mask,
        )  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        plan: Plan | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
        out_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend with one layer's queries, keys and values.

        Parameters
        ----------
        q : Tensor[num_rows or more, num_q_heads, head_dim]
        k, v : Tensor[num_cols or more, num_kv_heads, head_dim]
            Any strides, last one 1.
        scale, out, return_lse, plan, sinks, softcap, out_scale
            As of ``PagedAttention.run``.

        Returns
        -------
        out : Tensor like ``q``
            0 for queries that see no key.
        lse : Tensor[rows, num_q_heads], fp32
            Only with ``return_lse``; -inf where a query saw neither key nor sink.

        Raises
        ------
        PlanMismatch
            When the plan is stale, was made by another object, or the tensors do not fit it.
        """
        return self._attn.run(
            q, (k, v), scale=scale, out=out, return_lse=return_lse, plan=plan, sinks=sinks,
            softcap=softcap, out_scale=out_scale,
        )  # fmt: skip

    def _check_matrix(
        self, indptr: torch.Tensor, indices: torch.Tensor, num_rows: int, num_cols: int
    ) -> None:
        rows, columns = self.block_size
        for name, x in (("indptr", indptr), ("indices", indices)):
            if x.dim() != 1 or x.dtype != torch.int32 or x.device != self.device:
                raise PlanMismatch(
                    f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; accepted: torch.int32 "
                    f"with one axis on {self.device}"
                )
            if not x.is_contiguous():
                raise PlanMismatch(f"{name} has stride {x.stride(0)}; accepted: contiguous")
        block_rows = policy.cdiv(max(num_rows, 0), rows)
        if num_rows < 0 or block_rows > self.max_block_rows:
            raise PlanMismatch(
                f"num_rows={num_rows}; accepted: 0 to {self.max_block_rows * rows}, "
                f"{self.max_block_rows} blocks of {rows} rows"
            )
        if indptr.shape[0] != block_rows + 1:
            raise PlanMismatch(
                f"indptr has {indptr.shape[0]} entries; accepted: {block_rows + 1} for "
                f"num_rows={num_rows} in blocks of {rows}"
            )
        if num_cols < 0 or num_cols % columns:
            raise PlanMismatch(
                f"num_cols={num_cols}; accepted: multiples of a block's {columns} columns"
            )

    def _mask(self, mask: torch.Tensor | None, blocks: int) -> Mask | None:
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor):
            raise PlanMismatch(f"mask={mask!r}; accepted: a tensor or None")
        if mask.dtype == torch.uint8 and mask.dim() == 1:
            return CustomMask(mask)
        expected = (blocks, *self.block_size)
        if (
            mask.dtype != torch.bool
            or mask.shape != expected
            or mask.device != self.device
            or not mask.is_contiguous()
        ):
            raise PlanMismatch(
                f"mask is {mask.dtype} {tuple(mask.shape)} on {mask.device}; accepted: contiguous "
                f"torch.bool {expected}, or torch.uint8 [bytes] of eight elements, on {self.device}"
            )
        return BlockMask(mask)


def _is_block_size(size: Any) -> bool:
    """Whether it is rows and columns of a block."""
    pair = isinstance(size, tuple | list) and len(size) == 2
    return pair and all(isinstance(n, int) and n >= 1 for n in size)


def to_blocks(
    mask: torch.Tensor, block_size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make a block-sparse matrix of a dense mask, for ``plan``; waits for the device.

    Parameters
    ----------
    mask : Tensor[rows, columns], bool
        True where a query sees a key.
    block_size : (int, int)
        Rows and columns of a block; columns of the mask are whole blocks.

    Returns
    -------
    indptr : Tensor[block_rows + 1], int32
    indices : Tensor[blocks], int32
        Columns of the blocks of which something is seen, ascending.
    elements : Tensor[blocks, rows, columns], bool
        What is seen of them; rows past the mask's last are not.

    Raises
    ------
    PlanMismatch
        With what the mask has and what is accepted.
    """
    if not _is_block_size(block_size):
        raise PlanMismatch(
            f"block_size={block_size!r}; accepted: (rows, columns), each an int of 1 or more"
        )
    rows, columns = block_size
    if mask.dim() != 2 or mask.dtype != torch.bool or mask.shape[1] % columns:
        raise PlanMismatch(
            f"mask is {mask.dtype} {tuple(mask.shape)}; accepted: torch.bool [rows, multiple of "
            f"{columns}]"
        )
    padded = torch.nn.functional.pad(mask, (0, 0, 0, -mask.shape[0] % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2)
    listed = blocks.flatten(2).any(2)  # [block rows, block columns]
    counts = listed.sum(1)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    indices = listed.nonzero()[:, 1].to(torch.int32)
    return indptr, indices, blocks[listed].contiguous()


@dataclass(frozen=True)
class _BlockChecks(Checks):
    """Checks of a batch whose requests are rows of blocks, of ``columns`` keys each."""

    columns: int = 1

    def _partition(
        self,
        kv_start_loc: torch.Tensor,
        num_reqs: int,
        block_table: torch.Tensor | None,
        num_keys: int | None,
        max_query_len: int,
        config: policy.Config,
    ) -> None:
        assert block_table is not None
        blocks = block_table.shape[0]
        keys = blocks * self.columns
        longest = min(max(max_query_len, 1), policy.DECODE_MAX_QUERY_LEN)
        units = plan_rule.decode_units_of_all(num_reqs, longest, keys, config)
        if units >= 2**31 or keys > 2**31 - 1024:
            raise PlanMismatch(
                f"{blocks} blocks of {self.columns} columns in {num_reqs} rows of blocks could "
                "exceed the 2**31 units a plan counts; accepted: fewer or smaller blocks"
            )


class _BlockBinding(Binding):
    """Keys lie in rows, and are seen as pages of a block's columns.

    Parameters
    ----------
    checks : Checks
    config : policy.Config
    columns : int
        Keys of a block.
    """

    def __init__(self, checks: Checks, config: policy.Config, columns: int) -> None:
        super().__init__(checks, config)
        self.columns = columns

    def bind(
        self,
        plan: Plan,
        q: torch.Tensor,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> tuple[KvCache, bool]:
        """Views of keys and values as pages; see ``Binding.bind``."""
        self.check_lengths(plan, q, out)
        self.checks.rows("q", q, self.config)
        if out is not None:
            self.checks.rows("out", out, self.config)
        g = self.checks.geometry
        views = []
        for name, x in zip(("k", "v"), kv_cache, strict=True):
            if x.dim() != 3 or x.shape[1:] != (g.num_kv_heads, g.head_dim) or x.stride(2) != 1:
                raise PlanMismatch(
                    f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; accepted: "
                    f"[keys, {g.num_kv_heads}, {g.head_dim}] with unit last stride"
                )
            self.checks.dtype_of(name, x)
            if x.shape[0] < plan.num_keys:
                raise PlanMismatch(f"{name} has {x.shape[0]} rows; the plan has {plan.num_keys}")
            blocks = x[: plan.num_keys].unflatten(0, (plan.num_keys // self.columns, self.columns))
            views.append(blocks.transpose(1, 2))
        kv = KvCache(*views)
        aligned = tma_strides(kv) and (kv.k.data_ptr() | kv.v.data_ptr()) % 16 == 0
        return kv, aligned and plan.num_keys > 0


class _BlockRows(PagedAttention):
    """Requests are rows of blocks; pages are blocks of consecutive keys, of any size."""

    def take_blocks_of(self, columns: int) -> None:
        """Walk keys in blocks of so many, whatever page size the tiles were chosen for."""
        checks = _BlockChecks(**vars(self._checks), columns=columns)
        self._use(_BlockBinding(checks, self.config, columns))
