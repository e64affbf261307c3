"""The cache write: every slot gets its row, and no other byte changes."""

import pytest
import torch
from cases import Case, empty_cache

from tilewise.kernels.cache_write import write_kv_cache


def caches(head_dim, layout, device, dtype=torch.bfloat16, pages=6, page_size=16, heads=3):
    case = Case(
        (), heads, heads, head_dim, page_size=page_size, dtype=dtype, layout=layout, label="write"
    )
    kv = empty_cache(case, pages, str(device))
    return kv, kv[..., :head_dim], kv[..., head_dim:]


@pytest.mark.parametrize("head_dim", [40, 64, 80, 96])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "cross_layer"])
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
def test_rows_land_in_their_slots_and_nowhere_else(head_dim, layout, slot_dtype, device):
    kv, k_cache, v_cache = caches(head_dim, layout, device)
    tokens = 37
    gen = torch.Generator().manual_seed(head_dim)
    slots = torch.randperm(6 * 16, generator=gen)[:tokens]
    slots[[3, 20, 36]] = -1
    fused = torch.randn(tokens + 5, 9, head_dim, generator=gen).to(device, torch.bfloat16)
    key, value = fused[:, 2:5], fused[:, 5:8]  # slices of a fused QKV
    # The whole buffer behind the views, so that bytes between them are watched too.
    memory = torch.as_strided(kv, (kv.untyped_storage().nbytes() // 2,), (1,), 0)
    assert torch.isnan(memory).all()
    write_kv_cache(k_cache, v_cache, key, value, slots.to(device, slot_dtype))
    written = 0
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, row = divmod(slot, 16)
        assert torch.equal(k_cache[page, :, row], key[token])
        assert torch.equal(v_cache[page, :, row], value[token])
        written += 2 * 3 * head_dim
    assert (~torch.isnan(memory)).sum().item() == written


def test_padding_rows_beyond_the_slots_are_not_read(device):
    _, k_cache, v_cache = caches(64, "nhd", device)
    key = torch.full((8, 3, 64), float("nan"), dtype=torch.bfloat16, device=device)
    key[:2] = 1.0
    write_kv_cache(k_cache, v_cache, key, key, torch.tensor([5, 17], device=device))
    assert (~torch.isnan(k_cache)).sum().item() == 2 * 3 * 64
    write_kv_cache(k_cache, v_cache, key, key, torch.zeros(0, dtype=torch.int64, device=device))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda k, s: (k[:3], k, s), r"key is .*\(3, 3, 64\).*\[>= 4, 3, 64\]"),
        (lambda k, s: (k, k[:, :2], s), r"value is .*\(4, 2, 64\)"),
        (lambda k, s: (k.float(), k, s), r"key is torch\.float32"),
        (lambda k, s: (k.transpose(1, 2).contiguous().transpose(1, 2), k, s), "unit last stride"),
        (lambda k, s: (k, k, s.repeat(2)[::2]), "slot_mapping has shape"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, named, device):
    _, k_cache, v_cache = caches(64, "nhd", device)
    key = torch.ones((4, 3, 64), dtype=torch.bfloat16, device=device)
    slots = torch.arange(4, device=device)
    with pytest.raises(ValueError, match=named):
        write_kv_cache(k_cache, v_cache, *change(key, slots))


def test_caches_that_do_not_fit_are_named(device):
    _, k_cache, v_cache = caches(64, "nhd", device)
    key = torch.ones((4, 3, 64), dtype=torch.bfloat16, device=device)
    slots = torch.arange(4, device=device)
    with pytest.raises(ValueError, match="v_cache is"):
        write_kv_cache(k_cache, v_cache[:, :, :8], key, key, slots)
    with pytest.raises(ValueError, match="unit last stride"):
        write_kv_cache(k_cache[..., ::2], v_cache[..., ::2], key, key, slots)
