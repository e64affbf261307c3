"""Ahead-of-time compilation of the Gluon kernels for sm_90, and what their SASS shows.

It must run without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tilewise import policy
from tilewise.arch import ARCHITECTURES
from tilewise.bench import sass
from tilewise.bench.aot import Resources, measure, threads
from tilewise.errors import UnsupportedConfig
from tilewise.kernels import hopper_decode, hopper_prefill, hopper_prefill_fp8, hopper_prefill_kv8

POINTERS = (
    "query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "header_ptr", "tile_req_ptr",
    "tile_token_ptr", "counter_ptr",
)  # fmt: skip
DECODE_POINTERS = (
    "query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "header_ptr", "cu_work_ptr",
    "worker_record_ptr",
)  # fmt: skip


SCALES = ("k_scale_ptr", "v_scale_ptr")
OF_FP8 = {"enable_fp_fusion": False}  # as KvCache.options has it


def _descriptor(dtype: str, block: list[int]) -> str:
    element = {
        "bf16": gl.bfloat16, "fp16": gl.float16, "fp8e4nv": gl.float8e4nv, "fp8e5": gl.float8e5,
    }[dtype]  # fmt: skip
    return f"tensordesc<{dtype}{block},{gl.NVMMASharedLayout.get_default_for(block, element)!r}>"


def _compile(
    fn: Any, signature: dict[str, str], constants: dict[str, Any], aligned: Any, **options: Any
) -> Any:
    signature |= dict.fromkeys((n for n in constants if n not in signature), "constexpr")
    names = list(signature)
    source = GluonASTSource(
        fn=fn,
        signature=signature,
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | options
    )


def _prefill_signature(
    dtype: str, rows: str, page: str, scales: tuple[str, ...] = (), **optional: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of a prefill kernel's arguments, in its order, and None for the optional ones left out.

    ``scales`` are pointers to fp8 scales; ``optional`` says which of them, of ``lse_ptr``, of
    ``sinks_ptr`` and of ``cap_factor`` (which some kernels lack) are there.
    """
    signature = {"out_ptr": f"*{dtype}", "lse_ptr": "*fp32", "sinks_ptr": f"*{dtype}"}
    signature |= dict.fromkeys(scales, "*fp32") | {"q_desc": rows, "k_desc": page, "v_desc": page}
    signature |= dict.fromkeys(POINTERS, "*i32") | {"scale_log2": "fp32"}
    if "cap_factor" in optional:
        signature["cap_factor"] = "fp32"
    signature |= dict.fromkeys(("stride_o_t8", "stride_o_h8", "stride_bt_b"), "i32")
    left_out = [name for name, on in optional.items() if not on]
    return signature | dict.fromkeys(left_out, "constexpr"), dict.fromkeys(left_out)


