"""CUDA graphs of masked and block-sparse layers: captured once, replayed with other masks."""

import dataclasses

import pytest
import torch
from cases import Case, make_attention, make_batch, poison_scratch
from masked import ancestors, assert_matches, check_masked, random_masks, random_parents, tree_masks
from test_sparse import check_rows, element_mask, inputs_of, make_sparse, matrix, tensors_of

from tilewise import CustomMask, TreeMask
from tilewise.masks import flatten_masks

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
REQUESTS = ((1, 3000), (5, 700), (200, 300), (16, 0), (40, 0))


def captured(batch, attn, mask, out):
    """Plan eagerly, run once to compile, then capture the run alone."""
    plan_for(batch, attn, mask)
    attn.run(batch.q, batch.kv_cache, out=out, return_lse=True)
    torch.cuda.synchronize()
    plan_for(batch, attn, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = attn.run(batch.q, batch.kv_cache, out=out, return_lse=True)
    return graph, lse


def plan_for(batch, attn, mask):
    attn.plan(
        batch.starts, batch.lengths, batch.block_table, num_tokens=len(batch.q),
        max_query_len=max(q for q, _ in batch.case.requests), mask=mask,
    )  # fmt: skip


def make(requests, **changes):
    case = Case(requests, 32, 8, 128, dtype=BF16, **changes)
    batch = make_batch(case, "cuda")
    batch.starts, batch.lengths = batch.query_start_loc, batch.seq_lens
    return batch, make_attention(case, "cuda")


@pytest.mark.parametrize("packed", [False, True])
def test_another_mask_in_the_same_tensor(packed):
    """The captured run reads the mask; neither a new plan nor a new graph is needed."""
    batch, attn = make(REQUESTS)
    mask = CustomMask(flatten_masks(random_masks(batch), packed).cuda())
    out = torch.zeros_like(batch.q)
    graph, lse = captured(batch, attn, mask, out)
    for seed, share in ((1, 0.1), (2, 0.9), (3, 0.0)):
        masks = random_masks(batch, seed, share)
        mask.values.copy_(flatten_masks(masks, packed))
        out.fill_(7.0)
        poison = (attn._buffers.partial_acc, attn._buffers.partial_m, attn._buffers.partial_l)
        for buffer in poison:
            buffer.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check_masked(batch, out, lse, masks)
        assert (out[batch.num_tokens :] == 7.0).all()
        assert not attn._buffers.arrivals.any()


def test_another_tree_in_the_same_tensor():
    """Trees are read by the plan, which is made again before each replay, as for other lengths."""
    batch, attn = make(((16, 3000), (5, 700), (1, 100), (16, 0), (9, 64)), decode_query_len=16)
    parents = torch.full((len(batch.q),), -1, dtype=torch.int32, device="cuda")
    mask = TreeMask(parents=parents)
    out = torch.zeros_like(batch.q)
    graph, lse = captured(batch, attn, mask, out)
    gen = torch.Generator().manual_seed(0)
    for _ in range(4):
        trees = [random_parents(q, gen) for q, _ in batch.case.requests]
        flat = torch.tensor([p for tree in trees for p in tree], dtype=torch.int32)
        parents[: len(flat)].copy_(flat)
        out.fill_(7.0)
        poison_scratch(attn)
        plan_for(batch, attn, mask)
        graph.replay()
        torch.cuda.synchronize()
        check_masked(batch, out, lse, tree_masks(batch, [ancestors(tree) for tree in trees]))
        assert (out[batch.num_tokens :] == 7.0).all()


def test_a_graph_may_hold_the_plan_of_a_tree():
    batch, attn = make(((7, 500), (16, 64)))
    parents = torch.full((len(batch.q),), -1, dtype=torch.int32, device="cuda")
    mask = TreeMask(parents=parents)
    out = torch.zeros_like(batch.q)
    plan_for(batch, attn, mask)
    attn.run(batch.q, batch.kv_cache, out=out, return_lse=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan_for(batch, attn, mask)
        _, lse = attn.run(batch.q, batch.kv_cache, out=out, return_lse=True)
    gen = torch.Generator().manual_seed(1)
    for _ in range(3):
        trees = [random_parents(q, gen) for q, _ in batch.case.requests]
        parents[:23].copy_(torch.tensor([p for tree in trees for p in tree], dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        check_masked(batch, out, lse, tree_masks(batch, [ancestors(tree) for tree in trees]))


@pytest.mark.parametrize("block", [(16, 64), (64, 64), (4, 24)])
@pytest.mark.parametrize("with_mask", [False, True])
def test_another_matrix_in_the_same_tensors(block, with_mask):
    """Other blocks, other counts in each row, another mask: same buffers, same graph."""
    rows, columns = block
    first = matrix(8 * rows, 40 * columns, block, 0.5, heads=(8, 2), head_dim=128, dtype=BF16)
    blocks = sum(map(len, first.listed))
    attn = make_sparse(first, "cuda")
    indptr, indices = tensors_of(first, "cuda")
    mask = element_mask(first).cuda() if with_mask else None
    q, k, v = inputs_of(first, "cuda")
    sizes = {"num_rows": first.num_rows, "num_cols": first.num_cols, "mask": mask}
    out = torch.full_like(q, 7.0)
    attn.plan(indptr, indices, **sizes)
    attn.run(q, k, v, out=out, return_lse=True)
    torch.cuda.synchronize()
    attn.plan(indptr, indices, **sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = attn.run(q, k, v, out=out, return_lse=True)
    gen = torch.Generator().manual_seed(3)
    for seed in range(3):
        counts = torch.bincount(torch.randint(0, 8, (blocks,), generator=gen), minlength=8)
        counts = counts.clamp(max=40).tolist()
        order = [torch.randperm(40, generator=gen)[:n].tolist() for n in counts]
        other = dataclasses.replace(first, listed=tuple(map(tuple, order)))
        new_indptr, new_indices = tensors_of(other, "cuda")
        indptr.copy_(new_indptr)
        indices.fill_(2_147_480_000)
        indices[: len(new_indices)] = new_indices
        truth = None
        if with_mask:
            truth = torch.zeros(blocks, *block, dtype=torch.bool)
            truth[: len(new_indices)] = element_mask(other, seed)
            mask.copy_(truth)
        for x, new in zip((q, k, v), inputs_of(other, "cuda", seed), strict=True):
            x.copy_(new)
        out.fill_(7.0)
        poison_scratch(attn._attn)
        attn.plan(indptr, indices, **sizes)
        graph.replay()
        torch.cuda.synchronize()
        check_rows(other, out, lse, q, k, v, truth)


def test_long_rows_and_wide_masks():
    """Sizes at which work is split over all SMs and a mask has more than 2**31 elements."""
    batch, attn = make(((16, 40_000), (1, 100_000), (3000, 0)))
    masks = random_masks(batch)
    mask = CustomMask(flatten_masks(masks, packed=True).cuda())
    plan_for(batch, attn, mask)
    check_masked(batch, *attn.run(batch.q, batch.kv_cache, return_lse=True), masks)
    # 46400 * 46400 elements: offsets beyond 32 bits, looked at in the last rows alone.
    n = 46_400
    attn = make_attention(Case(((n, 0),), 1, 1, 64, dtype=BF16), "cuda")
    gen = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (torch.randn(n, 1, 64, device="cuda", dtype=BF16, generator=gen) for _ in range(3))
    values = torch.zeros(n * n, dtype=torch.bool, device="cuda")
    last = torch.rand(64, n, device="cuda", generator=gen) < 0.5
    values[-64 * n :] = last.flatten()
    starts = torch.tensor([0, n], dtype=torch.int32, device="cuda")
    attn.plan(
        starts, None, None, num_tokens=n, max_query_len=n, kv_start_loc=starts, num_keys=n,
        mask=CustomMask(values),
    )  # fmt: skip
    out, lse = attn.run(q, (k, v), return_lse=True)
    assert (out[: n - 64] == 0).all()
    assert_matches(out[-64:], lse[-64:], q[-64:], k, v, last)


def test_plans_with_masks_wait_for_nothing():
    """plan() and run() enqueue work and nothing else, block-sparse ones too."""
    batch, attn = make(REQUESTS)
    given = [
        CustomMask(flatten_masks(random_masks(batch)).cuda()),
        CustomMask(flatten_masks(random_masks(batch), packed=True).cuda()),
        TreeMask(parents=torch.zeros(len(batch.q), dtype=torch.int32, device="cuda")),
        TreeMask(visible=torch.ones(len(batch.q), 16, dtype=torch.bool, device="cuda")),
    ]
    m = matrix(64, 512, (16, 64), heads=(8, 2), head_dim=128, dtype=BF16)
    sparse, (indptr, indices) = make_sparse(m, "cuda"), tensors_of(m, "cuda")
    block_mask = element_mask(m).cuda()
    q, k, v = inputs_of(m, "cuda")
    out, sparse_out = torch.empty_like(batch.q), torch.empty_like(q)
    for mode in ("default", "error"):  # the second pass has nothing left to compile
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for mask in given:
                plan_for(batch, attn, mask)
                attn.run(batch.q, batch.kv_cache, out=out)
            sparse.plan(indptr, indices, num_rows=64, num_cols=512, mask=block_mask)
            sparse.run(q, k, v, out=sparse_out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
