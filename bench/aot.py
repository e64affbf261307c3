"""Ahead-of-time compilation of the kernels for a GPU that need not be there.

``resources`` compiles what the policy would launch and reports registers, spills and shared memory.
It must run without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from tilewise import policy
from tilewise.arch import ARCHITECTURES as DEVICES
from tilewise.bench import sass
from tilewise.kernels import cache_write, decode, fp8, plan, prefill
from tilewise.ragged import ROWS_PER_PAGE

# Argument and type of what a layer may do to its logits, and of flags that say which requests are
# causal; "sqrt" besides goes with ALiBi, and "bidirectional" stands for no causal request.  Spans
# are of the prefill kernel only; cuts and clocks of the decode kernel, for benchmarks.
FEATURES = {
    "softcap": ("cap_log2", "fp32"),
    "sinks": ("sinks_ptr", "*fp32"),
    "alibi": ("slopes_ptr", "*fp32"),
    "flags": ("causal_ptr", "*i32"),
    "spans": ("spans_ptr", "*i32"),
    "fp8_out": ("out_scale_ptr", "*fp32"),
    "cuts": ("cuts_ptr", "*i32"),
    "clocks": ("clock_ptr", "*i64"),
}
# Features that are masks, with the type of their elements; "starts" stands for requests whose keys
# or ids start anywhere in rows or in one row of a table.
MASKS = {"bytes": "*u8", "bits": "*u8", "blocks": "*u8", "tree": "*i32"}
KERNELS = ("prefill", "decode", "plan", "cache_write")
ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes: registers of a thread, bytes, counts of instructions.

    ``spill_bytes`` counts stores and loads of a thread, ``threads`` those of a program.  ``unset``
    names uniform registers that are read without a write on the way: a miscompilation by ptxas
    (``tilewise.bench.sass``).
    """

    kernel: str
    arch: int
    head_dim: int
    page_size: int
    group_size: int
    dtype: str
    features: str
    threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: int
    tma: int
    unset: tuple[str, ...] = ()


def _compile(
    fn: Any,
    signature: dict[str, str],
    constants: Mapping[str, Any],
    aligned: Iterable[str],
    arch: int,
    num_warps: int,
    **options: Any,
) -> Any:
    names = list(signature)
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=fn,
        signature=signature,
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps} | options
    )


