"""FlashInfer's paged wrappers, planned and run as vLLM's FLASHINFER backend does on Hopper."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tilewise.bench.cases import Case
from tilewise.bench.inputs import CaseInputs, PagedCache
from tilewise.bench.providers import Candidate, Provider, Runner, pages_of
from tilewise.bench.timing import Call

WORKSPACE_BYTES = 512 << 20

# Runs one part of a batch: (copy index) -> None.
Part = Callable[[int], None]


class FlashInfer(Provider):
    """Decodes through the decode wrapper, everything else through the prefill wrapper.

    The first use of every shape class compiles for minutes where no compiled module is cached.
    """

    name = "flashinfer"
    module = "flashinfer"

    def __init__(self, page_size: int = 16) -> None:
        self.page_size = page_size
        self._workspaces: dict[str, torch.Tensor] = {}

    def missing(self) -> str | None:
        """FlashInfer needs a GPU and its compiler."""
        reason = super().missing()
        if reason is None and not torch.cuda.is_available():
            return "no GPU"
        return reason

    def candidates(self, case: Case, inputs: CaseInputs) -> dict[str, Candidate]:
        """One candidate at vLLM's default page size."""
        return {f"page {self.page_size}": partial(self._build, case, inputs)}

    def _workspace(self, part: str, device: torch.device) -> torch.Tensor:
        # One for each part: a plan leaves split-KV state of its own in the workspace.
        if part not in self._workspaces:
            self._workspaces[part] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspaces[part]

    def _build(self, case: Case, inputs: CaseInputs) -> Runner:
        cache = inputs.paged(self.page_size)
        decodes = 0 if case.sinks else case.num_decodes
        if case.kind == "prefill" or any(q_len != 1 for q_len in case.q_lens[:decodes]):
            decodes = 0
        parts: list[Part] = []
        wrappers: list[tuple[str, Any]] = []
        if decodes:
            wrapper, part = self._decode_part(case, inputs, cache, decodes)
            wrappers.append(("decode", wrapper))
            parts.append(part)
        if decodes < case.num_reqs:
            build = self._sink_part if case.sinks else self._prefill_part
            wrapper, part = build(case, inputs, cache, decodes)
            wrappers.append(("prefill", wrapper))
            parts.append(part)

        def call(copy: int) -> None:
            for part in parts:
                part(copy)

        def path() -> str:
            names = [f"{what} {_backend(wrapper)}" for what, wrapper in wrappers]
            return f"FlashInfer {' + '.join(names)} page {self.page_size}"

        calls: list[Call] = [partial(call, copy) for copy in range(inputs.copies)]
        return Runner(calls, path)

    def _csr(
        self, case: Case, cache: PagedCache, first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return indptr (host), indices (device), last-page lengths (host) and lengths (host)."""
        counts = torch.tensor([0, *cache.page_counts[first:last]], dtype=torch.int32)
        indptr = counts.cumsum(0, dtype=torch.int32)
        indices = torch.cat(list(pages_of(cache))[first:last]).contiguous()
        lens = torch.tensor(case.kv_lens[first:last], dtype=torch.int32)
        last_page = (lens - 1) % cache.page_size + 1
        return indptr, indices, last_page.to(torch.int32), lens

    def _kv(self, case: Case, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = kv.transpose(1, 2).split(case.head_dim, dim=-1)
        return k, v

    def _decode_part(
        self, case: Case, inputs: CaseInputs, cache: PagedCache, count: int
    ) -> tuple[Any, Part]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        indptr, indices, last_page, lens = self._csr(case, cache, 0, count)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace("decode", inputs.device),
            "NHD",
            use_cuda_graph=True,
            paged_kv_indptr_buffer=indptr.to(inputs.device),
            paged_kv_indices_buffer=torch.empty_like(indices),
            paged_kv_last_page_len_buffer=last_page.to(inputs.device),
            use_tensor_cores=True,
            backend="auto",
        )
        wrapper.plan(
            indptr=indptr,
            indices=indices,
            last_page_len=last_page,
            num_qo_heads=case.num_q_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            page_size=cache.page_size,
            pos_encoding_mode="NONE",
            sm_scale=inputs.scale,
            window_left=-1 if case.window is None else case.window - 1,
            logits_soft_cap=case.softcap or None,
            q_data_type=torch.bfloat16,
            kv_data_type=inputs.kv_dtype,
            o_data_type=torch.bfloat16,
            seq_lens=lens,
        )

        def part(copy: int) -> None:
            wrapper.run(
                inputs.q[copy][:count],
                self._kv(case, cache.kv[copy]),
                q_scale=1.0,
                k_scale=1.0,
                v_scale=1.0,
                out=inputs.out[copy][:count],
            )

        return wrapper, part

    def _plan_prefill(
        self, wrapper: Any, case: Case, inputs: CaseInputs, cache: PagedCache, first: int
    ) -> None:
        indptr, indices, last_page, lens = self._csr(case, cache, first, case.num_reqs)
        starts = inputs.query_start_loc_cpu[first:]
        wrapper.plan(
            qo_indptr=(starts - starts[0]).contiguous(),
            paged_kv_indptr=indptr,
            paged_kv_indices=indices,
            paged_kv_last_page_len=last_page,
            seq_lens=lens,
            num_qo_heads=case.num_q_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim_qk=case.head_dim,
            page_size=cache.page_size,
            causal=True,
            sm_scale=inputs.scale,
            window_left=-1 if case.window is None else case.window - 1,
            logits_soft_cap=case.softcap or None,
            q_data_type=torch.bfloat16,
            kv_data_type=inputs.kv_dtype,
            o_data_type=torch.bfloat16,
        )

    def _prefill_part(
        self, case: Case, inputs: CaseInputs, cache: PagedCache, first: int
    ) -> tuple[Any, Part]:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            self._workspace("prefill", inputs.device), "NHD", backend="auto"
        )
        self._plan_prefill(wrapper, case, inputs, cache, first)
        token = int(inputs.query_start_loc_cpu[first])

        def part(copy: int) -> None:
            wrapper.run(
                inputs.q[copy][token:],
                self._kv(case, cache.kv[copy]),
                q_scale=1.0,
                k_scale=1.0,
                v_scale=1.0,
                out=inputs.out[copy][token:],
            )

        return wrapper, part

    def _sink_part(
        self, case: Case, inputs: CaseInputs, cache: PagedCache, first: int
    ) -> tuple[Any, Part]:
        from flashinfer import BatchAttentionWithAttentionSinkWrapper

        assert inputs.sinks is not None
        wrapper = BatchAttentionWithAttentionSinkWrapper(
            self._workspace("prefill", inputs.device),
            "NHD",
            backend="auto",
            q_data_type=torch.bfloat16,
            kv_data_type=inputs.kv_dtype,
            head_dim_qk=case.head_dim,
            head_dim_vo=case.head_dim,
            window_left=-1 if case.window is None else case.window - 1,
        )
        self._plan_prefill(wrapper, case, inputs, cache, first)
        sinks = inputs.sinks.float()

        def part(copy: int) -> None:
            kv = self._kv(case, cache.kv[copy])
            wrapper.run(inputs.q[copy], kv, sinks, inputs.scale, v_scale=1.0, out=inputs.out[copy])

        return wrapper, part


def _backend(wrapper: Any) -> str:
    """Return the backend that a planned wrapper chose: fa2, fa3, cudnn, ..."""
    return str(getattr(wrapper, "resolved_backend", None) or getattr(wrapper, "_backend", "?"))
