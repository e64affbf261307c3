"""What `make test` compiles ahead of time: all of it, and no more than ``MOST`` variants.

A variant takes some seconds. The fixture ``compiled`` gives tests that are not slow these only; the
slow ones (`make test-full`) have their variants beside them.
"""

import pytest

MOST = 60
ATTENTION = ("prefill", "decode")

PLAIN = [
    *((k, "bf16", arch, d, 64) for k in ATTENTION for arch in (80, 90) for d in (64, 128, 256)),
    *((k, "bf16", 100, d, 64) for k in ATTENTION for d in (64, 128)),
    *((k, "bf16", 90, 512, 64) for k in ATTENTION),
    ("decode", "bf16", 90, 128, 16),
    *((k, "bf16", 90, 128, 64) for k in ("plan", "cache_write")),
    # What models combine: gpt-oss, Gemma (with images among text); and everything at once.
    ("prefill", "bf16", 90, 64, 64, "window=128", "sinks"),
    ("prefill", "bf16", 90, 256, 64, "window=4096", "softcap", "spans"),
    ("decode", "bf16", 80, 128, 16, "window=300", "sinks", "softcap", "alibi", "sqrt", "fp8_out"),
    # fp8 caches, by instruction and by arithmetic.
    *((k, "bf16", 90, 128, 64, "e4m3") for k in ATTENTION),
    ("decode", "bf16", 80, 128, 64, "e4m3_bits"),
    ("prefill", "bf16", 90, 128, 64, "e4m3", "fp8_dot"),
    # Masks of the plan/run interface.
    ("decode", "bf16", 90, 128, 64, "tree"),
    ("prefill", "bf16", 80, 128, 64, "blocks", "starts"),
    ("mask_starts", "bf16", 90, 128, 64, "bits"),
    ("tree_words", "bf16", 80, 128, 64, "parents"),
    # Of pages that requests share, and of keys that ranks share.
    *((f"prefix_{k}", "bf16", 90, 128, 64) for k in ("decode", "keys", "groups", "plan")),
    ("shard_lengths", "bf16", 90, 128, 64, "new"),
]  # fmt: skip
PLAIN_36 = [
    *(("prefill", "bf16", arch, 128, 64) for arch in (80, 90)),
    ("decode", "bf16", 100, 128, 64),
    ("plan", "bf16", 80, 128, 64),
    ("cache_write", "bf16", 90, 128, 64, "e4m3"),
    ("mask_starts", "bf16", 90, 128, 64, "blocks"),
    ("tree_words", "bf16", 90, 128, 64, "visible"),
    *((f"prefix_{k}", "bf16", 90, 128, 64) for k in ("decode", "keys", "groups", "plan")),
    ("shard_lengths", "bf16", 100, 128, 64, "context"),
]
# With the tiles and the layer that are their defaults; all for sm_90.
GLUON = [{"kernel": k} for k in ("prefill", "prefill_kv8", "prefill_fp8", "decode")]
LADDER = [(
    "flash2._flash2_kernel", 90,
    {"visits_ptr": None, "DIM": 64, "BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 3, "CAUSAL": True}, 4,
)]  # fmt: skip
COMMANDS = [
    ("--arch", "sm_80", "sm_90", "--head-size", "64", "--kernel", "decode", "--json"),
]

# By the kind of job (``aot_job.py``) and whether Triton is the oldest that is supported.
VARIANTS = {
    ("plain", False): PLAIN, ("plain", True): PLAIN_36, ("gluon", False): GLUON,
    ("gluon", True): GLUON, ("ladder", False): LADDER, ("command", False): COMMANDS,
}  # fmt: skip


def count():
    """How many variants these are; a command has several."""
    from tilewise.bench.resources import parser
    from tilewise.bench.variants import Variant, variants

    asked = [v for words in COMMANDS for v in variants(parser().parse_args(words))]
    of_commands = sum(isinstance(v, Variant) for v in asked)
    return of_commands + sum(len(v) for (kind, _), v in VARIANTS.items() if kind != "command")


def gluon_chunks(variants):
    """Parameters: what of ``variants`` is compiled in every run, and the rest in slow tests."""
    quick = [variant for variant in variants if variant in GLUON]
    rest = [variant for variant in variants if variant not in GLUON]
    return [
        pytest.param(quick, id="quick"), pytest.param(rest, id="rest", marks=pytest.mark.slow)
    ]  # fmt: skip
