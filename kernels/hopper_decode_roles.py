"""The two roles of a program of the Gluon decode: who copies, and who computes.

``tilewise.kernels.hopper_decode`` says how they work together.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.hopper_parts import (
    ROWS,
    block_pages,
    clear_rows,
    copy_block,
    field,
    mask,
    partition_barrier,
    publish,
    rescale,
    row_sums,
    soft_cap,
    softmax,
    tma_load,
)

ITEM_FIELDS = gl.constexpr(12)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _owner(unit, total, active):
    """The worker whose stretch holds ``unit``: see ``tilewise.plan_rule.owner``."""
    return (((unit.to(gl.int64) + 1) * active - 1) // total).to(gl.int32)


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, query_start_loc_ptr, seq_lens_ptr, block_table_ptr, cu_work_ptr,
    worker_record_ptr, stride_bt_b, bars, q_token_s, k_pages_s, v_pages_s, item_s,
    NUM_WORKERS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, ITEM_OVERHEAD: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Announce the items of the program's stretches and copy their Q, K and V.

    A plan has one stretch a program; one that was made for more programs leaves each several.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    SLABS: gl.constexpr = HEAD_DIM // 64
    TOKENS: gl.constexpr = BLOCK_M // GROUP_SIZE
    ring = 0
    done = 0
    for worker in range(gl.program_id(0), NUM_WORKERS, gl.num_programs(0)):
        record = worker_record_ptr + worker * 8
        cursor = gl.load(record)
        stretch_end = gl.load(record + 1)
        req = gl.load(record + 2)
        req_begin = gl.load(record + 3)
        req_end = gl.load(record + 4)
        query_start = gl.load(record + 5)
        query_len = gl.load(record + 6)
        seq_len = gl.load(record + 7)
        while cursor < stretch_end:
            if cursor >= req_end:
                while req_end <= cursor:
                    req += 1
                    req_end = gl.load(cu_work_ptr + req + 1)
                req_begin = gl.load(cu_work_ptr + req)
                query_start = gl.load(query_start_loc_ptr + req)
                query_len = gl.load(query_start_loc_ptr + req + 1) - query_start
                seq_len = gl.load(seq_lens_ptr + req)
            # As in the plain twin: sizes come from the plan alone, whatever became of the lengths.
            tiles_m = gl.maximum((query_len * GROUP_SIZE + BLOCK_M - 1) // BLOCK_M, 1)
            length = gl.maximum((req_end - req_begin) // (tiles_m * NUM_KV_HEADS), 1)
            tiles_n = length - ITEM_OVERHEAD
            local = cursor - req_begin
            item = local // length
            kv_head = gl.minimum(item // tiles_m, NUM_KV_HEADS - 1)
            m_tile = item - kv_head * tiles_m
            begin = local - item * length
            end = gl.minimum(length, begin + stretch_end - cursor)
            lo = begin * tiles_n // length
            hi = end * tiles_n // length
            if length > 46340:  # its square is more than int32 holds; 64 bits take longer
                lo = (begin.to(gl.int64) * tiles_n // length).to(gl.int32)
                hi = (end.to(gl.int64) * tiles_n // length).to(gl.int32)
            first_key = 0
            if WINDOW:
                skipped = gl.maximum(seq_len - query_len + 1 - WINDOW, 0) // BLOCK_N
                lo += skipped
                hi += skipped
                first_pos = seq_len - query_len + m_tile * TOKENS
                first_key = gl.maximum(first_pos + 1 - WINDOW, 0)
            row_ptr = block_table_ptr + req.to(gl.int64) * stride_bt_b
            page, _ = block_pages(row_ptr, lo, first_key, seq_len, BLOCK_N, PAGE_SIZE, BLOCK_N)

            slot = done & 1
            mbarrier.wait(q_empty.index(slot), ((done >> 1) & 1) ^ 1)
            publish(item_s, slot, 0, query_start, ITEM_FIELDS)
            publish(item_s, slot, 1, query_len, ITEM_FIELDS)
            publish(item_s, slot, 2, seq_len, ITEM_FIELDS)
            publish(item_s, slot, 3, kv_head, ITEM_FIELDS)
            publish(item_s, slot, 4, m_tile, ITEM_FIELDS)
            publish(item_s, slot, 5, lo, ITEM_FIELDS)
            publish(item_s, slot, 6, hi, ITEM_FIELDS)
            publish(item_s, slot, 7, worker, ITEM_FIELDS)
            publish(item_s, slot, 8, cursor - begin, ITEM_FIELDS)
            publish(item_s, slot, 9, length, ITEM_FIELDS)
            publish(item_s, slot, 10, begin, ITEM_FIELDS)
            publish(item_s, slot, 11, end, ITEM_FIELDS)
            mbarrier.expect(q_full.index(slot), BLOCK_M * HEAD_DIM * 2)
            for slab in gl.static_range(SLABS):
                tma_load(
                    q_desc, [query_start + m_tile * TOKENS, kv_head * GROUP_SIZE, slab * 64],
                    q_full.index(slot), q_token_s.index((slot * SLABS + slab) * (ROWS // BLOCK_M)),
                )  # fmt: skip
            for j in range(lo, hi):
                # One tile ahead, so that no copy waits for a page id.
                ahead = gl.minimum(j + 1, hi - 1)
                next_page, _ = block_pages(
                    row_ptr, ahead, first_key, seq_len, BLOCK_N, PAGE_SIZE, BLOCK_N
                )
                in_page = (j * BLOCK_N) % PAGE_SIZE if PAGE_SIZE > BLOCK_N else 0
                copy_block(
                    k_desc, k_pages_s, k_full, k_empty, ring, page, page, kv_head, in_page,
                    BLOCK_N, HEAD_DIM, BLOCK_N, STAGES, 2, 64,
                )  # fmt: skip
                copy_block(
                    v_desc, v_pages_s, v_full, v_empty, ring, page, page, kv_head, in_page,
                    BLOCK_N, HEAD_DIM, BLOCK_N, STAGES, 2, 64,
                )  # fmt: skip
                ring += 1
                page = next_page
            cursor += end - begin
            done += 1
    # An item of no length tells the consumer that there is no further one.
    slot = done & 1
    mbarrier.wait(q_empty.index(slot), ((done >> 1) & 1) ^ 1)
    publish(item_s, slot, 9, 0, ITEM_FIELDS)
    mbarrier.arrive(q_full.index(slot))


@gluon.jit
def _write_rows(
    out, m, total, flat, ok, offs_d, query_start, kv_head, out_ptr, lse_ptr, sinks_ptr, stride_o_t,
    stride_o_h, NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Divide, and store rows all of whose keys have met; ``flat`` counts the request's rows."""
    head = kv_head * GROUP_SIZE + flat % GROUP_SIZE
    token = query_start.to(gl.int64) + flat // GROUP_SIZE
    factor = 1.0
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head, mask=ok, other=0.0).to(gl.float32) * 1.4426950408889634
        m_new = gl.maximum(m, sink)
        factor = gl.exp2(m - m_new)
        total = total * factor + gl.exp2(sink - m_new)
        m = m_new
    inverse = gl.where(total != 0.0, factor / total, 0.0)
    rows_layout: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    out = out * gl.expand_dims(gl.convert_layout(inverse, rows_layout), 1)
    o_rows = gl.convert_layout(token * stride_o_t + head * stride_o_h, rows_layout)
    o_ptrs = out_ptr + (gl.expand_dims(o_rows, 1) + gl.expand_dims(offs_d, 0))
    o_mask = gl.expand_dims(gl.convert_layout(ok.to(gl.int32), rows_layout) != 0, 1)
    gl.store(o_ptrs, out.to(out_ptr.dtype.element_ty), mask=o_mask)
    if HAS_LSE:
        lse = gl.where(total != 0.0, (m + gl.log2(total)) * LN2, float("-inf"))
        gl.store(lse_ptr + token * (NUM_KV_HEADS * GROUP_SIZE) + head, lse, mask=ok)


