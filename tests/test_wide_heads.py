"""Heads of 512, as of Gemma 4's global layers: both kernels, every feature, all page sizes."""

import dataclasses

import pytest
import torch
from cases import Case, make_attention, make_batch, plan_batch, run_and_check

from tilewise import policy, support
from tilewise.arch import ARCHITECTURES
from tilewise.errors import UnsupportedConfig

# numpy's remarks on poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Decodes, verification of drafts, prompts around a tile of rows, and a request of no tokens.
REQUESTS = ((1, 150), (1, 0), (4, 64), (33, 70), (0, 0), (17, 15))
SPANS = ((), (), (), ((75, 99),), (), ((20, 40),))


@pytest.mark.parametrize(
    "case",
    [
        Case(REQUESTS, 8, 2, 512, dtype=BF16),
        Case(REQUESTS, 8, 1, 512, page_size=16, dtype=FP16, layout="hnd", pad_requests=2),
        Case(REQUESTS, 3, 3, 512, page_size=48, dtype=BF16, layout="cross_layer"),
        Case(REQUESTS, 2, 1, 512, dtype=FP32),
        Case(((1, 500), (20, 520)), 4, 2, 512, page_size=528, dtype=BF16),
        Case(((18, 3), (2, 90)), 32, 1, 512, dtype=FP16),  # a tile for each token
        Case(REQUESTS, 4, 2, 512, window=40, softcap=5.0, sinks=1.0, dtype=BF16),
        Case(REQUESTS, 4, 2, 512, alibi="linear", dtype=FP16),
        Case(REQUESTS, 4, 2, 512, spans=SPANS, window=16, dtype=BF16),
        Case(REQUESTS, 4, 2, 512, causal=False, dtype=BF16),
        Case(REQUESTS, 8, 2, 512, dtype=BF16, kv_dtype=torch.float8_e4m3fn, kv_scales="head"),
        Case(REQUESTS, 4, 2, 512, page_size=16, dtype=FP16, kv_dtype=torch.float8_e5m2),
    ],
    ids=str,
)
def test_matches_reference(case, device):
    run_and_check(case, device)


@pytest.mark.parametrize("num_workers", [1, 3, 7])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_any_number_of_workers(num_workers, batch_invariant, device):
    case = Case(((1, 300), (3, 120), (1, 10)), 4, 2, 512, dtype=BF16)
    config = dataclasses.replace(make_attention(case, device).config, num_workers=num_workers)
    run_and_check(case, device, config=config, batch_invariant=batch_invariant)


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
@pytest.mark.parametrize("use_tma", [False, True])
def test_pointer_and_copy_engine_paths_agree(kernel, use_tma, device):
    case = Case(((20, 50), (1, 100), (16, 3)), 4, 2, 512, dtype=FP16, layout="cross_layer")
    config = make_attention(case, device).config
    tiles = dataclasses.replace(getattr(config, kernel), use_tma=use_tma)
    run_and_check(case, device, config=dataclasses.replace(config, **{kernel: tiles}))


def test_nothing_past_the_last_key_changes_a_bit(device):
    case = Case(((1, 77), (20, 30)), 4, 2, 512, dtype=BF16)
    outs = []
    for garbage in (float("nan"), 3.0, float("inf")):
        batch = make_batch(case, device)
        batch.kv_cache[torch.isnan(batch.kv_cache)] = garbage
        attn = make_attention(case, device)
        plan_batch(attn, batch)
        outs.append(attn.run(batch.q, batch.kv_cache)[: batch.num_tokens])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kv_size", [2, 1])
@pytest.mark.parametrize("page_size", [16, 48, 64, 528])
@pytest.mark.parametrize("group", [1, 5, 32])
def test_tiles_fit_everywhere(arch, kv_size, page_size, group):
    geometry = policy.Geometry(2 * group, 2, 512, page_size, 2, kv_size)
    device = ARCHITECTURES[arch]
    config = policy.choose(geometry, device, decode_query_len=4)
    assert config.hopper_prefill is None
    assert config.num_workers == device.num_sms
    for tiles in (config.prefill, config.decode):
        assert tiles.block_d == 512
        assert policy.shared_memory(tiles, geometry) <= device.shared_memory
        assert not tiles.use_tma or page_size % tiles.block_n == 0
    assert config.prefill.block_m >= group
    assert config.prefill_block_q >= 1
    assert policy.why_not_hopper(geometry, ARCHITECTURES[90]) is not None


@pytest.mark.parametrize("head_dim", [264, 320, 504, 520, 1024])
def test_head_sizes_between_are_named(head_dim):
    with pytest.raises(UnsupportedConfig, match=rf"head_dim={head_dim}; .* to 256, and 512"):
        policy.Geometry(8, 2, head_dim, 64, 2)


def test_more_heads_than_rows_of_a_tile_are_named():
    assert policy.Geometry(64, 2, 512, 64, 2).group_size == 32
    with pytest.raises(UnsupportedConfig, match="= 33; accepted: 1 to 32 with head_dim=512"):
        policy.Geometry(33, 1, 512, 64, 2)
    wide = support.Request(head_size=512, group_size=33)
    assert [reason.key for reason in support.check(wide)] == ["other_group_size"]
    assert not support.check(support.Request(head_size=512, group_size=32))
    assert not support.check(support.Request(head_size=256, group_size=33))
