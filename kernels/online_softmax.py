"""Online softmax in base 2, shared by the prefill and the decode kernel.

For one row of logits ``s`` scaled by ``scale`` the kernels keep

    m = max(s) * scale * log2(e)          running maximum, in powers of two
    l = sum(2 ** (s * scale * log2(e) - m))
    acc = sum(2 ** (s * scale * log2(e) - m) * v)

and divide once at the end: ``out = acc / l``, ``lse = (m + log2(l)) * ln(2)``.
Source: Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018), and
Dao et al., FlashAttention (2022) and FlashAttention-2 (2023), which defers the division.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def softmax_step(
    qk, m_i, scale_log2, MASKED: tl.constexpr, ROW_SCALE: tl.constexpr, SHIFT: tl.constexpr,
    SLACK: tl.constexpr,
):  # fmt: skip
    """Advance the running maximum by one tile of logits.

    Returns ``(p, alpha, m_new)``: the tile's weights, the factor for everything accumulated so
    far, and the new maximum.  ``scale_log2`` must be positive; with ``ROW_SCALE`` there is one a
    row.  With ``MASKED`` a row may still have no visible key; its maximum stays -inf and the pivot
    0 keeps ``-inf - (-inf)`` away.  ``SHIFT`` keeps the pivot that far below the maximum, so that
    weights reach up to ``2 ** SHIFT``; the sums do not mind which pivot they belong to.  A
    ``SLACK`` above 0 keeps the old maximum while no weight exceeds ``2 ** (SHIFT + SLACK)``, so
    that ``alpha`` is nearly always 1.
    """
    m_new = tl.max(qk, 1) * scale_log2
    if SHIFT != 0.0:
        # Of huge maxima a shift is lost in rounding, or comes out as more than it is.
        m_new = tl.where(tl.abs(m_new) < 2.0**20, m_new - SHIFT, m_new)
    m_new = tl.maximum(m_i, m_new)
    if SLACK > 0:
        m_new = tl.where(m_new - m_i > SLACK, m_new, m_i)
    if ROW_SCALE:
        scale_log2 = scale_log2[:, None]
    if MASKED:
        pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
    else:
        pivot = m_new
    p = tl.exp2(qk * scale_log2 - pivot[:, None])
    alpha = tl.exp2(m_i - pivot)
    return p, alpha, m_new


@triton.jit
def add_sink(acc, m_i, l_i, sink):
    """Put one more logit, ``sink`` (natural), under the fraction bar; it carries no value.

    To be applied once a row, to sums over all of the row's keys.
    """
    sink_log2 = sink.to(tl.float32) * LOG2E
    m_new = tl.maximum(m_i, sink_log2)
    pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
    alpha = tl.exp2(m_i - pivot)
    return acc * alpha[:, None], m_new, l_i * alpha + tl.exp2(sink_log2 - pivot)


@triton.jit
def softmax_finish(acc, m_i, l_i):
    """Return ``(out, lse)``: 0 and -inf for rows that saw no key."""
    has_keys = l_i != 0.0  # NaN keys must stay NaN, not pass for no keys
    out = acc / tl.where(has_keys, l_i, 1.0)[:, None]
    lse = tl.where(has_keys, (m_i + tl.log2(tl.where(has_keys, l_i, 1.0))) * LN2, NEG_INF)
    return out, lse
