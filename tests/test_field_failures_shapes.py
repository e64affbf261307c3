"""Field failures H and I: heads, head sizes, pages, layouts, strides (tests/README.md)."""

import dataclasses
import itertools

import pytest
import torch
from cases import Case, check, make_attention, make_batch, plan_batch, run_and_check
from field_cases import IGNORE_POISON, KERNEL_IDS, KERNELS, attend, with_config

from tilewise import policy
from tilewise.errors import PlanMismatch

pytestmark = IGNORE_POISON

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")


# -- H: head counts, head sizes, page sizes -------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(5, 1), (10, 2), (12, 2), (14, 2), (24, 2), (48, 1), (71, 1), (128, 1)]
)
def test_h2_any_ratio_of_heads(heads, kv_heads, device):
    run_and_check(Case(((20, 30), (1, 100), (4, 60)), heads, kv_heads, head_dim=16), device)


@pytest.mark.parametrize("query_len", [1, 2, 4, 16])
def test_h3_verification_of_a_ratio_that_is_no_power_of_two(query_len, device):
    """Six heads and four tokens are 24 rows of a tile of 32."""
    case = Case(((query_len, 90), (1, 20)), 12, 2, head_dim=16, decode_query_len=query_len)
    run_and_check(case, device)


def test_h5_each_group_reads_its_own_keys(device):
    """Values name their KV head: head h of the output belongs to KV head h // ratio."""
    case = Case(((1, 70), (20, 4)), 12, 3, head_dim=16)
    batch = make_batch(case, device)
    for head in range(3):
        values = batch.v_cache[:, head]
        values[~torch.isnan(values)] = float(head)
    out, _ = attend(batch, device)
    expected = (torch.arange(12, device=device) // 4).float()
    torch.testing.assert_close(out, expected[None, :, None].expand_as(out), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 24, 72, 80, 88, 96, 112, 160, 192, 256])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_h6_head_sizes_between_powers_of_two(head_dim, dtype, device):
    """Lanes beyond the head are another row's: they neither count nor are written."""
    case = Case(((20, 30), (1, 100)), 3, 3, head_dim, dtype=dtype, layout="hnd")
    run_and_check(case, device)


@pytest.mark.parametrize("page_size", [32, 48, 528, 544, 784, 1056])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_h11_pages_of_hybrid_models(page_size, head_dim, device):
    case = Case(((20, 1000), (1, 1100), (17, 0)), 2, 1, head_dim, page_size=page_size)
    run_and_check(case, device)


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("page_size", [16, 48, 544, 784, 1056, 2**15])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_h12_tiles_do_not_grow_with_pages(arch, page_size, head_dim):
    """And those of odd pages are powers of two that fit the device."""
    shared = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}[arch] * 1024
    device = policy.Device(arch, 100, shared)
    geometry = policy.Geometry(32, 8, head_dim, page_size, 2)
    config = policy.choose(geometry, device)
    for tiles in (config.prefill, config.decode):
        assert tiles.block_n in (16, 32, 64)
        assert policy.shared_memory(tiles, geometry) <= shared
        assert not tiles.use_tma or page_size % tiles.block_n == 0


@pytest.mark.parametrize("width", [5, 7, 13])
def test_h15_odd_tables(width, device):
    """Rows of a block table at odd strides and addresses."""
    case = Case(((1, 70), (20, 4), (2, 40)), page_size=16)
    batch = make_batch(case, device)
    used = batch.block_table.shape[1]
    table = torch.full((4, width + used), 2_147_480_000, dtype=torch.int32, device=device)
    table[1:, width:] = batch.block_table
    batch.block_table = table[1:, width:]
    check(batch, *attend(batch, device))


@pytest.mark.parametrize("query_len", range(1, 18))
def test_h16_every_short_query_is_bottom_right(query_len, device):
    """Each row's log-sum-exp counts its keys: the last query sees all of them."""
    case = Case(((query_len, 64 - query_len),), 2, 1, head_dim=16, pad_tokens=0)
    batch = make_batch(case, device)
    batch.q.zero_()
    _, lse = attend(batch, device)
    keys = torch.arange(65 - query_len, 65, device=device).log()
    torch.testing.assert_close(lse, keys[:, None].expand_as(lse), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [80, 96, 192])
def test_h8_scratch_holds_padded_heads(head_dim, device):
    """Pieces are as wide as the padded head; the scratch around them is NaN."""
    case = Case(((1, 900), (2, 300)), head_dim=head_dim, num_q_heads=6)
    run_and_check(case, device, config=with_config(case, device, num_workers=13, num_sms=132))


# -- I: layouts and strides -----------------------------------------------------------------------


def test_i8_layouts_that_changed_are_seen(device):
    """What was checked for one layout is not believed of another."""
    case = Case(((1, 70), (20, 4)), dtype=FP16)
    attn = make_attention(case, device)
    layouts = ("nhd", "hnd", "cross_layer", "nhd")
    for layout, fused in itertools.product(layouts, (False, True)):
        batch = make_batch(dataclasses.replace(case, layout=layout), device)
        plan_batch(attn, batch)
        q = batch.q
        if fused:
            wide = torch.full((q.shape[0], 8, q.shape[2]), NAN, dtype=FP16, device=device)
            wide[:, 2:6] = q
            q = wide[:, 2:6]
        check(batch, attn.run(q, batch.kv_cache))
    with pytest.raises(PlanMismatch, match=r"q is torch\.float32"):
        attn.run(batch.q.float(), batch.kv_cache)


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("requests", KERNELS, ids=KERNEL_IDS)
def test_i5_keys_and_values_with_strides_of_their_own(use_tma, requests, device):
    """Every axis of the values' cache is laid out otherwise than the keys'."""
    case = Case(requests, dtype=FP16)
    batch = make_batch(case, device)
    k = torch.full((*batch.k_cache.shape[:3], 72), NAN, dtype=FP16, device=device)[..., :64]
    v = torch.full((64, 2, k.shape[0], 80), NAN, dtype=FP16, device=device).permute(2, 1, 0, 3)
    k.copy_(batch.k_cache)
    v = v[..., :64].copy_(batch.v_cache)
    assert all(a != b for a, b in zip(k.stride()[:3], v.stride()[:3], strict=True))
    tiles = {"use_tma": use_tma}
    attn = make_attention(
        case, device, config=with_config(case, device, prefill=tiles, decode=tiles)
    )
    plan_batch(attn, batch)
    check(batch, attn.run(batch.q, (k, v)))
