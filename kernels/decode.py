"""Split-KV decode (flash-decoding) as even ranges of key tiles over a fixed set of workers.

All key tiles of all decode requests, in the order (request, KV head, query tile, key tile), form
one line of ``total`` units (an item also pays a few units for starting).  Worker ``w`` of
``active`` takes the ``w``-th of ``active`` equal stretches, whatever requests they cut: every SM
reads the same amount, and the launch geometry never depends on the lengths (so one CUDA graph
serves all of them).  Under a sliding window the line holds the window's tiles only.  An item, one
(request, KV head, query tile), that several workers share leaves fp32 partials in scratch; the
last of them to arrive merges the pieces in their order, so results repeat from run to run.
Batch-invariant mode cuts and merges by another rule: see ``tilewise.kernels.pieces``.

Sources: Dao et al., Flash-Decoding (2023); Osama et al., Stream-K (2023), for the even ranges.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from tilewise.kernels.attend import attend, keys_ahead, last_key, window_ranges
from tilewise.kernels.decode_parts import merge_pieces, owner, write_rows
from tilewise.kernels.fp8 import fp16_rows
from tilewise.kernels.hadamard import rotate_rows
from tilewise.kernels.launch import BATCH_ARGUMENTS, KvCache, Launcher, Logits, kv_arguments
from tilewise.kernels.masks import (
    KeyMask,
    mask_arguments,
    mask_constants,
    mask_rows,
    whole_tiles,
)
from tilewise.kernels.online_softmax import LOG2E
from tilewise.kernels.pieces import gather_pieces, piece_at
from tilewise.kernels.trace import cut_of, start_clock, stop_clock


@triton.jit(do_not_specialize=["stride_bt_b"], do_not_specialize_on_alignment=BATCH_ARGUMENTS)
def _decode_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_src,
    v_src,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    header_ptr,
    cu_work_ptr,
    worker_record_ptr,
    partial_acc_ptr,
    partial_m_ptr,
    partial_l_ptr,
    arrivals_ptr,
    scale_log2,
    cap_log2,
    sinks_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_scale_ptr,
    causal_ptr,
    kv_start_ptr,
    mask_ptr,
    mask_start_ptr,
    cuts_ptr,
    clock_ptr,
    stride_o_t,
    stride_o_h,
    stride_q_t,
    stride_q_h,
    stride_k_p,
    stride_k_h,
    stride_k_s,
    stride_v_p,
    stride_v_h,
    stride_v_s,
    stride_bt_b,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ITEM_OVERHEAD: tl.constexpr,
    HAS_LSE: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    PDL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    K_SCALE_STEP: tl.constexpr,
    V_SCALE_STEP: tl.constexpr,
    ROTATED: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    V_PAIRS: tl.constexpr,
    PIECE_TILES: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """out = softmax(shape(q k^T) + mask) v for short queries; grid = (workers,).

    Without ``CAUSAL`` rows see keys past their own too, but for requests whose flag at
    ``causal_ptr`` is set, if there are flags.  ``block_table_ptr`` is None where a request's keys
    are rows, those of its queries or, with a ``kv_start_ptr``, from there on.  That of a batch with
    a ``block_table_ptr`` says where each request's ids start in it.

    A ``MASK`` stands for the causal one (``tilewise.kernels.masks``); with ``CAUSAL`` off.

    With an ``out_scale_ptr`` the output is bytes of fp8, ``out / out_scale`` in ``OUT_FORMAT``.

    ``WINDOW`` is 0 for none; ``cap_log2``, ``sinks_ptr``, ``slopes_ptr`` and the scales of an fp8
    cache are None for none.  Scales lie ``…_SCALE_STEP`` apart from head to head; -1 says that
    every page has one of each head.  ``ROTATED`` turns queries as the cache's keys are.  With
    ``V_PAIRS`` the values' views are of uint16 (``attend``).  ``MAX_PIECES`` is 0 but in
    batch-invariant mode.
    ``cuts_ptr`` and ``clock_ptr`` are of benchmarks alone (``tilewise.kernels.trace``).
    """
    if PDL:
        # The launch before this one, whose results are read from here on, may still be running.
        tl.extra.cuda.gdc_wait()
    worker = tl.program_id(0)
    record = worker_record_ptr + worker * 8
    cursor = tl.load(record)
    stretch_end = tl.load(record + 1)
    if cursor >= stretch_end:
        return
    if clock_ptr is not None:
        start_clock(clock_ptr, worker)
    req = tl.load(record + 2)
    req_begin = tl.load(record + 3)
    req_end = tl.load(record + 4)
    query_start = tl.load(record + 5)
    query_len = tl.load(record + 6)
    seq_len = tl.load(record + 7)
    active = tl.load(header_ptr + 1)
    total = tl.load(header_ptr + 2)
    rows = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    stretch_begin = cursor

    while cursor < stretch_end:
        if cursor >= req_end:
            while req_end <= cursor:
                req += 1
                req_end = tl.load(cu_work_ptr + req + 1)
            req_begin = tl.load(cu_work_ptr + req)
            query_start = tl.load(query_start_loc_ptr + req)
            query_len = tl.load(query_start_loc_ptr + req + 1) - query_start
            seq_len = tl.load(seq_lens_ptr + req)
        # Sizes come from the plan and lengths only from its tensors: should these have changed
        # since, results are wrong, but the walk ends and no address leaves its tensor.
        tiles_m = tl.maximum(tl.cdiv(query_len * GROUP_SIZE, BLOCK_M), 1)
        length = tl.maximum((req_end - req_begin) // (tiles_m * NUM_KV_HEADS), 1)  # of an item
        tiles_n = length - ITEM_OVERHEAD
        local = cursor - req_begin
        item = local // length
        kv_head = tl.minimum(item // tiles_m, NUM_KV_HEADS - 1)
        m_tile = item - kv_head * tiles_m
        # This stretch's part of the item, in units, then in key tiles (perhaps none).
        begin = local - item * length
        end = tl.minimum(length, begin + stretch_end - cursor)
        if MAX_PIECES:
            piece, pieces, lo, hi, end = piece_at(
                begin, end, length, tiles_n, PIECE_TILES, MAX_PIECES
            )
        else:
            lo = (begin.to(tl.int64) * tiles_n // length).to(tl.int32)
            hi = (end.to(tl.int64) * tiles_n // length).to(tl.int32)
        if WINDOW:
            # The plan's line starts at the first key that the request's first token sees.
            skipped = tl.maximum(seq_len - query_len + 1 - WINDOW, 0) // BLOCK_N
            lo += skipped
            hi += skipped

        flat = m_tile * BLOCK_M + rows
        row_ok = flat < query_len * GROUP_SIZE
        token = flat // GROUP_SIZE
        pos = seq_len - query_len + token  # a row's own key, if its keys are its queries'
        ahead = None
        if not CAUSAL:
            ahead = keys_ahead(query_len, causal_ptr, req, WINDOW)
        last = last_key(pos, ahead, seq_len)
        req_token = query_start.to(tl.int64)
        first_head = kv_head.to(tl.int64) * GROUP_SIZE
        io_mask = row_ok[:, None] & (offs_d < HEAD_DIM)[None, :]
        q_rows = token * stride_q_t + flat % GROUP_SIZE * stride_q_h
        q_item_ptr = q_ptr + req_token * stride_q_t + first_head * stride_q_h
        q = tl.load(q_item_ptr + (q_rows[:, None] + offs_d[None, :]), mask=io_mask, other=0.0)

        sink = None
        if sinks_ptr is not None:
            # Not where it is used: nothing would hide its latency there.
            sink = tl.load(sinks_ptr + first_head + flat % GROUP_SIZE)

        ROW_SCALE: tl.constexpr = (KV_FORMAT != "") and (q.dtype == tl.bfloat16)
        scale = scale_log2
        k_scales_ptr = None
        v_scales_ptr = None
        if K_SCALE_STEP < 0:
            if k_scale_ptr is not None:
                k_scales_ptr = k_scale_ptr + kv_head
            if v_scale_ptr is not None:
                v_scales_ptr = v_scale_ptr + kv_head
        elif k_scale_ptr is not None:
            scale *= tl.load(k_scale_ptr + kv_head * K_SCALE_STEP)
        if ROTATED:
            q = rotate_rows(q.to(tl.float32), BLOCK_M, HEAD_DIM).to(q.dtype)
        if ROW_SCALE:
            q, q_scale = fp16_rows(q)
            scale *= q_scale

        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D // 2 if V_PAIRS else BLOCK_D], tl.float32)
        acc_odd = acc if V_PAIRS else 0.0
        first_pos = seq_len - query_len + m_tile * BLOCK_M // GROUP_SIZE
        # Tiles that every row sees whole.
        full = tl.maximum(last_key(first_pos, ahead, seq_len) + 1, 0) // BLOCK_N
        full = whole_tiles(full, seq_len - query_len, MASK, BLOCK_N)
        mask_row, mask_bound = mask_rows(
            mask_ptr, mask_start_ptr, req, query_start, token, query_len, seq_len, PAGE_SIZE, MASK
        )
        kv_start = req_token
        if kv_start_ptr is not None:
            kv_start = tl.load(kv_start_ptr + req).to(tl.int64)
        block_table_row_ptr = None
        if block_table_ptr is not None:
            if kv_start_ptr is None:
                block_table_row_ptr = block_table_ptr + req.to(tl.int64) * stride_bt_b
            else:
                block_table_row_ptr = block_table_ptr + kv_start
        if USE_TMA:
            k_head = k_src
            v_head = v_src
        else:
            k_head = k_src + kv_head.to(tl.int64) * stride_k_h
            v_head = v_src + kv_head.to(tl.int64) * stride_v_h
        if block_table_ptr is None:
            k_head += kv_start * stride_k_s
            v_head += kv_start * stride_v_s
        slope_log2 = None
        if slopes_ptr is not None:
            row_slope_ptr = slopes_ptr + first_head + flat % GROUP_SIZE
            slope_log2 = tl.load(row_slope_ptr).to(tl.float32) * LOG2E
        first_key = 0
        if WINDOW:
            first_key = tl.maximum(first_pos + 1 - WINDOW, 0)
        if USE_TMA:
            if WINDOW:
                last_pos = first_pos + tl.cdiv(BLOCK_M, GROUP_SIZE)
                lo, inside, full = window_ranges(lo, hi, last_pos, full, WINDOW, BLOCK_N)
                acc, acc_odd, m_i, l_i = attend(
                    acc, acc_odd, m_i, l_i, q, k_head, v_head, block_table_row_ptr, kv_head,
                    lo, inside, pos, None, last, seq_len, first_key, scale, cap_log2, slope_log2,
                    stride_k_p, stride_k_s, stride_v_p, stride_v_s,
                    HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, USE_TMA, PRECISION, True, TAIL_STAGES,
                    WINDOW, ALIBI_SQRT, KV_FORMAT, ROW_SCALE, V_PAIRS, 0,
                    "", k_scales_ptr, v_scales_ptr, NUM_KV_HEADS,
                )  # fmt: skip
                lo = inside
            split = tl.minimum(tl.maximum(full, lo), hi)
            acc, acc_odd, m_i, l_i = attend(
                acc, acc_odd, m_i, l_i, q, k_head, v_head, block_table_row_ptr, kv_head, lo, split,
                pos, None, last, seq_len, first_key, scale, cap_log2, slope_log2,
                stride_k_p, stride_k_s, stride_v_p, stride_v_s,
                HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, USE_TMA, PRECISION, False, NUM_STAGES,
                WINDOW, ALIBI_SQRT, KV_FORMAT, ROW_SCALE, V_PAIRS, 0,
                "", k_scales_ptr, v_scales_ptr, NUM_KV_HEADS,
            )  # fmt: skip
        else:
            # Masked rows cost nothing here (the copies themselves skip them), so one loop will do.
            split = lo
        acc, acc_odd, m_i, l_i = attend(
            acc, acc_odd, m_i, l_i, q, k_head, v_head, block_table_row_ptr, kv_head, split, hi,
            pos, None, last, seq_len, first_key, scale, cap_log2, slope_log2,
            stride_k_p, stride_k_s, stride_v_p, stride_v_s,
            HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, USE_TMA, PRECISION, True,
            TAIL_STAGES if USE_TMA else NUM_STAGES, WINDOW, ALIBI_SQRT, KV_FORMAT,
            ROW_SCALE, V_PAIRS, 0, "", k_scales_ptr, v_scales_ptr, NUM_KV_HEADS,
            mask_ptr, mask_row, mask_bound, MASK, MASK_ROWS,
        )  # fmt: skip
        if V_PAIRS:
            acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_D])

        if PDL and cursor + end - begin >= stretch_end:
            # The next kernel's programs may take the places of those that have left.
            tl.extra.cuda.gdc_launch_dependents()
        complete = True
        if MAX_PIECES:
            item_unit = cursor - begin
            acc, m_i, l_i, complete = gather_pieces(
                acc, m_i, l_i, partial_acc_ptr, partial_m_ptr, partial_l_ptr, arrivals_ptr, worker,
                owner(item_unit, total, active), piece, pieces, item_unit, item_unit + length,
                item_unit + end, stretch_begin, stretch_end, rows, offs_d, row_ok,
                MAX_PIECES, BLOCK_M, BLOCK_D,
            )  # fmt: skip
        elif end - begin < length:
            slot = (2 * worker + tl.where(begin == 0, 1, 0)).to(tl.int64)
            acc_ptrs = (
                partial_acc_ptr + (slot * BLOCK_M + rows)[:, None] * BLOCK_D + offs_d[None, :]
            )
            tl.store(acc_ptrs, acc, mask=row_ok[:, None])
            tl.store(partial_m_ptr + slot * BLOCK_M + rows, m_i, mask=row_ok)
            tl.store(partial_l_ptr + slot * BLOCK_M + rows, l_i, mask=row_ok)
            item_unit = cursor - begin
            if cuts_ptr is None:
                first = owner(item_unit, total, active)
                pieces = owner(item_unit + length - 1, total, active) - first + 1
            else:
                first, pieces = cut_of(cuts_ptr, worker)
            # Every thread's partial must be out before the one atomic that announces it.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals_ptr + first, 1, sem="acq_rel", scope="gpu")
            complete = False
            if arrived == pieces - 1:
                tl.store(arrivals_ptr + first, 0)  # ready for the next launch
                left = query_len * GROUP_SIZE - m_tile * BLOCK_M
                for begin_row in range(0, tl.minimum(left, BLOCK_M), BLOCK_R):
                    some_rows = begin_row + tl.arange(0, BLOCK_R)
                    some_ok = some_rows < left
                    acc_r, m_r, l_r = merge_pieces(
                        partial_acc_ptr, partial_m_ptr, partial_l_ptr, first, pieces, begin_row,
                        left, BLOCK_M, BLOCK_R, BLOCK_D, BLOCK_P,
                    )  # fmt: skip
                    some_flat = m_tile * BLOCK_M + some_rows
                    sink_r = None
                    if sinks_ptr is not None:
                        sink_r = tl.load(sinks_ptr + first_head + some_flat % GROUP_SIZE)
                    write_rows(
                        acc_r, m_r, l_r, some_flat, some_ok, offs_d, kv_head,
                        req_token, out_ptr, lse_ptr, sink_r, v_scale_ptr, out_scale_ptr,
                        stride_o_t, stride_o_h, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, HAS_LSE,
                        V_SCALE_STEP, OUT_FORMAT,
                    )  # fmt: skip
        if complete:
            write_rows(
                acc, m_i, l_i, flat, row_ok, offs_d, kv_head, req_token,
                out_ptr, lse_ptr, sink, v_scale_ptr, out_scale_ptr, stride_o_t, stride_o_h,
                NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, HAS_LSE, V_SCALE_STEP, OUT_FORMAT,
            )  # fmt: skip
        cursor += end - begin
    if clock_ptr is not None:
        stop_clock(clock_ptr, worker)


_launch_decode = Launcher(_decode_kernel)


def register_options(kv_format: str, block_d: int) -> dict[str, int]:
    """What the compiler is told of registers where it would spill rather than pass 128.

    It hopes for a second program on the SM; wide heads have one.
    """
    return {"maxnreg": 255} if kv_format and block_d > 256 else {}


def _values_pair_up(kv: KvCache, block_d: int) -> bool:
    """Whether an fp8 cache's values can be read two columns at a time."""
    even = kv.v.data_ptr() % 2 == 0 and all(stride % 2 == 0 for stride in kv.v.stride()[:-1])
    return kv.format != "" and even and block_d >= 64


