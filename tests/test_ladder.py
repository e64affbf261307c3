"""The ladder's kernels against fp32, and its formulas against what the kernels ask of memory."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tilewise.bench.ladder import flash1, flash2, flash3, naive, rmsnorm, softmax, split_kv
from tilewise.bench.ladder.figures import skipped_share, traffic_ratio
from tilewise.bench.ladder.problem import Built, Matrix, Memory, Problem
from tilewise.bench.ladder.rungs import MEASURED, SMOKE, rungs
from tilewise.bench.resources import LIMITS, occupancy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PAD = 8
# (queries, keys): one, whole tiles, neither, more queries than keys, many more keys.
SHAPES = [(1, 1), (128, 128), (130, 200), (150, 70), (65, 333)]
PROBLEMS = [Problem(2, m, n, 32, c) for m, n in SHAPES for c in (False, True)]
PROBLEMS += [Problem(1, 100, 100, d, causal=True) for d in (16, 64, 128)]
DECODES = [
    (Problem(2, 1, 700, 32), 3), (Problem(3, 5, 300, 16, causal=True), 7),
    (Problem(1, 16, 128, 64), 2), (Problem(2, 16, 10, 32, causal=True), 1),
    (Problem(2, 1, 1, 32), 4),
]  # fmt: skip
MODULES = {"naive": naive, "flash1": flash1, "flash2": flash2}


def inputs_of(built: Built) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V: the first three tensors that a rung of attention makes."""
    q, k, v = built.memory.tensors[:3]
    return q, k, v


