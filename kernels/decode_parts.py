"""What the split-KV decodes share: who owns an item, how its pieces merge, how its rows leave.

``tilewise.kernels.decode`` has the idea; ``tilewise.kernels.prefix_decode`` takes these as well.
"""

import triton
import triton.language as tl

from tilewise.kernels.fp8 import encode_fp8
from tilewise.kernels.online_softmax import add_sink, softmax_finish


@triton.jit
def owner(unit, total, active):
    """The worker whose stretch holds ``unit``: see ``tilewise.plan_rule.owner``."""
    return (((unit.to(tl.int64) + 1) * active - 1) // total).to(tl.int32)


@triton.jit
def merge_pieces(
    partial_acc_ptr,
    partial_m_ptr,
    partial_l_ptr,
    first,
    pieces,
    first_row,
    num_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Merge rows ``first_row ..`` of the partials of workers ``first .. first + pieces``, in order.

    A stretch that starts inside an item continues it (slot ``2 w``); one that starts an item
    keeps slot ``2 w + 1``, so a worker never needs more than two.  ``BLOCK_P`` pieces are on their
    way at a time, values, maxima and sums together: one memory latency for all of them.
    """
    row = first_row + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    m_i = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for base in range(0, pieces, BLOCK_P):
        # Loaded as a matrix, so that the rows of one piece lie across warps and the pieces of a
        # row in one thread: a tensor of three axes is laid out differently by every Triton.
        flat = tl.arange(0, BLOCK_P * BLOCK_R)
        piece = base + flat // BLOCK_R
        slots = 2 * (first + piece) + tl.where(piece == 0, 1, 0)
        ids = slots.to(tl.int64) * BLOCK_M + first_row + flat % BLOCK_R
        mask = (piece < pieces) & (first_row + flat % BLOCK_R < num_rows)
        acc_ptrs = partial_acc_ptr + ids[:, None] * BLOCK_D + offs_d[None, :]
        acc_p = tl.load(acc_ptrs, mask=mask[:, None], other=0.0)
        piece = base + tl.arange(0, BLOCK_P)
        slots = 2 * (first + piece) + tl.where(piece == 0, 1, 0)
        ids = slots[:, None] * BLOCK_M + row[None, :]  # [BLOCK_P, BLOCK_R]
        mask = (piece < pieces)[:, None] & (row < num_rows)[None, :]
        m_p = tl.load(partial_m_ptr + ids, mask=mask, other=float("-inf"))
        l_p = tl.load(partial_l_ptr + ids, mask=mask, other=0.0)
        m_new = tl.maximum(m_i, tl.max(m_p, 0))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        keep = tl.exp2(m_i - pivot)
        weight = tl.exp2(m_p - pivot[None, :])
        l_i = l_i * keep + tl.sum(l_p * weight, 0)
        acc_p = tl.reshape(acc_p, [BLOCK_P, BLOCK_R, BLOCK_D])
        acc = acc * keep[:, None] + tl.sum(acc_p * weight[:, :, None], 0)
        m_i = m_new
    return acc, m_i, l_i


@triton.jit
def write_rows(
    acc,
    m_i,
    l_i,
    flat,
    row_ok,
    offs_d,
    kv_head,
    req_token,
    out_ptr,
    lse_ptr,
    sink,
    v_scale_ptr,
    out_scale_ptr,
    stride_o_t,
    stride_o_h,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_LSE: tl.constexpr,
    V_SCALE_STEP: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
):
    """Finish rows all of whose keys have met; ``flat`` counts them within the request's head.

    ``sink`` has a logit for each, or is None.
    """
    first_head = kv_head.to(tl.int64) * GROUP_SIZE
    token = flat // GROUP_SIZE
    head = flat % GROUP_SIZE
    if sink is not None:
        # Here, and so once whatever the splits.
        acc, m_i, l_i = add_sink(acc, m_i, l_i, sink)
    out, lse = softmax_finish(acc, m_i, l_i)
    if v_scale_ptr is not None and V_SCALE_STEP >= 0:
        out *= tl.load(v_scale_ptr + kv_head * V_SCALE_STEP)
    if out_scale_ptr is not None:
        out = encode_fp8(tl.div_rn(out, tl.load(out_scale_ptr)), OUT_FORMAT)
    o_rows = token * stride_o_t + head * stride_o_h
    o_item_ptr = out_ptr + req_token * stride_o_t + first_head * stride_o_h
    o_ptrs = o_item_ptr + (o_rows[:, None] + offs_d[None, :])
    io_mask = row_ok[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(o_ptrs, out.to(out_ptr.dtype.element_ty), mask=io_mask)
    if HAS_LSE:
        NUM_Q_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
        lse_item_ptr = lse_ptr + req_token * NUM_Q_HEADS + first_head
        tl.store(lse_item_ptr + token * NUM_Q_HEADS + head, lse, mask=row_ok)
