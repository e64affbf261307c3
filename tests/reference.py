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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal (bottom-right) attention in ``dtype``; returns ``(out, lse)`` in ``dtype``/fp32.

    ``q`` [tokens, Hq, D]; caches [pages, Hkv, page, D]; rows of no request come back as NaN.
    """
    num_tokens, num_q_heads, _ = q.shape
    page_size, group = k_cache.shape[2], num_q_heads // k_cache.shape[1]
    out = torch.full_like(q, float("nan"), dtype=dtype)
    lse = torch.full((num_tokens, num_q_heads), float("nan"), device=q.device)
    for r, seq_len in enumerate(seq_lens):
        begin, end = query_start_loc[r], query_start_loc[r + 1]
        if begin == end:
            continue
        pages = block_table[r, : -(-seq_len // page_size)].long()
        # [pages, H, page, D] -> [H, keys, D]
        k = k_cache[pages].transpose(0, 1).flatten(1, 2)[:, :seq_len].to(dtype)
        v = v_cache[pages].transpose(0, 1).flatten(1, 2)[:, :seq_len].to(dtype)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        s = (q[begin:end].transpose(0, 1).to(dtype) @ k.transpose(1, 2)).float() * scale
        pos = torch.arange(seq_len - (end - begin), seq_len, device=q.device)
        visible = torch.arange(seq_len, device=q.device)[None, :] <= pos[:, None]
        s = s.masked_fill(~visible, float("-inf"))
        p = torch.softmax(s, -1).nan_to_num(0.0)  # rows without keys: 0, not NaN
        out[begin:end] = (p.to(dtype) @ v).transpose(0, 1)
        lse[begin:end] = torch.logsumexp(s, -1).transpose(0, 1)
    return out, lse
