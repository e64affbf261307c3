"""fp8 caches on the GPU: long batches, CUDA graphs, and both ways to convert."""

import dataclasses

import pytest
import torch
from cases import (
    Case,
    check,
    convert_by_arithmetic,
    make_attention,
    make_batch,
    plan_batch,
    run_and_check,
)
from test_fp8 import BF16, E4M3, E5M2, FP8, FP16, FP32

pytestmark = pytest.mark.gpu

LONG = ((1, 8191), (1, 4096), (1, 1), (300, 5000), (16, 3000), (0, 0), (2000, 0))
GPU_CASES = [
    *(Case(LONG, 32, 8, d, dtype=t, **FP8) for d in (64, 72, 96, 128, 256) for t in (BF16, FP16)),
    *(Case(LONG, 32, 8, 128, page_size=p, dtype=BF16, **FP8) for p in (16, 32, 48, 128, 528)),
    *(Case(LONG, *heads, 128, dtype=BF16, **FP8) for heads in ((32, 1), (8, 8), (28, 4), (71, 1))),
    *(Case(LONG, 32, 8, 128, dtype=BF16, layout=x, **FP8) for x in ("hnd", "cross_layer")),
    Case(LONG, 32, 8, 128, dtype=BF16, kv_dtype=E5M2, kv_scales="head"),
    Case(LONG, 32, 8, 128, dtype=BF16, kv_dtype=E4M3, kv_scales="head"),
    Case(LONG, 32, 8, 128, dtype=BF16, kv_dtype=E4M3),
    Case(LONG, 8, 2, 128, dtype=FP32, **FP8),
    Case(LONG, 64, 8, 64, dtype=BF16, window=128, sinks=1.0, **FP8),
    Case(LONG, 16, 4, 256, dtype=BF16, window=1000, softcap=50.0, **FP8),
    Case(LONG, 32, 8, 128, dtype=BF16, alibi="linear", **FP8),
    Case(tuple((1, 13 * i % 900) for i in range(300)), 32, 8, 128, dtype=BF16, **FP8),
    Case(tuple((1 + i % 4, 97 * i % 5000) for i in range(64)), 32, 8, 128, dtype=BF16,
         decode_query_len=4, **FP8),
    Case(((1, 131071),), 32, 8, 128, dtype=BF16, **FP8),
]  # fmt: skip


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_matches_reference(case):
    run_and_check(case, "cuda")


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_instruction_and_arithmetic_give_the_same_bits(kv_dtype, page_size):
    """What older GPUs compute, computed here."""
    case = Case(LONG, 32, 8, 128, page_size, BF16, kv_dtype=kv_dtype, kv_scales="head")
    batch = make_batch(case, "cuda")
    attn = make_attention(case, "cuda")
    # Older GPUs have the plain kernels alone.
    attn.config = dataclasses.replace(attn.config, hopper_prefill=None)
    plan_batch(attn, batch)
    out = attn.run(batch.q, batch.kv_cache, **batch.features)
    convert_by_arithmetic(attn)
    again = attn.run(batch.q, batch.kv_cache, **batch.features)
    assert torch.equal(out[: batch.num_tokens], again[: batch.num_tokens])


def test_graphs_replay_with_other_scales():
    """The scales' values are read by the replay, not kept by the capture."""
    case = Case(((1, 700), (40, 100), (5, 64)), 32, 8, 128, dtype=BF16, kv_dtype=E4M3,
                kv_scales="head")  # fmt: skip
    batch = make_batch(case, "cuda")
    attn = make_attention(case, "cuda")
    plan_batch(attn, batch)
    out = torch.empty_like(batch.q)
    attn.run(batch.q, batch.kv_cache, out=out, **batch.features)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(batch.q, batch.kv_cache, out=out, **batch.features)
    for factor in (1.0, 1.7, 0.4):
        batch.features["k_scale"] *= factor
        batch.features["v_scale"] *= 2 * factor
        out.fill_(7.0)
        graph.replay()
        check(batch, out)
