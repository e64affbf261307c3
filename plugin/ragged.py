"""Keys and values that lie in no cache: a batch's own rows, each request's one after another."""

import torch

from tilewise.errors import PlanMismatch
from tilewise.kernels.launch import KvCache
from tilewise.policy import Geometry

# Kernels walk rows in tiles of at most so many, so that a tile never has to look for its pages.
ROWS_PER_PAGE = 256


def view_rows(
    kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    geometry: Geometry,
    dtype: torch.dtype,
    device: torch.device,
    num_tokens: int,
) -> KvCache:
    """Return a batch's keys and values as the kernels read them.

    Parameters
    ----------
    kv : (Tensor, Tensor), both [rows, num_kv_heads, head_dim]
        Keys and values of the batch's tokens, in the order of its queries. Any strides, last one 1.
    geometry : Geometry
        The layer's.
    dtype, device
        Of the layer; both tensors must have them.
    num_tokens : int
        Rows that the batch may have.

    Returns
    -------
    KvCache
        Views; nothing is copied.

    Raises
    ------
    PlanMismatch
        With what a tensor has and what is accepted.
    """
    if isinstance(kv, torch.Tensor) or len(kv) != 2:
        raise PlanMismatch(
            "the plan has no block_table, so kv_cache must be a pair (k, v) of "
            f"[tokens, {geometry.num_kv_heads}, {geometry.head_dim}]"
        )
    expected = (geometry.num_kv_heads, geometry.head_dim)
    for name, x in zip(("k", "v"), kv, strict=True):
        if x.dim() != 3 or x.shape[1:] != expected or x.stride(2) != 1:
            raise PlanMismatch(
                f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; accepted: "
                f"[tokens, {expected[0]}, {expected[1]}] with unit last stride, as the plan has "
                "no block_table"
            )
        if x.dtype != dtype or x.device != device:
            raise PlanMismatch(f"{name} is {x.dtype} on {x.device}; built for {dtype} on {device}")
        if x.shape[0] < num_tokens:
            raise PlanMismatch(f"{name} has {x.shape[0]} rows; the plan covers {num_tokens} tokens")
    k, v = (x.transpose(0, 1)[None] for x in kv)
    return KvCache(k, v, rows_per_page=ROWS_PER_PAGE)
