"""Torch versions of the C++ operators of Mamba 2 layers, token by token: short texts only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


def _rows(cu_seqlens: torch.Tensor | None, num_seqs: int) -> Iterator[range]:
    """Rows of each sequence; one each where no offsets are given."""
    starts = list(range(num_seqs + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    for index in range(num_seqs):
        yield range(starts[index], starts[index + 1])


def _step(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
) -> torch.Tensor:
    """Advance ``state`` [heads, size, states] in place by one token and read it.

    ``x``, ``dt``, ``d`` are [heads, size], ``a`` broadcasts to the state, ``b`` and ``c`` are
    [groups, states].
    """
    heads = x.shape[0]
    b, c = (v.float().repeat_interleave(heads // v.shape[0], 0)[:, None] for v in (b, c))
    x, dt = x.float(), dt.float()[..., None]
    state.copy_(state.float() * torch.exp(dt * a.float()) + dt * x[..., None] * b)
    y = (state.float() * c).sum(-1)
    return y if d is None else y + d.float() * x


def _chunk_scan(
    out: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
) -> None:
    """All tokens of each sequence, from the states given to the states left behind."""
    if z is not None:
        raise NotImplementedError("gates inside the scan; accepted: None")
    skip = None if d is None else d[:, None]
    for state, rows in zip(states, _rows(cu_seqlens, len(states)), strict=True):
        for t in rows:
            out[t] = _step(state, x[t], dt[t, :, None], a[:, None, None], b[t], c[t], skip)


def _state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    null_block: int,
    out: torch.Tensor,
    num_accepted: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """One decode step of each sequence, in the states' own slots."""
    if z is not None or num_accepted is not None or source is None or target is None:
        raise NotImplementedError("gates, drafts or states without slots")
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    if dt_softplus:
        steps = torch.nn.functional.softplus(steps)
    slots = zip(source.flatten().tolist(), target.flatten().tolist(), strict=True)
    for (read, write), rows in zip(slots, _rows(cu_seqlens, source.numel()), strict=True):
        if read == null_block:
            continue
        current = state[read].clone()
        for t in rows:
            out[t] = _step(current, x[t], steps[t], a, b[t], c[t], d)
        state[write] = current


def _conv_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    slots: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    pad_slot: int,
) -> torch.Tensor:
    """Causal convolution of new tokens ``x`` [tokens, dim] behind their slots' last inputs."""
    if slots is None or activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"activation {activation!r}, or no slots")
    out = torch.zeros_like(x)
    length = weight.shape[1] - 1
    slot_ids = slots.flatten().tolist()
    for slot, rows in zip(slot_ids, _rows(cu_seqlens, len(slot_ids)), strict=True):
        if slot == pad_slot:
            continue
        own = slice(rows.start, rows.stop)
        window = torch.cat([conv_state[slot, :, :length].to(x.dtype), x[own].T], dim=-1)
        y = torch.nn.functional.conv1d(window[None], weight[:, None], bias, groups=len(weight))
        out[own] = (torch.nn.functional.silu(y) if activation else y)[0].T
        conv_state[slot, :, :length] = window[:, -length:]
    return out


SHIMS: dict[str, Callable[..., object]] = {
    "mamba_chunk_scan_fwd_cpu(Tensor(a!) out, Tensor(b!) states, Tensor x, Tensor dt, Tensor a, "
    "Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor cu_seqlens) -> ()": _chunk_scan,
    "selective_state_update_cpu(Tensor(a!) state, Tensor x, Tensor dt, Tensor a, Tensor b, "
    "Tensor c, Tensor? d, Tensor? z, Tensor? dt_bias, bool dt_softplus, Tensor? source, "
    "Tensor? target, int null_block, Tensor(b!) out, Tensor? num_accepted, "
    "Tensor? cu_seqlens) -> ()": _state_update,
    "causal_conv1d_update_cpu_vec(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, "
    "str? activation, Tensor? slots, Tensor? cu_seqlens, int pad_slot) -> Tensor": _conv_update,
}
