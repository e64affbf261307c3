"""The two roles of a program that prefills on Hopper: who copies, and who computes.

Three kernels take them, in Gluon: ``tilewise.kernels.hopper_prefill``, which says how they work
together, and, over an fp8 cache, ``hopper_prefill_kv8`` and, but for the consumer,
``hopper_prefill_fp8``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.hopper_parts import (
    ROWS,
    block_pages,
    capped_softmax,
    clear_rows,
    copy_block,
    field,
    mask,
    may_compare_bits,
    of_rows,
    partition_barrier,
    publish,
    rescale,
    row_sums,
    soft_cap,
    softmax,
    tma_load,
    wait_for_the_launch_before,
)

TILE_FIELDS = gl.constexpr(7)
# Parts of a tile's blocks: at the diagonal; below it, their maxima found among bits, or not; at a
# window's left edge.
_DIAGONAL, _BITS, _BELOW, _EDGE = (gl.constexpr(i) for i in range(4))


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, query_start_loc_ptr, seq_lens_ptr, block_table_ptr, header_ptr,
    tile_req_ptr, tile_token_ptr, counter_ptr, stride_bt_b, bars, q_s, k_pages_s, v_pages_s, tile_s,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, GROUP_PAD: gl.constexpr,
    BLOCK_D: gl.constexpr,
    PAGE_SIZE: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    BESIDE: gl.constexpr, SIZE: gl.constexpr, SLAB: gl.constexpr,
):  # fmt: skip
    """Announce tiles and copy their Q, K and V until the counter runs out."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty, t_full, t_empty = bars
    PAGE_ROWS: gl.constexpr = BLOCK_N if PAGE_SIZE >= BLOCK_N else PAGE_SIZE
    TOKENS: gl.constexpr = ROWS // GROUP_PAD  # of one warpgroup
    num_programs = gl.num_programs(0)
    num_tiles = gl.load(header_ptr)
    total = num_tiles * NUM_KV_HEADS
    turn = gl.program_id(0)
    drawn = num_programs
    if BESIDE:
        # Programs start when decode leaves them an SM: the first to come takes the heaviest tile.
        turn = gl.atomic_add(counter_ptr, 1)
        drawn = 0
    ring = 0
    done = 0
    while turn < total:
        next_turn = drawn + gl.atomic_add(counter_ptr, 1)
        # One KV head after the other: its keys stay in L2 while all its tiles pass.
        kv_head = turn // num_tiles
        tile = turn % num_tiles
        req = gl.load(tile_req_ptr + tile)
        first_token = gl.load(tile_token_ptr + tile)
        query_start = gl.load(query_start_loc_ptr + req)
        query_len = gl.load(query_start_loc_ptr + req + 1) - query_start
        seq_len = gl.load(seq_lens_ptr + req)
        first_pos = seq_len - query_len + first_token
        last = gl.minimum(first_pos + 2 * TOKENS, seq_len)
        blocks = gl.maximum((last + BLOCK_N - 1) // BLOCK_N, 1)
        first_key = 0
        if WINDOW:
            first_key = gl.maximum(first_pos + 1 - WINDOW, 0)
        first_block = gl.minimum(first_key // BLOCK_N, blocks - 1)

        slot = done & 1
        mbarrier.wait(t_empty.index(slot), ((done >> 1) & 1) ^ 1)
        publish(tile_s, slot, 0, query_start + first_token, TILE_FIELDS)
        publish(tile_s, slot, 1, query_len - first_token, TILE_FIELDS)
        publish(tile_s, slot, 2, first_pos, TILE_FIELDS)
        publish(tile_s, slot, 3, seq_len, TILE_FIELDS)
        publish(tile_s, slot, 4, kv_head, TILE_FIELDS)
        publish(tile_s, slot, 5, blocks, TILE_FIELDS)
        publish(tile_s, slot, 6, first_key, TILE_FIELDS)
        mbarrier.arrive(t_full.index(slot))

        row_ptr = block_table_ptr + req.to(gl.int64) * stride_bt_b
        page0, page1 = block_pages(
            row_ptr, blocks - 1, first_key, seq_len, BLOCK_N, PAGE_SIZE, PAGE_ROWS
        )
        for group in gl.static_range(2):
            mbarrier.wait(q_empty.index(group), (done & 1) ^ 1)
            mbarrier.expect(q_full.index(group), ROWS * BLOCK_D * 2)
            token = query_start + first_token + group * TOKENS
            tma_load(
                q_desc, [token, kv_head * GROUP_SIZE, 0], q_full.index(group), q_s.index(group)
            )
        for n in range(blocks - first_block):
            block = blocks - 1 - n
            # One block ahead, so that no copy waits for a page id.
            ahead = gl.maximum(block - 1, first_block)
            next0, next1 = block_pages(
                row_ptr, ahead, first_key, seq_len, BLOCK_N, PAGE_SIZE, PAGE_ROWS
            )
            in_page = (block * BLOCK_N) % PAGE_SIZE if PAGE_SIZE > BLOCK_N else 0
            copy_block(
                k_desc, k_pages_s, k_full, k_empty, ring, page0, page1, kv_head, in_page,
                BLOCK_N, BLOCK_D, PAGE_ROWS, STAGES, SIZE, SLAB,
            )  # fmt: skip
            copy_block(
                v_desc, v_pages_s, v_full, v_empty, ring, page0, page1, kv_head, in_page,
                BLOCK_N, BLOCK_D, PAGE_ROWS, STAGES, SIZE, SLAB,
            )  # fmt: skip
            ring += 1
            page0 = next0
            page1 = next1
        turn = next_turn
        done += 1
    # Tell the consumers that there is no further tile.
    slot = done & 1
    mbarrier.wait(t_empty.index(slot), ((done >> 1) & 1) ^ 1)
    publish(tile_s, slot, 5, 0, TILE_FIELDS)
    mbarrier.arrive(t_full.index(slot))
    # The last program to finish leaves the counters as it found them, for the next launch.
    if gl.atomic_add(counter_ptr + 1, 1) == num_programs - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)
    if BESIDE:
        # Whoever waits for this launch waits for the decode beside it as well.
        wait_for_the_launch_before()


@gluon.constexpr_function
def _store_layout(head_dim):
    """Rows as accumulators have them over warps and threads, but four columns a thread.

    Four threads trade registers for it, and together store sectors of 32 bytes.
    """
    columns = [[0, 1 << i] for i in range(head_dim.bit_length() - 1)]
    registers = [*columns[:2], *columns[4:], [8, 0]]
    lanes = [*columns[2:4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, head_dim])


@gluon.jit
def _store_rows(
    out_ptr, lse_ptr, acc, m, sums, row_token, rows_left, kv_head, stride_o_t8, stride_o_h8,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, GROUP_PAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Write one warpgroup's rows that belong to the request and to this group's heads.

    From registers, not by a bulk copy out of shared memory: there is no room but that of the
    queries, and the next tile's are on their way there.  Strides come in units of 16 bytes, so
    that the compiler knows of whole words whatever they are.
    """
    stride_o_t = stride_o_t8 * 8
    stride_o_h = stride_o_h8 * 8
    out_ptr = gl.multiple_of(out_ptr, 16)
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), _store_layout(BLOCK_D))
    base = out_ptr + row_token.to(gl.int64) * stride_o_t
    base += kv_head.to(gl.int64) * GROUP_SIZE * stride_o_h
    row = gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, out.type.layout))
    offset = row // GROUP_PAD * stride_o_t + row % GROUP_PAD * stride_o_h
    ok = (row // GROUP_PAD < rows_left) & (row % GROUP_PAD < GROUP_SIZE)
    pointers = base + (gl.expand_dims(offset, 1) + gl.expand_dims(d, 0))
    keep = gl.expand_dims(ok, 1)
    if HEAD_DIM < BLOCK_D:
        keep = keep & gl.expand_dims(d < HEAD_DIM, 0)
    gl.store(pointers, out, mask=keep)
    if HAS_LSE:
        heads: gl.constexpr = NUM_KV_HEADS * GROUP_SIZE
        row = gl.arange(0, ROWS, gl.SliceLayout(1, m.type.layout.parent))
        base = lse_ptr + row_token.to(gl.int64) * heads + kv_head * GROUP_SIZE
        lse = gl.where(sums != 0.0, (m + gl.log2(sums)) * 0.6931471805599453, float("-inf"))
        offset = row // GROUP_PAD * heads + row % GROUP_PAD
        ok = (row // GROUP_PAD < rows_left) & (row % GROUP_PAD < GROUP_SIZE)
        gl.store(base + offset, lse, mask=ok)


@gluon.jit
def _add_sink(m, total, sinks_ptr, kv_head, GROUP_SIZE: gl.constexpr, GROUP_PAD: gl.constexpr):
    """Give each row's sum its head's sink; return the maximum, the sum, the weights' factor."""
    row = gl.arange(0, ROWS, m.type.layout)
    head = row % GROUP_PAD
    sink = gl.load(sinks_ptr + kv_head * GROUP_SIZE + head, mask=head < GROUP_SIZE, other=0.0)
    sink = sink.to(gl.float32)
    sink = sink * 1.4426950408889634
    m_new = gl.maximum(m, sink)
    factor = gl.exp2(m - m_new)
    return m_new, total * factor + gl.exp2(sink - m_new), factor


@gluon.jit
def end_tile(
    out_ptr, lse_ptr, sinks_ptr, v_scale_ptr, acc, m, sums, row_token, rows_left, kv_head,
    stride_o_t8, stride_o_h8, NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    GROUP_PAD: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, HAS_LSE: gl.constexpr,
    V_SCALE_STEP: gl.constexpr,
):  # fmt: skip
    """Divide by the sums, sinks among them, apply the values' scale, and write the rows."""
    total = gl.convert_layout(gl.sum(sums, 1), m.type.layout)
    factor = 1.0
    if sinks_ptr is not None:
        m, total, factor = _add_sink(m, total, sinks_ptr, kv_head, GROUP_SIZE, GROUP_PAD)
    if v_scale_ptr is not None:
        factor *= gl.load(v_scale_ptr + kv_head * V_SCALE_STEP)
    inverse = gl.where(total != 0.0, factor / total, 0.0)
    acc *= gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, acc.type.layout)), 1)
    _store_rows(
        out_ptr, lse_ptr, acc, m, total, row_token, rows_left, kv_head, stride_o_t8, stride_o_h8,
        NUM_KV_HEADS, GROUP_SIZE, GROUP_PAD, HEAD_DIM, BLOCK_D, HAS_LSE,
    )  # fmt: skip


