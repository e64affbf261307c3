"""FlashInfer's cascade wrapper for cases whose requests begin with a prefix: it is told of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tilewise.bench.cases import Case
from tilewise.bench.flashinfer_provider import FlashInfer
from tilewise.bench.inputs import CaseInputs
from tilewise.bench.providers import Runner, pages_of
from tilewise.bench.timing import Call


class FlashInferCascade(FlashInfer):
    """``MultiLevelCascadeAttentionWrapper`` of two levels: a group's prefix, then the tails.

    Prefixes are planned on the host, from what the case says; nothing has to be found.  The wrapper
    allocates its output, so the first one is copied to where it is checked, outside of what is
    timed.
    """

    name = "flashinfer_cascade"

    def unsupported(self, case: Case) -> str | None:
        """Decodes with a prefix in a cache of bf16."""
        if case.kind != "decode" or not case.prefix or case.kv_itemsize != 2 or case.sinks:
            return "only bf16 decodes with a prefix"
        return None

    def _build(self, case: Case, inputs: CaseInputs) -> Runner:
        from flashinfer import MultiLevelCascadeAttentionWrapper

        cache = inputs.paged(self.page_size)
        members = case.num_reqs // case.prefix_groups
        shared = case.prefix // self.page_size
        rows = list(pages_of(cache))
        starts = inputs.query_start_loc_cpu
        device = inputs.device

        def ints(values: Any) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32).to(device)

        counts = [count - shared for count in cache.page_counts]
        tails = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        groups = range(case.prefix_groups)
        last_page = (torch.tensor(case.kv_lens) - 1) % self.page_size + 1
        # A level for each: first query row, first page, pages, and keys of the last page.
        query_rows = [ints(starts[::members]), ints(starts)]
        first_pages = [ints([shared * g for g in range(case.prefix_groups + 1)]), ints(tails)]
        pages = [
            torch.cat([rows[g * members][:shared] for g in groups]).contiguous(),
            torch.cat([row[shared:] for row in rows]).contiguous(),
        ]
        last_keys = [ints([self.page_size] * case.prefix_groups), ints(last_page)]
        wrapper = MultiLevelCascadeAttentionWrapper(
            2,
            self._workspace("cascade", device),
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf_arr=[x.clone() for x in query_rows],
            paged_kv_indptr_buf_arr=[x.clone() for x in first_pages],
            paged_kv_indices_buf_arr=[x.clone() for x in pages],
            paged_kv_last_page_len_buf_arr=[x.clone() for x in last_keys],
        )
        wrapper.plan(
            query_rows,
            first_pages,
            pages,
            last_keys,
            case.num_q_heads,
            case.num_kv_heads,
            case.head_dim,
            self.page_size,
            causal=True,
            sm_scale=inputs.scale,
            q_data_type=torch.bfloat16,
            kv_data_type=inputs.kv_dtype,
        )

        def call(copy: int) -> torch.Tensor:
            return wrapper.run(inputs.q[copy], self._kv(case, cache.kv[copy]))

        inputs.out[0].copy_(call(0))
        calls: list[Call] = [partial(call, copy) for copy in range(inputs.copies)]
        return Runner(calls, lambda: f"FlashInfer cascade page {self.page_size}")
