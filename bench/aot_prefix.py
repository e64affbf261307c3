"""Ahead-of-time compilation of the kernels by which requests share pages: see ``bench/aot.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise import policy, prefix_rule
from tilewise.arch import ARCHITECTURES as DEVICES
from tilewise.bench import aot
from tilewise.kernels import prefix_decode, prefix_find

KERNELS = ("prefix_decode", "prefix_keys", "prefix_groups", "prefix_plan")


def configured(config: policy.Config, arch: int, decode_query_len: int = 1) -> policy.Config:
    """The configuration with tiles for what requests share on a GPU of ``arch``."""
    return prefix_rule.share_prefixes(config, DEVICES[arch], decode_query_len)


def compile_prefix_decode(
    config: policy.Config, dtype: str, arch: int, features: Sequence[str] = ()
) -> Any:
    """Compile the decode kernel of a ``config`` with ``prefixes``."""
    tiles, prefixes = config.decode, config.prefixes
    assert prefixes is not None
    head, tail, constants = aot._attention_signature("decode", tiles, dtype, arch, features)
    names = "header cu_work worker_record shared_header members groups slots"
    middle = {f"{name}_ptr": "*i32" for name in names.split()}
    middle |= {f"partial_{name}_ptr": "*fp32" for name in ("acc", "m", "l")}
    middle |= dict.fromkeys(("arrivals_ptr", "row_arrivals_ptr"), "*i32")
    signature = head | middle | tail
    constants |= aot._attention_constants(config, tiles, dtype)
    constants |= {
        "ITEM_OVERHEAD": config.item_overhead, "PDL": config.pdl,
        "SHARED_BLOCK_M": prefixes.block_m, "SHARED_STAGES": prefixes.num_stages,
        "LANES": max(prefixes.block_m, tiles.block_m, 32 * tiles.num_warps),
    }  # fmt: skip
    constants["BLOCK_R"], constants["BLOCK_P"] = config.merge_tile
    # Its plain twin knows more: windows, masks, pieces.
    known = prefix_decode._prefix_decode_kernel.arg_names
    signature = {name: kind for name, kind in signature.items() if name in known}
    constants = {name: value for name, value in constants.items() if name in known}
    options: dict[str, Any] = {"enable_fp_fusion": False} if aot.kv_format(features) else {}
    if prefixes.max_registers:
        options["maxnreg"] = prefixes.max_registers
    return aot._compile(
        prefix_decode._prefix_decode_kernel, signature, constants, aot._aligned(signature), arch,
        tiles.num_warps, **options,
    )  # fmt: skip


def compile_prefix_find(kernel: str, config: policy.Config, arch: int, max_reqs: int = 1024) -> Any:
    """Compile ``prefix_keys`` or ``prefix_groups`` of a ``config`` with ``prefixes``."""
    prefixes, geometry = config.prefixes, config.geometry
    assert prefixes is not None
    keys = kernel == "prefix_keys"
    names = "keys common row_arrivals" if keys else "found common keys"
    names += " query_start_loc seq_lens block_table"
    signature = {f"{name}_ptr": "*i32" for name in names.split()}
    signature |= dict.fromkeys(("num_reqs", "table_width", "stride_bt_b"), "i32")
    constants = {"PAGE_SIZE": geometry.page_size, "MAX_QUERY_LEN": prefixes.max_query_len}
    rows = prefixes.max_query_len * geometry.num_q_heads
    if keys:
        constants |= {
            "MIN_PAGES": prefixes.min_pages, "NUM_Q_HEADS": geometry.num_q_heads,
            "BLOCK_R": min(max_reqs, 1024), "BLOCK_Z": policy.next_power_of_2(rows),
        }  # fmt: skip
    else:
        constants |= {
            "GROUP_SIZE": geometry.group_size, "DECODE_BLOCK_M": config.decode.block_m,
            "BLOCK_R": min(max_reqs, 1024), "BLOCK_C": 1024,
        }  # fmt: skip
    fn = prefix_find._prefix_keys_kernel if keys else prefix_find._prefix_groups_kernel
    return aot._compile(fn, signature, constants, [], arch, 4)


def resources(
    kernel: str, config: policy.Config, dtype: str, arch: int, features: Sequence[str] = ()
) -> aot.Resources:
    """Compile one of ``KERNELS`` and report what it takes; arguments as of ``aot.resources``.

    ``config`` has no ``prefixes`` yet.
    """
    config = configured(config, arch)
    if kernel == "prefix_decode":
        compiled = compile_prefix_decode(config, dtype, arch, features)
    elif kernel == "prefix_plan":
        compiled = aot.compile_plan(config, arch)
    else:
        compiled = compile_prefix_find(kernel, config, arch)
    return aot.report(compiled, kernel, config, dtype, arch, features)
