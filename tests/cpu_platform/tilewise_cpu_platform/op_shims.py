"""Torch versions of the C++ operators that a CPU engine calls and the CUDA wheel does not have."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewise_cpu_platform import mamba_shims

# Registrations live as long as their library object.
_library: torch.library.Library | None = None


def _init_cpu_memory_env(nodes: list[int]) -> None:
    """Bind memory to NUMA nodes; of no use to a test."""


def _compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """Write ``page * block_size + offset`` of every token; the row tells the request."""
    lengths = (query_start_loc[1:] - query_start_loc[:-1]).long()
    request = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    num_tokens = request.numel()
    where = positions[:num_tokens].long()
    page = block_table[request, where // block_size].long()
    slot_mapping[:num_tokens] = page * block_size + where % block_size


def _greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def _silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _prepack_moe_weight(weight: torch.Tensor, packed: torch.Tensor, isa: str) -> None:
    """Any order will do that ``_fused_moe`` knows: the one that is there."""
    packed.copy_(weight)


def _gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Gate and value of an expert; gpt-oss interleaves them, the others store halves."""
    if activation == "swigluoai":
        gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _fused_moe(
    out: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    skip_weighted: bool,
    activation: str,
    isa: str,
) -> None:
    """Sum of the chosen experts' outputs, token by token and choice by choice."""
    if activation not in ("silu", "swigluoai"):
        raise NotImplementedError(f"activation {activation!r}; accepted: silu, swigluoai")
    out.zero_()
    for choice in range(topk_ids.shape[1]):
        for expert in topk_ids[:, choice].unique().tolist():
            rows = topk_ids[:, choice] == expert
            up_bias = None if w13_bias is None else w13_bias[expert]
            down_bias = None if w2_bias is None else w2_bias[expert]
            hidden = torch.nn.functional.linear(x[rows], w13[expert], up_bias)
            y = torch.nn.functional.linear(_gated(hidden, activation), w2[expert], down_bias)
            weight = 1.0 if skip_weighted else topk_weights[rows, choice, None].to(y.dtype)
            out[rows] += weight * y


_SHIMS: dict[str, Callable[..., object]] = {
    "init_cpu_memory_env(int[] nodes) -> ()": _init_cpu_memory_env,
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, "
    "Tensor block_table, Tensor(a!) slot_mapping, int block_size) -> ()": _compute_slot_mapping,
    "greedy_argmax(Tensor logits) -> Tensor": _greedy_argmax,
    "silu_and_mul(Tensor(a!) out, Tensor x) -> ()": _silu_and_mul,
    "prepack_moe_weight(Tensor weight, Tensor(a!) packed, str isa) -> ()": _prepack_moe_weight,
    "cpu_fused_moe(Tensor(a!) out, Tensor x, Tensor w13, Tensor w2, Tensor? w13_bias, "
    "Tensor? w2_bias, Tensor topk_weights, Tensor topk_ids, bool skip_weighted, str activation, "
    "str isa) -> ()": _fused_moe,
    **mamba_shims.SHIMS,
}


def install() -> None:
    """Define the operators of ``torch.ops._C`` that are missing; harmless when repeated."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in _SHIMS.items():
        name = schema.partition("(")[0]
        if hasattr(torch.ops._C, name):
            continue
        _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
