"""The plan/run interface: plan once per batch, run once per layer.

Usable without vLLM.  The object owns every buffer the kernels share; after construction neither
``plan`` nor ``run`` synchronises with the device, and ``run`` given ``out`` allocates nothing, so
both can be captured in a CUDA graph and replayed with other lengths.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewise import counters, plan_rule, policy, prefix_rule
from tilewise.checks import (
    FP8_OUT,
    SUPPORTED_DTYPES,
    Checks,
    check_fp8_options,
    names_of,
    split_cache,
)
from tilewise.device import FP8_DTYPES, describe, fp8_format, resolve
from tilewise.errors import PlanMismatch, UnsupportedConfig
from tilewise.kernels.decode import decode_attention
from tilewise.kernels.launch import KvCache, Logits, tma_strides
from tilewise.kernels.masks import KeyMask
from tilewise.kernels.plan import HEADER_SIZE, RECORD_SIZE, plan_on_device
from tilewise.kernels.prefill import prefill_attention
from tilewise.kernels.prefix_decode import prefix_decode_attention
from tilewise.masks import Mask, MaskBuffers, check_alone
from tilewise.pieces import scratch_slots
from tilewise.prefixes import SharedPrefixes
from tilewise.ragged import view_rows

_OBJECTS = itertools.count(1)  # unlike id(), never used twice
_SPANS = ("whole", "windowed", "off")


@dataclass(frozen=True)
class Plan:
    """One batch, planned.  Valid until the next ``plan()`` of the object that made it.

    ``query_start_loc``, ``seq_lens``, ``block_table``, ``spans`` and ``causal`` (where it is a
    tensor) are the caller's own: whoever replays a captured graph refreshes them in place and plans
    again.
    Without a ``block_table`` keys are rows, and ``seq_lens`` is the object's.  ``why_plain`` says
    why the Gluon kernels leave the batch to their plain twins, if they do.
    """

    owner: int
    generation: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    num_reqs: int
    num_tokens: int
    max_prefill_tiles: int
    has_decode: bool
    causal: bool | torch.Tensor = True
    decodes_few: bool = False
    side_by_side: bool = False
    spans: torch.Tensor | None = None
    kv_starts: torch.Tensor | None = None
    num_keys: int = 0
    mask: KeyMask | None = None
    why_plain: str | None = None
    shared: bool = False


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
    shaped_logits : bool
        Layers will have a soft cap or ALiBi, which the Gluon kernels do not compute: tiles and
        workers are those of the plain ones alone.
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
        shaped_logits: bool = False,
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
        self.kv_dtype = kv_dtype
        self._fp8_format = fp8_format(kv_dtype, self.device) if kv_dtype in FP8_DTYPES else ""
        self._out_format = fp8_format(FP8_OUT, self.device, write=True)
        geometry = policy.Geometry(
            num_q_heads, num_kv_heads, head_dim, page_size, dtype.itemsize, kv_dtype.itemsize
        )
        check_fp8_options(fp8_matmul, rotated_keys, kv_dtype, head_dim)
        if config is None:
            config = policy.choose(
                geometry, describe(self.device), decode_query_len, window or 0, shaped_logits,
                fp8_matmul,
            )  # fmt: skip
        elif config.geometry != geometry:
            raise UnsupportedConfig(f"config is for {config.geometry}, not for {geometry}")
        if window is not None and window < 1:
            raise UnsupportedConfig(f"window={window}; accepted: 1 or more, or None")
        if config.window not in (0, window or 0):
            raise UnsupportedConfig(f"config is for window={config.window}, not for {window}")
        if config.pieces is not None and not batch_invariant:
            raise UnsupportedConfig(
                f"config has {config.pieces}, which batch_invariant={batch_invariant} does not take"
            )
        if bool(config.fp8_dot) != fp8_matmul:
            raise UnsupportedConfig(
                f"config has fp8_dot={config.fp8_dot!r}, but fp8_matmul={fp8_matmul}; accepted: "
                "both or neither"
            )
        if shared_prefixes not in (False, True, "always"):
            raise UnsupportedConfig(
                f'shared_prefixes={shared_prefixes!r}; accepted: False, True or "always"'
            )
        if batch_invariant:
            config = policy.batch_invariant(config)
        config = replace(config, window=window or 0)
        if config.prefixes is not None and not shared_prefixes:
            raise UnsupportedConfig(
                f"config has {config.prefixes}, which shared_prefixes={shared_prefixes} does not "
                "take"
            )
        if shared_prefixes and rotated_keys:
            raise UnsupportedConfig("shared_prefixes with rotated_keys; accepted: one of them")
        if config.prefixes is not None and (config.window or config.pieces is not None):
            beside = f"window={config.window}" if config.window else "batch_invariant"
            raise UnsupportedConfig(
                f"config has {config.prefixes} with {beside}; accepted: one of them"
            )
        if shared_prefixes and config.prefixes is None:
            device_kind = describe(self.device)
            config = prefix_rule.share_prefixes(config, device_kind, decode_query_len)
        self.config = config
        self.batch_invariant = batch_invariant
        self.rotated_keys = rotated_keys
        self.share_always = shared_prefixes == "always"
        self.window = window
        self.geometry = geometry
        self.dtype = dtype
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        self._checks = Checks(
            geometry, dtype, kv_dtype, self._fp8_format, self.device, max_num_reqs, max_num_tokens,
            rotated_keys,
        )  # fmt: skip
        self._layouts: dict[tuple[object, ...], bool] = {}
        self._masks = MaskBuffers(max_num_reqs, max_num_tokens, self.device)
        self._id = next(_OBJECTS)
        self._generation = 0
        self._plan: Plan | None = None
        self._allocate()

    def _allocate(self) -> None:
        cfg, workers = self.config, self.config.num_workers
        tiles = plan_rule.max_prefill_tiles(
            self.max_num_tokens, self.max_num_reqs, cfg.prefill_block_q, spans=True
        )

        def ints(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int32, device=self.device)

        self._header = ints(HEADER_SIZE)
        self._tile_req, self._tile_token = ints(max(tiles, 1)), ints(max(tiles, 1))
        self._cu_tiles, self._cu_work = ints(self.max_num_reqs + 1), ints(self.max_num_reqs + 1)
        self._arrivals, self._own_lengths = ints(workers), ints(self.max_num_reqs)
        self._worker_record = ints(workers * RECORD_SIZE).view(workers, RECORD_SIZE)
        rows = (scratch_slots(cfg.pieces, workers), cfg.decode.block_m)
        self._partial_acc = torch.empty(
            (*rows, cfg.decode.block_d), dtype=torch.float32, device=self.device
        )
        self._partial_m = torch.empty(rows, dtype=torch.float32, device=self.device)
        self._partial_l = torch.empty(rows, dtype=torch.float32, device=self.device)
        self._shared = None
        if cfg.prefixes is not None:
            self._shared = SharedPrefixes(cfg, self.max_num_reqs, self.device)

    @property
    def workspace_bytes(self) -> int:
        """Device memory held by the persistent buffers; those of masks come with the first."""
        buffers = (v for v in vars(self).values() if isinstance(v, torch.Tensor))
        held = sum(b.numel() * b.element_size() for b in buffers) + self._masks.nbytes
        return held + (self._shared.workspace_bytes if self._shared is not None else 0)

    def shares(self, num_reqs: int, beside: bool = False) -> bool:
        """Whether decodes of a batch of so many requests may share pages.

        Parameters
        ----------
        num_reqs : int
        beside : bool
            Prefills and decodes of the batch can run side by side.
        """
        if self._shared is None or num_reqs < 2:
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
        mask : CustomMask or TreeMask, optional
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
        if seq_lens is None:
            seq_lens = self._count_rows(query_start_loc, block_table, kv_start_loc)
        elif block_table is None:
            raise PlanMismatch("seq_lens without a block_table; accepted: both or neither")
        self._check_device()
        num_reqs = len(seq_lens) if seq_lens.dim() else 0  # without an axis it is refused next
        self._checks.batch(
            query_start_loc, seq_lens, block_table, num_tokens, max_query_len, self.config,
            kv_start_loc, num_keys,
        )  # fmt: skip
        self._checks.causal(causal, num_reqs)
        self._checks.spans(spans, causal, num_reqs)
        check_alone(mask, self.window, causal, spans)
        key_mask = self._masks.plan(mask, query_start_loc, seq_lens, kv_start_loc, num_tokens)
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
        share = self._shared
        if not gluon or spans is not None or not self.shares(num_reqs, beside):
            share = None
        beside = beside and share is None
        few = gluon and share is None and cfg.decodes_few(num_reqs)
        record = self._worker_record
        if share is not None and block_table is not None:
            options |= share.find(query_start_loc, seq_lens, block_table)
            record = share.worker_record
        if num_reqs:
            plan_on_device(
                self._header, self._tile_req, self._tile_token, self._cu_tiles, self._cu_work,
                record, self._arrivals, query_start_loc, seq_lens, num_reqs,
                num_kv_heads=self.geometry.num_kv_heads, group_size=self.geometry.group_size,
                decode_max_query_len=policy.DECODE_MAX_QUERY_LEN,
                prefill_block_q=cfg.prefill_block_q, decode_block_m=cfg.decode.block_m,
                decode_block_n=cfg.decode.block_n, num_sms=cfg.num_sms,
                item_overhead=cfg.item_overhead, window=cfg.window, spans=spans,
                most_workers=plan_rule.most_workers(num_reqs, cfg) if few else cfg.num_workers,
                beside=cfg.beside if beside else (0, 0),
                **options,
            )  # fmt: skip
            counters.add("launches", kernel="plan")
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
        self._check_device()
        plan = self._current(plan)
        self._checks.out_scale(out_scale, out)
        kv, use_tma = self._bind(plan, q, kv_cache, out, k_scale, v_scale)
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
        written = out if out_scale is None else out.view(torch.uint8)
        if plan.has_decode:
            self._run_decode(plan, written, lse, q, kv, logits, use_tma, out_scale)
        if plan.max_prefill_tiles:
            self._run_prefill(plan, written, lse, q, kv, logits, use_tma, spans, out_scale)
        return (out, lse) if lse is not None else out

    def _run_decode(
        self,
        plan: Plan,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        q: torch.Tensor,
        kv: KvCache,
        logits: Logits,
        use_tma: bool,
        out_scale: torch.Tensor | None,
    ) -> None:
        cfg, t = self.config, self.config.decode
        batch: tuple[Any, ...] = (
            plan.query_start_loc, plan.seq_lens, plan.block_table,
            self._header, self._cu_work, self._worker_record,
            self._partial_acc, self._partial_m, self._partial_l, self._arrivals, logits,
        )  # fmt: skip
        wanted = plan.decodes_few or plan.side_by_side
        plain = not wanted or not _plain_maths(plan, logits, use_tma, q, out, out_scale)
        if cfg.hopper_decode and not plain:
            # Imported late, as the Gluon prefill is.
            from tilewise.kernels.hopper_decode import hopper_decode_attention

            hopper_decode_attention(
                out, lse, q, kv, *batch, window=cfg.window, item_overhead=cfg.item_overhead,
                num_programs=cfg.num_sms, block_m=t.block_m, block_n=t.block_n,
                num_stages=cfg.hopper_decode.num_stages, pdl=cfg.pdl,
            )  # fmt: skip
            counters.add("launches", kernel="hopper_decode")
            return
        merge_rows, merge_pieces = cfg.merge_tile
        if plan.shared and self._shared is not None and plan.block_table is not None:
            batch = (
                plan.query_start_loc, plan.seq_lens, plan.block_table, self._header, self._cu_work,
                *self._shared.buffers, self._arrivals, self._shared.row_arrivals, logits,
            )  # fmt: skip
            tiles: dict[str, Any] = {**self._shared.tiles}
            prefix_decode_attention(
                out, lse, q, kv, *batch, item_overhead=cfg.item_overhead, block_m=t.block_m,
                block_n=t.block_n, block_d=t.block_d, num_warps=t.num_warps,
                num_stages=t.num_stages, tail_stages=t.tail_stages,
                use_tma=t.use_tma and use_tma, merge_rows=merge_rows, merge_pieces=merge_pieces,
                pdl=cfg.pdl, out_scale=out_scale,
                out_format=self._out_format if out_scale is not None else "", **tiles,
            )  # fmt: skip
            counters.add("launches", kernel="prefix_decode")
            return
        options: dict[str, Any] = {**cfg.piece_constants}
        decode_attention(
            out, lse, q, kv, *batch,
            item_overhead=cfg.item_overhead, window=cfg.window,
            causal=plan.causal if plan.mask is None else False,
            kv_starts=plan.kv_starts, mask=plan.mask,
            block_m=t.block_m, block_n=t.block_n, block_d=t.block_d,
            num_warps=t.num_warps, num_stages=t.num_stages, tail_stages=t.tail_stages,
            use_tma=t.use_tma and use_tma, merge_rows=merge_rows, merge_pieces=merge_pieces,
            pdl=cfg.pdl, out_scale=out_scale,
            out_format=self._out_format if out_scale is not None else "", **options,
        )  # fmt: skip
        counters.add("launches", kernel="decode")

    def _run_prefill(
        self,
        plan: Plan,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        q: torch.Tensor,
        kv: KvCache,
        logits: Logits,
        use_tma: bool,
        spans: str,
        out_scale: torch.Tensor | None,
    ) -> None:
        cfg = self.config
        batch: tuple[Any, ...] = (
            plan.query_start_loc, plan.seq_lens, plan.block_table,
            self._header, self._tile_req, self._tile_token, logits,
        )  # fmt: skip
        heeded = None if spans == "off" else plan.spans
        plain = heeded is not None or not _plain_maths(plan, logits, use_tma, q, out, out_scale)
        if cfg.hopper_prefill and not plain:
            # Imported late: other devices, and Triton's interpreter, need no Gluon.
            from tilewise.kernels.hopper_prefill import hopper_prefill_attention

            programs = min(cfg.num_sms, plan.max_prefill_tiles * self.geometry.num_kv_heads)
            hopper_prefill_attention(
                out, lse, q, kv, *batch, window=cfg.window, num_programs=programs,
                block_n=cfg.hopper_prefill.block_n, num_stages=cfg.hopper_prefill.num_stages,
                beside_decode=plan.side_by_side,
            )  # fmt: skip
            counters.add("launches", kernel="hopper_prefill")
            return
        fp8 = cfg.hopper_prefill_fp8 if cfg.fp8_dot == "promoted" else None
        if fp8 and not plain and not kv.page_scales:
            from tilewise.kernels.hopper_prefill_fp8 import hopper_prefill_fp8_attention

            hopper_prefill_fp8_attention(
                out, lse, q, kv, *batch, block_n=fp8.block_n, num_stages=fp8.num_stages,
                num_programs=min(cfg.num_sms, plan.max_prefill_tiles * self.geometry.num_kv_heads),
            )  # fmt: skip
            counters.add("launches", kernel="hopper_prefill_fp8")
            return
        t = cfg.prefill
        prefill_attention(
            out, lse, q, kv, *batch, max_tiles=plan.max_prefill_tiles, window=cfg.window,
            causal=plan.causal, spans=heeded, spans_in_window=spans == "windowed",
            kv_starts=plan.kv_starts,
            mask=None if plan.mask is None or plan.mask.is_tree else plan.mask,
            out_scale=out_scale, out_format=self._out_format if out_scale is not None else "",
            block_q=cfg.prefill_block_q, block_m=t.block_m,
            block_n=t.block_n, block_d=t.block_d,
            num_warps=t.num_warps, num_stages=t.num_stages, tail_stages=t.tail_stages,
            use_tma=t.use_tma and use_tma, lazy_rescale=t.lazy_rescale, fp8_dot=cfg.fp8_dot,
        )  # fmt: skip
        counters.add("launches", kernel="prefill")

    def _check_device(self) -> None:
        """Kernels start on the current device, whatever device their tensors are on."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            raise PlanMismatch(
                f"the current device is cuda:{torch.cuda.current_device()}; built for "
                f"{self.device} (torch.cuda.set_device makes another one current)"
            )

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
        starts = query_start_loc
        if kv_start_loc is not None:
            self._checks.starts(kv_start_loc, num_reqs)
            starts = kv_start_loc
        return torch.sub(starts[1:], starts[:-1], out=self._own_lengths[:num_reqs])

    def _bind(
        self,
        plan: Plan,
        q: torch.Tensor,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> tuple[KvCache, bool]:
        """Views of the cache, and whether the copy engine can read them; checks what is new.

        A layer passes the same layouts every step, so what was checked once is remembered by
        everything but the number of rows and the addresses.
        """
        for name, x in (("q", q), ("out", out)):
            if x is not None and x.shape[0] < plan.num_tokens:
                raise PlanMismatch(
                    f"{name} has {x.shape[0]} rows; the plan covers {plan.num_tokens} tokens"
                )
        if plan.block_table is None:
            return self._bind_rows(plan, q, kv_cache, out, k_scale, v_scale), False
        pair = (kv_cache,) if isinstance(kv_cache, torch.Tensor) else tuple(kv_cache)
        if len(pair) not in (1, 2):
            raise PlanMismatch(f"kv_cache is a tuple of {len(pair)}; accepted: (k, v)")
        tensors = (q, *pair) if out is None else (q, out, *pair)
        pages = pair[0].shape[0]
        self._checks.are_tensors(k_scale=k_scale, v_scale=v_scale)
        same_pages = pages == pair[-1].shape[0]
        layouts = ((x.shape[1:], x.stride(), x.dtype) for x in tensors)
        scales = (k_scale, v_scale)
        kinds = (x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in scales)
        of_pages = any(x is not None and x.dim() == 2 for x in scales)
        key = (len(pair), same_pages, out is None, of_pages and pages, *layouts, *kinds)
        aligned = self._layouts.get(key)
        if aligned is None:
            self._checks.rows("q", q, self.config)
            if out is not None:
                self._checks.rows("out", out, self.config)
            self._checks.kv_scales(k_scale, v_scale, pages)
            if of_pages and self._shared is not None:
                raise PlanMismatch(
                    "k_scale and v_scale of pages with shared_prefixes; accepted: of the tensor or "
                    "of heads"
                )
            kv = self._checks.cache(pair, scales)
            aligned = self._layouts[key] = tma_strides(kv)
        else:
            kv = split_cache(
                pair, scales, self.geometry.head_dim, self._fp8_format, self._checks.rotated
            )
        for x in tensors:
            if x.device != self.device:
                raise PlanMismatch(f"a tensor is on {x.device}; built for {self.device}")
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
        if self._fp8_format or k_scale is not None or v_scale is not None:
            raise PlanMismatch(
                f"kv_dtype={self.kv_dtype} with a plan without block_table; accepted: "
                f"{self.dtype}, without scales"
            )
        self._checks.rows("q", q, self.config)
        if out is not None:
            self._checks.rows("out", out, self.config)
        return view_rows(kv, self.geometry, self.dtype, self.device, plan.num_keys)


def _plain_maths(
    plan: Plan,
    logits: Logits,
    use_tma: bool,
    q: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
) -> bool:
    """Whether a layer is one for the Gluon kernels.

    A batch they take, logits that are only scaled, an output in the queries' dtype, aligned
    addresses.
    """
    simple = not logits.shaped and plan.why_plain is None and out_scale is None
    return use_tma and simple and _aligned_rows(q, out)


def _aligned_rows(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can address rows: positive strides and addresses of 16 bytes."""
    return all(
        x.data_ptr() % 16 == 0
        and all(
            stride > 0 and stride * x.element_size() % 16 == 0
            for stride, length in zip(x.stride()[:-1], x.shape[:-1], strict=True)
            if length > 1
        )
        for x in tensors
    )
