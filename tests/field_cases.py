"""What the tests of field failures share; ``tests/README.md`` lists those."""

import dataclasses

import pytest
from cases import make_attention, plan_batch

# numpy's remarks on the poison that masked tiles read and select away; the GPU has no such voice.
IGNORE_POISON = [
    pytest.mark.filterwarnings(f"ignore:{text}:RuntimeWarning")
    for text in ("invalid value encountered", "overflow encountered", "All-NaN slice encountered")
]
KERNELS = [((1, 200),), ((20, 130),)]  # a decode and a prefill
KERNEL_IDS = ["decode", "prefill"]


def with_config(case, device, **changes):
    """The case's configuration with other tiles or workers."""
    config = make_attention(case, device).config
    for kernel in ("prefill", "decode"):
        if kernel in changes:
            changes[kernel] = dataclasses.replace(getattr(config, kernel), **changes[kernel])
    return dataclasses.replace(config, **changes)


def attend(batch, device, **overrides):
    """``(out, lse)`` of one batch's own rows, by an object of its own."""
    attn = make_attention(batch.case, device, **overrides)
    plan_batch(attn, batch)
    out, lse = attn.run(batch.q, batch.kv_cache, return_lse=True, **batch.features)
    return out[: batch.num_tokens], lse[: batch.num_tokens]
