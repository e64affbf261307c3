"""The reference the kernels are held to: attention in plain torch, one request at a time."""

import torch


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start_loc: list[int],
    seq_lens: list[int],
    block_table: torch.Tensor,
    scale: float,
    dtype: torch.dtype = torch.float32,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    alibi_sqrt: bool = False,
    sinks: torch.Tensor | None = None,
    causal: bool | tuple[int, ...] = True,
    chunk: int | None = None,
    spans: tuple[tuple[tuple[int, int], ...], ...] | None = None,
    spans_in_window: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (causal is bottom-right) in ``dtype``; returns ``(out, lse)`` in ``dtype``/fp32.

    ``q`` [tokens, Hq, D]; caches [pages, Hkv, page, D]; rows of no request come back as NaN.
    Keys that no query of a request sees are not touched, nor are their block-table entries.
    ``causal`` may be a flag for each request; where it is not set, windows reach both ways.
    With ``chunk`` queries see no key before the last multiple of it.  Queries of one of their
    request's ``spans`` see all of it, even left of a window unless ``spans_in_window``.
    """
    num_tokens, num_q_heads, _ = q.shape
    page_size, group = k_cache.shape[2], num_q_heads // k_cache.shape[1]
    out = torch.full_like(q, float("nan"), dtype=dtype)
    lse = torch.full((num_tokens, num_q_heads), float("nan"), device=q.device)
    for r, seq_len in enumerate(seq_lens):
        begin, end = query_start_loc[r], query_start_loc[r + 1]
        if begin == end:
            continue
        pos = torch.arange(seq_len - (end - begin), seq_len, device=q.device)
        first = 0 if window is None else max(int(pos[0]) - window + 1, 0)
        if chunk is not None:
            first = max(first, int(pos[0]) // chunk * chunk)
        own = [] if spans is None else [s for s in spans[r] if s[0] < s[1]]
        if not spans_in_window:
            met = [s for s, e in own if s < seq_len and e >= int(pos[0])]
            first = min([first, *met])
        n = torch.arange(first, max(seq_len, first), device=q.device)
        pages, slots = block_table[r][n // page_size].long(), n % page_size
        # [keys, H, D] -> [H, keys, D]
        k, v = (
            cache[pages, :, slots].transpose(0, 1).to(dtype).repeat_interleave(group, 0)
            for cache in (k_cache, v_cache)
        )
        s = (q[begin:end].transpose(0, 1).to(dtype) @ k.transpose(1, 2)).float() * scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        distance = pos[:, None] - n[None, :]
        if alibi_slopes is not None:
            d = distance.clamp(min=0).float()
            s = s - alibi_slopes.float()[:, None, None] * (d.sqrt() if alibi_sqrt else d)
        is_causal = causal if isinstance(causal, bool) else bool(causal[r])
        visible = distance >= (0 if is_causal else -seq_len - len(pos))
        if window is not None:
            visible &= (distance if is_causal else distance.abs()) < window
        if chunk is not None:
            visible &= n[None, :] >= pos[:, None] // chunk * chunk
        for span_first, span_last in own:
            inside = [(span_first <= x) & (x <= span_last) for x in (pos, n)]
            together = inside[0][:, None] & inside[1][None, :]
            if spans_in_window and window is not None:
                together &= distance < window
            visible |= together
        s = s.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            s = torch.cat([sinks.float()[:, None, None].expand(-1, len(pos), 1), s], -1)
        p = torch.softmax(s, -1).nan_to_num(0.0)  # rows without keys: 0, not NaN
        p = p if sinks is None else p[..., 1:]
        out[begin:end] = (p.to(dtype) @ v).transpose(0, 1)
        lse[begin:end] = torch.logsumexp(s, -1).transpose(0, 1)
    return out, lse
