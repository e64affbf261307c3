"""Decode in which requests that begin with the same pages read these once: one launch.

The line of units (``tilewise.kernels.decode``) begins with the groups' shared items, one for each
(group, row tile, KV head): packed queries of all members, ``SHARED_BLOCK_M`` rows a tile, against
the keys that they share.  The tails follow, one item for each (request, KV head, query tile) as
ever, but starting at the shared length.  Workers take equal stretches of the whole line.

A packed row, one (query token, query head) of a member, thus has pieces from two items: those of
its shared item, then those of its tail, as many as workers share each.  Every piece leaves its part
of ``(m, l, acc)`` in scratch and adds one to the row's own counter; whoever finds that all others
have been there merges the row's pieces, in their order and not that of arrival, and writes it.
Nobody waits, and the same batch gives the same bits every time.  Requests that share nothing are
finished as in the plain kernel.

Sources: Ye et al., FlashInfer (2025), for the two parts; Juravsky et al., Hydragen (2024), for
batching queries over a shared prefix.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from tilewise.kernels.attend import attend
from tilewise.kernels.decode import _values_pair_up
from tilewise.kernels.decode_parts import merge_pieces, owner, write_rows
from tilewise.kernels.fp8 import fp16_rows
from tilewise.kernels.launch import BATCH_ARGUMENTS, KvCache, Launcher, Logits, kv_arguments
from tilewise.kernels.online_softmax import LOG2E
from tilewise.kernels.prefix_rows import arrive, leave, whole_ids


@triton.jit(do_not_specialize=["stride_bt_b"], do_not_specialize_on_alignment=BATCH_ARGUMENTS)
def _prefix_decode_kernel(
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
    shared_header_ptr,
    members_ptr,
    groups_ptr,
    slots_ptr,
    partial_acc_ptr,
    partial_m_ptr,
    partial_l_ptr,
    arrivals_ptr,
    row_arrivals_ptr,
    scale_log2,
    cap_log2,
    sinks_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_scale_ptr,
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
    SHARED_BLOCK_M: tl.constexpr,
    SHARED_STAGES: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    K_SCALE_STEP: tl.constexpr,
    V_SCALE_STEP: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    V_PAIRS: tl.constexpr,
):
    """out = softmax(shape(q k^T) + mask) v for short causal queries; grid = (workers,).

    What is None or 0 is as in the plain kernel, ``tilewise.kernels.decode._decode_kernel``.
    """
    if PDL:
        # The launch before this one, whose results are read from here on, may still be running.
        tl.extra.cuda.gdc_wait()
    worker = tl.program_id(0)
    record = worker_record_ptr + worker * 16
    cursor = tl.load(record)
    stretch_end = tl.load(record + 1)
    if cursor >= stretch_end:
        return
    req = tl.load(record + 2)  # the group in which the stretch starts, where it starts in one
    req_begin = tl.load(record + 3)
    req_end = tl.load(record + 4)
    query_start = tl.load(record + 5)
    query_len = tl.load(record + 6)
    seq_len = tl.load(record + 7)
    first_slot = tl.load(record + 8)
    shared_tiles = tl.load(record + 9)
    active = tl.load(header_ptr + 1)
    total = tl.load(header_ptr + 2)
    shared_units = tl.load(shared_header_ptr)
    offs_d = tl.arange(0, BLOCK_D)
    BF16_QUERIES: tl.constexpr = q_ptr.dtype.element_ty == tl.bfloat16
    ROW_SCALE: tl.constexpr = (KV_FORMAT != "") and BF16_QUERIES
    # Rows of a shared tile that are merged at a time: four pieces of them are on their way.
    AS_ROWS: tl.constexpr = 16 if BLOCK_D <= 64 else 8

    if cursor < shared_units:
        rows = tl.arange(0, SHARED_BLOCK_M)
        shared_end = tl.minimum(stretch_end, shared_units)
        group = req
        while cursor < shared_end:
            info = groups_ptr + group * 6
            group_begin = tl.load(info)
            group_end = tl.load(info + 1)
            leader = tl.load(info + 2)
            tiles_n = tl.load(info + 3)
            group_slot = tl.load(info + 4)
            tokens = tl.load(info + 5)
            length = tiles_n + ITEM_OVERHEAD
            local = cursor - group_begin
            item = local // length
            m_tile = item // NUM_KV_HEADS
            kv_head = item - m_tile * NUM_KV_HEADS
            begin = local - item * length
            end = tl.minimum(length, begin + shared_end - cursor)
            lo = (begin.to(tl.int64) * tiles_n // length).to(tl.int32)
            hi = (end.to(tl.int64) * tiles_n // length).to(tl.int32)

            packed = m_tile * SHARED_BLOCK_M + rows
            row_ok = packed < tokens * GROUP_SIZE
            x = group_slot * GROUP_SIZE + packed
            member = tl.load(slots_ptr + x // GROUP_SIZE, mask=row_ok, other=0)
            token = x // GROUP_SIZE - tl.load(members_ptr + member * 4, mask=row_ok, other=0)
            query_row = tl.load(query_start_loc_ptr + member, mask=row_ok, other=0) + token
            first_head = kv_head.to(tl.int64) * GROUP_SIZE
            q_rows = query_row.to(tl.int64) * stride_q_t + x % GROUP_SIZE * stride_q_h
            q_ptrs = q_ptr + first_head * stride_q_h + (q_rows[:, None] + offs_d[None, :])
            q = tl.load(q_ptrs, mask=row_ok[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
            scale = scale_log2
            if k_scale_ptr is not None:
                scale *= tl.load(k_scale_ptr + kv_head * K_SCALE_STEP)
            if ROW_SCALE:
                q, q_scale = fp16_rows(q)
                scale *= q_scale
            pos = None
            slope_log2 = None
            if slopes_ptr is not None:
                start = tl.load(query_start_loc_ptr + member, mask=row_ok, other=0)
                next_start = tl.load(query_start_loc_ptr + member + 1, mask=row_ok, other=0)
                keys = tl.load(seq_lens_ptr + member, mask=row_ok, other=0)
                # Rows of nobody stand behind the keys too: no distance is negative.
                pos = tl.where(row_ok, keys - (next_start - start) + token, tiles_n * BLOCK_N)
                slope = tl.load(slopes_ptr + first_head + x % GROUP_SIZE)
                slope_log2 = slope.to(tl.float32) * LOG2E
            m_i = tl.full([SHARED_BLOCK_M], float("-inf"), tl.float32)
            l_i = tl.zeros([SHARED_BLOCK_M], tl.float32)
            acc = tl.zeros([SHARED_BLOCK_M, BLOCK_D // 2 if V_PAIRS else BLOCK_D], tl.float32)
            acc_odd = acc if V_PAIRS else 0.0
            table_ptr = block_table_ptr + leader.to(tl.int64) * stride_bt_b
            if USE_TMA:
                k_head = k_src
                v_head = v_src
            else:
                k_head = k_src + kv_head.to(tl.int64) * stride_k_h
                v_head = v_src + kv_head.to(tl.int64) * stride_v_h
            acc, acc_odd, m_i, l_i = attend(
                acc, acc_odd, m_i, l_i, q, k_head, v_head, table_ptr, kv_head, lo, hi,
                pos, None, None, tiles_n * BLOCK_N, 0, scale, cap_log2, slope_log2,
                stride_k_p, stride_k_s, stride_v_p, stride_v_s,
                HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, USE_TMA, PRECISION, False, SHARED_STAGES,
                0, ALIBI_SQRT, KV_FORMAT, ROW_SCALE, V_PAIRS, 0,
            )  # fmt: skip
            if V_PAIRS:
                acc = tl.reshape(tl.join(acc, acc_odd), [SHARED_BLOCK_M, BLOCK_D])
            if PDL and cursor + end - begin >= stretch_end:
                # The next kernel's programs may take the places of those that have left.
                tl.extra.cuda.gdc_launch_dependents()
            if end - begin < length:
                slot = 2 * worker + tl.where(begin == 0, 1, 0)
                ids = 2 * tl.num_programs(0) * BLOCK_M + slot * SHARED_BLOCK_M + rows
                ids = ids.to(tl.int64)
            else:
                ids = whole_ids(x, kv_head, 0, BLOCK_M, SHARED_BLOCK_M, NUM_KV_HEADS, GROUP_SIZE)
            leave(partial_acc_ptr, partial_m_ptr, partial_l_ptr, ids, acc, m_i, l_i, row_ok,
                   BLOCK_D)  # fmt: skip
            left = tokens * GROUP_SIZE - m_tile * SHARED_BLOCK_M
            arrive(
                group_slot * GROUP_SIZE + m_tile * SHARED_BLOCK_M,
                tl.minimum(left, SHARED_BLOCK_M), kv_head, worker, shared_units, total, active,
                out_ptr, lse_ptr, query_start_loc_ptr, cu_work_ptr, members_ptr, slots_ptr,
                partial_acc_ptr, partial_m_ptr, partial_l_ptr, row_arrivals_ptr,
                sinks_ptr, v_scale_ptr, out_scale_ptr, stride_o_t, stride_o_h,
                NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, ITEM_OVERHEAD, HAS_LSE, BLOCK_M,
                SHARED_BLOCK_M, BLOCK_D, AS_ROWS, LANES, V_SCALE_STEP, OUT_FORMAT,
            )  # fmt: skip
            cursor += end - begin
            if cursor >= group_end:
                group += 1
        # The tails begin with the first request.
        req = -1
        req_begin = shared_units
        req_end = shared_units

    rows = tl.arange(0, BLOCK_M)
    while cursor < stretch_end:
        if cursor >= req_end:
            while req_end <= cursor:
                req += 1
                req_end = shared_units + tl.load(cu_work_ptr + req + 1)
            req_begin = shared_units + tl.load(cu_work_ptr + req)
            query_start = tl.load(query_start_loc_ptr + req)
            query_len = tl.load(query_start_loc_ptr + req + 1) - query_start
            seq_len = tl.load(seq_lens_ptr + req)
            first_slot = tl.load(members_ptr + req * 4)
            shared_tiles = tl.load(members_ptr + req * 4 + 1)
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
        lo = shared_tiles + (begin.to(tl.int64) * tiles_n // length).to(tl.int32)
        hi = shared_tiles + (end.to(tl.int64) * tiles_n // length).to(tl.int32)

        flat = m_tile * BLOCK_M + rows
        row_ok = flat < query_len * GROUP_SIZE
        token = flat // GROUP_SIZE
        pos = seq_len - query_len + token
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
        scale = scale_log2
        if k_scale_ptr is not None:
            scale *= tl.load(k_scale_ptr + kv_head * K_SCALE_STEP)
        if ROW_SCALE:
            q, q_scale = fp16_rows(q)
            scale *= q_scale
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D // 2 if V_PAIRS else BLOCK_D], tl.float32)
        acc_odd = acc if V_PAIRS else 0.0
        first_pos = seq_len - query_len + m_tile * BLOCK_M // GROUP_SIZE
        full = tl.maximum(first_pos + 1, 0) // BLOCK_N  # tiles that every row sees whole
        block_table_row_ptr = block_table_ptr + req.to(tl.int64) * stride_bt_b
        if USE_TMA:
            k_head = k_src
            v_head = v_src
        else:
            k_head = k_src + kv_head.to(tl.int64) * stride_k_h
            v_head = v_src + kv_head.to(tl.int64) * stride_v_h
        slope_log2 = None
        if slopes_ptr is not None:
            row_slope_ptr = slopes_ptr + first_head + flat % GROUP_SIZE
            slope_log2 = tl.load(row_slope_ptr).to(tl.float32) * LOG2E
        if USE_TMA:
            split = tl.minimum(tl.maximum(full, lo), hi)
            acc, acc_odd, m_i, l_i = attend(
                acc, acc_odd, m_i, l_i, q, k_head, v_head, block_table_row_ptr, kv_head, lo, split,
                pos, None, pos, seq_len, 0, scale, cap_log2, slope_log2,
                stride_k_p, stride_k_s, stride_v_p, stride_v_s,
                HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, USE_TMA, PRECISION, False, NUM_STAGES,
                0, ALIBI_SQRT, KV_FORMAT, ROW_SCALE, V_PAIRS, 0,
            )  # fmt: skip
        else:
            # Masked rows cost nothing here (the copies themselves skip them), so one loop will do.
            split = lo
        acc, acc_odd, m_i, l_i = attend(
            acc, acc_odd, m_i, l_i, q, k_head, v_head, block_table_row_ptr, kv_head, split, hi,
            pos, None, pos, seq_len, 0, scale, cap_log2, slope_log2,
            stride_k_p, stride_k_s, stride_v_p, stride_v_s,
            HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, USE_TMA, PRECISION, True,
            TAIL_STAGES if USE_TMA else NUM_STAGES, 0, ALIBI_SQRT, KV_FORMAT,
            ROW_SCALE, V_PAIRS, 0,
        )  # fmt: skip
        if V_PAIRS:
            acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_D])

        if PDL and cursor + end - begin >= stretch_end:
            tl.extra.cuda.gdc_launch_dependents()
        left = query_len * GROUP_SIZE - m_tile * BLOCK_M
        slot_ids = (2 * worker + tl.where(begin == 0, 1, 0)) * BLOCK_M + rows
        if first_slot >= 0:
            x0 = first_slot * GROUP_SIZE + m_tile * BLOCK_M
            own_ids = whole_ids(
                x0 + rows, kv_head, 1, BLOCK_M, SHARED_BLOCK_M, NUM_KV_HEADS, GROUP_SIZE
            )
            ids = tl.where(end - begin < length, slot_ids.to(tl.int64), own_ids)
            leave(partial_acc_ptr, partial_m_ptr, partial_l_ptr, ids, acc, m_i, l_i, row_ok,
                   BLOCK_D)  # fmt: skip
            arrive(
                x0, tl.minimum(left, BLOCK_M), kv_head, worker, shared_units, total, active,
                out_ptr, lse_ptr, query_start_loc_ptr, cu_work_ptr, members_ptr, slots_ptr,
                partial_acc_ptr, partial_m_ptr, partial_l_ptr, row_arrivals_ptr,
                sinks_ptr, v_scale_ptr, out_scale_ptr, stride_o_t, stride_o_h,
                NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, ITEM_OVERHEAD, HAS_LSE, BLOCK_M,
                SHARED_BLOCK_M, BLOCK_D, BLOCK_R, LANES, V_SCALE_STEP, OUT_FORMAT,
            )  # fmt: skip
        elif end - begin < length:
            leave(partial_acc_ptr, partial_m_ptr, partial_l_ptr, slot_ids.to(tl.int64), acc, m_i,
                   l_i, row_ok, BLOCK_D)  # fmt: skip
            item_unit = cursor - begin
            first = owner(item_unit, total, active)
            pieces = owner(item_unit + length - 1, total, active) - first + 1
            # Every thread's partial must be out before the one atomic that announces it.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals_ptr + first, 1, sem="acq_rel", scope="gpu")
            if arrived == pieces - 1:
                tl.store(arrivals_ptr + first, 0)  # ready for the next launch
                for begin_row in range(0, tl.minimum(left, BLOCK_M), BLOCK_R):
                    some_rows = begin_row + tl.arange(0, BLOCK_R)
                    acc_r, m_r, l_r = merge_pieces(
                        partial_acc_ptr, partial_m_ptr, partial_l_ptr, first, pieces, begin_row,
                        left, BLOCK_M, BLOCK_R, BLOCK_D, BLOCK_P,
                    )  # fmt: skip
                    some_flat = m_tile * BLOCK_M + some_rows
                    sink_r = None
                    if sinks_ptr is not None:
                        sink_r = tl.load(sinks_ptr + first_head + some_flat % GROUP_SIZE)
                    write_rows(
                        acc_r, m_r, l_r, some_flat, some_rows < left, offs_d, kv_head,
                        req_token, out_ptr, lse_ptr, sink_r, v_scale_ptr, out_scale_ptr,
                        stride_o_t, stride_o_h, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, HAS_LSE,
                        V_SCALE_STEP, OUT_FORMAT,
                    )  # fmt: skip
        else:
            write_rows(
                acc, m_i, l_i, flat, row_ok, offs_d, kv_head, req_token,
                out_ptr, lse_ptr, sink, v_scale_ptr, out_scale_ptr, stride_o_t, stride_o_h,
                NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, HAS_LSE, V_SCALE_STEP, OUT_FORMAT,
            )  # fmt: skip
        cursor += end - begin


_launch_prefix_decode = Launcher(_prefix_decode_kernel)


def scratch_rows(workers: int, block_m: int, shared_block_m: int, packed_rows: int) -> int:
    """Rows of partials: two slots a worker for tails and for shared items, two a packed row."""
    return 2 * workers * (block_m + shared_block_m) + 2 * packed_rows


def prefix_decode_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    kv: KvCache,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    header: torch.Tensor,
    cu_work: torch.Tensor,
    worker_record: torch.Tensor,
    shared_header: torch.Tensor,
    members: torch.Tensor,
    groups: torch.Tensor,
    slots: torch.Tensor,
    partial_acc: torch.Tensor,
    partial_m: torch.Tensor,
    partial_l: torch.Tensor,
    arrivals: torch.Tensor,
    row_arrivals: torch.Tensor,
    logits: Logits,
    *,
    item_overhead: int,
    block_m: int,
    block_n: int,
    block_d: int,
    num_warps: int,
    num_stages: int,
    tail_stages: int,
    shared_block_m: int,
    shared_stages: int,
    max_registers: int,
    use_tma: bool,
    merge_rows: int,
    merge_pieces: int,
    pdl: bool = False,
    out_scale: torch.Tensor | None = None,
    out_format: str = "",
) -> None:
    """Attend for every decode request of a causal plan with groups; write ``out`` (and ``lse``).

    Parameters
    ----------
    out, q : Tensor[num_tokens, num_q_heads, head_dim]
        Only rows of decode requests are written.
    lse : Tensor[num_tokens, num_q_heads], fp32, contiguous, or None
        Natural-log sum of exponentials, with the sink's.
    kv : KvCache
        Views of the keys and values in pages.
    query_start_loc, seq_lens, block_table : Tensor, int32
        The batch, as vLLM passes it.
    header, cu_work : Tensor, int32
        The plan (``tilewise.kernels.plan``); ``cu_work`` counts tails only.
    worker_record : Tensor[num_workers, 16], int32
        The plan's, for requests in groups.
    shared_header, members, groups, slots : Tensor, int32
        The groups (``tilewise.kernels.prefix_find``).
    partial_acc : Tensor[rows, block_d], fp32
    partial_m, partial_l : Tensor[rows], fp32
        Scratch of ``scratch_rows`` rows.
    arrivals : Tensor[num_workers], int32
    row_arrivals : Tensor[max_num_reqs * max_query_len * num_q_heads], int32
        Zero before and after every launch.
    logits : Logits
        What is done to products before the softmax.
    max_registers : int
        What a thread may take; 0 for the hardware's limit.
    out_scale : Tensor[] or Tensor[1], fp32, or None
        With one, ``out`` is uint8 and holds ``out / out_scale`` in fp8.
    out_format : str
        How that is rounded (``tilewise.kernels.fp8``).
    """
    num_q_heads, head_dim = q.shape[1], q.shape[2]
    v_pairs = _values_pair_up(kv, block_d)
    if v_pairs:
        kv = replace(kv, v=kv.v.view(torch.uint16))
    k_src, v_src, strides = kv_arguments(kv, block_n, block_d, use_tma)
    args = (
        out, lse, q, k_src, v_src, query_start_loc, seq_lens, block_table,
        header, cu_work, worker_record, shared_header, members, groups, slots,
        partial_acc, partial_m, partial_l, arrivals, row_arrivals,
        *logits.arguments, kv.k_scale, kv.v_scale, out_scale,
        out.stride(0), out.stride(1), q.stride(0), q.stride(1), *strides, block_table.stride(0),
    )  # fmt: skip
    of_cache = kv.constants
    of_pages = any(x is not None and x.dim() == 2 for x in (kv.k_scale, kv.v_scale))
    if of_cache.pop("ROTATED") or of_pages:
        raise ValueError("rotated keys, or scales of pages; accepted: neither")
    constants = dict(
        NUM_KV_HEADS=kv.num_kv_heads, GROUP_SIZE=num_q_heads // kv.num_kv_heads,
        HEAD_DIM=head_dim, PAGE_SIZE=kv.page_size, ITEM_OVERHEAD=item_overhead,
        HAS_LSE=lse is not None, USE_TMA=use_tma,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_R=merge_rows, BLOCK_P=merge_pieces,
        NUM_STAGES=num_stages, TAIL_STAGES=tail_stages,
        SHARED_BLOCK_M=shared_block_m, SHARED_STAGES=shared_stages,
        LANES=max(shared_block_m, block_m, 32 * num_warps), PDL=pdl,
        ALIBI_SQRT=logits.alibi_sqrt, **of_cache, OUT_FORMAT=out_format, V_PAIRS=v_pairs,
    )  # fmt: skip
    options: dict[str, bool | int] = dict(kv.options)
    if pdl:
        options["launch_pdl"] = True
    if max_registers:
        options["maxnreg"] = max_registers
    _launch_prefix_decode(
        (arrivals.shape[0], 1, 1), args, constants, num_warps=num_warps, **options
    )
