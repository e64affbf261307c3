"""The Gluon prefill with fp8 operands: compiled everywhere, run where there is a Hopper GPU."""

import dataclasses

import pytest
import torch
from aot_quick import gluon_chunks
from cases import Case, make_attention, make_batch, plan_batch
from test_fp8_matmul import check_rounded, rounded_rows, run_and_check
from test_hopper import (
    HOPPER,
    NEIGHBOURS,
    SLOPES,
    check_bits_beside_steered_rows,
    needs_hopper,
    steer_logits,
)

from tilewise import counters, policy

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

VARIANTS = [
    {"kernel": "prefill_fp8"},
    {"kernel": "prefill_fp8", "page_size": 256, "group_size": 7, "lse": True, "sinks": True},
    {"kernel": "prefill_fp8", "dtype": "fp16", "page_size": 128, "rotated": True, "scales": False},
]


def check_budget(rows, most_spills=2):
    """``most_spills``: loads and stores in the loop at the diagonal, which has few rounds."""
    for row in rows:
        assert row["shared_bytes"] <= 227 * 1024, row
        assert row["registers"] * row["threads"] <= 65536, row
        assert not row["unset"], row
        # As in the kernel for 16 bits, spills may stand outside the main loops only.
        assert row["spill_bytes"] <= 2400, row
        assert row["setmaxnreg"] > 0, row
        loops = [loop for loop in row["loops"] if loop["QGMMA"] == 8]
        loops = [loop for loop in loops if loop["instructions"] < 1050]
        # In each of the two consumers: one with masks and two without, a quick one among them.
        assert len(loops) == 6, row
        for loop in loops:
            assert loop["HGMMA"] == 0, row
            assert loop["LDL"] + loop["STL"] <= most_spills, row
        loops.sort(key=lambda loop: loop["instructions"])
        for loop in loops[:4]:
            # The quick one finds maxima among bits, and has one operation where the other has a
            # product, a difference, both as one, and a choice for each of 64 weights.
            assert loop["instructions"] <= (450 if loop in loops[:2] else 590), row
            assert loop["LDL"] == loop["STL"] == 0, row
            # Pairs of weights become fours; were weights exchanged, there would be more.
            assert loop["PRMT"] <= 16, row


@pytest.mark.parametrize("old_triton", [False, True])
@pytest.mark.parametrize("variants", gluon_chunks(VARIANTS))
def test_variants_compile_with_clean_main_loops(variants, old_triton, compiled):
    check_budget(compiled("gluon", variants, old_triton), most_spills=4 if old_triton else 2)


@pytest.mark.parametrize(
    ("geometry", "device", "window", "reason"),
    [
        ((32, 8, 128, 64, 2, 1), {}, 0, None),
        ((28, 4, 128, 256, 2, 1), {}, 0, None),
        ((32, 8, 128, 64, 2, 2), {}, 0, "2 bytes an element of the cache"),
        ((32, 8, 64, 64, 2, 1), {}, 0, "head_dim 64"),
        ((32, 8, 128, 16, 2, 1), {}, 0, "page_size 16"),
        ((32, 8, 128, 64, 2, 1), {}, 4096, "window 4096"),
        ((128, 1, 128, 64, 2, 1), {}, 0, "group size 128"),
        ((32, 8, 128, 64, 4, 1), {}, 0, "4 bytes"),
        ((32, 8, 128, 64, 2, 1), {"arch": 100}, 0, "capability 10.0"),
        ((32, 8, 128, 64, 2, 1), {"interpreted": True}, 0, "interpreter"),
        ((32, 8, 128, 64, 2, 1), {"shared_memory": 163 * 1024}, 0, "bytes of shared memory"),
    ],
)
def test_the_policy_says_why_not(geometry, device, window, reason):
    geometry, device = policy.Geometry(*geometry), dataclasses.replace(HOPPER, **device)
    why = policy.why_not_hopper_fp8(geometry, device, window)
    if reason is None:
        assert why is None
        config = policy.choose(geometry, device, window=window, fp8_matmul=True)
        assert config.hopper_prefill_fp8 is not None
        assert config.prefill.block_m == policy.HOPPER_ROWS
        plain = policy.choose(geometry, device, fp8_matmul=True, plain=True)
        assert plain.hopper_prefill_fp8 is None
        assert policy.choose(geometry, device).hopper_prefill_fp8 is None
    else:
        assert reason in why


LLAMA = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16,
         "kv_dtype": E4M3, "kv_scales": "head"}  # fmt: skip
