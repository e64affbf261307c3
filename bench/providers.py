"""Attention implementations under one interface: ours and the peers, as vLLM calls them.

A provider turns the inputs of a case into candidates. A candidate builds a `Runner`: one callable
for each copy of the inputs, each enqueuing exactly one attention layer, and the name of the path
that runs. Steps that vLLM does once for all layers (planning, scheduler metadata) happen while
building. Peers are imported on first use; one that is absent says why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilewise.bench.cases import Case
from tilewise.bench.inputs import FP8, CaseInputs, PagedCache
from tilewise.bench.timing import Call


@dataclass(eq=False)
class Runner:
    """Callables of one prepared case.

    Parameters
    ----------
    calls : list of callables
        ``calls[i]()`` writes ``inputs.out[i]`` from ``inputs.q[i]`` and the i-th cache.
    path : callable
        Returns the name of the path that ran, once a call was made.
    """

    calls: list[Call]
    path: Callable[[], str]


Candidate = Callable[[], Runner]


class Provider:
    """One implementation. Subclasses override what they need."""

    name = ""
    module = "torch"

    def missing(self) -> str | None:
        """Return why this provider cannot run at all, or None."""
        try:
            importlib.import_module(self.module)
        except (ImportError, RuntimeError, OSError, AttributeError) as error:
            return f"{self.module} does not import: {type(error).__name__}: {error}"
        return None

    def unsupported(self, case: Case) -> str | None:
        """Return why this provider cannot run `case`, or None."""
        return None

    def candidates(self, case: Case, inputs: CaseInputs) -> dict[str, Candidate]:
        """Return builders by label; the fastest one is measured."""
        raise NotImplementedError


def _nhd(kv: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V, Tensor[num_pages, page_size, num_kv_heads, head_dim]."""
    k, v = kv.transpose(1, 2).split(head_dim, dim=-1)
    return k, v


class Tilewise(Provider):
    """Our own kernels, through `PagedAttention`; plain ones only on request.

    With ``fp8_matmul`` an fp8 cache meets fp8 operands; queries are rounded inside the kernel.
    With ``hnd`` heads lie outside tokens in a page, so that a head's part of it is one piece.  A
    ``config`` goes before the policy's choice.  ``package`` is another checkout's, if not this one
    (``tilewise.bench.versions``).
    """

    def __init__(
        self,
        name: str = "tilewise",
        page_size: int = 64,
        plain: bool = False,
        shared_prefixes: bool = False,
        fp8_matmul: bool = False,
        hnd: bool = False,
        config: Any = None,
        package: str = "tilewise",
    ) -> None:
        self.name = name
        self.package = package
        self.module = f"{package}.attention"
        self.config = config
        self.page_size = page_size
        self.plain = plain
        self.shared_prefixes = shared_prefixes
        self.fp8_matmul = fp8_matmul
        self.hnd = hnd

    def unsupported(self, case: Case) -> str | None:
        """With shared prefixes: decodes, no window; products of fp8: prefills of such a cache."""
        if self.shared_prefixes and (case.kind != "decode" or case.window is not None):
            return "only decodes without a window"
        if self.fp8_matmul and (case.kv_itemsize != 1 or case.max_q_len <= 16):
            return "only prefills over an fp8 cache"
        return None

    def candidates(self, case: Case, inputs: CaseInputs) -> dict[str, Candidate]:
        """One candidate: the policy chooses the kernels."""
        return {f"page {self.page_size}": partial(self._build, case, inputs)}

    def _build(self, case: Case, inputs: CaseInputs) -> Runner:
        counters, policy, attention, device_module = (
            importlib.import_module(f"{self.package}.{name}")
            for name in ("counters", "policy", "attention", "device")
        )
        cache = inputs.paged(self.page_size, self.hnd)
        heads = (case.num_q_heads, case.num_kv_heads, case.head_dim)
        query_len = case.max_q_len if case.kind == "decode" else 1
        config = self.config
        if self.plain:
            device = device_module.describe(torch.device(inputs.device))
            sizes = (torch.bfloat16.itemsize, inputs.kv_dtype.itemsize)
            geometry = policy.Geometry(*heads, self.page_size, *sizes)
            config = policy.choose(
                geometry, device, query_len, case.window or 0, plain=True,
                fp8_matmul=self.fp8_matmul,
            )  # fmt: skip
        attn = attention.PagedAttention(
            *heads,
            page_size=self.page_size,
            dtype=torch.bfloat16,
            max_num_reqs=case.num_reqs,
            max_num_tokens=case.num_tokens,
            device=str(inputs.device),
            decode_query_len=query_len,
            window=case.window,
            kv_dtype=inputs.kv_dtype,
            shared_prefixes=self.shared_prefixes,
            fp8_matmul=self.fp8_matmul,
            config=config,
        )
        # As a layer of vLLM passes them: always, and 1 where a checkpoint has none.
        one = torch.ones((), device=inputs.device) if inputs.kv_dtype == FP8 else None
        plan = attn.plan(
            inputs.query_start_loc,
            inputs.seq_lens,
            cache.block_table,
            num_tokens=case.num_tokens,
            max_query_len=case.max_q_len,
            has_decode=any(q_len <= 16 for q_len in case.q_lens),
        )

        before = counters.snapshot()

        def call(copy: int) -> None:
            attn.run(
                inputs.q[copy],
                cache.kv[copy],
                scale=inputs.scale,
                out=inputs.out[copy],
                plan=plan,
                sinks=inputs.sinks,
                softcap=case.softcap,
                k_scale=one,
                v_scale=one,
            )

        def path() -> str:
            after = counters.snapshot()
            ran = sorted(
                name.partition("{")[2].rstrip("}").rpartition("=")[2] or name
                for name, count in after.items()
                if name.startswith("launches") and count > before.get(name, 0)
            )
            return f"tilewise page {self.page_size}: {'+'.join(ran) or 'triton'}"

        return Runner([partial(call, copy) for copy in range(inputs.copies)], path)


