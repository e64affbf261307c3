"""Every kernel variant compiles for sm_80, sm_89, sm_90 and sm_100, within its budget.

No GPU is needed.  Compilation runs in a process of its own, since the interpreter's switch must be
off there, and its results are kept in pytest's cache by a digest of the sources and of Triton's
version.
"""

import hashlib
import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
OLD_TRITON = Path(sys.prefix) / "triton36"

# Registers are bounded by the hardware (255); what may grow unseen is spilling and memory.
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Programs that must fit on one SM together, by the registers and shared memory they take.
DECODE_PROGRAMS = {80: 2, 89: 1, 90: 2, 100: 2}
ATTENTION = ("prefill", "decode")
QUICK = [
    *((k, "bf16", arch, d, 64) for k in ATTENTION for arch in (80, 90) for d in (64, 128, 256)),
    *((k, "bf16", 100, d, 64) for k in ATTENTION for d in (64, 128)),
    *((k, "bf16", arch, 128, 16) for k in ATTENTION for arch in (80, 90)),
    *((k, t, arch, d, 64) for k in ATTENTION
      for t, arch, d in (("bf16", 90, 512), ("fp32", 90, 64), ("bf16", 89, 128))),
    ("decode", "fp16", 90, 128, 64),
    ("prefill", "fp16", 90, 128, 64, "twin"),
    *((k, "bf16", arch, 128, 64) for k in ("plan", "cache_write") for arch in (80, 90)),
    # What models combine: gpt-oss, Gemma (with images among text); and everything at once.
    ("prefill", "bf16", 90, 64, 64, "window=128", "sinks"),
    ("decode", "bf16", 90, 64, 64, "window=128", "sinks"),
    ("prefill", "bf16", 90, 256, 64, "window=4096", "softcap", "spans"),
    ("decode", "bf16", 80, 128, 16, "window=300", "sinks", "softcap", "alibi", "sqrt", "fp8_out"),
    # fp8 caches, by instruction and by arithmetic.
    *((k, "bf16", 90, 128, 64, "e4m3") for k in ATTENTION),
    ("decode", "bf16", 90, 128, 16, "e4m3"),
    *((k, "bf16", 80, 128, 64, "e4m3_bits") for k in (*ATTENTION, "cache_write")),
    # Masks of the plan/run interface.
    ("decode", "bf16", 90, 128, 64, "tree"),
    ("prefill", "bf16", 80, 128, 64, "blocks", "starts"),
    # Of pages that requests share.
    *(("prefix_decode", "bf16", 90, d, 64) for d in (64, 128)),
    *((k, "bf16", 90, 128, 64) for k in ("prefix_keys", "prefix_groups", "prefix_plan")),
    *(("prefill", "bf16", 90, d, 64, "e4m3", "fp8_dot") for d in (64, 128)),
    ("decode", "bf16", 90, 128, 64, "e4m3", "rotated"),
]  # fmt: skip
OLD = [(k, "bf16", arch, 128, 64) for k in ATTENTION for arch in (80, 90)]
OLD += [(k, "bf16", 90, 128, 64, "e4m3") for k in ("decode", "cache_write")]
OLD += [("prefix_decode", "bf16", 90, 128, 64)]
OLD += [("prefill", "bf16", 90, 128, 64, "e4m3", "fp8_dot", "rotated")]
OLD_SLOW = [
    (k, "bf16", arch, 128, 64, "invariant") for k in ("decode", "plan") for arch in (80, 90)
]
OLD_SLOW += [
    (k, "bf16", arch, 128, 64, *mask)
    for arch in (80, 90)
    for k, *mask in (("decode", "tree"), ("prefill", "bits"), ("decode", "blocks", "starts"))
]
assert len(QUICK) + len(OLD) <= 60, "keep `make test` quick; more variants belong into FULL"
FULL = [
    *((k, "bf16", 100, 128, 64) for k in ("plan", "cache_write")),
    ("cache_write", "bf16", 90, 128, 64, "e4m3", "rotated"),
]
FULL += [
    (k, t, arch, d, page)
    for k in ATTENTION
    for t in ("bf16", "fp16")
    for arch in (80, 89, 90, 100)
    for d in (64, 80, 96, 128, 192, 256)
    for page in (16, 48, 64, 128)
]
COMBINATIONS = [
    ("window=128", "sinks"),
    ("window=4096", "softcap"),
    ("softcap",),
    ("alibi",),
    ("window=4096", "sinks", "softcap", "alibi", "sqrt"),
]
FULL += [
    (k, "bf16", arch, d, page, *features)
    for k in ATTENTION
    for arch in (80, 90, 100)
    for d in (64, 128, 256)
    for page in (16, 64)
    for features in COMBINATIONS
]
FULL += [
    (k, "bf16", arch, d, 64, *features, "fp8_out")
    for k in ATTENTION
    for arch in (80, 89, 90, 100)
    for d in (64, 128, 256, 512)
    for features in ((), ("window=4096", "softcap"))
]
FULL += [
    (k, t, arch, 512, page, *features)
    for k in ATTENTION
    for t in ("bf16", "fp16")
    for arch in (80, 89, 90, 100)
    for page in (16, 48, 64, 784)
    for features in ((), COMBINATIONS[-1])
]
FULL += [
    (k, "bf16", arch, 512, page, f)
    for k in ATTENTION
    for arch, f in ((80, "e4m3_bits"), (89, "e4m3"), (90, "e4m3"), (90, "e5m2"), (100, "e4m3"))
    for page in (16, 64)
]  # fmt: skip
FULL += [("decode", "bf16", arch, 512, 64, "invariant") for arch in (80, 90, 100)]
# Other ratios of heads: a merge of pieces takes registers by it, and so do the rows of a tile.
FULL += [
    (k, "bf16", arch, 512, page, *features, f"heads={heads}")
    for k in ATTENTION
    for arch, f in ((80, "e4m3_bits"), (90, "e4m3"), (100, "e4m3"))
    for page in (16, 64)
    for heads in ("8/1", "16/16", "32/1")
    for features in ((), (f,))
]
FULL += [
    ("prefill", "bf16", arch, 512, page, "spans") for arch in (80, 90, 100) for page in (16, 64)
]
FULL += [
    ("prefill", "bf16", arch, d, page, *features, "spans")
    for arch in (80, 89, 90, 100)
    for d in (64, 128, 256)
    for page in (16, 64)
    for features in ((), ("window=1024",))
]
FULL += [("prefill", "bf16", 90, d, 64, "twin") for d in (64, 96, 128, 192, 256)]
FULL += [("prefill", "bf16", 90, d, 64, "twin", "e4m3") for d in (64, 96, 128, 256)]
FULL += [
    (k, "bf16", arch, d, page, f)
    for k in ATTENTION
    for arch, f in (
        (80, "e4m3_bits"), (80, "e5m2_bits"), (89, "e4m3"), (90, "e4m3"), (90, "e5m2"),
        (100, "e4m3"),
    )
    for d in (64, 72, 128, 256)
    for page in (16, 64)
]  # fmt: skip
FULL += [("decode", "fp16", 90, d, 128, "e4m3") for d in (64, 128)]
FULL += [
    ("prefill", "bf16", arch, d, page, "e4m3", "fp8_dot", *features)
    for arch in (89, 90, 100)
    for d in (64, 128, 256)
    for page in (16, 64)
    for features in ((), ("rotated",), ("window=1024", "sinks"))
]
FULL += [
    (k, "bf16", 90, d, 64, "e4m3", *features)
    for k in ATTENTION
    for d in (64, 128)
    for features in COMBINATIONS
]
FULL += [("cache_write", t, 100, 128, 64, "e4m3") for t in ("bf16", "fp16", "fp32")]
# Pages of hybrid models: 544 is whole tiles of 32 keys, 784 of 16; neither is a power of two.
FULL += [
    (k, "bf16", arch, d, page, *features)
    for k in ATTENTION
    for arch in (80, 89, 90, 100)
    for d in (64, 128, 256)
    for page in (544, 784)
    for features in ((), COMBINATIONS[-1])
]
FULL += [("plan", "bf16", arch, 128, 64, "window=128") for arch in (80, 90, 100)]
FULL += [("plan", "bf16", arch, 128, 64, "invariant") for arch in (80, 90, 100)]
FULL += [
    ("decode", "bf16", arch, d, page, "invariant")
    for arch in (80, 89, 90, 100)
    for d in (64, 128, 256)
    for page in (16, 64)
]
FULL += [("decode", "bf16", 90, 128, 64, *f, "invariant") for f in (("e4m3",), *COMBINATIONS)]
FULL += [
    (k, "bf16", arch, d, page, *mask)
    for k in ATTENTION
    for arch in (80, 89, 90, 100)
    for d in (64, 128, 256)
    for page in (16, 64)
    for mask in (("bits",), ("bytes", "starts"), ("blocks", "starts"), ("starts",))
]
FULL += [
    ("decode", "bf16", arch, d, page, "tree")
    for arch in (80, 89, 90, 100)
    for d in (64, 128, 256)
    for page in (16, 64)
]
FULL += [(k, "bf16", 90, 128, 64, "e4m3", "bits") for k in ATTENTION]
FULL += [("decode", "bf16", 90, 128, 64, mask, "invariant") for mask in ("bits", "tree")]
FULL += [(k, "bf16", 90, 512, 64, "bits") for k in ATTENTION]
FULL += [("decode", "bf16", arch, 128, 64, "cuts", "clocks") for arch in (80, 90, 100)]


