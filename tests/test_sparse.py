"""Block-sparse rows: the blocks that are listed are read, and no others; elements inside them."""

import dataclasses
import re

import pytest
import torch
from cases import poison_scratch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import assert_matches

from tilewise import BlockSparseAttention, plan_rule, policy
from tilewise.errors import PlanMismatch, UnsupportedConfig
from tilewise.masks import flatten_masks
from tilewise.sparse import to_blocks

# numpy's remarks on poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A block-sparse problem; ``listed`` are the block columns of each row of blocks."""

    num_rows: int
    num_cols: int
    block: tuple[int, int]
    listed: tuple[tuple[int, ...], ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: torch.dtype = FP32

    def __str__(self):
        shape = f"{self.num_rows}x{self.num_cols}by{self.block[0]}x{self.block[1]}"
        return f"{shape}-{self.heads[0]}-{self.heads[1]}-{self.head_dim}-{self.dtype}"[:-6]


def listed(num_rows, num_cols, block, density, seed=0):
    """Random columns in any order; the second row of blocks has none."""
    gen = torch.Generator().manual_seed(seed)
    rows = []
    for r in range(-(-num_rows // block[0])):
        order = torch.randperm(num_cols // block[1], generator=gen)
        count = 0 if r == 1 else max(1, int(len(order) * density)) if len(order) else 0
        rows.append(tuple(order[:count].tolist()))
    return tuple(rows)


def matrix(num_rows, num_cols, block, density=0.4, **changes):
    return Matrix(num_rows, num_cols, block, listed(num_rows, num_cols, block, density), **changes)


MATRICES = [
    matrix(64, 512, (16, 64)),  # split KV, whole tiles
    matrix(96, 384, (32, 64), dtype=BF16, heads=(8, 1)),  # prefill
    matrix(75, 256, (32, 32), dtype=FP16, heads=(6, 2), head_dim=128),  # a short last row
    matrix(9, 96, (1, 1), heads=(3, 1), head_dim=16),  # single elements
    matrix(12, 120, (4, 24), dtype=BF16, heads=(9, 3), head_dim=96),  # blocks that divide no tile
    matrix(20, 700, (7, 100), dtype=FP16, heads=(2, 2), head_dim=80),
    matrix(260, 256, (128, 128), dtype=BF16, heads=(5, 5)),  # large blocks, and a short last row
]


def tensors_of(m: Matrix, device):
    ints = {"dtype": torch.int32, "device": device}
    indptr = torch.tensor([0, *torch.tensor([len(x) for x in m.listed]).cumsum(0)], **ints)
    indices = torch.tensor([c for row in m.listed for c in row], **ints)
    return indptr, indices


def inputs_of(m: Matrix, device, seed=0):
    """Queries, keys and values; keys in blocks that no row lists, and all padding, are NaN."""
    gen = torch.Generator().manual_seed(seed)
    columns = m.block[1]
    q = torch.randn(m.num_rows + 3, m.heads[0], m.head_dim, generator=gen)
    q[m.num_rows :] = float("nan")
    k, v = (torch.randn(m.num_cols + 2, m.heads[1], m.head_dim, generator=gen) for _ in range(2))
    used = {c for row in m.listed for c in row}
    for c in range(m.num_cols // columns):
        if c not in used:
            k[c * columns : (c + 1) * columns] = float("nan")
            v[c * columns : (c + 1) * columns] = float("nan")
    k[m.num_cols :] = float("nan")
    v[m.num_cols :] = float("nan")
    return [x.to(device=device, dtype=m.dtype) for x in (q, k, v)]


def make_sparse(m: Matrix, device, **options):
    rows = len(m.listed)
    attn = BlockSparseAttention(
        *m.heads, m.head_dim, block_size=m.block, dtype=m.dtype, max_block_rows=rows + 2,
        device=device, **options,
    )  # fmt: skip
    poison_scratch(attn._attn)
    return attn


def check_rows(m: Matrix, out, lse, q, k, v, mask=None):
    """Each row of blocks against the dense result over the keys that it lists, in its order."""
    rows, columns = m.block
    before = 0
    for r, blocks in enumerate(m.listed):
        here = slice(r * rows, min((r + 1) * rows, m.num_rows))
        tokens = here.stop - here.start
        keys = [torch.arange(c * columns, (c + 1) * columns) for c in blocks]
        keys = torch.cat(keys) if keys else torch.zeros(0, dtype=torch.long)
        visible = torch.ones(tokens, len(keys), dtype=torch.bool)
        if mask is not None:
            own = mask[before : before + len(blocks), :tokens]  # [blocks, tokens, columns]
            visible = own.transpose(0, 1).reshape(tokens, len(keys))
        before += len(blocks)
        keys, visible = keys.to(q.device), visible.to(q.device)
        assert_matches(out[here], lse[here], q[here], k[keys], v[keys], visible, f"row {r} of {m}")
    assert (out[m.num_rows :] == 7.0).all(), "rows outside the matrix were written"


def run_sparse(m: Matrix, attn, device, mask=None, given=None):
    """``mask`` is the truth [blocks, rows, columns]; ``given`` is what ``plan`` gets of it."""
    indptr, indices = tensors_of(m, device)
    given = mask if given is None else given
    given = None if given is None else given.to(device)
    attn.plan(indptr, indices, num_rows=m.num_rows, num_cols=m.num_cols, mask=given)
    q, k, v = inputs_of(m, device)
    out = torch.full_like(q, 7.0)
    out, lse = attn.run(q, k, v, out=out, return_lse=True)
    check_rows(m, out, lse, q, k, v, mask)
    assert not attn._attn._buffers.arrivals.any()
    return out


def element_mask(m: Matrix, seed=0):
    gen = torch.Generator().manual_seed(seed)
    mask = torch.rand(sum(map(len, m.listed)), *m.block, generator=gen) < 0.5
    mask[:, 0] = False  # the first query of every row of blocks sees nothing
    return mask


def packed(m: Matrix, mask):
    """FlashInfer's form: for each row of blocks its queries by its blocks' columns, in bits."""
    rows, columns = m.block
    before, flat = 0, []
    for r, blocks in enumerate(m.listed):
        tokens = min(rows, m.num_rows - r * rows)
        own = mask[before : before + len(blocks), :tokens].transpose(0, 1)
        flat.append(own.reshape(tokens, len(blocks) * columns))
        before += len(blocks)
    return flatten_masks(flat, packed=True)


@pytest.mark.parametrize("m", MATRICES, ids=str)
def test_blocks(m, device):
    run_sparse(m, make_sparse(m, device), device)


@pytest.mark.parametrize("form", ["blocks", "packed"])
@pytest.mark.parametrize("m", MATRICES, ids=str)
def test_elements_of_blocks(m, form, device):
    mask = element_mask(m)
    given = packed(m, mask) if form == "packed" else mask
    run_sparse(m, make_sparse(m, device), device, mask, given)


@pytest.mark.parametrize("block", [(16, 64), (32, 64), (4, 8)])
def test_every_block_is_dense_attention(block, device):
    m = matrix(32, 128, block, density=1.0)
    m = dataclasses.replace(m, listed=tuple(tuple(range(128 // block[1])) for _ in m.listed))
    attn = make_sparse(m, device)
    out = run_sparse(m, attn, device)
    q, k, v = inputs_of(m, device)
    _, lse = attn.run(q, k, v, return_lse=True)
    everything = torch.ones(32, 128, dtype=torch.bool, device=device)
    assert_matches(out[:32], lse[:32], q[:32], k[:128], v[:128], everything)


@pytest.mark.parametrize("block", [(16, 32), (32, 16)])
def test_a_dense_mask_in_blocks(block, device):
    """A mask with empty blocks costs the others alone, and gives what it says."""
    gen = torch.Generator().manual_seed(0)
    rows, columns = block
    dense = torch.rand(75, 192, generator=gen) < 0.3
    empty = torch.rand(-(-75 // rows), 192 // columns, generator=gen) < 0.6
    dense &= ~empty.repeat_interleave(rows, 0)[:75].repeat_interleave(columns, 1)
    indptr, indices, elements = to_blocks(dense.to(device), block)
    assert len(indices) == int((~empty).sum()) == indptr[-1]
    m = Matrix(75, 192, block, ((),) * len(empty))
    attn = make_sparse(m, device)
    attn.plan(indptr, indices, num_rows=75, num_cols=192, mask=elements)
    walked = attn._attn._plan.seq_lens
    assert (walked.cpu() == columns * (~empty).sum(1)).all()
    q, k, v = (
        torch.randn(n, h, 64, generator=gen).to(device) for n, h in ((75, 4), (192, 2), (192, 2))
    )
    out, lse = attn.run(q, k, v, return_lse=True)
    assert_matches(out, lse, q, k, v, dense.to(device))
    with pytest.raises(PlanMismatch, match=r"\(75, 192\); accepted: torch.bool .*multiple of 50"):
        to_blocks(dense, (16, 50))


def work_of(attn):
    """Prefill tiles and units of decode of the last plan, from the device."""
    tiles, _, units = attn._attn._buffers.header.tolist()[:3]
    return tiles, units


def test_decode_work_is_that_of_the_listed_blocks(device):
    """Units count the key tiles of blocks that are there, however wide the matrix is."""
    block, rows = (16, 64), 8
    counts = [1, 0, 5, 2, 9, 1, 1, 3]
    seen = []
    for num_cols in (1024, 64 * 1024):
        blocks = tuple(tuple(range(n)) for n in counts)
        m = Matrix(16 * rows, num_cols, block, blocks)
        attn = make_sparse(m, device)
        attn.plan(*tensors_of(m, device), num_rows=m.num_rows, num_cols=num_cols)
        seen.append(work_of(attn))
    config = attn.config
    units = sum(plan_rule.decode_units(16, n * 64, config) for n in counts)
    overhead = sum(plan_rule.decode_items(16, config) for _ in counts) * config.item_overhead
    assert seen == [(0, units)] * 2
    # Twice the blocks are twice the key tiles; of a row of none, one.
    doubled = sum(plan_rule.decode_units(16, 2 * n * 64, config) for n in counts)
    empty = plan_rule.decode_items(16, config)
    assert doubled - overhead - empty == 2 * (units - overhead - empty)


def test_prefill_tiles_are_those_of_the_rows_of_blocks(device):
    """A tile of queries lies in one row of blocks and walks that row's blocks alone."""
    m = matrix(256, 4096, (64, 64), density=0.05)
    attn = make_sparse(m, device)
    attn.plan(*tensors_of(m, device), num_rows=256, num_cols=4096)
    tiles, units = work_of(attn)
    assert tiles == 4 * policy.cdiv(64, attn.config.prefill_block_q)
    assert units == 0
    walked = attn._attn._plan.seq_lens.tolist()
    assert walked == [64 * len(blocks) for blocks in m.listed]


@pytest.mark.parametrize("num_workers", [1, 3, 13])
def test_any_number_of_workers_gives_the_same_result(num_workers, device):
    m = MATRICES[0]
    config = dataclasses.replace(make_sparse(m, device).config, num_workers=num_workers)
    run_sparse(m, make_sparse(m, device, config=config), device, element_mask(m))


def test_batch_invariant_rows(device):
    """A row of blocks, alone and among others: the same bits."""
    m = matrix(48, 2048, (16, 64), density=0.8)
    attn = make_sparse(m, device, batch_invariant=True)
    out = run_sparse(m, attn, device)
    q, k, v = inputs_of(m, device)
    alone = dataclasses.replace(m, num_rows=16, listed=m.listed[:1])
    attn.plan(*tensors_of(alone, device), num_rows=16, num_cols=2048)
    assert torch.equal(attn.run(q, k, v)[:16], out[:16])


def test_no_rows_and_no_keys(device):
    m = matrix(32, 128, (16, 64))
    attn = make_sparse(m, device)
    q, k, v = inputs_of(m, device)
    ints = {"dtype": torch.int32, "device": device}
    attn.plan(torch.zeros(1, **ints), torch.zeros(0, **ints), num_rows=0, num_cols=128)
    out = torch.full_like(q, 7.0)
    attn.run(q, k, v, out=out)
    assert (out == 7.0).all()
    for num_cols in (0, 128):
        attn.plan(torch.zeros(3, **ints), torch.zeros(0, **ints), num_rows=32, num_cols=num_cols)
        out, lse = attn.run(q, k[:num_cols], v[:num_cols], out=out, return_lse=True)
        assert (out[:32] == 0).all()
        assert (lse[:32] == float("-inf")).all()


def test_sinks_softcap_and_scale_reach_the_kernels(device):
    m = matrix(32, 256, (16, 64), density=0.6)
    attn = make_sparse(m, device)
    attn.plan(*tensors_of(m, device), num_rows=32, num_cols=256)
    q, k, v = inputs_of(m, device)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    out, lse = attn.run(q, k, v, return_lse=True, sinks=sinks, softcap=3.0)
    for r, blocks in enumerate(m.listed):
        keys = [torch.arange(c * 64, (c + 1) * 64) for c in blocks]
        keys = torch.cat(keys) if keys else torch.zeros(0, dtype=torch.long)
        rows = slice(16 * r, 16 * (r + 1))
        everything = torch.ones(16, len(keys), dtype=torch.bool, device=device)
        assert_matches(
            out[rows], lse[rows], q[rows], k[keys], v[keys], everything, sinks=sinks, softcap=3.0
        )
    half = attn.run(q, k, v, scale=2 * m.head_dim**-0.5)
    torch.testing.assert_close(half[:32], attn.run(2 * q, k, v)[:32], rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=8)
@given(
    block=st.tuples(st.sampled_from([1, 3, 16, 20]), st.sampled_from([1, 5, 16, 32])),
    block_rows=st.integers(1, 3),
    short=st.integers(0, 2),
    columns=st.integers(1, 6),
    group=st.sampled_from([1, 3]),
    form=st.sampled_from(["none", "blocks", "packed"]),
    seed=st.integers(0, 99),
)
def test_any_matrix(device, block, block_rows, short, columns, group, form, seed):
    num_rows = max(block_rows * block[0] - short, (block_rows - 1) * block[0] + 1)
    num_cols = columns * block[1]
    blocks = listed(num_rows, num_cols, block, 0.6, seed)
    m = Matrix(num_rows, num_cols, block, blocks, (group, 1), 16)
    mask = None if form == "none" else element_mask(m, seed)
    given_mask = packed(m, mask) if form == "packed" else mask
    run_sparse(m, make_sparse(m, device), device, mask, given_mask)


def test_a_refused_matrix_changes_nothing(device):
    """The rows of blocks of the plan before it are still those that are walked."""
    m = matrix(64, 256, (32, 64), density=0.5)
    attn = make_sparse(m, device)
    attn.plan(*tensors_of(m, device), num_rows=64, num_cols=256)
    q, k, v = inputs_of(m, device)
    before = attn.run(q, k, v)[:64].clone()
    all_blocks = dataclasses.replace(m, listed=((0, 1, 2, 3),) * 2)
    with pytest.raises(PlanMismatch, match=r"mask is torch\.bool"):
        attn.plan(
            *tensors_of(all_blocks, device), num_rows=64, num_cols=256,
            mask=torch.ones(1, 32, 64, dtype=torch.bool, device=device),
        )  # fmt: skip
    assert torch.equal(attn.run(q, k, v)[:64], before)


@pytest.mark.parametrize("size", [16, (16,), (0, 64), (16, -1), (16, 64.0), None])
def test_sizes_that_are_no_blocks(size, device):
    text = re.escape(f"block_size={size!r}; accepted: (rows, columns), each an int of 1 or more")
    with pytest.raises(UnsupportedConfig, match=text):
        make_sparse(Matrix(32, 128, size, ((0,),)), device)
    with pytest.raises(PlanMismatch, match=text):
        to_blocks(torch.ones(32, 128, dtype=torch.bool), size)


def test_what_does_not_fit(device):
    m = matrix(32, 128, (16, 64), density=1.0)
    attn = make_sparse(m, device)
    indptr, indices = tensors_of(m, device)
    mask = element_mask(m).to(device)
    sizes = {"num_rows": 32, "num_cols": 128}
    for args, options, text in (
        ((indptr.long(), indices), {}, r"indptr is torch.int64 \(3,\).*accepted: torch.int32"),
        ((indptr, indices[None]), {}, "indices is torch.int32 .*one axis"),
        ((indptr, indices.repeat(2)[::2]), {}, "indices has stride 2; accepted: contiguous"),
        ((indptr, indices), {"num_rows": 65}, "num_rows=65; accepted: 0 to 64, 4 blocks of 16"),
        ((indptr, indices), {"num_rows": -1}, "num_rows=-1; accepted"),
        ((indptr, indices), {"num_rows": 33}, "indptr has 3 entries; accepted: 4 for num_rows=33"),
        ((indptr, indices), {"num_cols": 100}, "num_cols=100; accepted: multiples of .* 64"),
        ((indptr, indices), {"mask": mask[:, :8]}, r"accepted: .* torch.bool \(2, 16, 64\)"),
        ((indptr, indices), {"mask": mask.float()}, "mask is torch.float32"),
        ((indptr, indices), {"mask": [1]}, r"mask=\[1\]; accepted: a tensor or None"),
    ):
        with pytest.raises(PlanMismatch, match=text):
            attn.plan(*args, **(sizes | options))
    attn.plan(indptr, indices, **sizes)
    q, k, v = inputs_of(m, device)
    for args, text in (
        ((q[:31], k, v), "q has 31 rows; the plan covers 32"),
        ((q, k[:127], v), "k has 127 rows; the plan has 128"),
        ((q, k, v[:, :1]), r"v has shape \(130, 1, 64\)"),
        ((q, k.half(), v), "k is torch.float16"),
    ):
        with pytest.raises(PlanMismatch, match=text):
            attn.run(*args)
    for options, text in (
        ({"block_size": (0, 64)}, r"block_size=\(0, 64\); accepted: \(rows, columns\)"),
        ({"max_block_rows": 0}, "max_block_rows=0; accepted: 1 or more"),
        ({"dtype": torch.float64}, "dtype=torch.float64; accepted"),
    ):
        given_options = {"block_size": (16, 64), "dtype": FP32, "max_block_rows": 4} | options
        with pytest.raises(UnsupportedConfig, match=text):
            BlockSparseAttention(4, 2, 64, device=device, **given_options)


def test_units_that_a_plan_cannot_count(device):
    attn = BlockSparseAttention(
        8, 8, 64, block_size=(16, 2**20), dtype=FP32, max_block_rows=2, device=device
    )
    indptr = torch.tensor([0, 4096], dtype=torch.int32, device=device)
    with pytest.raises(PlanMismatch, match="4096 blocks of 1048576 columns"):
        attn.plan(
            indptr, torch.zeros(4096, dtype=torch.int32, device=device), num_rows=16, num_cols=2**20
        )
