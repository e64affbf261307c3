"""Ahead-of-time compilation of kernels that know no layer's sizes: see ``bench/aot.py``.

A kernel has a form for each thing that it may be asked for.
"""

from __future__ import annotations

from typing import Any

from tilewise.bench import aot
from tilewise.kernels import masks, shards

KERNELS = ("mask_starts", "tree_words", "shard_lengths")


def _compile(
    kernel: Any, arch: int, types: dict[str, str], constants: dict[str, Any], num_warps: int
) -> Any:
    """Compile with 32-bit integers where ``types`` and ``constants`` say nothing else."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    return aot._compile(kernel, signature, constants, [], arch, num_warps)


def compile_mask_starts(form: str, arch: int, max_reqs: int = 1024) -> Any:
    """Compile the kernel that finds where masks start, of ``bytes``, ``bits`` or ``blocks``."""
    pointers = ("query_start_loc_ptr", "seq_lens_ptr", "kv_start_ptr")
    constants: dict[str, Any] = {"PACKED": form == "bits", "BLOCK_R": max_reqs}
    constants |= {} if form == "blocks" else {"kv_start_ptr": None}
    types = {"starts_ptr": "*i64"} | dict.fromkeys(pointers, "*i32")
    return _compile(masks._mask_starts_kernel, arch, types, constants, 4)


def compile_tree_words(form: str, arch: int) -> Any:
    """Compile the kernel that packs trees, from ``parents`` or from what is ``visible``."""
    pointers = ("words_ptr", "parents_ptr", "query_start_loc_ptr")
    visible = form == "visible"
    constants = {
        "WIDTH": masks.TREE_TOKENS if visible else 0, "TOKENS": masks.TREE_TOKENS,
        "parents_ptr" if visible else "visible_ptr": None,
    }  # fmt: skip
    types = {"visible_ptr": "*u8"} | dict.fromkeys(pointers, "*i32")
    return _compile(masks._tree_words_kernel, arch, types, constants, 1)


def compile_shard_lengths(form: str, arch: int) -> Any:
    """Compile the kernel that counts a rank's keys, of the ``context`` or with the ``new`` ones."""
    pointers = ("lengths_ptr", "query_start_loc_ptr", "seq_lens_ptr")
    constants = {"WITH_NEW": form == "new", "BLOCK_R": shards.BLOCK_R}
    types = dict.fromkeys(pointers, "*i32")
    return _compile(shards._shard_lengths_kernel, arch, types, constants, 4)


def resources(kernel: str, form: str, arch: int) -> aot.Resources:
    """Compile one kernel and report what it takes; sizes in the report mean nothing."""
    compilers = {
        "mask_starts": compile_mask_starts, "tree_words": compile_tree_words,
        "shard_lengths": compile_shard_lengths,
    }  # fmt: skip
    compiled = compilers[kernel](form, arch)
    return aot.report(compiled, kernel, aot.configured("bf16", arch, 128, 64), "", arch, [form])
