"""Every kernel variant compiles for sm_80, sm_89, sm_90 and sm_100, within its budget.

No GPU is needed; ``aot_cache.py`` says how, and ``aot_quick.py`` what is compiled in every run.
"""

import re
from itertools import groupby
from pathlib import Path

import aot_quick
import pytest
from aot_quick import ATTENTION

from tilewise.geometry import next_power_of_2

TESTS = Path(__file__).parent
ROOT = TESTS.parent

SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
REGISTERS = 65536  # of an SM
# Programs that must fit on one SM together, by the registers and shared memory they take.
DECODE_PROGRAMS = {80: 2, 89: 1, 90: 2, 100: 2}
# Of plain layers with pages of whole tiles, by the head size that tiles are padded to: how many
# programs an SM's registers must hold, which `plugin/tiles.py` chooses warps for, and how many
# registers a thread may take. 255 is all that there are: what they cannot hold spills, and
# `spill_budget` bounds that.
PREFILL = {
    80: {64: (2, 255), 128: (1, 255), 256: (1, 255), 512: (1, 248)},
    89: {64: (2, 255), 128: (1, 255), 256: (1, 255), 512: (1, 248)},
    90: {64: (2, 128), 128: (2, 192), 256: (1, 255), 512: (1, 208)},
    100: {64: (1, 168), 128: (2, 208), 256: (1, 255), 512: (1, 240)},
}
# Kernels that no head size, or hardly any, matters to, in all their forms.
SMALL = [
    (k, "bf16", arch, 128, 64, *form)
    for arch in (80, 90, 100)
    for k, *form in (
        ("plan",), ("plan", "spans"), ("plan", "window=128"), ("plan", "invariant"),
        ("cache_write",), ("prefix_keys",), ("prefix_groups",), ("prefix_plan",),
        ("mask_starts", "bytes"), ("mask_starts", "bits"), ("mask_starts", "blocks"),
        ("tree_words", "parents"), ("tree_words", "visible"),
        ("shard_lengths", "context"), ("shard_lengths", "new"),
    )
]  # fmt: skip
SMALL += [("cache_write", "bf16", 80, 128, 64, "e4m3_bits")]
SMALL += [("cache_write", "bf16", arch, 128, 64, "e4m3", "rotated") for arch in (90, 100)]
# Formats of fp8 caches, by arithmetic or by instruction.
FP8 = ((80, "e4m3_bits"), (90, "e4m3"), (100, "e4m3"))
OLD_FULL = [
    *SMALL,
    *((k, "bf16", arch, d, 64)
      for k in ATTENTION for arch in (80, 90, 100) for d in (64, 128, 256, 512)),
    *(("prefix_decode", "bf16", arch, d, 64) for arch in (80, 90, 100) for d in (64, 128, 256)),
    *((k, "bf16", arch, 128, 64, f) for k in (*ATTENTION, "prefix_decode") for arch, f in FP8),
    *((k, "bf16", arch, d, page, *features)
      for arch in (80, 90, 100)
      for k, d, page, *features in (
          ("prefill", 128, 16), ("decode", 128, 16),
          ("prefill", 64, 64, "window=128", "sinks"), ("decode", 64, 64, "window=128", "sinks"),
          ("prefill", 256, 64, "window=4096", "softcap", "spans"),
          ("decode", 128, 16, "window=300", "sinks", "softcap", "alibi", "sqrt", "fp8_out"),
          ("decode", 128, 64, "tree"), ("decode", 128, 64, "invariant"),
          ("decode", 128, 64, "blocks", "starts"), ("prefill", 128, 64, "bits"),
      )),
    ("prefill", "bf16", 90, 128, 64, "e4m3", "fp8_dot", "rotated"),
]  # fmt: skip
FULL = [
    *SMALL,
    *((k, "fp32", 90, 64, 64) for k in ATTENTION),
    ("prefill", "fp16", 90, 128, 64, "twin"),
    ("decode", "bf16", 90, 128, 64, "e4m3", "rotated"),
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


def _chunks(variants):
    """What is compiled in one test: a few minutes' worth."""

    def name(variant):
        kernel, _, arch, *_, last = variant
        if kernel not in (*ATTENTION, "prefix_decode"):
            return f"small-sm_{arch}"
        return f"{kernel}-sm_{arch}" + ("-features" if isinstance(last, str) else "")

    return {k: list(v) for k, v in groupby(sorted(variants, key=name), key=name)}


FULL_CHUNKS, OLD_CHUNKS = _chunks(FULL), _chunks(OLD_FULL)


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


def prefill_budget(row) -> tuple[int, int]:
    """Programs that must share an SM, by their registers, and registers a thread may take."""
    if row["features"] or row["dtype"] == "fp32" or row["page_size"] not in (64, 128):
        return 1, 255
    programs, registers = PREFILL[row["arch"]][max(next_power_of_2(row["head_dim"]), 64)]
    # The stand-in of a Gluon kernel has as many rows as that one, which has an SM for itself.
    return 1 if row["twin"] else programs, registers


def check_budget(rows):
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
        if r["kernel"] == "prefill":
            programs, registers = prefill_budget(r)
            if r["registers"] > registers:
                over.append(f"{r['registers']} > {registers} registers: {r}")
            if r["registers"] * r["threads"] * programs > REGISTERS:
                over.append(f"{programs} prefill programs an SM need fewer registers: {r}")
        if r["kernel"].endswith("decode") and r["dtype"] != "fp32":
            programs = DECODE_PROGRAMS[r["arch"]] if r["head_dim"] <= 256 else 1
            if r["registers"] * r["threads"] * programs > REGISTERS:
                over.append(f"{programs} decode programs an SM need fewer registers: {r}")
            if r["shared_bytes"] * programs > SHARED_LIMIT[r["arch"]]:
                over.append(f"{programs} decode programs an SM need less shared memory: {r}")
    assert not over, "\n".join(over)


def test_what_every_run_compiles_is_little():
    assert aot_quick.count() <= aot_quick.MOST, "more variants belong into slow tests"


def test_nothing_is_compiled_past_that_count():
    """Tests compile by the fixture, but for a toy whose compilations are counted."""
    compiles = re.compile(r'"aot_job\.py"|triton\.compile\(')
    found = {path.name for path in TESTS.rglob("*.py") if compiles.search(path.read_text())}
    assert found == {"aot_cache.py", "test_step_metrics.py"}


@pytest.mark.parametrize("old_triton", [False, True])
def test_every_run_compiles_every_kernel(old_triton):
    launched = set()
    for source in (ROOT / "kernels").glob("*.py"):
        launched.update(re.findall(r"= Launcher\(_(\w+)_kernel\)", source.read_text()))
    names = {"cache_write": "write_kv", "prefix_plan": "plan"}
    compiled = {names.get(k, k) for k, *_ in aot_quick.VARIANTS["plain", old_triton]}
    compiled |= {f"hopper_{v['kernel']}" for v in aot_quick.VARIANTS["gluon", old_triton]}
    assert compiled == launched


def test_variants_stay_within_budget(compiled):
    rows = compiled("plain", aot_quick.PLAIN)
    check_budget(rows)
    # Tiles of heads of 512 have too few rows for wgmma; everything else must use it, and the copy
    # engine where pages are whole.
    hopper = [r for r in rows if (r["arch"], r["kernel"]) == (90, "prefill")]
    assert hopper
    assert all(r["wgmma"] > 0 for r in hopper if r["head_dim"] <= 256)
    assert all((r["tma"] > 0) == (r["page_size"] % 64 == 0) for r in hopper)


def test_variants_stay_within_budget_on_triton_36(compiled):
    check_budget(compiled("plain", aot_quick.PLAIN_36, old_triton=True))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", OLD_CHUNKS)
def test_more_variants_stay_within_budget_on_triton_36(chunk, compiled):
    check_budget(compiled("plain", OLD_CHUNKS[chunk], old_triton=True))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", FULL_CHUNKS)
def test_all_variants_stay_within_budget(chunk, compiled):
    check_budget(compiled("plain", FULL_CHUNKS[chunk]))