FULL += [
    ("prefix_decode", t, arch, d, page, *features)
    for t, features in (
        ("bf16", ()), ("fp16", ()), ("bf16", ("sinks", "softcap", "alibi", "sqrt", "fp8_out"))
    )
    for arch in (80, 89, 90, 100)
    for d in (64, 128, 256)
    for page in (16, 64)
]  # fmt: skip
FULL += [
    ("prefix_decode", "bf16", arch, d, 64, f)
    for arch, f in ((80, "e4m3_bits"), (90, "e4m3"), (90, "e5m2"))
    for d in (64, 128)
]


def _chunk(variant):
    """What is compiled in one test: a few minutes' worth."""
    kernel, _, arch, *_, last = variant
    return f"{kernel}-sm_{arch}" + ("-features" if isinstance(last, str) else "")


FULL_CHUNKS = {k: list(v) for k, v in groupby(sorted(FULL, key=_chunk), key=_chunk)}


def spill_budget(arch: int, head_dim: int, kernel: str, features: str) -> int:
    """Bytes of spill traffic a thread may have, all outside the main loop's matrix products."""
    if kernel == "prefill" and {"bits", "bytes", "blocks"}.intersection(features.split("+")):
        # Every tile is masked, a word a row carried through; batches of vLLM run other variants.
        return 1536 if arch < 90 else 768
    if head_dim > 256:
        return 0
    if kernel == "prefix_decode":
        # Where items start and rows are merged: registers are few, so that as many programs share
        # an SM as of the plain decode.
        return 1024
    if kernel != "prefill":
        return 64
    plain = features.replace("spans", "").replace("fp8_out", "")
    if plain != features:
        # Two more bounds a row, or rounding by arithmetic: steps without these run other variants.
        budget = spill_budget(arch, head_dim, kernel, plain.strip("+"))
        return 2 * budget if arch < 90 else 3 * budget // 2
    if head_dim > 128 and features:
        return 1536 if arch < 90 else 448  # a wide window has three loops to carry values through
    if head_dim > 128:
        return 640 if arch < 90 else 256
    return 160 if arch < 90 else 64