@gluon.jit
def _merge(
    partial_acc_ptr, partial_m_ptr, partial_l_ptr, out_ptr, lse_ptr, sinks_ptr, first, pieces,
    first_flat, rows_left, query_start, kv_head, stride_o_t, stride_o_h,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_LSE: gl.constexpr, BLOCK_M: gl.constexpr, PIECES: gl.constexpr, SOME: gl.constexpr,
):  # fmt: skip
    """Merge the partials of workers ``first .. first + pieces`` in that order, and store.

    ``SOME`` rows at a time.  All of ``PIECES`` pieces of a row lie in one thread, their loads on
    their way together.
    """
    LANES: gl.constexpr = HEAD_DIM // 4
    cube: gl.constexpr = gl.BlockedLayout(
        [PIECES, SOME * LANES // 128, 4], [1, 32 // LANES, LANES], [1, 4, 1], [2, 1, 0]
    )
    by_piece: gl.constexpr = gl.SliceLayout(2, cube)
    plane: gl.constexpr = gl.SliceLayout(0, cube)
    row_layout: gl.constexpr = gl.SliceLayout(0, by_piece)
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, plane))
    offs_d3 = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, cube)))
    for begin_row in range(0, rows_left, SOME):
        row = begin_row + gl.arange(0, SOME, row_layout)
        m = gl.full([SOME], -1e30, gl.float32, row_layout)
        total = gl.zeros([SOME], gl.float32, row_layout)
        acc = gl.zeros([SOME, HEAD_DIM], gl.float32, plane)
        for base in range(0, pieces, PIECES):
            piece = base + gl.arange(0, PIECES, gl.SliceLayout(1, by_piece))
            # The first piece starts the item, others continue it: see the plain twin.
            slots = 2 * (first + piece) + gl.where(piece == 0, 1, 0)
            ids = gl.expand_dims(slots * BLOCK_M, 1) + gl.expand_dims(row, 0)
            ok = gl.expand_dims(piece < pieces, 1) & gl.expand_dims(row < rows_left, 0)
            pointers = gl.expand_dims(ids.to(gl.int64) * HEAD_DIM, 2) + gl.expand_dims(
                gl.expand_dims(offs_d3, 0), 1
            )
            acc_p = gl.load(partial_acc_ptr + pointers, mask=gl.expand_dims(ok, 2), other=0.0)
            m_p = gl.load(partial_m_ptr + ids, mask=ok, other=-1e30)
            l_p = gl.load(partial_l_ptr + ids, mask=ok, other=0.0)
            m_new = gl.maximum(m, gl.max(m_p, 0))
            keep = gl.exp2(m - m_new)
            weight = gl.exp2(m_p - gl.expand_dims(m_new, 0))
            total = total * keep + gl.sum(l_p * weight, 0)
            keep = gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, plane)), 1)
            acc = acc * keep + gl.sum(acc_p * gl.expand_dims(weight, 2), 0)
            m = m_new
        _write_rows(
            acc, m, total, first_flat + row, row < rows_left, offs_d, query_start, kv_head,
            out_ptr, lse_ptr, sinks_ptr, stride_o_t, stride_o_h, NUM_KV_HEADS, GROUP_SIZE, HAS_LSE,
        )  # fmt: skip