MIXED = ((2000, 0), (129, 5000), (64, 8000), (1999, 1), (1, 700), (16, 90))
MANY = tuple((17 + 29 * i % 200, 131 * i % 3000) for i in range(100))
GPU_CASES = [
    Case(((128, 0),), **LLAMA),
    Case(((17, 0), (40, 100), (0, 0), (300, 64)), pad_requests=2, **LLAMA),
    Case(MIXED, **LLAMA),
    Case(MIXED, layout="hnd", **(LLAMA | {"dtype": FP16, "kv_scales": ""})),
    Case(((500, 3000), (33, 0)), layout="cross_layer", page_size=128, **LLAMA),
    Case(((500, 3000), (33, 0)), page_size=256, **(LLAMA | {"kv_scales": "tensor"})),
    Case(((500, 3000), (33, 0)), **(LLAMA | {"num_q_heads": 8})),
    Case(((200, -50), (77, 0)), **LLAMA),
    Case(MANY, **LLAMA),
    Case(MIXED, sinks=2.0, **LLAMA),
    Case(MIXED, **(LLAMA | {"num_q_heads": 28, "num_kv_heads": 4})),
]


def launches():
    return counters.snapshot().get("launches{kernel=hopper_prefill_fp8}", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_matches_reference(case, rotated):
    needs_hopper()
    before = launches()
    attn = run_and_check(case, "cuda", rotated=rotated)
    assert attn.config.hopper_prefill_fp8 is not None
    assert launches() == before + 1
    assert attn._buffers.header[3:].tolist() == [0, 0]


def check_twin(attn, batch, most_error):
    outs = []
    before = launches()
    for _ in range(3):  # launches back to back: the counters must come back to zero
        outs.append(attn.run(batch.q, batch.kv_cache, return_lse=True, **batch.features))
    assert launches() == before + 3
    rows = slice(0, batch.num_tokens)
    assert torch.equal(outs[0][0][rows], outs[1][0][rows])
    assert torch.equal(outs[0][0][rows], outs[2][0][rows])
    attn.config = dataclasses.replace(attn.config, hopper_prefill_fp8=None)
    plain, plain_lse = attn.run(batch.q, batch.kv_cache, return_lse=True, **batch.features)
    assert launches() == before + 3
    fast, fast_lse = outs[0]
    error = (fast[rows].float() - plain[rows].float()).norm() / plain[rows].float().norm()
    assert error < most_error, error
    torch.testing.assert_close(fast_lse[rows], plain_lse[rows], rtol=1e-4, atol=2e-3)
    return fast


# What leaves a tensor core's 14 bits enough for the other products.
SMALL_SLOPES = [(-7, -7), (-3, -20), (-20, -3), (2, -5), (-12, -3), (8, -8), (-5.4, -5.7)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES[2:9:2], ids=str)
def test_the_plain_twin_agrees_on_the_same_plan(case):
    """Both round the same numbers; maxima that lag by other blocks move weights within e4m3."""
    needs_hopper()
    batch = make_batch(case, "cuda")
    attn = make_attention(case, "cuda", fp8_matmul=True)
    plan_batch(attn, batch)
    check_twin(attn, batch, most_error=4e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("last", "first"), [*SLOPES, *SMALL_SLOPES])
def test_maxima_below_zero(last, first, every):
    """Compared as integers, the largest of negative logits is not found, and need not be.

    The log-sum-exp is held to the twin's: a large product costs the others beside it bits of the
    accumulator, in both.
    """
    needs_hopper()
    case = Case(((700, 900), (300, 0)), **(LLAMA | {"kv_scales": ""}))
    batch = make_batch(case, "cuda")
    steer_logits(batch, case, last, first, every)
    attn = make_attention(case, "cuda", fp8_matmul=True)
    plan_batch(attn, batch)
    # Weights are off by 2**-4 of themselves at the most, and of few large ones not at random.
    out = check_twin(attn, batch, most_error=2**-3)
    if (last, first) in SMALL_SLOPES:
        # Element by element, which weights that saturate do not pass.
        check_rounded(batch, rounded_rows(batch.q), out, None)


@pytest.mark.gpu
def test_a_neighbours_maxima_change_no_bit():
    needs_hopper()
    case = Case(NEIGHBOURS, **(LLAMA | {"kv_scales": ""}))
    check_bits_beside_steered_rows(case, fp8_matmul=True)


@pytest.mark.gpu
def test_graphs_replay_with_other_scales():
    needs_hopper()
    case = Case(MIXED, **LLAMA)
    batch = make_batch(case, "cuda")
    attn = make_attention(case, "cuda", fp8_matmul=True)
    plan_batch(attn, batch)
    out = torch.empty_like(batch.q)
    attn.run(batch.q, batch.kv_cache, out=out, **batch.features)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(batch.q, batch.kv_cache, out=out, **batch.features)
    for factor in (1.0, 0.5):
        batch.features["k_scale"] *= factor
        wanted = attn.run(batch.q, batch.kv_cache, **batch.features)
        out.fill_(7.0)
        graph.replay()
        assert torch.equal(out[: batch.num_tokens], wanted[: batch.num_tokens])
