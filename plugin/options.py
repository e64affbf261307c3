"""From the options of a ``PagedAttention`` to its configuration; what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewise import policy, prefix_rule
from tilewise.errors import UnsupportedConfig, UnsupportedFp8


def settle(
    geometry: policy.Geometry,
    device: policy.Device,
    config: policy.Config | None,
    *,
    kv_dtype: torch.dtype,
    decode_query_len: int,
    window: int | None,
    batch_invariant: bool,
    alibi: bool,
    shared_prefixes: bool | str,
    fp8_matmul: bool,
    rotated_keys: bool,
) -> policy.Config:
    """Check options of ``PagedAttention`` against each other and settle tiles and workers.

    Parameters
    ----------
    geometry : policy.Geometry
    device : policy.Device
    config : policy.Config or None
        The caller's; None for the policy's choice.
    kv_dtype, decode_query_len, window, batch_invariant, alibi, shared_prefixes, fp8_matmul
    rotated_keys
        As of ``PagedAttention``.

    Raises
    ------
    UnsupportedConfig
        With the offending value and what is accepted; ``UnsupportedFp8`` where it is accepted
        without ``fp8_matmul`` and ``rotated_keys``.
    """
    if config is None:
        layer = (geometry, device, decode_query_len, window or 0, alibi)
        config = policy.choose(*layer)
        _check_fp8(fp8_matmul, rotated_keys, kv_dtype, geometry.head_dim)
        if fp8_matmul:
            # A layer that got this far is refused for its products alone.
            try:
                config = policy.choose(*layer, fp8_matmul=True)
            except UnsupportedConfig as error:
                raise UnsupportedFp8(str(error)) from error
    else:
        _check_fp8(fp8_matmul, rotated_keys, kv_dtype, geometry.head_dim)
    if config.geometry != geometry:
        raise UnsupportedConfig(f"config is for {config.geometry}, not for {geometry}")
    if window is not None and window < 1:
        raise UnsupportedConfig(f"window={window}; accepted: 1 or more, or None")
    if config.window not in (0, window or 0):
        raise UnsupportedConfig(f"config is for window={config.window}, not for {window}")
    if config.pieces is not None and not batch_invariant:
        raise UnsupportedConfig(
            f"config has {config.pieces}, which batch_invariant={batch_invariant} does not take"
        )
    if bool(config.fp8_dot) != fp8_matmul:
        raise UnsupportedConfig(
            f"config has fp8_dot={config.fp8_dot!r}, but fp8_matmul={fp8_matmul}; accepted: "
            "both or neither"
        )
    if shared_prefixes not in (False, True, "always"):
        raise UnsupportedConfig(
            f'shared_prefixes={shared_prefixes!r}; accepted: False, True or "always"'
        )
    if batch_invariant:
        config = policy.batch_invariant(config)
    config = replace(config, window=window or 0)
    if config.prefixes is not None and not shared_prefixes:
        raise UnsupportedConfig(
            f"config has {config.prefixes}, which shared_prefixes={shared_prefixes} does not take"
        )
    if shared_prefixes and rotated_keys:
        raise UnsupportedConfig("shared_prefixes with rotated_keys; accepted: one of them")
    if config.prefixes is not None and (config.window or config.pieces is not None):
        beside = f"window={config.window}" if config.window else "batch_invariant"
        raise UnsupportedConfig(
            f"config has {config.prefixes} with {beside}; accepted: one of them"
        )
    if shared_prefixes and config.prefixes is None:
        config = prefix_rule.share_prefixes(config, device, decode_query_len)
    return config


def _check_fp8(fp8_matmul: bool, rotated_keys: bool, kv_dtype: torch.dtype, head_dim: int) -> None:
    """What multiplying and rotating an fp8 cache asks of it."""
    if fp8_matmul and kv_dtype != torch.float8_e4m3fn:
        raise UnsupportedFp8(f"fp8_matmul with kv_dtype={kv_dtype}; accepted: float8_e4m3fn")
    if rotated_keys and kv_dtype.itemsize != 1:
        raise UnsupportedFp8(f"rotated_keys with kv_dtype={kv_dtype}; accepted: fp8")
    if rotated_keys and head_dim & (head_dim - 1):
        raise UnsupportedFp8(f"rotated_keys with head_dim={head_dim}; accepted: powers of two")
