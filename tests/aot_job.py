"""Compiles kernels ahead of time in a process without the interpreter: ``aot_job.py KIND JOB``.

``JOB`` is a file with a JSON list: for ``plain``, ``[kernel, dtype, arch, head_dim, page_size,
feature, ...]`` each; for ``gluon``, arguments of ``aot_gluon.report`` each; for ``ladder``,
``[module.kernel, arch, constants, warps]`` each; for ``command``, words of a command line each; for
``shared_rows``, ``[rows]`` each. One JSON line a variant.
"""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path


def plain(kernel, dtype, arch, head_dim, page_size, *features):
    from tilewise import policy
    from tilewise.bench import aot, aot_prefix, aot_small

    if kernel in aot_small.KERNELS:
        return asdict(aot_small.resources(kernel, *features, arch))
    windows = [int(f.partition("=")[2]) for f in features if f.startswith("window=")]
    heads = [f.partition("=")[2] for f in features if f.startswith("heads=")]
    q, _, kv = (heads or ["32/8"])[0].partition("/")
    twin, kv_size = "twin" in features, 1 if aot.kv_format(features) else 0
    config = aot.configured(
        dtype, arch, head_dim, page_size, (int(q), int(kv)), sum(windows), kv_size, twin,
        fp8_matmul="fp8_dot" in features,
    )  # fmt: skip
    if "invariant" in features:
        config = policy.batch_invariant(config)
    features = [f for f in features if f != "twin" and not f.startswith(("window=", "heads="))]
    module = aot_prefix if kernel in aot_prefix.KERNELS else aot
    return asdict(module.resources(kernel, config, dtype, arch, features)) | {"twin": twin}


def shared_rows(block_m):
    """The decode of requests that share pages of fp8, of so many rows; None: the policy's."""
    from tilewise import policy
    from tilewise.bench import aot, aot_prefix

    config = policy.choose(policy.Geometry(8, 2, 64, 64, 2, 1), aot.DEVICES[90], plain=True)
    config = aot_prefix.configured(config, 90)
    tiles = replace(config.prefixes, block_m=block_m or config.prefixes.block_m)
    config = replace(config, prefixes=tiles)
    compiled = aot_prefix.compile_prefix_decode(config, "fp16", 90, ["e5m2"])
    return asdict(aot.report(compiled, "prefix_decode", config, "fp16", 90, ["e5m2"]))


def command(*words):
    """``tilewise bench resources`` as it is run, and what it says."""
    line = [sys.executable, "-m", "tilewise.cli", "bench", "resources", *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return {"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def gluon(**variant):
    """Compile a Gluon kernel for sm_90."""
    from tilewise.bench import aot_gluon

    return aot_gluon.report(**variant)


def ladder(name, arch, constants, warps):
    """Compile a kernel of the ladder; types follow from the names of its arguments."""
    from tilewise.bench import aot

    module, _, kernel = name.partition(".")
    fn = getattr(importlib.import_module(f"tilewise.bench.ladder.{module}"), kernel)
    singles = {"lse_ptr", "max_ptr", "sum_ptr", "acc_ptr"}
    singles |= {"out_ptr"} if module == "flash1" else set()
    signature = {}
    for argument in fn.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            signature[argument] = "*fp32" if argument in singles else "*fp16"
        else:
            signature[argument] = "fp32" if argument in ("scale_log2", "epsilon") else "i32"
    aligned = [a for a, kind in signature.items() if a.startswith("stride_") or kind[0] == "*"]
    compiled = aot._compile(fn, signature, constants, aligned, arch, warps)
    registers, spill_bytes = aot.measure(compiled, arch)
    return {
        "kernel": name, "arch": arch, "registers": registers, "spill_bytes": spill_bytes,
        "shared_bytes": compiled.metadata.shared,
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
    }  # fmt: skip


def main(kind, path):
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter cannot compile"
    for variant in json.loads(Path(path).read_text()):
        compiles = globals()[kind]
        row = compiles(**variant) if isinstance(variant, dict) else compiles(*variant)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