# What decides which kernels are compiled, beside the kernels.
POLICY_MODULES = (
    "arch", "geometry", "pieces", "policy", "prefix_rule", "prefix_tiles", "tiles", "tuned",
)  # fmt: skip


@pytest.fixture
def cache(pytestconfig):
    """Where results are kept between runs: a folder that git ignores."""
    return pytestconfig.cache.mkdir("tilewise-aot")


def compile_variants(variants, cache, tmp_path, old_triton=False):
    """Resources of every variant, from the cache of this source and Triton version if there."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONSAFEPATH"] = "1"
    if old_triton:
        # Before what is there: the checkout may be on the path by this variable.
        paths = [str(OLD_TRITON), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    digest = hashlib.sha256(json.dumps([variants, old_triton]).encode())
    kernels = sorted((ROOT / "kernels").glob("*.py"))
    sources = [*kernels, *(ROOT / f"plugin/{name}.py" for name in POLICY_MODULES)]
    sources += [ROOT / f"bench/{name}.py" for name in ("aot", "aot_prefix", "sass")]
    sources += [ROOT / "plugin/tuned.json", TESTS / "aot_job.py"]
    for source in sources:
        digest.update(source.read_bytes())
    probe = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    version = subprocess.run(probe, env=env, capture_output=True, text=True, check=True).stdout
    assert version.startswith("3.6.") == old_triton, f"compiling with Triton {version}"
    digest.update(version.encode())
    kept = cache / f"{digest.hexdigest()[:24]}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    job = tmp_path / "variants.json"
    job.write_text(json.dumps(variants))
    command = [sys.executable, str(TESTS / "aot_job.py"), "plain", str(job)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    # Renamed when complete, so that a run that is stopped leaves no half of a file.
    part = kept.with_suffix(".part")
    part.write_text(json.dumps(rows))
    part.replace(kept)
    return rows


def check_budget(rows, variants):
    assert len(rows) == len(variants)
    over = []
    for r in rows:
        budget = spill_budget(r["arch"], r["head_dim"], r["kernel"], r["features"])
        # fp32 products run without tensor cores and are not tuned.
        if r["dtype"] != "fp32" and r["spill_bytes"] > budget:
            over.append(f"spills {r['spill_bytes']} > {budget}: {r}")
        if r["shared_bytes"] > SHARED_LIMIT[r["arch"]]:
            over.append(f"shared memory {r['shared_bytes']}: {r}")
        if r["unset"]:
            over.append(f"ptxas left registers unset: {r}")
        if r["kernel"].endswith("decode") and r["dtype"] != "fp32":
            programs = DECODE_PROGRAMS[r["arch"]] if r["head_dim"] <= 256 else 1
            if r["registers"] * r["threads"] * programs > 65536:
                over.append(f"{programs} decode programs an SM need fewer registers: {r}")
            if r["shared_bytes"] * programs > SHARED_LIMIT[r["arch"]]:
                over.append(f"{programs} decode programs an SM need less shared memory: {r}")
    assert not over, "\n".join(over)


def test_variants_stay_within_budget(cache, tmp_path):
    rows = compile_variants(QUICK, cache, tmp_path)
    check_budget(rows, QUICK)
    # fp32 has no wgmma, and tiles of heads of 512 have too few rows for it; everything else must
    # use it, and the copy engine where pages are whole.
    hopper = [r for r in rows if (r["arch"], r["kernel"]) == (90, "prefill")]
    hopper = [r for r in hopper if r["dtype"] != "fp32"]
    assert hopper
    assert all(r["wgmma"] > 0 for r in hopper if r["head_dim"] <= 256)
    assert all((r["tma"] > 0) == (r["page_size"] % 64 == 0) for r in hopper)


def test_variants_stay_within_budget_on_triton_36(cache, tmp_path):
    if not OLD_TRITON.is_dir():
        pytest.skip(f"Triton 3.6 is not set up ({OLD_TRITON.name} in the environment)")
    check_budget(compile_variants(OLD, cache, tmp_path, old_triton=True), OLD)


@pytest.mark.slow
def test_more_variants_stay_within_budget_on_triton_36(cache, tmp_path):
    if not OLD_TRITON.is_dir():
        pytest.skip(f"Triton 3.6 is not set up ({OLD_TRITON.name} in the environment)")
    check_budget(compile_variants(OLD_SLOW, cache, tmp_path, old_triton=True), OLD_SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", FULL_CHUNKS)
def test_all_variants_stay_within_budget(chunk, cache, tmp_path):
    variants = FULL_CHUNKS[chunk]
    check_budget(compile_variants(variants, cache, tmp_path), variants)
