"""Compiles kernels ahead of time in a process without the interpreter: ``aot_job.py KIND JOB``.

``JOB`` is a file with a JSON list: for ``plain``, ``[kernel, dtype, arch, head_dim, page_size,
feature, ...]`` each; for ``gluon``, arguments of ``aot_gluon.report`` each. One JSON
line a variant.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path


def plain(kernel, dtype, arch, head_dim, page_size, *features):
    from tilewise import policy
    from tilewise.bench import aot

    windows = [int(f.partition("=")[2]) for f in features if f.startswith("window=")]
    twin, kv_size = "twin" in features, 1 if aot.kv_format(features) else 0
    config = aot.configured(
        dtype, arch, head_dim, page_size, window=sum(windows), kv_size=kv_size, twin=twin
    )
    if "invariant" in features:
        config = policy.batch_invariant(config)
    features = [f for f in features if f != "twin" and not f.startswith("window=")]
    return asdict(aot.resources(kernel, config, dtype, arch, features))


def gluon(variant):
    from tilewise.bench import aot_gluon

    return aot_gluon.report(**variant)


def main(kind, path):
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter cannot compile"
    for variant in json.loads(Path(path).read_text()):
        row = plain(*variant) if kind == "plain" else gluon(variant)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
