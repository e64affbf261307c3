"""The plan/run interface: plan once per batch, run once per layer.

Usable without vLLM.  The object owns every buffer the kernels share; after construction neither
``plan`` nor ``run`` synchronises with the device, and ``run`` given ``out`` allocates nothing, so
both can be captured in a CUDA graph and replayed with other lengths.
"""

import itertools
import math
from typing import Any

import torch

from tilewise import counters, plan_rule, policy
from tilewise.binding import Binding, CacheBinding
from tilewise.buffers import Buffers
from tilewise.checks import FP8_OUT, SUPPORTED_DTYPES, Checks, names_of
from tilewise.device import FP8_DTYPES, check_current, describe, fp8_format, resolve
from tilewise.errors import PlanMismatch, UnsupportedConfig
from tilewise.kernels.launch import Logits
from tilewise.kernels.plan import plan_on_device
from tilewise.launches import Layer, launch_decode, launch_prefill
from tilewise.masks import Mask, check_alone
from tilewise.options import settle
from tilewise.plan import Plan

__all__ = ["PagedAttention", "Plan"]

_OBJECTS = itertools.count(1)  # unlike id(), never used twice
_PLAN = counters.cell("launches", kernel="plan")
_SPANS = ("whole", "windowed", "off")


class PagedAttention:
    """Attention of variable-length queries over a paged KV cache, or over their own keys.

    One object serves one stream at a time, and every change of lengths needs a new ``plan``.

    Parameters
    ----------
    num_q_heads, num_kv_heads : int
        Query heads must be a multiple of KV heads (ratio 1 to 128, powers of two or not).
    head_dim : int
        Multiple of 8 from 16 to 256, or 512.
    page_size : int
        Tokens per page, a multiple of 16; 64 and 128 are read fastest on Hopper.
    dtype : torch.dtype
        float16, bfloat16 or float32, the same for queries, output and, but for ``kv_dtype``, cache.
    max_num_reqs, max_num_tokens : int
        Bounds on every later batch; they size the persistent buffers.
    device : str or torch.device
        A CUDA device of compute capability 8.0 or later, or "cpu" under ``TRITON_INTERPRET=1``.
    decode_query_len : int
        Query tokens of a typical decode request (1 + speculative tokens), 1 to 16.
    window : int, optional
        Sliding window: a query sees this many keys at most, the last ones and its own among
        them.  Pages left of it are not read.  None for all keys.  Of a batch that is not causal
        it reaches as far to the right.
    kv_dtype : torch.dtype, optional
        float8_e4m3fn or float8_e5m2 for an fp8 cache, whose tensors have that dtype or are its
        bytes, uint8.  Default: ``dtype``.
    batch_invariant : bool
        A request gets the same bits whatever else is in the batch: its length alone decides how
        its keys are cut, not the batch's.  Costs time, and scratch (``workspace_bytes``).
    alibi : bool
        Layers will have ALiBi, which the Gluon kernels do not compute: tiles and workers are those
        of the plain ones alone.
    shared_prefixes : bool or "always"
        Decode requests of at most ``decode_query_len`` tokens whose block tables begin with the
        same pages read these once (``tilewise.prefix_rule``); plans find them on the device.  For
        causal batches of two requests or more without spans; these take the plain decode, so
        batches that the Gluon decode serves faster are left to it unless it says "always".  Not
        with a window, ``batch_invariant``, heads of 512 or 64 query heads a KV head and more.
    fp8_matmul : bool
        Multiply an e4m3 cache as fp8 operands in the prefill, with queries and weights rounded to
        e4m3 for it; decode waits for memory and keeps products of 16 bits.
    rotated_keys : bool
        Keys of an fp8 cache are written rotated (``write_kv_cache(rotated=True)``), so queries are
        rotated as well: outliers cost less precision then.  ``head_dim`` a power of two.
    config : policy.Config, optional
        Tiles and worker count, instead of the policy's choice (tuning, tests).

    Raises
    ------
    UnsupportedConfig
        With the offending value and what is accepted.

    Examples
    --------
    >>> attn = PagedAttention(32, 8, 128, page_size=64, dtype=torch.bfloat16,
    ...                       max_num_reqs=64, max_num_tokens=8192)
    >>> attn.plan(query_start_loc, seq_lens, block_table, num_tokens=512, max_query_len=200)
    >>> for layer in layers:
    ...     out = attn.run(layer.q, layer.kv_cache)
    """

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int,
        dtype: torch.dtype,
        max_num_reqs: int,
        max_num_tokens: int,
        device: str | torch.device = "cuda",
        decode_query_len: int = 1,
        window: int | None = None,
        kv_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
        alibi: bool = False,
        shared_prefixes: bool | str = False,
        fp8_matmul: bool = False,
        rotated_keys: bool = False,
        config: policy.Config | None = None,
    ) -> None:
        if dtype not in SUPPORTED_DTYPES:
            raise UnsupportedConfig(f"dtype={dtype}; accepted: {names_of(SUPPORTED_DTYPES)}")
        for name, value in (("max_num_reqs", max_num_reqs), ("max_num_tokens", max_num_tokens)):
            if value < 1:
                raise UnsupportedConfig(f"{name}={value}; accepted: 1 or more")
        self.device = resolve(device)
        kv_dtype = dtype if kv_dtype is None else kv_dtype
        if kv_dtype not in (dtype, *FP8_DTYPES):
            raise UnsupportedConfig(
                f"kv_dtype={kv_dtype}; accepted: {names_of((dtype, *FP8_DTYPES))}"
            )
        fp8 = fp8_format(kv_dtype, self.device) if kv_dtype in FP8_DTYPES else ""
        self._out_format = fp8_format(FP8_OUT, self.device, write=True)
        geometry = policy.Geometry(
            num_q_heads, num_kv_heads, head_dim, page_size, dtype.itemsize, kv_dtype.itemsize
        )
        self.config = settle(
            geometry, describe(self.device), config, kv_dtype=kv_dtype,
            decode_query_len=decode_query_len, window=window, batch_invariant=batch_invariant,
            alibi=alibi, shared_prefixes=shared_prefixes, fp8_matmul=fp8_matmul,
            rotated_keys=rotated_keys,
        )  # fmt: skip
        self.batch_invariant = batch_invariant
        self.rotated_keys = rotated_keys
        self.share_always = shared_prefixes == "always"
        self.window = window
        self.geometry = geometry
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        checks = Checks(
            geometry, dtype, kv_dtype, fp8, self.device, max_num_reqs, max_num_tokens, rotated_keys
        )
        self._use(CacheBinding(checks, self.config))
        self._buffers = Buffers(self.config, max_num_reqs, max_num_tokens, self.device)
        self._id = next(_OBJECTS)
        self._generation = 0
        self._plan: Plan | None = None

    def _use(self, binding: Binding) -> None:
        """Take batches and layers as the binding says."""
        self._binding, self._checks = binding, binding.checks

    @property
    def workspace_bytes(self) -> int:
        """Device memory held by the persistent buffers; those of masks come with the first."""
        return self._buffers.nbytes

    def shares(self, num_reqs: int, beside: bool = False) -> bool:
        """Whether decodes of a batch of so many requests may share pages.

        Parameters
        ----------
        num_reqs : int
        beside : bool
            Prefills and decodes of the batch can run side by side.
        """
        if self._buffers.shared is None or num_reqs < 2:
            return False
        return self.share_always or not (beside or self.config.decodes_few(num_reqs))

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor | None,
        block_table: torch.Tensor | None,
        *,
        num_tokens: int,
        max_query_len: int,
        has_decode: bool = True,
        causal: bool | torch.Tensor = True,
        spans: torch.Tensor | None = None,
        kv_start_loc: torch.Tensor | None = None,
        num_keys: int | None = None,
        mask: Mask | None = None,
    ) -> Plan:
        """Turn the batch's device lengths into tiles and splits; no host sync.

        Parameters
        ----------
        query_start_loc : Tensor[num_reqs + 1], int32
            First query row of each request; padding requests have no rows.
        seq_lens : Tensor[num_reqs], int32, or None
            Keys of each request: context plus new tokens, which are the last ones (causal,
            bottom-right); of cross attention, keys of the encoder.
        block_table : Tensor[num_reqs, pages], int32, or None
            Page ids; entries past a request's last page are never read.  Those of pages wholly
            left of the window of its first query are never followed.  None, together with
            ``seq_lens``: the keys of a request are the rows of its queries (encoders), or what
            ``kv_start_loc`` says, and layers run on these instead of a cache.  With a
            ``kv_start_loc``, Tensor[ids]: the ids of one request after those of another.
        num_tokens : int
            Upper bound on ``query_start_loc[-1]`` (the padded number of tokens).
        max_query_len : int
            Upper bound on the query lengths; above 16 the prefill kernel is launched.  Rows of
            requests that break this promise, or that of ``has_decode``, are not computed.
        has_decode : bool
            False promises that no request has 1 to 16 query tokens; the split-KV kernel is
            then not launched.
        causal : bool or Tensor[num_reqs], int32
            Whether queries see no key past their own.  A tensor says so for each request (0: they
            see every key); it is read when layers run.
        spans : Tensor[num_reqs, num_spans, 2], int32, optional
            First and last position, from the sequence's start, of spans that are bidirectional
            inside a causal sequence (images among text): their queries see all keys of their span.
            Those of a request must not overlap; where the last is not beyond the first, there is
            none.  Keys past ``seq_lens`` are not seen.  Requests with queries in a span take the
            prefill kernel, however short.  Pass None where no query of the batch is in one.
        kv_start_loc : Tensor[num_reqs + 1], int32, optional
            Without a ``block_table``: first key row of each request, whose keys are the rows up to
            the next one's (FlashInfer's ``kv_indptr``); causal is bottom-right.  With one: first
            page id of each request in it (``paged_kv_indptr``).
        num_keys : int, optional
            Upper bound on ``kv_start_loc[-1]`` of rows; needed for these.
        mask : CustomMask, TreeMask or BlockMask, optional
            What queries see instead of what ``causal`` says; not with windows, spans or ALiBi.
            Such batches run the plain kernels.

        Returns
        -------
        Plan
            Also kept, as the default of ``run``.

        Raises
        ------
        PlanMismatch
            When the batch exceeds the bounds given at construction, or a tensor does not fit.
        """
        # First, since what refuses a batch may come after some of its buffers are written: the
        # plan before it is stale either way.
        self._generation += 1
        buffers = self._buffers
        if seq_lens is None:
            seq_lens = self._count_rows(query_start_loc, block_table, kv_start_loc)
        elif block_table is None:
            raise PlanMismatch("seq_lens without a block_table; accepted: both or neither")
        check_current(self.device)
        num_reqs = len(seq_lens) if seq_lens.dim() else 0  # without an axis it is refused next
        self._checks.batch(
            query_start_loc, seq_lens, block_table, num_tokens, max_query_len, self.config,
            kv_start_loc, num_keys,
        )  # fmt: skip
        self._checks.causal(causal, num_reqs)
        self._checks.spans(spans, causal, num_reqs)
        check_alone(mask, self.window, causal, spans)
        key_mask = buffers.masks.plan(mask, query_start_loc, seq_lens, kv_start_loc, num_tokens)
        if key_mask is not None and not key_mask.is_tree:
            causal = False
        cfg = self.config
        tiles = 0
        if max_query_len > policy.DECODE_MAX_QUERY_LEN or spans is not None:
            tiles = plan_rule.max_prefill_tiles(
                num_tokens, num_reqs, cfg.prefill_block_q, spans is not None
            )
        options: dict[str, Any] = {**cfg.piece_constants}
        why_plain = policy.why_plain_batch(
            causal is True,
            block_table is not None and kv_start_loc is None,
            "" if key_mask is None else key_mask.kind,
        )
        gluon = why_plain is None
        # Functions of the shape alone, so that a captured graph meets the same kind of plan.
        beside = gluon and spans is None and cfg.side_by_side and has_decode and tiles > 0
        share = buffers.shared
        if not gluon or spans is not None or not self.shares(num_reqs, beside):
            share = None
        beside = beside and share is None
        few = gluon and share is None and cfg.decodes_few(num_reqs)
        record = buffers.worker_record
        if share is not None and block_table is not None:
            options |= share.find(query_start_loc, seq_lens, block_table)
            record = share.worker_record
        if num_reqs:
            plan_on_device(
                buffers.header, buffers.tile_req, buffers.tile_token, buffers.cu_tiles,
                buffers.cu_work, record, buffers.arrivals, query_start_loc, seq_lens, num_reqs,
                num_kv_heads=self.geometry.num_kv_heads, group_size=self.geometry.group_size,
                decode_max_query_len=policy.DECODE_MAX_QUERY_LEN,
                prefill_block_q=cfg.prefill_block_q, decode_block_m=cfg.decode.block_m,
                decode_block_n=cfg.decode.block_n, num_sms=cfg.num_sms,
                item_overhead=cfg.item_overhead, window=cfg.window, spans=spans,
                most_workers=plan_rule.most_workers(num_reqs, cfg) if few else cfg.num_workers,
                beside=cfg.beside if beside else (0, 0),
                **options,
            )  # fmt: skip
            _PLAN.n += 1
        self._plan = Plan(
            owner=self._id,
            generation=self._generation,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_prefill_tiles=tiles,
            has_decode=has_decode and num_reqs > 0,
            causal=causal,
            decodes_few=few,
            side_by_side=beside and num_reqs > 0,
            spans=spans,
            kv_starts=kv_start_loc,
            num_keys=num_tokens if num_keys is None else num_keys,
            mask=key_mask,
            why_plain=why_plain,
            shared=share is not None,
        )
        return self._plan

    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        scale: float | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        plan: Plan | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        alibi_sqrt: bool = False,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        spans: str = "whole",
        out_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend with one layer's queries and cache.

        Parameters
        ----------
        q : Tensor[rows, num_q_heads, head_dim]
            At least ``num_tokens`` rows.  Any strides, unit stride in the last axis; the rows of
            a tile must lie within 2**31 elements.
        kv_cache : Tensor[num_pages, num_kv_heads, page_size, 2 * head_dim], or a pair (k, v)
            One tensor holds K then V in each row (vLLM 0.33); of a pair, each is
            ``[num_pages, num_kv_heads, page_size, head_dim]``.  Any strides, last one 1.  Of a
            plan without ``block_table``, a pair of ``[rows, num_kv_heads, head_dim]``.
        scale : float, optional
            Factor of the logits, positive; default ``head_dim ** -0.5``.
        out : Tensor like ``q``, optional
            Written in place.  Rows that belong to no request are left alone.
        return_lse : bool
            Also return the natural-log sum of exponentials.
        plan : Plan, optional
            Default: the newest.
        sinks : Tensor[num_q_heads], floating point, optional
            One logit a head that joins the denominator once and carries no value.
        softcap : float
            Logits become ``softcap * tanh(logits / softcap)``; 0 leaves them alone.
        alibi_slopes : Tensor[num_q_heads], floating point, optional
            ``slope * (query position - key position)`` is taken off each logit, after the cap.
            For causal plans only.
        alibi_sqrt : bool
            Take ALiBi's distances under a square root.
        k_scale, v_scale : Tensor[], [1], [num_kv_heads] or [num_pages, num_kv_heads], fp32
            What an fp8 cache's keys and values are multiplied with, positive; read on the device
            when the kernels run.  None for 1.  Those of pages: both or neither, ``page_size`` a
            multiple of 64.
        spans : str
            What this layer makes of the plan's spans, if there are any: ``"whole"``, queries see
            all keys of their span; ``"windowed"``, but for those left of the layer's window;
            ``"off"``, it is causal throughout.
        out_scale : Tensor[] or Tensor[1], fp32, optional
            Quantise the output: ``out`` is float8_e4m3fn then, and holds the result divided by
            this positive number, at most 448 in size; read on the device when the kernels run.

        Returns
        -------
        out : Tensor[rows, num_q_heads, head_dim]
            Rows that belong to no request hold what was there; in a fresh ``out``, anything.
        lse : Tensor[rows, num_q_heads], fp32
            Only with ``return_lse``; the logarithm of the denominator, so with the sink's part.
            -inf where a row saw neither key nor sink (its output is 0).

        Raises
        ------
        PlanMismatch
            When the plan is stale, was made by another object, or the tensors do not fit it.
        """
        check_current(self.device)
        plan = self._current(plan)
        self._checks.out_scale(out_scale, out)
        kv, use_tma = self._binding.bind(plan, q, kv_cache, out, k_scale, v_scale)
        scale = self.geometry.head_dim**-0.5 if scale is None else float(scale)
        softcap = float(softcap)
        if not (scale > 0.0 and math.isfinite(scale)):
            raise PlanMismatch(f"scale={scale}; accepted: a positive finite number")
        if not (softcap >= 0.0 and math.isfinite(softcap)):
            raise PlanMismatch(f"softcap={softcap}; accepted: 0 (off) or a positive finite number")
        self._checks.per_head("sinks", sinks)
        self._checks.per_head("alibi_slopes", alibi_slopes)
        if spans not in _SPANS:
            raise PlanMismatch(f"spans={spans!r}; accepted: {', '.join(map(repr, _SPANS))}")
        ruled = plan.mask is not None or (plan.spans is not None and spans != "off")
        if alibi_slopes is not None and (plan.causal is not True or ruled):
            raise PlanMismatch("alibi_slopes with a plan that is not causal; accepted: None")
        alibi_sqrt = alibi_sqrt and alibi_slopes is not None
        logits = Logits(scale, softcap, sinks, alibi_slopes, alibi_sqrt)
        if out is None:
            dtype = q.dtype if out_scale is None else FP8_OUT
            out = torch.empty((q.shape[0], *q.shape[1:]), dtype=dtype, device=q.device)
        lse = None
        if return_lse:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        written, out_format = out, ""
        if out_scale is not None:
            written, out_format = out.view(torch.uint8), self._out_format
        layer = Layer(written, lse, q, kv, use_tma, logits, spans, out_scale, out_format)
        if plan.has_decode:
            launch_decode(self.config, self._buffers, plan, layer)
        if plan.max_prefill_tiles:
            launch_prefill(self.config, self._buffers, plan, layer)
        return (out, lse) if lse is not None else out

    def _current(self, plan: Plan | None) -> Plan:
        if plan is None:
            plan = self._plan
        if plan is None:
            raise PlanMismatch("run() before plan(): call plan() once per batch")
        if plan.owner != self._id:
            raise PlanMismatch("the plan was made by another PagedAttention object")
        if plan.generation != self._generation:
            raise PlanMismatch(
                f"stale plan: made as number {plan.generation}, the buffers now belong to number "
                f"{self._generation}, planned or refused; run every layer of a batch before the "
                "next plan()"
            )
        return plan

    def _count_rows(
        self,
        query_start_loc: torch.Tensor,
        block_table: torch.Tensor | None,
        kv_start_loc: torch.Tensor | None,
    ) -> torch.Tensor:
        """Key counts of a batch whose keys are rows, counted on the device."""
        if block_table is not None:
            raise PlanMismatch("seq_lens is None; accepted: only without a block_table")
        num_reqs = self._checks.query_starts(query_start_loc)
        starts = query_start_loc
        if kv_start_loc is not None:
            self._checks.starts(kv_start_loc, num_reqs)
            starts = kv_start_loc
        return torch.sub(starts[1:], starts[:-1], out=self._buffers.own_lengths[:num_reqs])