class Fa3(Provider):
    """FlashAttention 3 of vLLM's wheel, called as its FLASH_ATTN backend calls it."""

    name = "fa3"
    module = "vllm.vllm_flash_attn.flash_attn_interface"
    # vLLM bounds the splits of batches that a captured graph may hold, and leaves others free.
    graph_tokens = 512
    graph_splits = 32

    def missing(self) -> str | None:
        """FA3 needs its extension library and a Hopper GPU."""
        reason = super().missing()
        if reason is not None:
            return reason
        reason = importlib.import_module(self.module).fa_version_unsupported_reason(3)
        return str(reason) if reason else None

    def splits(self, case: Case) -> int:
        """Return the split bound that vLLM passes for a batch of this size."""
        return self.graph_splits if case.num_tokens <= self.graph_tokens else 0

    def candidates(self, case: Case, inputs: CaseInputs) -> dict[str, Candidate]:
        """One candidate: page 16, as vLLM serves by default."""
        return {"page 16": partial(self._paged, case, inputs, 16, self.splits(case))}

    def _common(self, case: Case, inputs: CaseInputs) -> dict[str, Any]:
        ones = torch.ones(1, device=inputs.device).expand(case.num_reqs, case.num_kv_heads)
        window = [-1, -1] if case.window is None else [case.window - 1, 0]
        return {
            "cu_seqlens_q": inputs.query_start_loc,
            "max_seqlen_q": case.max_q_len,
            "max_seqlen_k": case.max_kv_len,
            "softmax_scale": inputs.scale,
            "causal": True,
            "window_size": window,
            "fa_version": 3,
            "q_descale": ones,
            "k_descale": ones,
            "v_descale": ones,
            "s_aux": inputs.sinks,
            "softcap": case.softcap,
        }

    def _metadata(
        self, case: Case, inputs: CaseInputs, page_size: int, splits: int
    ) -> torch.Tensor:
        interface = importlib.import_module(self.module)
        window = (-1, -1) if case.window is None else (case.window - 1, 0)
        return interface.get_scheduler_metadata(
            batch_size=case.num_reqs,
            max_seqlen_q=case.max_q_len,
            max_seqlen_k=case.max_kv_len,
            num_heads_q=case.num_q_heads,
            num_heads_kv=case.num_kv_heads,
            headdim=case.head_dim,
            cache_seqlens=inputs.seq_lens,
            qkv_dtype=inputs.kv_dtype,
            cu_seqlens_q=inputs.query_start_loc,
            page_size=page_size,
            causal=True,
            window_size=window,
            has_softcap=case.softcap > 0,
            num_splits=splits,
        )

    def _queries(self, inputs: CaseInputs) -> list[torch.Tensor]:
        # With an fp8 cache vLLM hands FA3 fp8 queries; quantising them is not part of the kernel.
        return [q.to(FP8) for q in inputs.q] if inputs.kv_dtype == FP8 else inputs.q

    def _paged(self, case: Case, inputs: CaseInputs, page_size: int, splits: int) -> Runner:
        flash = importlib.import_module(self.module).flash_attn_varlen_func
        cache = inputs.paged(page_size)
        queries = self._queries(inputs)
        options = self._common(case, inputs)
        options["scheduler_metadata"] = self._metadata(case, inputs, page_size, splits)

        def call(copy: int) -> None:
            k, v = _nhd(cache.kv[copy], case.head_dim)
            flash(
                q=queries[copy],
                k=k,
                v=v,
                out=inputs.out[copy],
                seqused_k=inputs.seq_lens,
                block_table=cache.block_table,
                num_splits=splits,
                **options,
            )

        calls: list[Call] = [partial(call, copy) for copy in range(inputs.copies)]
        return Runner(calls, lambda: f"FA3 page {page_size} splits {splits or 'auto'}")

    def _dense(self, case: Case, inputs: CaseInputs) -> Runner:
        flash = importlib.import_module(self.module).flash_attn_varlen_func
        cache = inputs.dense()
        queries = self._queries(inputs)
        options = self._common(case, inputs)

        def call(copy: int) -> None:
            flash(
                q=queries[copy],
                k=cache.k[copy],
                v=cache.v[copy],
                out=inputs.out[copy],
                cu_seqlens_k=cache.kv_start_loc,
                **options,
            )

        calls: list[Call] = [partial(call, copy) for copy in range(inputs.copies)]
        return Runner(calls, lambda: "FA3 dense splits auto")