def measure(compiled: Any, arch: int) -> tuple[int, int]:
    """``(registers, spill bytes)`` from ptxas, run with the flags Triton gives it."""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        target = re.findall(r"\.target (sm_\w+)", compiled.asm["ptx"])[0]
        log = subprocess.run(
            [get_ptxas(arch).path, "-v", f"--gpu-name={target}", str(ptx), "-o", f"{folder}/o"],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers = int(re.findall(r"Used (\d+) registers", log)[0])
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return registers, max(int(a) + int(b) for a, b in spills)


def threads(compiled: Any) -> int:
    """Threads of one program, those of specialised warps among them."""
    return int(re.findall(r"\.reqntid (\d+)", compiled.asm["ptx"])[0])


def kv_format(features: Sequence[str]) -> str:
    """Format of an fp8 cache among a variant's features; "" without."""
    return next((f for f in features if f in fp8.FORMATS), "")


def scale_step(features: Sequence[str]) -> int:
    """How far an fp8 cache's scales lie apart, among a variant's features; -1 for one a page."""
    return -1 if "page_scales" in features else int("head_scales" in features)


def fp8_dot(features: Sequence[str]) -> str:
    """How products of fp8 operands are added, among a variant's features; "" without."""
    return "promoted" if "fp8_dot" in features else ""


def _attention_signature(
    kernel: str, tiles: policy.Tiles, dtype: str, arch: int, features: Sequence[str]
) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    element = "fp32" if dtype == "fp32" else dtype
    cache = "u8" if kv_format(features) else element
    if kernel == "prefill" and fp8_dot(features) and kv_format(features) == "e4m3":
        cache = "fp8e4nv"
    pairs = kernel == "decode" and cache == "u8" and tiles.block_d >= 64
    k = v = f"*{cache}"
    if tiles.use_tma:
        k = v = f"tensordesc<{cache}[1, 1, {tiles.block_n}, {tiles.block_d}]>"
    if pairs:
        v = v.replace("u8", "u16").replace(f"{tiles.block_d}]", f"{tiles.block_d // 2}]")
    out = "u8" if "fp8_out" in features else element
    lse = "lse" in features
    head = {"out_ptr": f"*{out}", "lse_ptr": "*fp32" if lse else "constexpr"}
    head |= {"q_ptr": f"*{element}"}
    head |= {"k_src": k, "v_src": v}
    head |= dict.fromkeys(("query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"), "*i32")
    if "rows" in features:
        head["block_table_ptr"] = "constexpr"
    scales = ("k_scale_ptr", "v_scale_ptr")
    masks = {"kv_start_ptr": "*i32"} if "starts" in features else {}
    mask = next((f for f in features if f in MASKS), "")
    if mask:
        masks["mask_ptr"] = MASKS[mask]
        masks |= {} if mask == "tree" else {"mask_start_ptr": "*i64"}
    others = ("cuts", "clocks") if kernel == "prefill" else ("spans",)
    known = {f: v for f, v in FEATURES.items() if f not in others}
    optional = {name: kind for feature, (name, kind) in known.items() if feature in features}
    optional |= dict.fromkeys(scales, "*fp32") if kv_format(features) else {}
    optional |= masks
    names = (*(n for n, _ in known.values()), *scales, "kv_start_ptr", "mask_ptr", "mask_start_ptr")
    off = [n for n in names if n not in optional]
    if "spans_ptr" in optional:
        optional["num_spans"] = "i32"
    elif kernel == "prefill":
        off.append("num_spans")
    tail = {"scale_log2": "fp32"} | dict.fromkeys(off, "constexpr") | optional
    tail |= dict.fromkeys(("stride_o_t", "stride_o_h", "stride_q_t", "stride_q_h"), "i32")
    strides = [f"stride_{x}_{axis}" for x in "kv" for axis in "phs"]
    tail |= dict.fromkeys(strides, "constexpr" if tiles.use_tma else "i32")
    tail["stride_bt_b"] = "i32"
    constants: dict[str, Any] = {"HAS_LSE": lse, "ALIBI_SQRT": "sqrt" in features}
    constants |= dict.fromkeys(off if lse else [*off, "lse_ptr"])
    constants |= {"block_table_ptr": None} if "rows" in features else {}
    step = scale_step(features)
    constants |= {"KV_FORMAT": kv_format(features), "K_SCALE_STEP": step, "V_SCALE_STEP": step}
    constants |= {"ROTATED": "rotated" in features}
    rounded = "e4m3" if arch >= 90 else "e4m3_bits"
    constants["OUT_FORMAT"] = rounded if "fp8_out" in features else ""
    constants["CAUSAL"] = not {"flags", "bidirectional", *MASKS}.intersection(features)
    constants |= {"MASK": mask, "MASK_ROWS": 16 if mask == "blocks" else 0}
    if kernel == "decode":
        constants |= {"V_PAIRS": pairs}
    else:
        per_thread = tiles.block_m * tiles.block_d // (tiles.num_warps * 32)
        constants["LAZY"] = per_thread if tiles.lazy_rescale else 0
        constants["SPANS_IN_WINDOW"] = "windowed" in features
        constants["FP8_DOT"] = fp8_dot(features)
    constants |= dict.fromkeys(strides, 1) if tiles.use_tma else {}
    return head, tail, constants


def _attention_constants(config: policy.Config, tiles: policy.Tiles, dtype: str) -> dict[str, Any]:
    g = config.geometry
    return {
        "NUM_KV_HEADS": g.num_kv_heads, "GROUP_SIZE": g.group_size, "HEAD_DIM": g.head_dim,
        "PAGE_SIZE": g.page_size, "USE_TMA": tiles.use_tma,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32", "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n, "BLOCK_D": tiles.block_d, "NUM_STAGES": tiles.num_stages,
        "TAIL_STAGES": tiles.tail_stages, "WINDOW": config.window,
    }  # fmt: skip


def _pieces(config: policy.Config) -> dict[str, Any]:
    return {name.upper(): value for name, value in config.piece_constants.items()}


def _aligned(signature: Mapping[str, str]) -> list[str]:
    """Pointers and strides of real batches are multiples of 16; block_table rows need not be."""
    return [
        n for n, t in signature.items()
        if (t.startswith("*") or n.startswith("stride_")) and t != "constexpr"
        and n not in ("stride_bt_b", "seq_lens_ptr", "query_start_loc_ptr", "block_table_ptr")
    ]  # fmt: skip


def _compile_attention(
    kernel: str,
    config: policy.Config,
    dtype: str,
    arch: int,
    middle: dict[str, str],
    features: Sequence[str],
) -> Any:
    tiles = config.prefill if kernel == "prefill" else config.decode
    fn = prefill._prefill_kernel if kernel == "prefill" else decode._decode_kernel
    if "rows" in features:
        tiles = replace(tiles, use_tma=False)
        config = replace(config, geometry=replace(config.geometry, page_size=ROWS_PER_PAGE))
    head, tail, constants = _attention_signature(kernel, tiles, dtype, arch, features)
    signature = head | middle | tail
    constants |= _attention_constants(config, tiles, dtype)
    if kernel == "decode":
        constants["ITEM_OVERHEAD"] = config.item_overhead
        constants["BLOCK_R"], constants["BLOCK_P"] = config.merge_tile
        constants["PDL"] = config.pdl
        constants |= _pieces(config)
    else:
        constants["BLOCK_Q"] = config.prefill_block_q
    options: dict[str, Any] = {"enable_fp_fusion": False} if kv_format(features) else {}
    if kernel == "decode":
        options |= decode.register_options(kv_format(features), tiles.block_d)
    compiled = _compile(
        fn, signature, constants, _aligned(signature), arch, tiles.num_warps, **options
    )
    if kernel == "prefill" and tiles.lazy_rescale:
        _check_accumulators(compiled.asm["ttgir"], tiles)
    return compiled


def _check_accumulators(ttgir: str, tiles: policy.Tiles) -> None:
    """See that accumulators lie as ``tilewise.kernels.lazy_rescale`` takes them to lie.

    Raises
    ------
    RuntimeError
        If a warp holds other than 16 rows of a warpgroup's product.
    """
    layouts = dict(re.findall(r"(#mma\d*) = #ttg.nvidia_mma<\{([^}]*)\}>", ttgir))
    found = re.findall(r"elementwise_inline_asm .*-> tensor<[\dx]*f32, (#\w+)>", ttgir)
    wanted = f"versionMajor = 3, versionMinor = 0, warpsPerCTA = [{tiles.num_warps}, 1], instrShape"
    wrong = [layouts.get(name, name) for name in found if wanted not in layouts.get(name, "")]
    if wrong or not found:
        raise RuntimeError(f"lazily rescaled accumulators lie as {wrong or 'nothing'}: {tiles}")


def compile_prefill(
    config: policy.Config, dtype: str, arch: int, features: Sequence[str] = ()
) -> Any:
    """Compile the prefill kernel of ``config``."""
    middle = dict.fromkeys(("header_ptr", "tile_req_ptr", "tile_token_ptr"), "*i32")
    return _compile_attention("prefill", config, dtype, arch, middle, features)


def compile_decode(
    config: policy.Config, dtype: str, arch: int, features: Sequence[str] = ()
) -> Any:
    """Compile the decode kernel of ``config``."""
    middle = dict.fromkeys(("header_ptr", "cu_work_ptr", "worker_record_ptr"), "*i32")
    middle |= dict.fromkeys(("partial_acc_ptr", "partial_m_ptr", "partial_l_ptr"), "*fp32")
    middle["arrivals_ptr"] = "*i32"
    return _compile_attention("decode", config, dtype, arch, middle, features)


def compile_plan(
    config: policy.Config, arch: int, max_reqs: int = 1024, spans: bool = False
) -> Any:
    """Compile the plan kernel of ``config``."""
    names = "header tile_req tile_token cu_tiles cu_work worker_record arrivals"
    names += " query_start_loc seq_lens"
    shared = ("found", "common", "members", "groups", "slots", "shared_header")
    t = config.prefixes
    signature = {f"{n}_ptr": "*i32" for n in names.split()} | {
        "spans_ptr": "*i32" if spans else "constexpr",
        "num_spans": "i32" if spans else "constexpr",
        **{f"{n}_ptr": "*i32" if t else "constexpr" for n in shared},
        "num_reqs": "i32",
        "max_tiles": "i32",
        "most_workers": "i32",
        "fewest_beside": "i32",
        "most_beside": "i32",
    }
    constants = {
        "NUM_KV_HEADS": config.geometry.num_kv_heads, "GROUP_SIZE": config.geometry.group_size,
        "DECODE_MAX_QUERY_LEN": policy.DECODE_MAX_QUERY_LEN,
        "PREFILL_BLOCK_Q": config.prefill_block_q, "DECODE_BLOCK_M": config.decode.block_m,
        "DECODE_BLOCK_N": config.decode.block_n, "NUM_WORKERS": config.num_workers,
        "NUM_SMS": config.num_sms,
        "ITEM_OVERHEAD": config.item_overhead, "BLOCK_R": min(max_reqs, 1024), "BLOCK_LIST": 1024,
        "BLOCK_W": policy.next_power_of_2(config.num_workers),
        "SEARCH_STEPS": max_reqs.bit_length(), "WINDOW": config.window,
        "SHARED_BLOCK_M": t.block_m if t else 0,
        "SHARED_PAGE_SIZE": config.geometry.page_size if t else 0,
        "SHARED_MAX_QUERY_LEN": t.max_query_len if t else 0,
    } | _pieces(config)  # fmt: skip
    constants |= {} if t else {f"{n}_ptr": None for n in shared}
    constants |= {} if spans else {"spans_ptr": None, "num_spans": None}
    return _compile(plan._plan_kernel, signature, constants, [], arch, 8)


def compile_cache_write(
    config: policy.Config, dtype: str, arch: int, features: Sequence[str] = ()
) -> Any:
    """Compile the cache-write kernel of ``config``."""
    cache = "u8" if kv_format(features) else dtype
    pointers = {"k_cache_ptr": f"*{cache}", "v_cache_ptr": f"*{cache}"}
    pointers |= {"key_ptr": f"*{dtype}", "value_ptr": f"*{dtype}"}
    strides = [f"stride_{x}_{a}" for x in ("kc", "vc") for a in "phs"]
    strides += ["stride_k_t", "stride_k_h", "stride_v_t", "stride_v_h"]
    scales = dict.fromkeys(
        ("k_scale_ptr", "v_scale_ptr"), "*fp32" if kv_format(features) else "constexpr"
    )
    signature = pointers | {"slot_mapping_ptr": "*i64"} | scales | {"num_tokens": "i32"}
    signature |= dict.fromkeys(strides, "i32")
    g = config.geometry
    constants = {
        "HEAD_DIM": g.head_dim, "PAGE_SIZE": g.page_size, "BLOCK_T": 16, "BLOCK_D": g.block_d,
        "KV_FORMAT": kv_format(features), "K_SCALE_STEP": scale_step(features),
        "V_SCALE_STEP": scale_step(features), "ROTATED": "rotated" in features,
    }  # fmt: skip
    if not kv_format(features):
        constants |= dict.fromkeys(scales)
    aligned = [*pointers, *strides]
    return _compile(cache_write._write_kv_kernel, signature, constants, aligned, arch, 4)


def resources(
    kernel: str, config: policy.Config, dtype: str, arch: int, features: Sequence[str] = ()
) -> Resources:
    """Compile one kernel and report what it takes.

    Parameters
    ----------
    kernel : str
        One of ``KERNELS``.
    config : policy.Config
        Tiles and window.
    dtype : str
        ``bf16``, ``fp16`` or ``fp32``.
    arch : int
        80, 89, 90 or 100.
    features : sequence of str
        Keys of ``FEATURES``, ``sqrt`` beside ``alibi``, the format of an fp8 cache, beside that
        ``fp8_dot``, ``rotated`` and ``head_scales`` or ``page_scales``, a key of ``MASKS``,
        ``starts``, ``rows`` (keys in no pages), ``windowed`` (of spans) and ``lse``.
    """
    if kernel == "prefill":
        compiled = compile_prefill(config, dtype, arch, features)
    elif kernel == "decode":
        compiled = compile_decode(config, dtype, arch, features)
    elif kernel == "plan":
        compiled = compile_plan(config, arch, spans="spans" in features)
    else:
        compiled = compile_cache_write(config, dtype, arch, features)
    return report(compiled, kernel, config, dtype, arch, features)


def report(
    compiled: Any,
    kernel: str,
    config: policy.Config,
    dtype: str,
    arch: int,
    features: Sequence[str] = (),
) -> Resources:
    """What a compiled kernel takes; arguments as of ``resources``."""
    g = config.geometry
    registers, spill_bytes = measure(compiled, arch)
    ptx = compiled.asm["ptx"]
    # Blackwell has other instructions than tilewise.bench.sass knows.
    unset = sass.unset_uniforms(sass.of(compiled)) if arch < 100 else []
    if config.window:
        features = (*features, f"window={config.window}")
    if config.pieces:
        features = tuple(dict.fromkeys((*features, "invariant")))
    return Resources(
        kernel, arch, g.head_dim, g.page_size, g.group_size, dtype, "+".join(features),
        threads(compiled),
        registers, spill_bytes, compiled.metadata.shared, ptx.count("wgmma.mma_async"),
        ptx.count("cp.async.bulk.tensor"), tuple(unset),
    )  # fmt: skip


def configured(
    dtype: str,
    arch: int,
    head_dim: int,
    page_size: int,
    heads: tuple[int, int] = (32, 8),
    window: int = 0,
    kv_size: int = 0,
    twin: bool = False,
    fp8_matmul: bool = False,
) -> policy.Config:
    """The policy's configuration of one variant: the plain kernels', or the Gluon kernel's twin."""
    geometry = policy.Geometry(*heads, head_dim, page_size, ELEMENT_SIZE[dtype], kv_size)
    return policy.choose(
        geometry, DEVICES[arch], window=window, plain=not twin, fp8_matmul=fp8_matmul
    )
