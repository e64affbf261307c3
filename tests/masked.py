"""Dense attention under any mask, and what the tests of masks and block-sparse rows share."""

import math

import torch
from cases import Batch


def attend(q, k, v, visible, dtype, *, softcap=0.0, sinks=None):
    """``(out, lse)`` of q [t, Hq, D] over k, v [n, Hkv, D] under ``visible`` [t, n]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.transpose(0, 1).to(dtype).repeat_interleave(group, 0) for x in (k, v))
    s = (q.transpose(0, 1).to(dtype) @ k.transpose(1, 2)).float() * q.shape[2] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        s = torch.cat([sinks.float()[:, None, None].expand(-1, len(q), 1), s], -1)
    p = torch.softmax(s, -1).nan_to_num(0.0)  # rows without keys: 0, not NaN
    p = p if sinks is None else p[..., 1:]
    lse = torch.logsumexp(s, -1)
    return (p.to(dtype) @ v).transpose(0, 1), lse.transpose(0, 1)


def assert_matches(out, lse, q, k, v, visible, label="", **features):
    """Hold one request to the dense fp32 result, within four times torch's error in its dtype."""
    expected, expected_lse = attend(q, k, v, visible, torch.float32, **features)
    same_dtype, _ = attend(q, k, v, visible, q.dtype, **features)
    torch_error = (same_dtype.float() - expected).abs().max().item()
    error = (out.float() - expected).abs().max().item()
    largest = expected.abs().max().item()
    roundings = 64 * math.log(2) if q.dtype == torch.float32 else 4
    allowed = max(4 * torch_error, roundings * torch.finfo(q.dtype).eps * largest)
    assert error <= allowed, f"{label}: error {error:.3g}, allowed {allowed:.3g}"
    atol = 1e-5 if q.dtype == torch.float32 else 1e-3
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=atol)
    if features.get("sinks") is None:
        blind = ~visible.any(1)
        assert (out[blind] == 0).all()
        assert (lse[blind] == float("-inf")).all()


def keys_of(batch: Batch, request: int):
    """Keys and values [n, Hkv, D] of a request, in its order."""
    n = torch.arange(batch.lens[request], device=batch.q.device)
    pages = batch.block_table[request][n // batch.case.page_size].long()
    slots = n % batch.case.page_size
    return batch.k_cache[pages, :, slots], batch.v_cache[pages, :, slots]


def check_masked(batch: Batch, out, lse, masks, **features) -> None:
    """Hold every request of a batch to the dense result under its mask [query_len, seq_len]."""
    for r, visible in enumerate(masks):
        rows = slice(batch.qsl[r], batch.qsl[r + 1])
        if rows.start == rows.stop:
            continue
        label = f"request {r} of {batch.case}"
        keys = keys_of(batch, r)
        visible = visible.to(batch.q.device)
        assert_matches(out[rows], lse[rows], batch.q[rows], *keys, visible, label, **features)


def random_masks(batch: Batch, seed: int = 0, share: float = 0.5):
    """A random mask of each request, some rows of which see nothing, and some blocks all."""
    gen = torch.Generator().manual_seed(seed)
    masks = []
    for r, length in enumerate(batch.lens):
        mask = torch.rand(batch.qsl[r + 1] - batch.qsl[r], length, generator=gen) < share
        mask[1::5] = False
        mask[:, 64:128] = True
        mask[2::5, 64:] = False
        masks.append(mask)
    return masks


def tree_masks(batch: Batch, drafts):
    """Masks of requests whose queries see the context and, of the drafts, what ``drafts`` says.

    ``drafts`` has a bool [query_len, query_len] for each request, None for a causal one.
    """
    masks = []
    for r, length in enumerate(batch.lens):
        tokens = batch.qsl[r + 1] - batch.qsl[r]
        mask = torch.ones(tokens, length, dtype=torch.bool)
        own = drafts[r] if r < len(drafts) else None
        mask[:, length - tokens :] = torch.ones(tokens, tokens).tril() if own is None else own
        masks.append(mask)
    return masks


def ancestors(parents):
    """What each draft sees, bool [tokens, tokens], by walking from draft to parent."""
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for token in range(len(parents)):
        at, steps = token, 0
        while 0 <= at < len(parents) and steps <= len(parents):
            seen[token, at] = True
            at, steps = parents[at], steps + 1
    return seen


def random_parents(tokens: int, gen: torch.Generator):
    """Parents of a random tree of drafts; some hang on the context."""
    return [int(torch.randint(-1, max(t, 1), (), generator=gen)) for t in range(tokens)]
