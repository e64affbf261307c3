"""Compiles kernels ahead of time in a process without the interpreter: ``aot_job.py KIND JOB``.

``JOB`` is a file with a JSON list: for ``plain``, ``[kernel, dtype, arch, head_dim, page_size,
feature, ...]`` each; for ``gluon``, arguments of ``aot_gluon.report`` each; for ``ladder``,
``[module.kernel, arch, constants, warps]`` each. One JSON line a variant.
"""

import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path


def plain(kernel, dtype, arch, head_dim, page_size, *features):
    from tilewise import policy
    from tilewise.bench import aot

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
    if kernel.startswith("prefix_"):
        from tilewise.bench import aot_prefix

        return asdict(aot_prefix.resources(kernel, config, dtype, arch, features))
    return asdict(aot.resources(kernel, config, dtype, arch, features))


def gluon(variant):
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
        row = gluon(variant) if kind == "gluon" else globals()[kind](*variant)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