@gluon.jit
def _read_item(item_s, q_full, done):
    """The fields of the program's item number ``done``; no length after the last."""
    slot = done & 1
    mbarrier.wait(q_full.index(slot), (done >> 1) & 1)
    return (
        field(item_s, slot, 0, ITEM_FIELDS, 4), field(item_s, slot, 1, ITEM_FIELDS, 4),
        field(item_s, slot, 2, ITEM_FIELDS, 4), field(item_s, slot, 3, ITEM_FIELDS, 4),
        field(item_s, slot, 4, ITEM_FIELDS, 4), field(item_s, slot, 5, ITEM_FIELDS, 4),
        field(item_s, slot, 6, ITEM_FIELDS, 4), field(item_s, slot, 7, ITEM_FIELDS, 4),
        field(item_s, slot, 8, ITEM_FIELDS, 4), field(item_s, slot, 9, ITEM_FIELDS, 4),
        field(item_s, slot, 10, ITEM_FIELDS, 4), field(item_s, slot, 11, ITEM_FIELDS, 4),
    )  # fmt: skip


@gluon.jit
def _mask_edges(
    s, tile, first_pos, leftmost, GROUP_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Mask a tile's logits, if some row does not see all of its keys."""
    start = tile * BLOCK_N
    if (start + BLOCK_N > first_pos + 1) | (start < leftmost):
        s = mask(s, first_pos, start, GROUP_SIZE, BLOCK_N, WINDOW)
    return s


@gluon.jit
def _clear_strangers(
    v_slabs_s, stage, tile, first_key, seq_len, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """Zero the rows of a tile's values that are not the request's: see ``clear_rows``."""
    start = tile * BLOCK_N
    if (start + BLOCK_N > seq_len) | (start < first_key):
        clear_rows(v_slabs_s, stage, first_key - start, seq_len - start, BLOCK_N, HEAD_DIM)


@gluon.jit
def consumer(
    out_ptr, lse_ptr, sinks_ptr, partial_acc_ptr, partial_m_ptr, partial_l_ptr, arrivals_ptr,
    header_ptr, bars, q_s, k_s, v_s, v_slabs_s, item_s, stride_o_t, stride_o_h, scale_log2,
    cap_factor,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_LSE: gl.constexpr, WINDOW: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, PIECES: gl.constexpr, SOME: gl.constexpr,
):  # fmt: skip
    """Attend for every item of the program; merge those that this program is the last to reach."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    m_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    TOKENS: gl.constexpr = BLOCK_M // GROUP_SIZE
    active = gl.load(header_ptr + 1)
    total_units = gl.load(header_ptr + 2)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout))
    row = gl.arange(0, ROWS, m_layout)
    ring = 0
    done = 0
    query_start, query_len, seq_len, kv_head, m_tile, lo, hi, worker, unit, length, begin, end = (
        _read_item(item_s, q_full, 0)
    )
    while length > 0:
        slot = done & 1
        q = q_s.index(slot)
        first_pos = seq_len - query_len + m_tile * TOKENS
        first_key = 0
        leftmost = 0
        if WINDOW:
            first_key = gl.maximum(first_pos + 1 - WINDOW, 0)
            leftmost = first_pos + TOKENS - WINDOW
        # While the first keys are on their way: these divisions take long.
        first = _owner(unit, total_units, active)
        pieces = _owner(unit + length - 1, total_units, active) - first + 1
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, o_layout)
        m = gl.full([ROWS], -1e30, gl.float32, m_layout)
        sums = row_sums(zero, BLOCK_N)
        if lo < hi:
            mbarrier.wait(k_full.index(ring % STAGES), (ring // STAGES) & 1)
            s = warpgroup_mma(
                q, k_s.index(ring % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(ring % STAGES))
            s = soft_cap(s, cap_factor)
            s = _mask_edges(s, lo, first_pos, leftmost, GROUP_SIZE, BLOCK_N, WINDOW)
            p, m, sums, alpha = softmax(s, m, sums, scale_log2, BLOCK_N)
            mbarrier.wait(
                k_full.index((ring + 1) % STAGES), ((ring + 1) // STAGES) & 1, pred=lo + 1 < hi
            )
            for j in range(lo + 1, hi):
                # Tile j's logits are computed while the values of tile j - 1 are weighted.
                stage = (ring + 1) % STAGES  # its K is there: waited for below
                v_stage = ring % STAGES
                s = warpgroup_mma(
                    q, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                p16 = gl.convert_layout(p.to(dtype), p_layout)
                acc = rescale(acc, alpha)
                mbarrier.wait(v_full.index(v_stage), (ring // STAGES) & 1)
                _clear_strangers(v_slabs_s, v_stage, j - 1, first_key, seq_len, BLOCK_N, HEAD_DIM)
                pending = warpgroup_mma(p16, v_s.index(v_stage), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(k_empty.index(stage))
                s = soft_cap(s, cap_factor)
                s = _mask_edges(s, j, first_pos, leftmost, GROUP_SIZE, BLOCK_N, WINDOW)
                p, m, sums, alpha = softmax(s, m, sums, scale_log2, BLOCK_N)
                ring += 1
                # Before the wait for P V, as in the prefill: its polling loop ends the basic block,
                # or ptxas would lift that wait above the exponentials.
                mbarrier.wait(
                    k_full.index((ring + 1) % STAGES), ((ring + 1) // STAGES) & 1, pred=j + 1 < hi
                )
                acc, p, sums = warpgroup_mma_wait(0, deps=[pending, p, sums])
                mbarrier.arrive(v_empty.index(v_stage))
            p16 = gl.convert_layout(p.to(dtype), p_layout)
            acc = rescale(acc, alpha)
            v_stage = ring % STAGES
            mbarrier.wait(v_full.index(v_stage), (ring // STAGES) & 1)
            _clear_strangers(v_slabs_s, v_stage, hi - 1, first_key, seq_len, BLOCK_N, HEAD_DIM)
            acc = warpgroup_mma(p16, v_s.index(v_stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(v_stage))
            ring += 1
        mbarrier.arrive(q_empty.index(slot))
        total = gl.convert_layout(gl.sum(sums, 1), m_layout)
        first_flat = m_tile * BLOCK_M
        rows_left = gl.minimum(query_len * GROUP_SIZE - first_flat, BLOCK_M)
        if end - begin == length:
            _write_rows(
                acc, m, total, first_flat + row, row < rows_left, offs_d, query_start, kv_head,
                out_ptr, lse_ptr, sinks_ptr, stride_o_t, stride_o_h,
                NUM_KV_HEADS, GROUP_SIZE, HAS_LSE,
            )  # fmt: skip
        else:
            # Slots as in the plain twin: two a worker, the second for an item that it starts.
            base = (2 * worker + (begin == 0).to(gl.int32)).to(gl.int64) * BLOCK_M
            ok = row < rows_left
            o_row = gl.convert_layout(row, gl.SliceLayout(1, o_layout))
            pointers = gl.expand_dims(o_row * HEAD_DIM, 1) + gl.expand_dims(offs_d, 0)
            gl.store(
                partial_acc_ptr + base * HEAD_DIM + pointers, acc,
                mask=gl.expand_dims(o_row < rows_left, 1),
            )  # fmt: skip
            gl.store(partial_m_ptr + base + row, m, mask=ok)
            gl.store(partial_l_ptr + base + row, total, mask=ok)
            # Every thread's partial must be out before the one atomic that announces it.
            partition_barrier()
            arrived = gl.atomic_add(arrivals_ptr + first, 1, sem="acq_rel", scope="gpu")
            if arrived == pieces - 1:
                gl.store(arrivals_ptr + first, 0)  # ready for the next launch
                _merge(
                    partial_acc_ptr, partial_m_ptr, partial_l_ptr, out_ptr, lse_ptr, sinks_ptr,
                    first, pieces, first_flat, rows_left, query_start, kv_head,
                    stride_o_t, stride_o_h, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, HAS_LSE, BLOCK_M,
                    PIECES, SOME,
                )  # fmt: skip
        done += 1
        (
            query_start, query_len, seq_len, kv_head, m_tile, lo, hi, worker, unit, length, begin,
            end,
        ) = _read_item(item_s, q_full, done)  # fmt: skip
