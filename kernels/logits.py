"""What models do to logits between the product and the softmax: soft cap and ALiBi.

    s = scale * q k^T
    s = cap * tanh(s / cap)                       soft cap (Gemma 2, Grok)
    s = s - slope * (pos - n)                     ALiBi (BLOOM, MPT): query at pos, key at n
    s = s - slope * sqrt(pos - n)                 its square-root variant

in that order, as in vLLM; masks come after it, since a capped -inf would be finite.
Sources: Bello et al. (2016) for the cap; Press et al., "Train Short, Test Long" (2021).
"""

import triton
import triton.language as tl

from tilewise.kernels.online_softmax import LOG2E


@triton.jit
def shape_logits(qk, n, pos, scale_log2, cap_log2, slope_log2, ALIBI_SQRT: tl.constexpr):
    """Logits in powers of two, ``[BLOCK_M, BLOCK_N]``, of raw products ``qk``.

    ``n`` [BLOCK_N] and ``pos`` [BLOCK_M] are positions.  ``cap_log2`` and ``slope_log2``
    [BLOCK_M] are in powers of two like ``scale_log2``, or None.
    """
    if cap_log2 is not None:
        # tanh(y) = 1 - 2 / (e^2y + 1): an overflow or underflow of the power saturates it.  It errs
        # by 2**-22 of the cap, which is below what fp16 shows of a logit up to caps of thousands.
        power = tl.exp2(qk * (scale_log2 / cap_log2 * (2 * LOG2E)))
        qk = cap_log2 - 2 * cap_log2 / (power + 1)
    else:
        qk = qk * scale_log2
    if slope_log2 is not None:
        # Negative where the key is after the query: the root is NaN there, and then masked.
        distance = (pos[:, None] - n[None, :]).to(tl.float32)
        if ALIBI_SQRT:
            distance = tl.sqrt(distance)
        qk = qk - slope_log2[:, None] * distance
    return qk
