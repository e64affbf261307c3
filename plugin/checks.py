"""What a batch and its layers must look like: every error names the value and what is accepted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise import plan_rule, policy
from tilewise.errors import PlanMismatch
from tilewise.geometry import PAGE_SCALES_STEP
from tilewise.kernels.launch import KvCache

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_OUT = torch.float8_e4m3fn  # dtype of quantised outputs


def names_of(dtypes: tuple[torch.dtype, ...]) -> str:
    """Dtypes for an error message."""
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def split_cache(
    pair: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor | None, ...],
    head_dim: int,
    fp8_format: str,
    rotated: bool = False,
) -> KvCache:
    """Views of keys and values, of one tensor with both in each row or of a pair."""
    if fp8_format:
        pair = tuple(x if x.dtype == torch.uint8 else x.view(torch.uint8) for x in pair)
    if len(pair) == 1:
        pair = (pair[0][..., :head_dim], pair[0][..., head_dim:])
    return KvCache(pair[0], pair[1], fp8_format, scales[0], scales[1], rotated=rotated)


@dataclass(frozen=True)
class Checks:
    """What a ``PagedAttention`` was built for; its methods raise ``PlanMismatch``.

    Parameters
    ----------
    geometry : policy.Geometry
    dtype, kv_dtype : torch.dtype
    fp8_format : str
        How an fp8 cache is read; "" without.
    device : torch.device
    max_num_reqs, max_num_tokens : int
    rotated : bool
        Whether keys of the cache are rotated.
    """

    geometry: policy.Geometry
    dtype: torch.dtype
    kv_dtype: torch.dtype
    fp8_format: str
    device: torch.device
    max_num_reqs: int
    max_num_tokens: int
    rotated: bool = False

    def causal(self, causal: bool | torch.Tensor, num_reqs: int) -> None:
        """Whether queries see keys past their own: a flag, or one for each request."""
        if isinstance(causal, bool):
            return
        if not isinstance(causal, torch.Tensor):
            raise PlanMismatch(f"causal={causal!r}; accepted: True, False or a tensor of flags")
        if (
            causal.shape != (num_reqs,)
            or causal.dtype != torch.int32
            or causal.device != self.device
            or (num_reqs > 1 and causal.stride(0) != 1)
        ):
            raise PlanMismatch(
                f"causal is {causal.dtype} {tuple(causal.shape)} on {causal.device}; accepted: "
                f"True, False or contiguous torch.int32 ({num_reqs},) on {self.device}"
            )

    def spans(self, spans: torch.Tensor | None, causal: bool | torch.Tensor, num_reqs: int) -> None:
        """Bidirectional spans of a causal batch."""
        if spans is None:
            return
        if not isinstance(spans, torch.Tensor):
            raise PlanMismatch(f"spans={spans!r}; accepted: a tensor or None")
        if causal is not True:
            raise PlanMismatch("spans of a batch that is not causal; accepted: None")
        fits = spans.dim() == 3 and spans.shape[0] == num_reqs and spans.shape[2] == 2
        if (
            not fits
            or spans.shape[1] < 1
            or spans.dtype != torch.int32
            or spans.device != self.device
            or not spans.is_contiguous()
        ):
            raise PlanMismatch(
                f"spans is {spans.dtype} {tuple(spans.shape)} on {spans.device}; accepted: "
                f"contiguous torch.int32 ({num_reqs}, 1 or more, 2) on {self.device}"
            )

    def batch(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | None,
        num_tokens: int,
        max_query_len: int,
        config: policy.Config,
        kv_start_loc: torch.Tensor | None = None,
        num_keys: int | None = None,
    ) -> None:
        """A batch's tensors and bounds; that a plan can count its units in 32 bits."""
        if seq_lens.dim() != 1:
            raise PlanMismatch(f"seq_lens has shape {tuple(seq_lens.shape)}; accepted: [num_reqs]")
        num_reqs = seq_lens.shape[0]
        if num_reqs > self.max_num_reqs:
            raise PlanMismatch(f"{num_reqs} requests; built for at most {self.max_num_reqs}")
        if not 0 <= num_tokens <= self.max_num_tokens:
            raise PlanMismatch(f"num_tokens={num_tokens}; built for 0 to {self.max_num_tokens}")
        named = {"query_start_loc": query_start_loc, "seq_lens": seq_lens}
        if block_table is not None:
            named["block_table"] = block_table
        for name, x in named.items():
            if x.dtype != torch.int32 or x.device != self.device:
                raise PlanMismatch(
                    f"{name} is {x.dtype} on {x.device}; accepted: torch.int32 on {self.device}"
                )
        if query_start_loc.shape != (num_reqs + 1,) or not query_start_loc.is_contiguous():
            raise PlanMismatch(
                f"query_start_loc has shape {tuple(query_start_loc.shape)}; "
                f"accepted: contiguous ({num_reqs + 1},) for {num_reqs} requests"
            )
        if num_reqs > 1 and seq_lens.stride(0) != 1:
            raise PlanMismatch(f"seq_lens has stride {seq_lens.stride(0)}; accepted: contiguous")
        if kv_start_loc is not None:
            self._partition(kv_start_loc, num_reqs, block_table, num_keys, max_query_len, config)
            return
        if num_keys is not None:
            raise PlanMismatch(f"num_keys={num_keys} without kv_start_loc; accepted: None")
        keys = num_tokens
        if block_table is not None:
            rows_of_ids = block_table.dim() == 2 and block_table.shape[0] >= num_reqs
            if not rows_of_ids or (block_table.stride(1) != 1 and block_table.shape[1] != 1):
                raise PlanMismatch(
                    f"block_table has shape {tuple(block_table.shape)} and strides "
                    f"{block_table.stride()}; accepted: [>= {num_reqs}, pages] with unit last "
                    "stride"
                )
            keys = block_table.shape[1] * self.geometry.page_size
        longest = min(max(max_query_len, 1), policy.DECODE_MAX_QUERY_LEN)
        units = num_reqs * plan_rule.decode_units_bound(longest, keys, config)
        if units >= 2**31 or keys > 2**31 - 1024:
            raise PlanMismatch(
                f"{num_reqs} requests of up to {keys} keys and {longest} query tokens could "
                f"exceed the 2**31 units a plan counts; pass a narrower block_table"
            )

    def query_starts(self, query_start_loc: torch.Tensor) -> int:
        """Starts of a batch that says nothing of its keys; returns its requests."""
        num_reqs = query_start_loc.numel() - 1
        if query_start_loc.dim() != 1 or not 0 <= num_reqs <= self.max_num_reqs:
            raise PlanMismatch(
                f"query_start_loc has shape {tuple(query_start_loc.shape)}; accepted: "
                f"[num_reqs + 1] of at most {self.max_num_reqs} requests"
            )
        if query_start_loc.dtype != torch.int32 or query_start_loc.device != self.device:
            raise PlanMismatch(
                f"query_start_loc is {query_start_loc.dtype} on {query_start_loc.device}; "
                f"accepted: torch.int32 on {self.device}"
            )
        return num_reqs

    def starts(self, kv_start_loc: torch.Tensor, num_reqs: int) -> None:
        """Where each request's keys or page ids start."""
        if not isinstance(kv_start_loc, torch.Tensor):
            raise PlanMismatch(f"kv_start_loc={kv_start_loc!r}; accepted: a tensor or None")
        if (
            kv_start_loc.shape != (num_reqs + 1,)
            or kv_start_loc.dtype != torch.int32
            or kv_start_loc.device != self.device
            or not kv_start_loc.is_contiguous()
        ):
            raise PlanMismatch(
                f"kv_start_loc is {kv_start_loc.dtype} {tuple(kv_start_loc.shape)} on "
                f"{kv_start_loc.device}; accepted: contiguous torch.int32 ({num_reqs + 1},) on "
                f"{self.device} for {num_reqs} requests"
            )

    def _partition(
        self,
        kv_start_loc: torch.Tensor,
        num_reqs: int,
        block_table: torch.Tensor | None,
        num_keys: int | None,
        max_query_len: int,
        config: policy.Config,
    ) -> None:
        """Requests whose keys, or page ids, follow each other in one row."""
        self.starts(kv_start_loc, num_reqs)
        if block_table is None:
            if num_keys is None or num_keys < 0:
                raise PlanMismatch(
                    f"num_keys={num_keys} with kv_start_loc; accepted: 0 or more, a bound on its "
                    "last entry"
                )
            keys = num_keys
        else:
            if block_table.dim() != 1 or not block_table.is_contiguous():
                raise PlanMismatch(
                    f"block_table has shape {tuple(block_table.shape)} with kv_start_loc; "
                    "accepted: contiguous [ids]"
                )
            if num_keys is not None:
                raise PlanMismatch(f"num_keys={num_keys} with a block_table; accepted: None")
            keys = block_table.shape[0] * self.geometry.page_size
        longest = min(max(max_query_len, 1), policy.DECODE_MAX_QUERY_LEN)
        units = plan_rule.decode_units_of_all(num_reqs, longest, keys, config)
        if units >= 2**31 or keys > 2**31 - 1024:
            raise PlanMismatch(
                f"{num_reqs} requests of up to {longest} query tokens and {keys} keys in all could "
                "exceed the 2**31 units a plan counts; accepted: fewer keys or requests"
            )

    def rows(self, name: str, x: torch.Tensor, config: policy.Config) -> None:
        """Queries or outputs: shape, strides that fit the kernels' 32-bit offsets, dtype."""
        g = self.geometry
        if x.dim() != 3 or x.shape[1:] != (g.num_q_heads, g.head_dim) or x.stride(2) != 1:
            raise PlanMismatch(
                f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; accepted: "
                f"[tokens, {g.num_q_heads}, {g.head_dim}] with unit last stride"
            )
        # The kernels add 32-bit offsets inside a tile to the tile's 64-bit address.
        tokens = max(config.prefill_block_q, policy.DECODE_MAX_QUERY_LEN)
        reach = (tokens - 1) * x.stride(0) + (g.group_size - 1) * x.stride(1) + g.head_dim
        if reach >= 2**31:
            raise PlanMismatch(
                f"{name} has strides {x.stride()}; accepted: {tokens} tokens of {g.group_size} "
                f"heads within 2**31 elements, these span {reach}"
            )
        if name != "out" or x.dtype != FP8_OUT:
            self.dtype_of(name, x)

    def cache(
        self, pair: tuple[torch.Tensor, ...], scales: tuple[torch.Tensor | None, ...]
    ) -> KvCache:
        """The views of a layer's cache, after a look at what was given."""
        g = self.geometry
        if len(pair) == 1 and (pair[0].dim() != 4 or pair[0].shape[3] != 2 * g.head_dim):
            raise PlanMismatch(
                f"kv_cache has shape {tuple(pair[0].shape)}; accepted: "
                f"[pages, {g.num_kv_heads}, {g.page_size}, {2 * g.head_dim}]"
            )
        accepted = (self.kv_dtype, torch.uint8) if self.fp8_format else (self.kv_dtype,)
        for name, x in (("k cache", pair[0]), ("v cache", pair[-1])):
            if x.dtype not in accepted or x.device != self.device:
                raise PlanMismatch(
                    f"{name} is {x.dtype} on {x.device}; built for {names_of(accepted)} on "
                    f"{self.device}"
                )
        kv = split_cache(pair, scales, g.head_dim, self.fp8_format, self.rotated)
        for name, x in (("k cache", kv.k), ("v cache", kv.v)):
            expected = (g.num_kv_heads, g.page_size, g.head_dim)
            if x.dim() != 4 or tuple(x.shape[1:]) != expected or x.stride(3) != 1:
                raise PlanMismatch(
                    f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; accepted: "
                    f"[pages, {g.num_kv_heads}, {g.page_size}, {g.head_dim}] "
                    "with unit last stride"
                )
        if kv.k.shape[0] != kv.v.shape[0]:
            raise PlanMismatch(
                f"the k cache has {kv.k.shape[0]} pages, the v cache {kv.v.shape[0]}; "
                "accepted: equally many"
            )
        return kv

    def are_tensors(self, **given: torch.Tensor | None) -> None:
        """What may be left out, but is a tensor where it is not: no number, no list."""
        for name, x in given.items():
            if x is not None and not isinstance(x, torch.Tensor):
                raise PlanMismatch(f"{name}={x!r}; accepted: a tensor or None")

    def per_head(self, name: str, x: torch.Tensor | None) -> None:
        """One number of each query head."""
        if x is None:
            return
        self.are_tensors(**{name: x})
        heads = self.geometry.num_q_heads
        if x.shape != (heads,) or (heads > 1 and x.stride(0) != 1):
            raise PlanMismatch(
                f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; accepted: "
                f"contiguous ({heads},), one of each query head"
            )
        if x.dtype not in SUPPORTED_DTYPES or x.device != self.device:
            raise PlanMismatch(
                f"{name} is {x.dtype} on {x.device}; accepted: {names_of(SUPPORTED_DTYPES)} "
                f"on {self.device}"
            )

    def out_scale(self, scale: torch.Tensor | None, out: torch.Tensor | None) -> None:
        """Quantised outputs have a scale, and only they."""
        if out is not None and (scale is not None) != (out.dtype == FP8_OUT):
            accepted = self.dtype if scale is None else FP8_OUT
            given = "without" if scale is None else "with"
            raise PlanMismatch(f"out is {out.dtype} {given} out_scale; accepted: {accepted}")
        self.are_tensors(out_scale=scale)
        if scale is not None and (
            scale.shape not in ((), (1,))
            or scale.dtype != torch.float32
            or scale.device != self.device
        ):
            raise PlanMismatch(
                f"out_scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}; accepted: "
                f"torch.float32 of shape () or (1,) on {self.device}"
            )

    def kv_scales(
        self, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, pages: int
    ) -> None:
        """Scales of an fp8 cache of so many pages."""
        self.kv_scale("k_scale", k_scale, pages)
        self.kv_scale("v_scale", v_scale, pages)
        given = [x for x in (k_scale, v_scale) if x is not None]
        if len({x.dim() == 2 for x in given}) > 1:
            raise PlanMismatch(
                f"k_scale and v_scale have shapes {[tuple(x.shape) for x in given]}; accepted: "
                "both of pages, or neither"
            )

    def kv_scale(self, name: str, x: torch.Tensor | None, pages: int) -> None:
        """What the elements of an fp8 cache are multiplied with."""
        if x is None:
            return
        if not self.fp8_format:
            raise PlanMismatch(f"{name} is given for a cache of {self.kv_dtype}; accepted: None")
        heads = self.geometry.num_kv_heads
        of_pages = x.shape == (pages, heads)
        if of_pages and self.geometry.page_size % PAGE_SCALES_STEP:
            raise PlanMismatch(
                f"{name} of pages with page_size={self.geometry.page_size}; accepted: multiples "
                f"of {PAGE_SCALES_STEP}"
            )
        fits = (of_pages or x.shape in ((), (1,), (heads,))) and x.is_contiguous()
        if not fits or x.dtype != torch.float32 or x.device != self.device:
            raise PlanMismatch(
                f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; accepted: contiguous "
                f"torch.float32 of shape (), (1,), ({heads},) or ({pages}, {heads}) on "
                f"{self.device}"
            )

    def dtype_of(self, name: str, x: torch.Tensor) -> None:
        """The dtype and the device that the object was built for."""
        if x.dtype != self.dtype or x.device != self.device:
            raise PlanMismatch(
                f"{name} is {x.dtype} on {x.device}; built for {self.dtype} on {self.device}"
            )