@gluon.jit
def read_tile(
    tile_s, t_full, t_empty, done, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr,
    WARPS: gl.constexpr = 4,
):  # fmt: skip
    """The fields of tile number ``done``, as this warpgroup sees them; 0 blocks after the last."""
    TOKENS: gl.constexpr = ROWS // GROUP_PAD
    slot = done & 1
    mbarrier.wait(t_full.index(slot), (done >> 1) & 1)
    row_token = field(tile_s, slot, 0, TILE_FIELDS, WARPS) + GROUP * TOKENS
    rows_left = field(tile_s, slot, 1, TILE_FIELDS, WARPS) - GROUP * TOKENS
    first_pos = field(tile_s, slot, 2, TILE_FIELDS, WARPS) + GROUP * TOKENS
    seq_len = field(tile_s, slot, 3, TILE_FIELDS, WARPS)
    kv_head = field(tile_s, slot, 4, TILE_FIELDS, WARPS)
    blocks = field(tile_s, slot, 5, TILE_FIELDS, WARPS)
    first_key = field(tile_s, slot, 6, TILE_FIELDS, WARPS)
    mbarrier.arrive(t_empty.index(slot))
    return row_token, rows_left, first_pos, seq_len, kv_head, blocks, first_key


@gluon.jit
def _scale_queries(raw_s, q_s, BLOCK_D: gl.constexpr):
    """Turn 64 rows of bf16 into fp16 where they lie; return each row's factor, a power of two.

    The largest of a row comes to 2**14, or one below 2**-63 to less.  What is below 2**-28 of it
    loses bits, which is too little to move a logit.  No factor is so small that with the scales it
    might come to 0, which would make masked logits no numbers.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    largest = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    for slab in gl.static_range(BLOCK_D // 64):
        x = raw_s.slice(slab * 64, 64, dim=1).load(layout).to(gl.float32)
        largest = gl.maximum(largest, gl.max(gl.maximum(x, -x), 1))
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) & 0xFF
    exponent = gl.minimum(gl.maximum(exponent, 64), 253)
    inverse = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    for slab in gl.static_range(BLOCK_D // 64):
        x = raw_s.slice(slab * 64, 64, dim=1).load(layout).to(gl.float32)
        x = x * gl.expand_dims(inverse, 1)
        q_s.slice(slab * 64, 64, dim=1).store(x.to(gl.float16))
    fence_async_shared()
    partition_barrier()
    return ((exponent - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _products(q, k, zero, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr):
    """Start q k^T; of padded heads over as many quarters of the columns as are needed."""
    HALF: gl.constexpr = BLOCK_D // 2
    k = k.permute((1, 0))
    if HEAD_DIM > HALF + HALF // 2:
        return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    else:
        s = warpgroup_mma(
            q.slice(0, HALF, dim=1), k.slice(0, HALF), zero, use_acc=False, is_async=True
        )
        q, k = q.slice(HALF, HALF // 2, dim=1), k.slice(HALF, HALF // 2)
        return warpgroup_mma(q, k, s, is_async=True)


@gluon.jit
def consumer(
    out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, bars, raw_q_s, q_s, k_s, v_s, v_slabs_s,
    tile_s,
    stride_o_t8, stride_o_h8, scale_log2, cap_factor, GROUP: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, GROUP_PAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    HAS_LSE: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    K_SCALE_STEP: gl.constexpr, V_SCALE_STEP: gl.constexpr, WIDE_CAP: gl.constexpr,
):  # fmt: skip
    """Warpgroup ``GROUP`` of two: rows ``64 * GROUP .. 64 * GROUP + 64`` of every tile.

    ``raw_q_s`` are its queries as they come: bf16 where keys are fp16, else ``q_s`` itself.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty, t_full, t_empty = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    m_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = q_s.dtype
    TOKENS: gl.constexpr = ROWS // GROUP_PAD
    PARTS: gl.constexpr = 4 if WINDOW else 3
    # Heads of 256 leave no registers for it, and their products take longer than softmax does.
    BY_BITS: gl.constexpr = cap_factor is None and BLOCK_D <= 128
    q = q_s.index(GROUP)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    k_ring = 0
    v_ring = 0
    done = 0
    row_token, rows_left, first_pos, seq_len, kv_head, blocks, first_key = read_tile(
        tile_s, t_full, t_empty, 0, GROUP, GROUP_PAD
    )
    while blocks > 0:
        stage = k_ring % STAGES
        mbarrier.wait(q_full.index(GROUP), done & 1)
        factor = 1.0
        if k_scale_ptr is not None:
            factor = gl.load(k_scale_ptr + kv_head * K_SCALE_STEP)
        if raw_q_s.dtype != dtype:
            factor *= gl.convert_layout(_scale_queries(raw_q_s.index(GROUP), q, BLOCK_D), m_layout)
        if cap_factor is None:
            scale, cap = scale_log2 * factor, None
        else:
            scale, cap = scale_log2, cap_factor * factor
        mbarrier.wait(k_full.index(stage), (k_ring // STAGES) & 1)
        s = _products(q, k_s.index(stage), zero, HEAD_DIM, BLOCK_D)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage))
        k_ring += 1
        count = blocks - gl.minimum(first_key // BLOCK_N, blocks - 1)
        # Block n (of 0 .. count) is blocks - 1 - n. Those from ``whole`` to ``edge`` need no mask:
        # they lie below the diagonal and, under a window, right of the last row's first key.
        whole = gl.maximum(blocks - gl.maximum(first_pos + 1, 0) // BLOCK_N, 1)
        whole = gl.minimum(whole, count)
        edge = count
        if WINDOW:
            leftmost = gl.maximum(first_pos + TOKENS - WINDOW, 0)
            edge = gl.maximum(blocks - (leftmost + BLOCK_N - 1) // BLOCK_N, whole)
            edge = gl.minimum(edge, count)

        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, o_layout)
        m = gl.full([ROWS], -1e30, gl.float32, m_layout)
        s = soft_cap(s, cap)
        s = mask(s, first_pos, (blocks - 1) * BLOCK_N, GROUP_PAD, BLOCK_N, WINDOW)
        m = gl.maximum(m, gl.max(s, 1) * scale)
        p = gl.exp2(s * of_rows(scale) - gl.expand_dims(m, 1))
        sums = row_sums(p, BLOCK_N)
        alpha = gl.full([ROWS], 1.0, gl.float32, m_layout)
        keys_left = seq_len - (blocks - 1) * BLOCK_N
        if keys_left < BLOCK_N:
            mbarrier.wait(v_full.index(v_ring % STAGES), (v_ring // STAGES) & 1)
            clear_rows(v_slabs_s, v_ring % STAGES, 0, keys_left, BLOCK_N, BLOCK_D)
        mbarrier.wait(k_full.index(k_ring % STAGES), (k_ring // STAGES) & 1, pred=count > 1)
        for part in gl.static_range(PARTS):
            if part == _DIAGONAL:
                begin = 1
                end = whole
            elif part == _BITS:
                begin = whole
                end = whole
                if BY_BITS:
                    end = may_compare_bits(m, edge, whole)
            elif part == _BELOW:
                begin = end
                end = edge
            else:
                begin = edge
                end = count
            for n in range(begin, end):
                stage = k_ring % STAGES  # its K is there: waited for below
                v_stage = v_ring % STAGES
                s = _products(q, k_s.index(stage), zero, HEAD_DIM, BLOCK_D)
                # Packed here and carried as fp32: a 16-bit tensor on the loop's back edge is
                # unpacked and packed again, scalar by scalar, in every round.
                p16 = gl.convert_layout(p.to(dtype), p_layout)
                acc = rescale(acc, alpha)
                mbarrier.wait(v_full.index(v_stage), (v_ring // STAGES) & 1)
                pending = warpgroup_mma(p16, v_s.index(v_stage), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                if part != _BITS and part != _BELOW:
                    s = soft_cap(s, cap)
                    start = (blocks - 1 - n) * BLOCK_N
                    s = mask(s, first_pos, start, GROUP_PAD, BLOCK_N, WINDOW)
                if cap_factor is not None and part == _BELOW:
                    p, m, sums, alpha = capped_softmax(
                        s, m, sums, scale, cap, rows_left, GROUP_PAD, BLOCK_N, WIDE_CAP
                    )
                else:
                    p, m, sums, alpha = softmax(s, m, sums, scale, BLOCK_N, part == _BITS)
                k_ring += 1
                v_ring += 1
                # The wait for the next K stands before the wait for P V: its polling loop ends
                # the basic block, or ptxas lifts the latter above the exponentials and nothing
                # overlaps.  p and sums among the deps keep LLVM from sinking them below.
                mbarrier.wait(
                    k_full.index(k_ring % STAGES), (k_ring // STAGES) & 1, pred=n + 1 < count
                )
                acc, p, sums = warpgroup_mma_wait(0, deps=[pending, p, sums])
                mbarrier.arrive(k_empty.index(stage))
                mbarrier.arrive(v_empty.index(v_stage))
        # All logits are there: the next tile's queries and keys may come while this one ends.
        mbarrier.arrive(q_empty.index(GROUP))
        p16 = gl.convert_layout(p.to(dtype), p_layout)
        acc = rescale(acc, alpha)
        v_stage = v_ring % STAGES
        mbarrier.wait(v_full.index(v_stage), (v_ring // STAGES) & 1)
        if WINDOW:
            strangers = first_key - (blocks - count) * BLOCK_N
            if strangers > 0:
                clear_rows(v_slabs_s, v_stage, strangers, BLOCK_N, BLOCK_N, BLOCK_D)
        pending = warpgroup_mma(p16, v_s.index(v_stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(v_empty.index(v_stage))
        v_ring += 1

        end_tile(
            out_ptr, lse_ptr, sinks_ptr, v_scale_ptr, acc, m, sums, row_token, rows_left, kv_head,
            stride_o_t8, stride_o_h8, NUM_KV_HEADS, GROUP_SIZE, GROUP_PAD, HEAD_DIM, BLOCK_D,
            HAS_LSE, V_SCALE_STEP,
        )  # fmt: skip
        done += 1
        row_token, rows_left, first_pos, seq_len, kv_head, blocks, first_key = read_tile(
            tile_s, t_full, t_empty, done, GROUP, GROUP_PAD
        )
