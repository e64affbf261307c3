"""What every kernel variant takes of a GPU: registers, spills, shared memory, occupancy.

The kernels are compiled for the architecture, which need not be there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tilewise import policy
from tilewise.arch import ACCEPTED, ARCHITECTURES, parse_arch
from tilewise.bench.variants import (
    EACH,
    FEATURES,
    FORMS,
    FP8_CACHES,
    KERNELS,
    SPECIALISED,
    LeftOut,
    Variant,
    config_of,
    variants,
)
from tilewise.errors import UnsupportedConfig

if TYPE_CHECKING:
    from tilewise.bench.aot import Resources

SCHEMA = 2
DTYPES = ("bf16", "fp16", "fp32")
# Architectures from which kernels convert by instruction, as tilewise.device has it with torch.
FIRST_TO_READ_FP8, FIRST_TO_WRITE_FP8 = 89, 90
# Kernels that an fp8 cache is a matter of, the Gluon ones apart.
_OF_CACHE = ("prefill", "decode", "prefix_decode", "cache_write")


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


def compile_variant(variant: Variant, args: argparse.Namespace) -> dict[str, Any]:
    """Compile one variant; its row of the report, with ``error`` where it cannot be.

    Parameters
    ----------
    variant : Variant
    args : argparse.Namespace
        For heads, window and features.
    """
    row: dict[str, Any] = _described(variant)
    try:
        found = _resources(variant, args)
    except UnsupportedConfig as error:
        return {**row, "error": str(error)}
    programs, limit = occupancy(found.arch, found.threads, found.registers, found.shared_bytes)
    warps, most = programs * policy.cdiv(found.threads, 32), LIMITS[found.arch].warps
    return {
        **row, "features": found.features, "threads": found.threads,
        "registers": found.registers, "spill_bytes": found.spill_bytes,
        "shared_bytes": found.shared_bytes, "programs_per_sm": programs, "limited_by": limit,
        "warps_per_sm": warps, "most_warps_per_sm": most,
        "occupancy_percent": round(100 * warps / most, 1),
        "wgmma": found.wgmma, "tma": found.tma, "unset_registers": list(found.unset),
        "error": None,
    }  # fmt: skip


def _described(variant: Variant) -> dict[str, Any]:
    return asdict(variant) | {"features": "+".join(variant.features)}


def _resources(variant: Variant, args: argparse.Namespace) -> Resources:
    from tilewise.bench import aot

    v = variant
    if v.kernel in FORMS:
        from tilewise.bench import aot_small

        return aot_small.resources(v.kernel, v.features[0], v.arch)
    assert v.dtype is not None
    assert v.head_size is not None
    assert v.page_size is not None
    if v.kernel.startswith("hopper"):
        from tilewise.bench import aot_gluon

        group = args.heads[0] // args.heads[1]
        more = {
            name: True for name in ("lse", "beside", "rotated", "head_scales") if name in v.features
        }
        return aot_gluon.resources(
            v.kernel, v.dtype, v.head_size, v.page_size, group, "sinks" in v.features, args.window,
            "softcap" in v.features, FP8_CACHES.get(args.kv_cache_dtype, ""), **more,
        )  # fmt: skip
    config, own = config_of(v, args), SPECIALISED[v.kernel]
    if "invariant" not in own:
        config = replace(config, pieces=None)
    if "window" not in own:
        config = replace(config, window=0)
    features = list(v.features)
    kv_format = _kv_format(args.kv_cache_dtype, v.arch, v.kernel)
    if kv_format and v.kernel in _OF_CACHE:
        features.append(kv_format)
    if v.kernel.startswith("prefix_"):
        from tilewise.bench import aot_prefix

        return aot_prefix.resources(v.kernel, config, v.dtype, v.arch, features)
    return aot.resources(v.kernel, config, v.dtype, v.arch, features)


def _kv_format(kv_cache_dtype: str, arch: int, kernel: str) -> str:
    """How a kernel takes such a cache there (``tilewise.device.fp8_format``); "" if not fp8."""
    name = FP8_CACHES.get(kv_cache_dtype, "")
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compile the kernels that would be launched, for a GPU that need not be there, "
        "and say what they take:\nregisters of a thread, bytes spilt, shared memory, and how many "
        "programs and warps fit on an SM.",
        epilog="Features:\n"
        + "\n".join(f"  {name:15}{text}" for name, text in FEATURES.items())
        + f"\n  {EACH:15}nothing, then every feature by itself (a few minutes)\n\n"
        "Exit codes: 0; 1 if a variant cannot be compiled; 2 for a wrong command line, or if there "
        "is no such variant.",
    )  # fmt: skip
    p.add_argument(
        "--arch", nargs="+", type=_arch, default=[90], metavar="sm_NN",
        help=f"architectures, of {ACCEPTED} (default: sm_90)",
    )  # fmt: skip
    p.add_argument(
        "--kernel", nargs="+", choices=KERNELS, default=list(KERNELS), metavar="NAME",
        help=f"of {', '.join(KERNELS)} (default: all)",
    )  # fmt: skip
    p.add_argument(
        "--features", nargs="*", choices=(*FEATURES, EACH), default=[], metavar="NAME",
        help="what the layers and batches have, all of it at once; see below (default: nothing)",
    )  # fmt: skip
    p.add_argument(
        "--head-size", nargs="+", type=_count, default=[64, 128], metavar="N",
        help="elements: multiples of 8 from 16 to 256, and 512 (default: 64 128)",
    )  # fmt: skip
    p.add_argument(
        "--page-size", nargs="+", type=_count, default=[64], metavar="N",
        help="tokens of a page, multiples of 16 (default: 64)",
    )  # fmt: skip
    p.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=["bf16"],
        help="of queries and outputs (default: bf16)",
    )  # fmt: skip
    p.add_argument(
        "--kv-cache-dtype", choices=("auto", *FP8_CACHES), default="auto",
        help="the cache's; auto is the queries' (default: auto)",
    )  # fmt: skip
    p.add_argument(
        "--heads", type=_heads, default=(32, 8), metavar="Q/KV",
        help="query heads / KV heads, the former a multiple of the latter (default: 32/8)",
    )  # fmt: skip
    p.add_argument(
        "--window", type=_count, default=0, metavar="N",
        help="keys that a query sees, itself included; 0 for all (default: 0)",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 1 if a variant cannot be compiled, or 2 for wrong usage."""
    args = parser().parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("tilewise bench resources: unset TRITON_INTERPRET to compile", file=sys.stderr)
        return 2
    if EACH in args.features and len(args.features) > 1:
        print(f"--features {' '.join(args.features)}; accepted: {EACH} alone", file=sys.stderr)
        return 2
    found = list(variants(args))
    wanted = [one for one in found if isinstance(one, Variant)]
    left_out = [one for one in found if isinstance(one, LeftOut)]
    if not wanted:
        print("tilewise bench resources: no such variant exists", file=sys.stderr)
        print(*left_out_lines(left_out), sep="\n", file=sys.stderr)
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
        without = [_described(one.variant) | {"why": one.why} for one in left_out]
        print(json.dumps(report | {"variants": rows, "left_out": without}, indent=2))
    else:
        show(rows)
        print(*left_out_lines(left_out), sep="\n", end="\n" if left_out else "")
    return int(any(row["error"] for row in rows))


