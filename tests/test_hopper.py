"""The Gluon prefill for Hopper: compiled everywhere, run where there is such a GPU."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import Case, check, make_attention, make_batch, plan_batch

from tilewise.kernels.launch import KvCache

TESTS = Path(__file__).parent
OLD_TRITON = Path(sys.prefix) / "triton36"
BF16, FP16 = torch.bfloat16, torch.float16

VARIANTS = [
    {"head_dim": 128, "page_size": 64, "group_size": 4},
    {"head_dim": 64, "page_size": 128, "group_size": 8, "lse": True},
    {"head_dim": 128, "page_size": 256, "group_size": 64, "dtype": "fp16"},
]
OLD_VARIANTS = VARIANTS[:1]


def compiled(variants, old_triton=False):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONSAFEPATH"] = "1"
    # Before, not instead of: the path may be what leads to this checkout.
    path = [str(OLD_TRITON) if old_triton else None, str(TESTS), os.environ.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, str(TESTS / "aot_gluon.py"), *map(json.dumps, variants)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check_budget(rows):
    for row in rows:
        assert row["shared_bytes"] <= 227 * 1024, row
        # Spills are real (the three partitions share 168 registers in the report) but may stand
        # outside the loops only.
        assert row["spill_bytes"] <= 1200, row
        assert row["wgmma"] >= 64, row
        assert row["tma"] >= 6, row
        assert row["setmaxnreg"] > 0, row
        # Two loops, with and without masks, in each of the two consumers.
        loops = [loop for loop in row["loops"] if loop["MUFU.EX2"] and loop["instructions"] < 700]
        assert len(loops) == 4, row
        for loop in loops:
            assert loop["LDL"] == loop["STL"] == loop["PRMT"] == 0, row
        assert min(loop["instructions"] for loop in loops) <= 480, row


def test_variants_compile_with_clean_main_loops():
    rows = compiled(VARIANTS)
    assert len(rows) == len(VARIANTS)
    check_budget(rows)


def test_compiles_on_triton_36():
    if not OLD_TRITON.is_dir():
        pytest.skip(f"Triton 3.6 is not set up ({OLD_TRITON.name} in the environment)")
    rows = compiled(OLD_VARIANTS, old_triton=True)
    assert rows[0]["shared_bytes"] <= 227 * 1024
    assert rows[0]["wgmma"] >= 64


GPU_CASES = [
    Case(((128, 0),), 32, 8, 128, dtype=BF16),
    Case(((17, 0), (40, 100), (0, 0), (300, 64)), 32, 8, 128, dtype=BF16, pad_requests=2),
    Case(((2000, 0), (129, 5000), (64, 8000), (1999, 1)), 32, 8, 128, dtype=BF16),
    Case(((2000, 0), (129, 5000), (64, 8000), (1999, 1)), 32, 8, 128, dtype=FP16, layout="hnd"),
    Case(((500, 3000), (33, 0)), 32, 8, 128, dtype=BF16, layout="cross_layer", page_size=128),
    Case(((500, 3000), (33, 0)), 64, 8, 64, dtype=BF16, page_size=256),
    Case(((500, 3000), (33, 0)), 8, 8, 128, dtype=BF16),
    Case(((500, 3000), (33, 0)), 64, 1, 64, dtype=BF16),
    Case(((200, -50), (77, 0)), 32, 8, 128, dtype=BF16),
    Case(tuple((17 + 29 * i % 200, 131 * i % 3000) for i in range(100)), 32, 8, 128, dtype=BF16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_matches_reference(case):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9.0")
    from tilewise.kernels.hopper_prefill import hopper_prefill_attention, hopper_prefill_supported

    group = case.num_q_heads // case.num_kv_heads
    assert hopper_prefill_supported(group, case.head_dim, case.page_size) is None
    batch = make_batch(case, "cuda")
    config = make_attention(case, "cuda").config
    config = dataclasses.replace(config, prefill=dataclasses.replace(config.prefill, block_m=128))
    attn = make_attention(case, "cuda", config=config)
    plan = plan_batch(attn, batch)
    counter = torch.zeros(2, dtype=torch.int32, device="cuda")
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    outs = []
    for _ in range(3):  # launches back to back: the counter must come back to zero
        out = torch.full_like(batch.q, 7.0)
        lse = torch.full(out.shape[:2], 7.0, device="cuda")
        hopper_prefill_attention(
            out, lse, batch.q, KvCache(batch.k_cache, batch.v_cache), plan.query_start_loc,
            plan.seq_lens, plan.block_table, attn._header, attn._tile_req, attn._tile_token,
            counter, case.head_dim**-0.5, num_programs=programs,
        )  # fmt: skip
        check(batch, out, lse)
        assert (out[batch.num_tokens :] == 7.0).all()
        assert not counter.any()
        outs.append(out)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_layers_it_cannot_serve_are_named():
    from tilewise.kernels.hopper_prefill import hopper_prefill_supported

    assert hopper_prefill_supported(4, 128, 64) is None
    assert "group size 3" in hopper_prefill_supported(3, 128, 64)
    assert "head_dim 96" in hopper_prefill_supported(4, 96, 64)
    assert "page_size 16" in hopper_prefill_supported(4, 128, 16)
