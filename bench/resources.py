"""What every kernel variant takes of a GPU: registers, spills, shared memory, programs an SM.

The kernels are compiled for the architecture, which need not be there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from tilewise import policy, prefix_rule
from tilewise.arch import ACCEPTED, ARCHITECTURES, parse_arch
from tilewise.errors import UnsupportedConfig

if TYPE_CHECKING:
    from tilewise.bench.aot import Resources

SCHEMA = 1
KERNELS = (
    "prefill", "hopper_prefill", "hopper_prefill_kv8", "hopper_prefill_fp8", "decode",
    "hopper_decode", "prefix_decode", "plan", "cache_write",
)  # fmt: skip
DTYPES = ("bf16", "fp16", "fp32")
FEATURES = ("sinks", "softcap", "alibi", "sqrt")
# Names as in `vllm serve --kv-cache-dtype`, and their formats.
_FP8_CACHES = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
# Architectures from which kernels convert by instruction, as tilewise.device has it with torch.
FIRST_TO_READ_FP8, FIRST_TO_WRITE_FP8 = 89, 90
# Kernels that what a layer does to its logits is part of.
_ATTENTION = ("prefill", "decode", "prefix_decode")


@dataclass(frozen=True)
class Limits:
    """What one SM has to share; CUDA C++ Programming Guide, compute capabilities."""

    warps: int
    programs: int
    shared_memory: int
    registers: int = 64 * 1024


LIMITS = {
    80: Limits(warps=64, programs=32, shared_memory=164 * 1024),
    89: Limits(warps=48, programs=24, shared_memory=100 * 1024),
    90: Limits(warps=64, programs=32, shared_memory=228 * 1024),
    100: Limits(warps=64, programs=32, shared_memory=228 * 1024),
}
# Registers are handed out to a warp in units of so many; CUDA keeps shared memory for itself.
REGISTER_UNIT = 256
RESERVED_SHARED = 1024


def occupancy(arch: int, threads: int, registers: int, shared_bytes: int) -> tuple[int, str]:
    """Return how many programs of a kernel share an SM, and what limits them.

    Parameters
    ----------
    arch : int
        80, 89, 90 or 100.
    threads : int
        Of one program.
    registers : int
        Of one thread.
    shared_bytes : int
        Of one program.

    Returns
    -------
    programs : int
    limit : str
        ``registers``, ``shared memory``, ``warps`` or ``programs``; the first of equals.
    """
    limits = LIMITS[arch]
    warps = policy.cdiv(threads, 32)
    of_warp = policy.cdiv(registers * 32, REGISTER_UNIT) * REGISTER_UNIT
    fit = {
        "registers": limits.registers // (of_warp * warps),
        "shared memory": limits.shared_memory // (shared_bytes + RESERVED_SHARED),
        "warps": limits.warps // warps,
        "programs": limits.programs,
    }
    limit = min(fit, key=lambda name: fit[name])
    return fit[limit], limit


@dataclass(frozen=True)
class Variant:
    """One kernel to compile."""

    kernel: str
    arch: int
    dtype: str
    head_size: int
    page_size: int


def variants(args: argparse.Namespace) -> Iterator[Variant]:
    """Yield what the command line asks for; a kernel comes once where sizes do not matter to it."""
    seen = set()
    for arch, kernel, dtype, head_size, page_size in product(
        args.arch, args.kernel, args.dtype, args.head_size, args.page_size
    ):
        variant = Variant(kernel, arch, dtype, head_size, page_size)
        takes = {"hopper": _hopper_takes, "prefix": _prefix_takes}.get(kernel.partition("_")[0])
        if takes is not None and not takes(variant, args):
            continue
        if variant not in seen:
            seen.add(variant)
            yield variant


def _hopper_takes(variant: Variant, args: argparse.Namespace) -> bool:
    """Whether a Gluon kernel serves such layers."""
    uncapped = variant.kernel == "hopper_prefill_fp8"
    if "alibi" in args.features or (uncapped and "softcap" in args.features):
        return False
    try:
        geometry = _geometry(variant, args)
    except UnsupportedConfig:
        return False
    device, window = ARCHITECTURES[variant.arch], args.window or 0
    if variant.kernel == "hopper_decode":
        return policy.choose(geometry, device, window=window).hopper_decode is not None
    if variant.kernel == "hopper_prefill_fp8":
        e4m3 = _FP8_CACHES.get(args.kv_cache_dtype) == "e4m3"
        return e4m3 and policy.why_not_hopper_fp8(geometry, device, window) is None
    fp8 = args.kv_cache_dtype in _FP8_CACHES
    mine = fp8 == (variant.kernel == "hopper_prefill_kv8")
    return mine and policy.why_not_hopper(geometry, device, window) is None


def _prefix_takes(variant: Variant, args: argparse.Namespace) -> bool:
    """Whether requests of such layers may share pages."""
    try:
        config = policy.choose(_geometry(variant, args), ARCHITECTURES[variant.arch])
    except UnsupportedConfig:
        return False
    config = replace(config, window=args.window or 0)
    return prefix_rule.why_not_share(config, ARCHITECTURES[variant.arch]) is None


def _geometry(variant: Variant, args: argparse.Namespace) -> policy.Geometry:
    size = 4 if variant.dtype == "fp32" else 2
    kv_size = 1 if args.kv_cache_dtype in _FP8_CACHES else 0
    q, kv = args.heads
    return policy.Geometry(q, kv, variant.head_size, variant.page_size, size, kv_size)


def compile_variant(variant: Variant, args: argparse.Namespace) -> dict[str, Any]:
    """Compile one variant; its row of the report, with ``error`` where it cannot be.

    Parameters
    ----------
    variant : Variant
    args : argparse.Namespace
        For heads, window and features.
    """
    row: dict[str, Any] = asdict(variant)
    try:
        found = _resources(variant, args)
    except UnsupportedConfig as error:
        return {**row, "error": str(error)}
    programs, limit = occupancy(found.arch, found.threads, found.registers, found.shared_bytes)
    return {
        **row, "features": found.features, "threads": found.threads,
        "registers": found.registers, "spill_bytes": found.spill_bytes,
        "shared_bytes": found.shared_bytes, "programs_per_sm": programs, "limited_by": limit,
        "wgmma": found.wgmma, "tma": found.tma, "unset_registers": list(found.unset),
        "error": None,
    }  # fmt: skip


def _resources(variant: Variant, args: argparse.Namespace) -> Resources:
    from tilewise.bench import aot

    v = variant
    if v.kernel.startswith("hopper"):
        from tilewise.bench import aot_gluon

        group = args.heads[0] // args.heads[1]
        sinks, softcap = ("sinks" in args.features), ("softcap" in args.features)
        return aot_gluon.resources(
            v.kernel, v.dtype, v.head_size, v.page_size, group, sinks, args.window, softcap,
            _FP8_CACHES.get(args.kv_cache_dtype, ""),
        )  # fmt: skip
    kv_format = _kv_format(args.kv_cache_dtype, v.arch, v.kernel)
    # The plain prefill as the policy has it beside the Gluon kernel.
    config = aot.configured(
        v.dtype, v.arch, v.head_size, v.page_size, args.heads, args.window,
        kv_size=1 if kv_format else 0, twin=True,
    )  # fmt: skip
    features = list(args.features) if v.kernel in _ATTENTION else []
    if kv_format and v.kernel != "plan":
        features.append(kv_format)
    if v.kernel == "prefix_decode":
        from tilewise.bench import aot_prefix

        return aot_prefix.resources(v.kernel, config, v.dtype, v.arch, features)
    return aot.resources(v.kernel, config, v.dtype, v.arch, features)


def _kv_format(kv_cache_dtype: str, arch: int, kernel: str) -> str:
    """How a kernel takes such a cache there (``tilewise.device.fp8_format``); "" if not fp8."""
    name = _FP8_CACHES.get(kv_cache_dtype, "")
    first = FIRST_TO_WRITE_FP8 if kernel == "cache_write" else FIRST_TO_READ_FP8
    return name if arch >= first or not name else f"{name}_bits"


def _arch(text: str) -> int:
    try:
        return parse_arch(text).arch
    except UnsupportedConfig as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _heads(text: str) -> tuple[int, int]:
    q, _, kv = text.partition("/")
    if not (q.isdecimal() and kv.isdecimal() and int(kv) and int(q) and int(q) % int(kv) == 0):
        raise argparse.ArgumentTypeError(
            f"{text!r}; accepted: query heads / KV heads, the former a multiple of the latter"
        )
    return int(q), int(kv)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a whole number")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    p = argparse.ArgumentParser(
        prog="tilewise bench resources",
        description="Compile the kernels that the policy would launch, for a GPU that need not be "
        "there, and say what they take: registers of a thread, bytes spilt, shared memory, and how "
        "many programs fit on an SM.",
        epilog="Exit codes: 0; 1 if a variant cannot be compiled; 2 for a wrong command line.",
    )
    p.add_argument(
        "--arch", nargs="+", type=_arch, default=[90], metavar="sm_NN",
        help=f"{ACCEPTED} (sm_90)",
    )  # fmt: skip
    p.add_argument("--head-size", nargs="+", type=_count, default=[64, 128], help="(64 128)")
    p.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS), help="(all)")
    p.add_argument("--page-size", nargs="+", type=_count, default=[64], help="tokens (64)")
    p.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"], help="(bf16)")
    p.add_argument(
        "--kv-cache-dtype", choices=("auto", *_FP8_CACHES), default="auto",
        help="the cache's; auto is the model's (auto)",
    )  # fmt: skip
    p.add_argument("--heads", type=_heads, default=(32, 8), help="query / KV heads (32/8)")
    p.add_argument("--window", type=_count, default=0, help="sliding window; 0 for none (0)")
    p.add_argument(
        "--features", nargs="*", choices=FEATURES, default=[],
        help="what the layers do to their logits besides (nothing)",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 1 if a variant cannot be compiled, or 2 for wrong usage."""
    args = parser().parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("tilewise bench resources: unset TRITON_INTERPRET to compile", file=sys.stderr)
        return 2
    wanted = list(variants(args))
    if not wanted:
        print("tilewise bench resources: no such variant exists", file=sys.stderr)
        return 2
    rows = []
    for number, variant in enumerate(wanted, 1):
        if sys.stderr.isatty():
            text = f"compiling {number} of {len(wanted)}: {variant.kernel} for sm_{variant.arch}"
            print(f"\r{text:60}", end="", file=sys.stderr, flush=True)
        rows.append(compile_variant(variant, args))
    if sys.stderr.isatty():
        print(f"\r{'':60}\r", end="", file=sys.stderr, flush=True)
    if args.json:
        import triton

        report = {"schema": SCHEMA, "triton": triton.__version__, "heads": list(args.heads)}
        print(json.dumps(report | {"variants": rows}, indent=2))
    else:
        show(rows)
    return int(any(row["error"] for row in rows))


HEAD = (
    "kernel", "arch", "head", "page", "dtype", "features", "threads", "registers", "spilt",
    "shared", "programs/SM", "limited by",
)  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table; bytes as bytes of a thread (spilt) and KiB of a program (shared)."""
    table = [HEAD]
    for r in rows:
        sizes = (r["kernel"], f"sm_{r['arch']}", str(r["head_size"]), str(r["page_size"]))
        if r["error"]:
            table.append((*sizes, r["dtype"], r["error"], *[""] * (len(HEAD) - 6)))
            continue
        taken = (str(r["threads"]), str(r["registers"]), f"{r['spill_bytes']} B")
        shared = f"{r['shared_bytes'] / 1024:.1f} KiB"
        fit = (str(r["programs_per_sm"]), r["limited_by"])
        table.append((*sizes, r["dtype"], r["features"] or "-", *taken, shared, *fit))
    # Errors run over the columns that they leave empty.
    whole = [row for row in table if row[-1]]
    widths = [max(len(row[i]) for row in whole) for i in range(len(HEAD))]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


assert set(LIMITS) == set(ARCHITECTURES)

if __name__ == "__main__":
    raise SystemExit(main())