class Fa3Best(Fa3):
    """FlashAttention 3 at its best: larger pages or none, with and without vLLM's split bound."""

    name = "fa3_best"

    def candidates(self, case: Case, inputs: CaseInputs) -> dict[str, Candidate]:
        """Pages of 16, 64 and 128 with every split rule, and the dense layout."""
        found: dict[str, Candidate] = {}
        for page_size in (16, 64, 128):
            for splits in sorted({0, self.splits(case)}):
                label = f"page {page_size} splits {splits or 'auto'}"
                found[label] = partial(self._paged, case, inputs, page_size, splits)
        found["dense"] = partial(self._dense, case, inputs)
        return found


class TritonAttn(Provider):
    """vLLM's TRITON_ATTN: `unified_attention` with the scratch of its split-KV path."""

    name = "triton_attn"
    module = "vllm.v1.attention.ops.triton_unified_attention"
    segments = 16
    min_grid = 128
    max_split_query = 8

    def __init__(self, page_size: int = 16) -> None:
        self.page_size = page_size

    def candidates(self, case: Case, inputs: CaseInputs) -> dict[str, Candidate]:
        """One candidate at vLLM's default page size."""
        return {f"page {self.page_size}": partial(self._build, case, inputs)}

    def _scratch(self, case: Case, inputs: CaseInputs, threshold: int) -> dict[str, Any]:
        query = case.max_q_len if case.max_q_len <= self.max_split_query else 1
        rows = (min(threshold, case.num_reqs) * query, case.num_q_heads, self.segments)
        empty = partial(torch.empty, dtype=torch.float32, device=inputs.device)
        padded = 1 << (case.head_dim - 1).bit_length()
        return {
            "softmax_segm_output": empty((*rows, padded)),
            "softmax_segm_max": empty(rows),
            "softmax_segm_expsum": empty(rows),
            "seq_threshold_3D": threshold,
            "num_par_softmax_segments": self.segments,
        }

    def _build(self, case: Case, inputs: CaseInputs) -> Runner:
        unified = importlib.import_module(self.module).unified_attention
        modes = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode
        cache = inputs.paged(self.page_size)
        fp8 = inputs.kv_dtype == FP8
        # A layer of an fp8 cache gets fp8 queries from vLLM on CUDA.
        queries = [q.to(FP8) for q in inputs.q] if fp8 else inputs.q
        one = torch.ones(1, device=inputs.device)
        threshold = self.min_grid // case.num_kv_heads
        options = {
            "cu_seqlens_q": inputs.query_start_loc,
            "max_seqlen_q": case.max_q_len,
            "seqused_k": inputs.seq_lens,
            "max_seqlen_k": case.max_kv_len,
            "softmax_scale": inputs.scale,
            "causal": True,
            "window_size": (-1, -1) if case.window is None else (case.window - 1, 0),
            "block_table": cache.block_table,
            "softcap": case.softcap,
            "q_descale": one if fp8 else None,
            "k_descale": one.expand(case.num_reqs, case.num_kv_heads),
            "v_descale": one.expand(case.num_reqs, case.num_kv_heads),
            "sinks": inputs.sinks,
            "kv_quant_mode": modes.FP8_PER_TENSOR if fp8 else modes.NONE,
            **self._scratch(case, inputs, threshold),
        }

        def call(copy: int) -> None:
            k, v = _nhd(cache.kv[copy], case.head_dim)
            unified(q=queries[copy], k=k, v=v, out=inputs.out[copy], **options)

        rows = max(16, 1 << (case.num_q_heads // case.num_kv_heads - 1).bit_length())
        per_block = rows // (case.num_q_heads // case.num_kv_heads)
        blocks = case.num_reqs * -(-case.max_q_len // per_block)
        split = case.max_q_len <= self.max_split_query and blocks <= threshold
        path = f"unified_attention {'3D' if split else '2D'} page {self.page_size}"
        return Runner([partial(call, copy) for copy in range(inputs.copies)], lambda: path)


class Cudnn(Provider):
    """cuDNN attention through torch, dense, where all requests have one length."""

    name = "cudnn"
    names = ("pf_1x16k", "pf_8x2k")

    def missing(self) -> str | None:
        """The cuDNN backend of torch needs a GPU."""
        return None if torch.cuda.is_available() else "no GPU"

    def unsupported(self, case: Case) -> str | None:
        """Only the dense cases of the suite."""
        return None if case.name in self.names else f"only {' and '.join(self.names)}"

    def candidates(self, case: Case, inputs: CaseInputs) -> dict[str, Candidate]:
        """One candidate."""
        return {"dense": partial(self._build, case, inputs)}

    def _build(self, case: Case, inputs: CaseInputs) -> Runner:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        cache = inputs.dense()
        shape = (case.num_reqs, case.max_q_len, -1, case.head_dim)

        def call(copy: int) -> torch.Tensor:
            q, k, v = (
                x.view(shape).transpose(1, 2)
                for x in (inputs.q[copy], cache.k[copy], cache.v[copy])
            )
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=inputs.scale, enable_gqa=True
                )

        # torch has no `out` here: copy the first result once, outside of what is timed.
        inputs.out[0].copy_(call(0).transpose(1, 2).reshape(inputs.out[0].shape))
        calls: list[Call] = [partial(call, copy) for copy in range(inputs.copies)]
        version = torch.backends.cudnn.version()
        return Runner(calls, lambda: f"cuDNN {version} dense")


def registry(flashinfer: bool = True) -> dict[str, Provider]:
    """Return all providers by name, in the order of the tables."""
    from tilewise.bench.flashinfer_cascade import FlashInferCascade
    from tilewise.bench.flashinfer_provider import FlashInfer

    providers: list[Provider] = [
        Tilewise(),
        Tilewise("tilewise_p16", page_size=16),
        Tilewise("tilewise_p128", page_size=128),
        Tilewise("tilewise_hnd", hnd=True),
        Tilewise("tilewise_plain", plain=True),
        Tilewise("tilewise_shared", shared_prefixes=True),
        Tilewise("tilewise_fp8", fp8_matmul=True),
        Tilewise("tilewise_fp8_plain", plain=True, fp8_matmul=True),
        Fa3(),
        Fa3Best(),
        TritonAttn(),
        Cudnn(),
    ]
    if flashinfer:
        after = next(i for i, p in enumerate(providers) if p.name == "fa3_best") + 1
        providers[after:after] = [FlashInfer(), FlashInferCascade()]
    return {provider.name: provider for provider in providers}


def provider_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions by which a provider may refuse or fail one case."""
    from triton.errors import TritonError

    from tilewise.errors import TilewiseError

    return (
        TilewiseError,
        TritonError,
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        ImportError,
        KeyError,
        OSError,
    )


def pages_of(cache: PagedCache) -> Iterable[torch.Tensor]:
    """Return the page ids of each request, without the padding of the table."""
    for row, count in zip(cache.block_table, cache.page_counts, strict=True):
        yield row[:count]