def compile_prefill(
    dtype: str = "bf16",
    head_dim: int = 128,
    page_size: int = 64,
    group_size: int = 4,
    lse: bool = False,
    sinks: bool = False,
    window: int = 0,
    beside: bool = False,
    softcap: bool = False,
    **tiles: int,
) -> Any:
    """Compile one variant of the Hopper prefill kernel, with the policy's tiles by default."""
    geometry = policy.Geometry(8 * group_size, 8, head_dim, page_size, 2)
    device = ARCHITECTURES[90]
    tuned = policy.choose(geometry, device, window=window).hopper_prefill
    if tuned is None:
        raise UnsupportedConfig(
            f"the Gluon prefill: {policy.why_not_hopper(geometry, device, window)}"
        )
    chosen = replace(tuned, **tiles)
    group_pad = policy.next_power_of_2(group_size)
    rows = _descriptor(dtype, [64 // group_pad, group_pad, geometry.block_d])
    page = _descriptor(dtype, [1, 1, min(page_size, chosen.block_n), 64])
    signature, constants = _prefill_signature(
        dtype, rows, page, lse_ptr=lse, sinks_ptr=sinks, cap_factor=softcap
    )
    constants |= {
        "NUM_KV_HEADS": 8, "GROUP_SIZE": group_size, "GROUP_PAD": group_pad, "HEAD_DIM": head_dim,
        "BLOCK_D": geometry.block_d, "PAGE_SIZE": page_size, "HAS_LSE": lse, "WINDOW": window,
        "BLOCK_N": chosen.block_n, "STAGES": chosen.num_stages, "BESIDE": beside,
        "WIDE_CAP": softcap and dtype == "bf16",
    }  # fmt: skip
    return _compile(hopper_prefill._hopper_prefill_kernel, signature, constants, ("out_ptr",))


def compile_prefill_kv8(
    dtype: str = "bf16",
    head_dim: int = 128,
    page_size: int = 64,
    group_size: int = 4,
    lse: bool = False,
    sinks: bool = False,
    window: int = 0,
    softcap: bool = False,
    scales: bool = True,
    kv_dtype: str = "fp8e4nv",
    head_scales: bool = False,
    **tiles: int,
) -> Any:
    """Compile one variant of the Hopper prefill over an fp8 cache, with the policy's tiles."""
    geometry = policy.Geometry(8 * group_size, 8, head_dim, page_size, 2, 1)
    device = ARCHITECTURES[90]
    tuned = policy.choose(geometry, device, window=window).hopper_prefill
    if tuned is None:
        raise UnsupportedConfig(
            f"the Gluon prefill: {policy.why_not_hopper(geometry, device, window)}"
        )
    chosen = replace(tuned, **tiles)
    block_d, group_pad = geometry.block_d, policy.next_power_of_2(group_size)
    rows = _descriptor(dtype, [64 // group_pad, group_pad, block_d])
    page = _descriptor(kv_dtype, [1, 1, min(page_size, chosen.block_n), min(block_d, 128)])
    signature, constants = _prefill_signature(
        dtype, rows, page, SCALES, lse_ptr=lse, sinks_ptr=sinks, cap_factor=softcap,
        **dict.fromkeys(SCALES, scales),
    )  # fmt: skip
    constants |= {
        "NUM_KV_HEADS": 8, "GROUP_SIZE": group_size, "GROUP_PAD": group_pad, "HEAD_DIM": head_dim,
        "BLOCK_D": block_d, "PAGE_SIZE": page_size, "HAS_LSE": lse, "WINDOW": window,
        "BLOCK_N": chosen.block_n, "STAGES": chosen.num_stages,
        "NARROW_STAGES": chosen.narrow_stages,
        "K_SCALE_STEP": int(head_scales), "V_SCALE_STEP": int(head_scales),
    }  # fmt: skip
    kernel = hopper_prefill_kv8._hopper_prefill_kv8_kernel
    return _compile(kernel, signature, constants, ("out_ptr",), **OF_FP8)


def compile_prefill_fp8(
    dtype: str = "bf16",
    page_size: int = 64,
    group_size: int = 4,
    lse: bool = False,
    sinks: bool = False,
    rotated: bool = False,
    scales: bool = True,
    head_scales: bool = False,
    block_n: int = 128,
    num_stages: int = 3,
) -> Any:
    """Compile one variant of the Hopper prefill kernel with fp8 operands."""
    head_dim = 128
    group_pad = policy.next_power_of_2(group_size)
    rows = _descriptor(dtype, [64 // group_pad, group_pad, head_dim])
    page = _descriptor("fp8e4nv", [1, 1, min(page_size, block_n), head_dim])
    signature, constants = _prefill_signature(
        dtype, rows, page, SCALES, lse_ptr=lse, sinks_ptr=sinks, **dict.fromkeys(SCALES, scales)
    )
    constants |= {
        "NUM_KV_HEADS": 8, "GROUP_SIZE": group_size, "GROUP_PAD": group_pad, "HEAD_DIM": head_dim,
        "STEPS": 7, "PAGE_SIZE": page_size, "HAS_LSE": lse, "BLOCK_N": block_n,
        "STAGES": num_stages, "ROTATED": rotated,
        "K_SCALE_STEP": int(head_scales), "V_SCALE_STEP": int(head_scales),
    }  # fmt: skip
    kernel = hopper_prefill_fp8._hopper_prefill_fp8_kernel
    return _compile(kernel, signature, constants, ("out_ptr",), **OF_FP8)


def compile_decode(
    dtype: str = "bf16",
    head_dim: int = 128,
    page_size: int = 64,
    group_size: int = 4,
    lse: bool = False,
    sinks: bool = False,
    window: int = 0,
    query_len: int = 1,
    softcap: bool = False,
) -> Any:
    """Compile one variant of the Hopper decode kernel, with the policy's tiles."""
    geometry = policy.Geometry(8 * group_size, 8, head_dim, page_size, 2)
    device = ARCHITECTURES[90]
    config = policy.choose(geometry, device, query_len, window)
    chosen, block_m = config.hopper_decode, config.decode.block_m
    if chosen is None:
        why = policy.why_not_hopper_decode(geometry, device, config.decode)
        raise UnsupportedConfig(f"the Gluon decode: {why}")
    some, pieces = hopper_decode.merge_tile(head_dim, group_size, block_m)
    page = _descriptor(dtype, [1, 1, chosen.block_n, 64])
    signature = {"out_ptr": f"*{dtype}", "lse_ptr": "*fp32" if lse else "constexpr"}
    signature |= {"sinks_ptr": f"*{dtype}" if sinks else "constexpr"}
    signature |= {"q_desc": _descriptor(dtype, [block_m // group_size, group_size, 64])}
    signature |= {"k_desc": page, "v_desc": page} | dict.fromkeys(DECODE_POINTERS, "*i32")
    signature |= dict.fromkeys(("partial_acc_ptr", "partial_m_ptr", "partial_l_ptr"), "*fp32")
    signature |= {"arrivals_ptr": "*i32", "scale_log2": "fp32"}
    signature |= {"cap_factor": "fp32" if softcap else "constexpr"}
    signature |= dict.fromkeys(("stride_o_t", "stride_o_h", "stride_bt_b"), "i32")
    constants: dict[str, Any] = {
        "NUM_WORKERS": config.num_workers, "NUM_KV_HEADS": 8, "GROUP_SIZE": group_size,
        "HEAD_DIM": head_dim, "PAGE_SIZE": page_size, "ITEM_OVERHEAD": config.item_overhead,
        "HAS_LSE": lse, "WINDOW": window, "BLOCK_M": block_m, "BLOCK_N": chosen.block_n,
        "STAGES": chosen.num_stages, "PIECES": pieces, "SOME": some, "PDL": config.pdl,
    }  # fmt: skip
    optional = {"lse_ptr": lse, "sinks_ptr": sinks, "cap_factor": softcap}
    constants |= {name: None for name, on in optional.items() if not on}
    aligned = ["out_ptr", "stride_o_t", "stride_o_h"]
    aligned += [n for n in signature if n.startswith("partial_")]
    return _compile(hopper_decode._hopper_decode_kernel, signature, constants, aligned)


def main_loops(compiled: Any) -> list[dict[str, int]]:
    """Opcode counts of the innermost loops that hold matrix products, from the SASS.

    A loop is what lies between a backward branch and its target.
    """
    code = [(x.address, f"{x.opcode} {x.operands}") for x in sass.of(compiled)]
    spans = []
    for address, text in code:
        target = re.search(r"\bBRA (?:\S+, )?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            spans.append((int(target[1], 16), address))
    loops = []
    for begin, end in spans:
        body = [text for address, text in code if begin <= address <= end]
        within = [(b, e) for b, e in spans if begin <= b and e <= end and (b, e) != (begin, end)]
        inner = any("GMMA" in t for b, e in within for a, t in code if b <= a <= e)
        if any("GMMA" in text for text in body) and not inner:
            counts = {
                op: sum(op in text for text in body)
                for op in ("HGMMA", "QGMMA", "MUFU.EX2", "LDL", "STL", "PRMT")
            }
            loops.append(counts | {"instructions": len(body)})
    return loops


def resources(
    kernel: str,
    dtype: str,
    head_dim: int,
    page_size: int,
    group_size: int,
    sinks: bool = False,
    window: int = 0,
    softcap: bool = False,
    kv_format: str = "",
    **more: bool,
) -> Resources:
    """Compile one variant and report what it takes, as ``tilewise.bench.aot.resources`` does.

    ``more`` are options that this kernel may have: ``lse``, ``beside``, ``rotated``,
    ``head_scales``.
    """
    variant: dict[str, Any] = {"sinks": sinks} | more
    if kernel == "hopper_prefill_fp8":
        compiled = compile_prefill_fp8(dtype, page_size, group_size, **variant)
    else:
        compilers: dict[str, Any] = {
            "hopper_prefill": compile_prefill, "hopper_prefill_kv8": compile_prefill_kv8,
            "hopper_decode": compile_decode,
        }  # fmt: skip
        if kernel == "hopper_prefill_kv8":
            variant["kv_dtype"] = {"e4m3": "fp8e4nv", "e5m2": "fp8e5"}[kv_format]
        variant |= {"window": window, "softcap": softcap}
        compiled = compilers[kernel](dtype, head_dim, page_size, group_size, **variant)
    features = ["sinks"] * sinks + ["softcap"] * softcap + [f"window={window}"] * bool(window)
    features += [kv_format] * bool(kv_format) + [name for name, on in more.items() if on]
    ptx = compiled.asm["ptx"]
    return Resources(
        kernel, 90, head_dim, page_size, group_size, dtype, "+".join(features),
        threads(compiled),
        *measure(compiled, 90), compiled.metadata.shared, ptx.count("wgmma.mma_async"),
        ptx.count("cp.async.bulk.tensor"), tuple(sass.unset_uniforms(sass.of(compiled))),
    )  # fmt: skip


def report(kernel: str = "prefill", **variant: Any) -> dict[str, Any]:
    """Compile one variant and describe it, its main loops as well."""
    compilers: dict[str, Any] = {
        "prefill": compile_prefill, "prefill_kv8": compile_prefill_kv8,
        "prefill_fp8": compile_prefill_fp8, "decode": compile_decode,
    }  # fmt: skip
    compiled = compilers[kernel](**variant)
    registers, spill_bytes = measure(compiled, 90)
    ptx, code = compiled.asm["ptx"], sass.of(compiled)
    return variant | {
        "threads": threads(compiled), "registers": registers, "spill_bytes": spill_bytes,
        "shared_bytes": compiled.metadata.shared, "wgmma": ptx.count("wgmma.mma_async"),
        "tma": ptx.count("cp.async.bulk.tensor"), "setmaxnreg": ptx.count("setmaxnreg"),
        # What ptxas made of both: copies to shared memory, products of 16 and of 8 bits.
        "sass": {
            op: sum(x.opcode.startswith(op) for x in code) for op in ("UTMALDG", "HGMMA", "QGMMA")
        },
        "loops": main_loops(compiled), "unset": sass.unset_uniforms(code),
    }  # fmt: skip
