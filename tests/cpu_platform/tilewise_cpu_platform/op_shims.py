"""Torch versions of the C++ operators that a CPU engine calls and the CUDA wheel does not have."""

from __future__ import annotations

from collections.abc import Callable

import torch

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


_SHIMS: dict[str, Callable[..., object]] = {
    "init_cpu_memory_env(int[] nodes) -> ()": _init_cpu_memory_env,
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, "
    "Tensor block_table, Tensor(a!) slot_mapping, int block_size) -> ()": _compute_slot_mapping,
    "greedy_argmax(Tensor logits) -> Tensor": _greedy_argmax,
    "silu_and_mul(Tensor(a!) out, Tensor x) -> ()": _silu_and_mul,
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