def decode_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    kv: KvCache,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor | None,
    header: torch.Tensor,
    cu_work: torch.Tensor,
    worker_record: torch.Tensor,
    partial_acc: torch.Tensor,
    partial_m: torch.Tensor,
    partial_l: torch.Tensor,
    arrivals: torch.Tensor,
    logits: Logits,
    *,
    window: int,
    causal: bool | torch.Tensor,
    item_overhead: int,
    block_m: int,
    block_n: int,
    block_d: int,
    num_warps: int,
    num_stages: int,
    tail_stages: int,
    use_tma: bool,
    merge_rows: int,
    merge_pieces: int,
    pdl: bool = False,
    out_scale: torch.Tensor | None = None,
    out_format: str = "",
    piece_tiles: int = 0,
    max_pieces: int = 0,
    kv_starts: torch.Tensor | None = None,
    mask: KeyMask | None = None,
    cuts: torch.Tensor | None = None,
    clocks: torch.Tensor | None = None,
) -> None:
    """Attend for every decode request of the plan and write ``out`` (and ``lse``) in place.

    Parameters
    ----------
    out, q : Tensor[num_tokens, num_q_heads, head_dim]
        Only rows of decode requests are written.
    lse : Tensor[num_tokens, num_q_heads], fp32, contiguous, or None
        Natural-log sum of exponentials, with the sink's; -inf for rows without any.
    kv : KvCache
        Views of the keys and values: pages, or the batch's own rows.
    query_start_loc, seq_lens, block_table : Tensor, int32
        The batch, as vLLM passes it.  Without a ``block_table`` a request's keys are the rows of
        its queries, or from ``kv_starts`` on.
    header, cu_work, worker_record : Tensor, int32
        The plan (``tilewise.kernels.plan``): totals, units before each request, worker's starts.
    partial_acc : Tensor[slots, block_m, block_d], fp32
    partial_m, partial_l : Tensor[slots, block_m], fp32
        Scratch for items that several workers share: ``2 * num_workers`` slots, or
        ``(max_pieces + 1) * num_workers`` with pieces.
    arrivals : Tensor[num_workers], int32
        Zero before and after every launch.
    logits : Logits
        What is done to products before the softmax.
    window : int
        Keys a query may see, itself included; 0 for all.  The plan must have been made for it.
        Where attention is not causal it sees as many to its right.
    causal : bool or Tensor[num_reqs], int32
        Whether queries see no key past their own; a tensor says so for each request.
    out_scale : Tensor[] or Tensor[1], fp32, or None
        With one, ``out`` is uint8 and holds ``out / out_scale`` in fp8.
    out_format : str
        How that is rounded (``tilewise.kernels.fp8``).
    piece_tiles, max_pieces : int
        Fewest key tiles of a piece and most pieces of an item in batch-invariant mode, else 0.
        The plan must have been made for them.
    kv_starts : Tensor[num_reqs + 1], int32, or None
        First row of each request's keys; with a ``block_table`` its first entry in that, one row.
    mask : KeyMask or None
        What queries see instead of what ``causal`` says, which must be False then.
    cuts : Tensor[workers, 2], int32, or None
        Of stretches that are not even, each in one item: the first of the workers that share it,
        and how many they are.  They follow each other, and there is a record and a counter of
        arrivals for each (``tilewise bench splits``).
    clocks : Tensor[workers, 3], int64, or None
        Written: when each worker that has a stretch started and ended, in nanoseconds, and its SM.
    """
    num_q_heads, head_dim = q.shape[1], q.shape[2]
    v_pairs = _values_pair_up(kv, block_d)
    if v_pairs:
        kv = replace(kv, v=kv.v.view(torch.uint16))
    flags = causal if isinstance(causal, torch.Tensor) else None
    if mask is not None and not mask.is_tree:
        tail_stages = num_stages  # every tile is masked: no other loop is left to pipeline
    k_src, v_src, strides = kv_arguments(kv, block_n, block_d, use_tma)
    args = (
        out, lse, q, k_src, v_src, query_start_loc, seq_lens, block_table,
        header, cu_work, worker_record, partial_acc, partial_m, partial_l, arrivals,
        *logits.arguments, kv.k_scale, kv.v_scale, out_scale, flags,
        kv_starts, *mask_arguments(mask), cuts, clocks,
        out.stride(0), out.stride(1), q.stride(0), q.stride(1), *strides,
        0 if block_table is None else block_table.stride(0),
    )  # fmt: skip
    constants = dict(
        NUM_KV_HEADS=kv.num_kv_heads, GROUP_SIZE=num_q_heads // kv.num_kv_heads,
        HEAD_DIM=head_dim, PAGE_SIZE=kv.page_size, ITEM_OVERHEAD=item_overhead,
        HAS_LSE=lse is not None, USE_TMA=use_tma,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_R=merge_rows, BLOCK_P=merge_pieces,
        NUM_STAGES=num_stages, TAIL_STAGES=tail_stages, PDL=pdl, WINDOW=window,
        CAUSAL=causal is True, ALIBI_SQRT=logits.alibi_sqrt, **kv.constants, OUT_FORMAT=out_format,
        V_PAIRS=v_pairs,
        PIECE_TILES=piece_tiles, MAX_PIECES=max_pieces, **mask_constants(mask),
    )  # fmt: skip
    options: dict[str, int] = {**kv.options, **register_options(kv.format, block_d)}
    options |= {"launch_pdl": True} if pdl else {}
    _launch_decode((arrivals.shape[0], 1, 1), args, constants, num_warps=num_warps, **options)
