"""From the tensors of a layer to the views that kernels read; what is new is checked first."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from tilewise import policy
from tilewise.checks import Checks, split_cache
from tilewise.errors import PlanMismatch
from tilewise.kernels.launch import KvCache, tma_strides
from tilewise.plan import Plan
from tilewise.ragged import view_rows


class Binding(ABC):
    """How a ``PagedAttention`` takes its layers' tensors.

    Parameters
    ----------
    checks : Checks
        What the object was built for.
    config : policy.Config
    """

    def __init__(self, checks: Checks, config: policy.Config) -> None:
        self.checks = checks
        self.config = config

    def check_lengths(self, plan: Plan, q: torch.Tensor, out: torch.Tensor | None) -> None:
        """Queries and outputs, ``[rows, …]`` each, must reach as far as the plan."""
        for name, x in (("q", q), ("out", out)):
            if x is not None and x.shape[0] < plan.num_tokens:
                raise PlanMismatch(
                    f"{name} has {x.shape[0]} rows; the plan covers {plan.num_tokens} tokens"
                )

    @abstractmethod
    def bind(
        self,
        plan: Plan,
        q: torch.Tensor,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> tuple[KvCache, bool]:
        """Check tensors and make views of keys and values.

        Parameters
        ----------
        plan : Plan
        q, kv_cache, out, k_scale, v_scale
            As of ``PagedAttention.run``.

        Returns
        -------
        KvCache
            Views; nothing is copied.
        bool
            Whether the copy engine can read them.

        Raises
        ------
        PlanMismatch
            With what a tensor has and what is accepted.
        """


class CacheBinding(Binding):
    """Keys lie in pages of a cache or, of a plan without a block table, in the batch's own rows.

    A layer passes the same layouts every step, so what was checked once is remembered by
    everything but the number of rows and the addresses.

    Parameters
    ----------
    checks : Checks
    config : policy.Config
    """

    def __init__(self, checks: Checks, config: policy.Config) -> None:
        super().__init__(checks, config)
        # Layouts that were checked, and whether the strides of their caches suit the copy engine.
        self._layouts: dict[tuple[object, ...], bool] = {}

    def bind(
        self,
        plan: Plan,
        q: torch.Tensor,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> tuple[KvCache, bool]:
        """Views of the cache; see ``Binding.bind``."""
        self.check_lengths(plan, q, out)
        if plan.block_table is None:
            return self._bind_rows(plan, q, kv_cache, out, k_scale, v_scale), False
        checks = self.checks
        pair = (kv_cache,) if isinstance(kv_cache, torch.Tensor) else tuple(kv_cache)
        if len(pair) not in (1, 2):
            raise PlanMismatch(f"kv_cache is a tuple of {len(pair)}; accepted: (k, v)")
        tensors = (q, *pair) if out is None else (q, out, *pair)
        pages = pair[0].shape[0]
        checks.are_tensors(k_scale=k_scale, v_scale=v_scale)
        same_pages = pages == pair[-1].shape[0]
        layouts = ((x.shape[1:], x.stride(), x.dtype) for x in tensors)
        scales = (k_scale, v_scale)
        kinds = (x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in scales)
        of_pages = any(x is not None and x.dim() == 2 for x in scales)
        key = (len(pair), same_pages, out is None, of_pages and pages, *layouts, *kinds)
        aligned = self._layouts.get(key)
        if aligned is None:
            checks.rows("q", q, self.config)
            if out is not None:
                checks.rows("out", out, self.config)
            checks.kv_scales(k_scale, v_scale, pages)
            if of_pages and self.config.prefixes is not None:
                raise PlanMismatch(
                    "k_scale and v_scale of pages with shared_prefixes; accepted: of the tensor or "
                    "of heads"
                )
            kv = checks.cache(pair, scales)
            aligned = self._layouts[key] = tma_strides(kv)
        else:
            head_dim = checks.geometry.head_dim
            kv = split_cache(pair, scales, head_dim, checks.fp8_format, checks.rotated)
        for x in tensors:
            if x.device != checks.device:
                raise PlanMismatch(f"a tensor is on {x.device}; built for {checks.device}")
        return kv, aligned and (kv.k.data_ptr() | kv.v.data_ptr()) % 16 == 0

    def _bind_rows(
        self,
        plan: Plan,
        q: torch.Tensor,
        kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> KvCache:
        """Views of keys and values that are the batch's own rows; the copy engine reads pages."""
        checks = self.checks
        if checks.fp8_format or k_scale is not None or v_scale is not None:
            raise PlanMismatch(
                f"kv_dtype={checks.kv_dtype} with a plan without block_table; accepted: "
                f"{checks.dtype}, without scales"
            )
        checks.rows("q", q, self.config)
        if out is not None:
            checks.rows("out", out, self.config)
        return view_rows(kv, checks.geometry, checks.dtype, checks.device, plan.num_keys)