def left_out_lines(left_out: Iterable[LeftOut]) -> Iterator[str]:
    """A line for every reason, with the kernels that it holds for; it names what sizes matter."""
    kernels: dict[tuple[Any, ...], dict[str, None]] = {}
    for one in left_out:
        v = one.variant
        kernels.setdefault((v.arch, v.features, one.why), {})[v.kernel] = None
    for (arch, features, why), names in kernels.items():
        asked = f" with {' and '.join(features)}" if features else ""
        yield f"left out for sm_{arch}: {', '.join(names)}{asked}: {why}"


HEAD = (
    "kernel", "arch", "head", "page", "dtype", "features", "threads", "registers", "spilt",
    "shared", "programs/SM", "warps/SM", "limited by",
)  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table; bytes as bytes of a thread (spilt) and KiB of a program (shared)."""
    table = [HEAD]
    for r in rows:
        sizes = (
            f"sm_{r['arch']}",
            *(str(r[n] or "-") for n in ("head_size", "page_size", "dtype")),
        )
        if r["error"]:
            table.append((r["kernel"], *sizes, r["error"], *[""] * (len(HEAD) - 6)))
            continue
        taken = (str(r["threads"]), str(r["registers"]), f"{r['spill_bytes']} B")
        shared = f"{r['shared_bytes'] / 1024:.1f} KiB"
        share = f"({r['occupancy_percent']:g} %)"
        warps = f"{r['warps_per_sm']} of {r['most_warps_per_sm']} {share}"
        fit = (str(r["programs_per_sm"]), warps, r["limited_by"])
        table.append((r["kernel"], *sizes, r["features"] or "-", *taken, shared, *fit))
    # Errors run over the columns that they leave empty.
    whole = [row for row in table if row[-1]]
    widths = [max(len(row[i]) for row in whole) for i in range(len(HEAD))]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


assert set(LIMITS) == set(ARCHITECTURES)

if __name__ == "__main__":
    raise SystemExit(main())