def reference(problem: Problem, q, k, v, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and log-sum-exp in `dtype`; rows without keys give 0 and -inf."""
    s = q.to(dtype) @ k.to(dtype).transpose(1, 2) * problem.dim**-0.5
    if problem.causal:
        row = torch.arange(problem.queries, device=q.device)[:, None]
        key = torch.arange(problem.keys, device=q.device)[None]
        s = s.masked_fill(key > row + problem.keys - problem.queries, -math.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v.to(dtype), s.float().logsumexp(-1)


def check(problem: Problem, built: Built) -> None:
    """The result is right to a few times the error that torch makes in fp16, and nothing else."""
    built.call()
    inputs = inputs_of(built)
    want, lse = reference(problem, *inputs)
    theirs = (reference(problem, *inputs, dtype=torch.float16)[0].float() - want).abs().max()
    torch.testing.assert_close(
        built.out.float(), want, atol=4 * max(float(theirs), 2.0**-11), rtol=0
    )
    if "lse" in built.extra:
        torch.testing.assert_close(built.extra["lse"][0], lse, atol=2e-3, rtol=1e-3)
    assert built.memory.untouched()
    assert built.error() < 2e-3


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_attention_matches_fp32(problem, name, device):
    built = MODULES[name].build(problem, Memory(device, PAD))
    check(problem, built)
    assert built.memory.held == MODULES[name].count(problem).held


@pytest.mark.parametrize(("problem", "splits"), DECODES, ids=str)
def test_split_kv_matches_fp32(problem, splits, device):
    built = split_kv.build(problem, Memory(device, PAD), splits)
    check(problem, built)
    assert built.memory.held == split_kv.count(problem, splits).held


@pytest.mark.parametrize("shape", [(17, 17), (130, 200), (65, 333)])
def test_the_product_stands_for_flash_attention_3(shape, device):
    problem = Problem(2, *shape, 64, causal=True)
    built = flash3.build(problem, Memory(device))
    assert not bool(built.out.isfinite().any())
    built.call()
    assert built.error() < 2e-3
    assert built.path in ("prefill", "hopper_prefill")
    with pytest.raises(ValueError, match=r"full; accepted by the product's prefill here: causal"):
        flash3.build(Problem(2, 17, 17, 64), Memory(device))


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("matrix", [Matrix(1, 1), Matrix(5, 300), Matrix(3, 256)], ids=str)
def test_softmax_matches_fp32(matrix, passes, device):
    built = softmax.build(matrix, Memory(device, PAD), passes, chunk=128)
    built.call()
    s, y = built.memory.tensors
    torch.testing.assert_close(y.float(), torch.softmax(s.float(), -1), atol=2.0**-11, rtol=2e-3)
    assert built.memory.untouched()
    assert built.memory.held == softmax.count(matrix, passes).held


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_softmax_of_large_and_of_hidden_scores(passes, device):
    """A safe softmax does not overflow; a row with nothing in it gives 0, not NaN."""
    memory = Memory(device)
    s, y = memory.new(1, 3, 300), memory.new(1, 3, 300)
    s.copy_(torch.linspace(-6e4, 6e4, 900).view(1, 3, 300))
    s[0, 1] = -math.inf
    s[0, 2, 100:] = -math.inf
    softmax.softmax(y, s, passes, math.log2(math.e), 128)
    want = torch.softmax(s[0].float(), -1).nan_to_num(0.0)
    torch.testing.assert_close(y[0].float(), want, atol=1e-3, rtol=1e-3)


def test_rmsnorm_matches_fp32(device):
    matrix = Matrix(5, 200)
    built = rmsnorm.build(matrix, Memory(device, PAD))
    x, residual, _, w = built.memory.tensors
    before = residual.clone()
    built.call()
    assert torch.equal(residual, (before.float() + x.float()).half())
    r = residual.float()
    want = w.float() * r / (r.square().mean(-1, keepdim=True) + rmsnorm.EPSILON).sqrt()
    torch.testing.assert_close(built.out.float(), want, atol=2e-3, rtol=2e-3)
    assert built.memory.untouched()
    assert built.error() < 2e-3


def test_a_wrong_result_is_an_error(device):
    built = flash2.build(Problem(1, 40, 40, 32), Memory(device))
    assert math.isnan(built.error())  # nothing was written yet
    built.call()
    built.out[0, 39] *= 1.1
    assert built.error() > 2e-3


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("queries=0; accepted: 1 or more", lambda: Problem(1, 0, 5)),
        ("dim=48; accepted: 16, 32, 64, 128", lambda: Problem(1, 5, 5, 48)),
        ("columns=0; accepted: 1 or more", lambda: Matrix(1, 0)),
        ("queries=17; accepted by split-KV: up to 16",
         lambda: split_kv.build(Problem(1, 17, 20), Memory("cpu"), 2)),
        ("splits=0; accepted: 1 or more",
         lambda: split_kv.build(Problem(1, 1, 20), Memory("cpu"), 0)),
        ("passes=4; accepted: 1, 2, 3",
         lambda: softmax.softmax(*(torch.ones(1, 2, 2),) * 2, 4, 1.0)),
        ("passes=1 for rows of 20000; accepted: rows of up to 16384",
         lambda: softmax.softmax(*(torch.ones(1, 1, 20000),) * 2, 1, 1.0)),
    ],
)  # fmt: skip
def test_what_is_not_taken_is_named(what, make):
    with pytest.raises(ValueError, match=what):
        make()


# What the formulas say.


@pytest.fixture
def asked(monkeypatch):
    """Bytes that programs load and store in the interpreter: elements whose mask is set."""
    total = [0]
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def add(pointers, mask):
        total[0] += int(np.sum(np.asarray(mask.data))) * (
            pointers.get_element_ty().primitive_bitwidth // 8
        )

    def counting_load(self, pointers, mask, *rest, **options):
        add(pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def counting_store(self, pointers, value, mask, *rest, **options):
        add(pointers, mask)
        return store(self, pointers, value, mask, *rest, **options)

    monkeypatch.setattr(builder, "create_masked_load", counting_load)
    monkeypatch.setattr(builder, "create_masked_store", counting_store)
    return total


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter can be asked")
@pytest.mark.parametrize("index", range(len(rungs(SMOKE, "cpu")) if INTERPRETED else 0))
def test_the_formula_is_what_the_programs_ask_for(index, asked):
    rung = rungs(SMOKE, "cpu")[index]
    built = rung.build(Memory("cpu"))
    asked[0] = 0
    built.call()
    if rung.name.startswith("FlashAttention-3"):
        # The product also reads its plan and block table, for every tile.
        assert rung.count().traffic <= asked[0] <= 1.05 * rung.count().traffic
    else:
        assert asked[0] == rung.count().traffic


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter can be asked")
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_formulas_hold_for_ragged_shapes(problem, name, asked):
    built = MODULES[name].build(problem, Memory("cpu"))
    built.call()
    found = MODULES[name].count(problem)
    assert asked[0] == found.traffic
    assert found.least <= found.traffic or problem.causal  # a mask may leave keys unread


def test_bytes_by_hand():
    """The closed forms of the docstrings, at sizes that tiles divide."""
    h, n, d = 3, 4096, 64
    square = Problem(h, n, n, d)
    assert naive.count(square).least == 2 * h * (4 * n * n + 4 * n * d)
    tiles = n // 128
    assert flash1.count(square).traffic == h * (
        4 * n * d + tiles * 2 * n * d + (2 * tiles - 1) * (4 * n * d + 8 * n)
    )
    assert flash2.count(square).traffic == h * (4 * n * d + 4 * n + tiles * 4 * n * d)
    assert flash2.count(square).least == h * (8 * n * d + 4 * n)
    s = 8
    one = Problem(h, 1, n, d)
    assert split_kv.count(one, s).traffic == h * (
        4 * n * d + s * 2 * d + 8 * s * (d + 2) + 2 * d + 4
    )
    assert softmax.count(Matrix(7, 300), 2).traffic == 2 * 7 * 300 * 3
    assert softmax.count(Matrix(7, 300), 3).least == 2 * 7 * 300 * 2
    norm = Matrix(7, 300)
    assert rmsnorm.count(norm).least == 2 * (4 * 7 * 300 + 300)
    assert rmsnorm.unfused_bytes(norm) / rmsnorm.count(norm).least == pytest.approx(1.25, rel=0.05)
    assert square.flops == 4 * d * h * n * n
    assert Problem(h, n, n, d, causal=True).flops == 4 * d * h * n * (n + 1) // 2
    # Rows past a program's registers take a pass more.
    long = Problem(1, 2, 20000, d)
    assert naive.count(long).least == long.score_bytes * 5 + long.io_bytes


def test_the_figures_that_people_quote():
    long = MEASURED.long
    assert (long.heads, long.queries, long.keys, long.dim) == (1, 65536, 65536, 64)
    assert long.score_bytes == 2 * 65536**2
    assert round(long.score_bytes / 1e9, 1) == 8.6
    assert round(flash2.count(long).held / 1e6) == 34
    assert naive.count(long).held == long.score_bytes + long.io_bytes
    # 2 B / D, from below as N grows; half of it for twice the head, or half the tile.
    ratios = [traffic_ratio(Problem(1, n, n, 64)) for n in (2048, 8192, 16384)]
    assert ratios == sorted(ratios)
    assert ratios[-1] == pytest.approx(4, rel=0.01)
    assert ratios[-1] < 4
    assert traffic_ratio(Problem(1, 16384, 16384, 128)) == pytest.approx(2, rel=0.02)
    half = flash2.count(Problem(1, 16384, 16384, 64), flash2.Tiles(block_m=64)).traffic
    least = naive.count(Problem(1, 16384, 16384, 64)).least
    assert least / half == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("shape", [(150, 150), (128, 512), (200, 70), (1, 300)])
@pytest.mark.parametrize("tiles", [flash2.Tiles(64, 32), flash2.Tiles(32, 64)], ids=str)
def test_skipped_tiles_are_those_behind_the_mask(shape, tiles, device):
    problem = Problem(2, *shape, 32, causal=True)
    m, n = tiles.block_m, tiles.block_n
    seen = {
        (row // m, key // n)
        for row in range(problem.queries)
        for key in range(problem.keys)
        # A tile's rows go on behind the end of the queries.
        if key <= row // m * m + m - 1 + problem.shift
    }
    assert problem.visited_tiles(m, n) == 2 * len(seen)
    assert flash2.counted_visits(problem, device, tiles) == 2 * len(seen)
    assert skipped_share(problem, tiles) == 1 - problem.visited_tiles(m, n) / (
        2 * math.ceil(problem.queries / m) * math.ceil(problem.keys / n)
    )


def test_a_long_causal_walk_skips_nearly_half():
    assert 0.49 < skipped_share(MEASURED.causal, flash2.Tiles()) < 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(13))
def test_rungs_replay_in_a_graph(index):
    """Launchers allocate nothing and read nothing back: a graph follows inputs that change."""
    rung = rungs(SMOKE, "cuda")[index]
    built = rung.build(Memory("cuda"))
    built.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built.call()
    first = built.memory.tensors[0]
    if not rung.name.startswith("FlashAttention-3"):  # its reference draws its inputs again
        first.mul_(-1)
    built.out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert built.error() < 2e-3


def test_the_chapter_states_what_the_formulas_give():
    text = " ".join((Path(__file__).parent.parent / "docs" / "ladder.md").read_text().split())
    long, full, one = MEASURED.long, MEASURED.full, MEASURED.one_query
    assert (long.keys, full.keys, one.keys, MEASURED.splits) == (65536, 8192, 65536, 32)
    naive_full, flash_full = naive.count(full), flash2.count(full)
    partials = 8 * MEASURED.splits * (one.dim + 2) / (4 * one.keys * one.dim)
    programs, _ = occupancy(90, 128, 255, 0)
    stated = [
        f"At 65,536 tokens it takes {long.score_bytes / 1e9:.1f} GB a head",
        f"take {flash2.count(long).held / 1e6:.0f} MB;",
        f"32 heads would need {32 * long.score_bytes / 1e9:.0f} GB",
        f"{flash1.count(full).traffic / flash_full.traffic:.1f} times the traffic of the next rung",
        f"{traffic_ratio(full):.2f} at 8,192 tokens",
        f"the ratio is {naive_full.traffic / flash_full.traffic:.1f}. Counted at DRAM alike",
        f"it is {naive_full.least / flash_full.least:.0f}. One idea",
        f"{100 * skipped_share(MEASURED.causal, flash2.Tiles()):.1f} % are never visited",
        f"are {100 * partials:.1f} % of the traffic",
        f"{round(full.flops / naive_full.least)} at `D = 64`",
        f"two such programs fit into an SM: {programs * 4} warps of {LIMITS[90].warps}",
    ]
    assert programs == 2
    assert [words for words in stated if words not in text] == []
