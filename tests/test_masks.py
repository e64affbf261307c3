"""Masks by element and trees of drafts, over pages and over rows; keys in rows of their own."""

import dataclasses

import pytest
import torch
from cases import Case, make_attention, make_batch, plan_batch, poison_scratch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import (
    ancestors,
    assert_matches,
    check_masked,
    random_masks,
    random_parents,
    tree_masks,
)

from tilewise import CustomMask, TreeMask, counters, plan_rule, policy
from tilewise.errors import PlanMismatch
from tilewise.masks import flatten_masks

# numpy's remarks on poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

BF16, FP16 = torch.bfloat16, torch.float16
# Prefills and decodes, behind a context and not, a page's ends, and a request of no tokens.
MIXED = ((20, 43), (1, 200), (5, 64), (0, 0), (40, 30), (16, 0), (1, 0))
CASES = [
    Case(MIXED),
    Case(MIXED, page_size=16, num_q_heads=8, num_kv_heads=1, dtype=BF16, layout="hnd"),
    Case(MIXED, head_dim=128, num_q_heads=6, pad_requests=2, dtype=FP16),
    Case(MIXED, head_dim=96, page_size=48, num_q_heads=9, num_kv_heads=3),
    Case(MIXED, softcap=5.0, sinks=1.0, layout="cross_layer"),
    Case(MIXED, page_size=128, num_q_heads=7, num_kv_heads=1, decode_query_len=4, dtype=BF16),
]


def custom(batch, masks, packed):
    return CustomMask(flatten_masks([m.to(batch.q.device) for m in masks], packed))


def run(batch, attn, mask, **overrides):
    """Plan and run; rows of no request must come back untouched."""
    plan_batch(attn, batch, mask=mask, **overrides)
    out = torch.full_like(batch.q, 7.0)
    out, lse = attn.run(batch.q, batch.kv_cache, out=out, return_lse=True, **batch.features)
    assert (out[batch.num_tokens :] == 7.0).all(), "rows of no request were written"
    assert not attn._buffers.arrivals.any(), "arrival counters must be zero between launches"
    return out, lse


def features_of(batch):
    return {name: batch.features[name] for name in ("softcap", "sinks") if name in batch.features}


# -- masks by element -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "packed"),
    [(CASES[0], True), *((case, bool(i % 2)) for i, case in enumerate(CASES))],
    ids=str,
)
def test_custom_masks(case, packed, device):
    batch = make_batch(case, device)
    masks = random_masks(batch)
    assert any((~m.any(1)).any() for m in masks)  # some rows see nothing
    out, lse = run(batch, make_attention(case, device), custom(batch, masks, packed))
    check_masked(batch, out, lse, masks, **features_of(batch))


@pytest.mark.parametrize("packed", [False, True])
def test_an_fp8_cache_under_a_mask(packed, device):
    """Against the same keys, dequantised, in a cache of the queries' dtype."""
    case = Case(MIXED, dtype=BF16, kv_dtype=torch.float8_e4m3fn)
    batch = make_batch(case, device)
    masks = random_masks(batch)
    out, lse = run(batch, make_attention(case, device), custom(batch, masks, packed))
    wide = dataclasses.replace(batch, kv_cache=batch.kv_cache.to(BF16))
    check_masked(wide, out, lse, masks)


def test_the_causal_mask_by_element_is_the_causal_rule(device):
    case = Case(MIXED, dtype=FP16)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    causal = tree_masks(batch, [])
    out, lse = run(batch, attn, custom(batch, causal, packed=True))
    plan_batch(attn, batch)
    ruled, ruled_lse = attn.run(batch.q, batch.kv_cache, return_lse=True)
    rows = slice(0, batch.num_tokens)
    torch.testing.assert_close(out[rows], ruled[rows], rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(lse[rows], ruled_lse[rows], rtol=1e-5, atol=1e-5)


def test_a_mask_is_read_when_layers_run(device):
    """Another mask in the same tensor needs no new plan, as a replayed graph has none."""
    batch = make_batch(CASES[0], device)
    attn = make_attention(batch.case, device)
    for packed in (False, True):
        mask = custom(batch, random_masks(batch), packed)
        plan_batch(attn, batch, mask=mask)
        for seed in (1, 2):
            masks = random_masks(batch, seed, share=0.2)
            mask.values.copy_(custom(batch, masks, packed).values)
            check_masked(batch, *attn.run(batch.q, batch.kv_cache, return_lse=True), masks)


@pytest.mark.parametrize("packed", [False, True])
def test_what_lies_past_the_end_of_a_mask_is_hidden(packed, device):
    """A tensor that ends too early: nothing past it is read, and rows there see nothing."""
    batch = make_batch(Case(((3, 61), (20, 30), (2, 40))), device)
    masks = [torch.ones_like(m) for m in random_masks(batch)]
    # A row that ends at a byte's end, in the second request.
    kept = masks[0].numel() + 4 * 50
    whole = custom(batch, masks, packed).values
    attn = make_attention(batch.case, device)
    # What follows the mask in memory says that everything is seen.
    short = whole[: kept // 8 if packed else kept]
    out, lse = run(batch, attn, CustomMask(short))
    masks[1][4:] = False
    masks[2][:] = False
    check_masked(batch, out, lse, masks)


@pytest.mark.parametrize("num_workers", [1, 3, 13])
def test_any_number_of_workers_gives_the_same_result(num_workers, device):
    case = Case(((1, 0), (3, 250), (1, 129), (0, 0), (1, 63)), num_q_heads=6)
    config = dataclasses.replace(make_attention(case, device).config, num_workers=num_workers)
    batch = make_batch(case, device)
    masks = random_masks(batch)
    out, lse = run(batch, make_attention(case, device, config=config), custom(batch, masks, True))
    check_masked(batch, out, lse, masks)


def test_batch_invariant_decode_under_masks(device):
    """The same request, alone and among others: the same bits."""
    case = Case(((1, 1500), (3, 250), (2, 700)), num_kv_heads=1)
    batch = make_batch(case, device)
    attn = make_attention(case, device, batch_invariant=True)
    masks = random_masks(batch)
    out, lse = run(batch, attn, custom(batch, masks, False))
    check_masked(batch, out, lse, masks)
    poison_scratch(attn)
    attn.plan(
        batch.query_start_loc[:2], batch.seq_lens[:1], batch.block_table[:1], num_tokens=1,
        max_query_len=1, mask=custom(batch, masks[:1], False),
    )  # fmt: skip
    assert torch.equal(attn.run(batch.q, batch.kv_cache)[0], out[0])


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
@pytest.mark.parametrize("use_tma", [False, True])
def test_pointer_and_copy_engine_paths_agree(kernel, use_tma, device):
    case = Case(((20, 50), (1, 100), (16, 3)), dtype=FP16, layout="cross_layer")
    config = make_attention(case, device).config
    tiles = dataclasses.replace(getattr(config, kernel), use_tma=use_tma)
    attn = make_attention(case, device, config=dataclasses.replace(config, **{kernel: tiles}))
    batch = make_batch(case, device)
    masks = random_masks(batch)
    check_masked(batch, *run(batch, attn, custom(batch, masks, True)), masks)
    drafts = [None, None, ancestors(random_parents(16, torch.Generator().manual_seed(1)))]
    seen = torch.ones(batch.num_tokens + 3, 16, dtype=torch.bool, device=device)
    seen[21:37] = drafts[2].to(device)
    mask = TreeMask(visible=seen)
    check_masked(batch, *run(batch, attn, mask), tree_masks(batch, drafts))


@settings(deadline=None, max_examples=8)
@given(
    requests=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 90)), min_size=1, max_size=4),
    group=st.sampled_from([1, 3, 4]),
    share=st.sampled_from([0.02, 0.5, 0.98]),
    packed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_custom_mask(device, requests, group, share, packed, seed):
    case = Case(tuple(requests), num_q_heads=group, num_kv_heads=1, head_dim=16, page_size=16)
    batch = make_batch(case, device, seed)
    masks = random_masks(batch, seed, share)
    out, lse = run(batch, make_attention(case, device), custom(batch, masks, packed))
    check_masked(batch, out, lse, masks)


def test_flattened_and_packed_masks():
    masks = [torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0]]).bool(), torch.ones(1, 2).bool()]
    assert flatten_masks(masks).tolist() == [*masks[0].flatten().tolist(), True, True]
    assert flatten_masks(masks, packed=True).tolist() == [0b11100101, 0b0, 0b11]


# -- trees of drafts ------------------------------------------------------------------------------

# A chain, bushes, one token, a prompt beside them, no tokens, no context.
TREES = ((5, 100), (16, 48), (1, 300), (40, 30), (0, 0), (7, 0), (12, 59))


def make_trees(case, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [None if q > 16 else random_parents(q, gen) for q, _ in case.requests]


def parents_of(batch, trees):
    """One number for each row, the rows of other requests and the padding anything."""
    numbers = torch.full((len(batch.q),), 77, dtype=torch.int32)
    for r, tree in enumerate(trees):
        if tree:
            numbers[batch.qsl[r] : batch.qsl[r + 1]] = torch.tensor(tree, dtype=torch.int32)
    return numbers.to(batch.q.device)


def visible_of(batch, trees, width=16):
    seen = torch.ones(len(batch.q), width, dtype=torch.bool)
    for r, tree in enumerate(trees):
        if tree:
            rows = slice(batch.qsl[r], batch.qsl[r + 1])
            seen[rows, : len(tree)] = ancestors(tree)
    return seen.to(batch.q.device)


@pytest.mark.parametrize("form", ["parents", "visible"])
@pytest.mark.parametrize(
    "case",
    [
        Case(TREES),
        Case(TREES, page_size=16, num_q_heads=8, num_kv_heads=1, dtype=BF16, layout="hnd"),
        Case(TREES, head_dim=128, num_q_heads=6, pad_requests=2, dtype=FP16, decode_query_len=8),
        Case(TREES, head_dim=96, page_size=48, num_q_heads=9, num_kv_heads=3),
        Case(TREES, softcap=5.0, sinks=1.0, layout="cross_layer"),
    ],
    ids=str,
)
def test_drafts_see_the_context_and_their_ancestors(case, form, device):
    batch = make_batch(case, device)
    trees = make_trees(case)
    make = parents_of if form == "parents" else visible_of
    mask = TreeMask(**{form: make(batch, trees)})
    out, lse = run(batch, make_attention(case, device), mask)
    drafts = [None if tree is None else ancestors(tree) for tree in trees]
    check_masked(batch, out, lse, tree_masks(batch, drafts), **features_of(batch))


@pytest.mark.parametrize("width", [1, 7, 16])
def test_any_visible_drafts(width, device):
    """Later drafts too, not oneself, nothing at all; a row without context then sees no key."""
    batch = make_batch(Case(((7, 60), (5, 0), (1, 0))), device)
    gen = torch.Generator().manual_seed(3)
    wide = torch.rand(len(batch.q), 16, generator=gen) < 0.4
    wide[7] = False  # the first of the request without a context
    drafts = []
    for r, tokens in enumerate((7, 5, 1)):
        own = wide[batch.qsl[r] : batch.qsl[r + 1], :tokens].clone()
        own[:, width:] = False
        drafts.append(own)
    buffer = wide.to(device)
    mask = TreeMask(visible=buffer[:, :width])
    out, lse = run(batch, make_attention(batch.case, device), mask)
    assert (lse[7] == float("-inf")).all()
    check_masked(batch, out, lse, tree_masks(batch, drafts))


def test_a_chain_is_the_causal_rule(device):
    """Drafts in a row, each the child of the one before."""
    batch = make_batch(Case(((5, 100), (16, 300), (1, 70), (3, 0)), dtype=BF16), device)
    attn = make_attention(batch.case, device)
    parents = [t - 1 for q, _ in batch.case.requests for t in range(q)] + [0] * 3
    mask = TreeMask(parents=torch.tensor(parents, dtype=torch.int32, device=device))
    out, lse = run(batch, attn, mask)
    plan_batch(attn, batch)
    ruled, ruled_lse = attn.run(batch.q, batch.kv_cache, return_lse=True)
    rows = slice(0, batch.num_tokens)
    torch.testing.assert_close(out[rows], ruled[rows], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse[rows], ruled_lse[rows], rtol=1e-5, atol=1e-5)


def test_parents_in_a_circle_and_out_of_range_end(device):
    batch = make_batch(Case(((4, 30), (3, 10))), device)
    trees = [[1, 2, 0, 2_000_000_000], [-7, 3, 1]]
    mask = TreeMask(parents=parents_of(batch, trees))
    out, lse = run(batch, make_attention(batch.case, device), mask)
    check_masked(batch, out, lse, tree_masks(batch, [ancestors(tree) for tree in trees]))


def test_a_tree_costs_what_a_chain_costs(device):
    """The plan of a batch is its lengths' alone: a tree adds no tile and no unit."""
    case = Case(TREES)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    plain = attn._buffers.header.tolist()
    plan_batch(attn, batch, mask=TreeMask(parents=parents_of(batch, make_trees(case))))
    assert attn._buffers.header.tolist() == plain


@settings(deadline=None, max_examples=8)
@given(
    requests=st.lists(st.tuples(st.integers(0, 16), st.integers(0, 90)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (10, 2)]),
    form=st.sampled_from(["parents", "visible"]),
    seed=st.integers(0, 99),
)
def test_any_tree(device, requests, heads, form, seed):
    case = Case(tuple(requests), *heads, head_dim=16, page_size=16)
    batch = make_batch(case, device, seed)
    trees = make_trees(case, seed)
    mask = TreeMask(**{form: (parents_of if form == "parents" else visible_of)(batch, trees)})
    out, lse = run(batch, make_attention(case, device), mask)
    check_masked(batch, out, lse, tree_masks(batch, [ancestors(tree) for tree in trees]))


# -- keys in rows, and tables in one row ----------------------------------------------------------

# Queries and keys of each request: more of either, none, short and long.
RAGGED = ((40, 10), (1, 200), (5, 64), (0, 30), (3, 0), (50, 70), (16, 17), (20, 0))


def make_ragged(case, lengths, device, pad=5):
    """Queries, keys and values as slices of wider buffers; all else is NaN."""
    gen = torch.Generator().manual_seed(0)
    tensors, starts = [], []
    for heads, which in ((case.num_q_heads, 0), (case.num_kv_heads, 1), (case.num_kv_heads, 1)):
        counts = [pair[which] for pair in lengths]
        rows = sum(counts)
        memory = torch.full((rows + pad, heads, case.head_dim + 8), float("nan"))
        memory[:rows, :, : case.head_dim] = torch.randn(rows, heads, case.head_dim, generator=gen)
        tensors.append(memory.to(device=device, dtype=case.dtype)[..., : case.head_dim])
        starts.append([0, *torch.tensor(counts).cumsum(0).tolist()])
    return (*tensors, starts[0], starts[1])


def run_ragged(case, lengths, device, *, causal=True, masks=None, packed=False):
    q, k, v, q_starts, k_starts = make_ragged(case, lengths, device)
    attn = make_attention(case, device)
    ints = {"dtype": torch.int32, "device": device}
    mask = None
    if masks is not None:
        mask = CustomMask(flatten_masks([m.to(device) for m in masks], packed))
    attn.plan(
        torch.tensor(q_starts, **ints), None, None, num_tokens=q_starts[-1],
        max_query_len=max(n for n, _ in lengths), causal=causal,
        kv_start_loc=torch.tensor(k_starts, **ints), num_keys=k_starts[-1], mask=mask,
    )  # fmt: skip
    out = torch.full(q.shape, 7.0, dtype=q.dtype, device=device)
    out, lse = attn.run(q, (k, v), out=out, return_lse=True)
    assert (out[q_starts[-1] :] == 7.0).all()
    for r, (tokens, keys) in enumerate(lengths):
        if not tokens:
            continue
        visible = torch.ones(tokens, keys, dtype=torch.bool)
        if masks is not None:
            visible = masks[r]
        elif causal:
            visible = visible.tril(keys - tokens)
        rows = slice(q_starts[r], q_starts[r + 1])
        there = slice(k_starts[r], k_starts[r + 1])
        assert_matches(
            out[rows], lse[rows], q[rows], k[there], v[there], visible.to(device), f"request {r}"
        )


RAGGED_CASES = [
    Case(RAGGED),
    Case(RAGGED, num_q_heads=8, num_kv_heads=1, dtype=BF16, page_size=16),
    Case(RAGGED, num_q_heads=9, num_kv_heads=3, head_dim=96, dtype=FP16),
]


@pytest.mark.parametrize(
    ("case", "causal"),
    [(RAGGED_CASES[0], True), *zip(RAGGED_CASES, (False, True, False), strict=True)],
    ids=str,
)
def test_keys_in_rows_of_their_own(case, causal, device):
    """Contiguous keys and values whose lengths are not the queries', without pages."""
    run_ragged(case, RAGGED, device, causal=causal)


@pytest.mark.parametrize(
    ("case", "packed"), list(zip(RAGGED_CASES, (False, True, False), strict=True)), ids=str
)
def test_masks_over_rows(case, packed, device):
    gen = torch.Generator().manual_seed(2)
    masks = [torch.rand(q, k, generator=gen) < 0.4 for q, k in RAGGED]
    run_ragged(case, RAGGED, device, masks=masks, packed=packed)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_table_in_one_row(case, device):
    """Page ids of one request after those of another: the same bits as from a row each."""
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    expected, expected_lse = attn.run(batch.q, batch.kv_cache, return_lse=True)
    counts = [-(-n // case.page_size) for n in batch.lens]
    ids = torch.cat([row[:n] for row, n in zip(batch.block_table, counts, strict=True)])
    starts = torch.tensor([0, *counts]).cumsum(0).to(dtype=torch.int32, device=device)
    attn.plan(
        batch.query_start_loc, batch.seq_lens, ids, num_tokens=len(batch.q), max_query_len=40,
        kv_start_loc=starts,
    )  # fmt: skip
    out, lse = attn.run(batch.q, batch.kv_cache, return_lse=True)
    rows = slice(0, batch.num_tokens)
    if make_attention(case, device).config.hopper_prefill is None:
        assert torch.equal(out[rows], expected[rows])
    torch.testing.assert_close(out[rows], expected[rows], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse[rows], expected_lse[rows], rtol=1e-4, atol=1e-4)


# -- which kernel, and refusals -------------------------------------------------------------------


def test_the_policy_says_why_a_batch_runs_plain():
    assert policy.why_plain_batch(True, True) is None
    assert "mask of tree" in policy.why_plain_batch(True, True, "tree")
    assert "mask of bits" in policy.why_plain_batch(False, True, "bits")
    assert "not causal" in policy.why_plain_batch(False, True)
    assert "block table" in policy.why_plain_batch(True, False)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["none", "tree", "custom"])
def test_gluon_kernels_leave_masked_batches_to_their_twins(mask, device):
    case = Case(((200, 100), (1, 90)), 8, 2, 128, page_size=128, dtype=BF16)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    if attn.config.hopper_prefill is None or attn.config.hopper_decode is None:
        pytest.skip("this GPU has no Gluon kernels")
    masks = {
        "none": None,
        "tree": TreeMask(parents=torch.zeros(len(batch.q), dtype=torch.int32, device=device)),
        "custom": custom(batch, random_masks(batch), True),
    }
    before = counters.snapshot()
    run(batch, attn, masks[mask])
    after = counters.snapshot()
    ran = {
        name for name in after if name.startswith("launches") and after[name] != before.get(name, 0)
    }
    kernels = {
        "none": {"hopper_prefill", "hopper_decode"},
        "tree": {"tree_words", "prefill", "decode"},
        "custom": {"mask_starts", "prefill", "decode"},
    }
    assert ran == {f"launches{{kernel={k}}}" for k in (*kernels[mask], "plan")}


def test_buffers_of_masks_come_with_the_first(device):
    batch = make_batch(Case(((1, 30), (20, 4))), device)
    attn = make_attention(batch.case, device)
    before = attn.workspace_bytes
    plan_batch(attn, batch)
    assert attn.workspace_bytes == before
    plan_batch(attn, batch, mask=custom(batch, random_masks(batch), True))
    plan_batch(attn, batch, mask=TreeMask(parents=parents_of(batch, [])))
    grown = 8 * (1 + attn.max_num_reqs) + 4 * attn.max_num_tokens
    assert attn.workspace_bytes == before + grown
    plan_batch(attn, batch, mask=custom(batch, random_masks(batch), False))
    assert attn.workspace_bytes == before + grown


def test_masks_that_do_not_fit(device):
    batch = make_batch(Case(((1, 30), (20, 4))), device)
    attn = make_attention(batch.case, device)
    flat = custom(batch, random_masks(batch), False).values
    parents = torch.zeros(24, dtype=torch.int32, device=device)
    seen = torch.ones(24, 16, dtype=torch.bool, device=device)
    for mask, text in (
        (flat, "mask is a Tensor; accepted: CustomMask, TreeMask or None"),
        (CustomMask(flat.float()), "values is torch.float32 .*accepted: contiguous torch.bool"),
        (CustomMask(flat[::2]), "accepted: contiguous"),
        (CustomMask(flat[None]), r"values is torch.bool \(1, 511\)"),
        (CustomMask([True]), r"values=\[True\]; accepted: a tensor"),
        (TreeMask(), "TreeMask has neither of parents and visible; accepted: one"),
        (TreeMask(parents, seen), "TreeMask has both of"),
        (TreeMask(parents=parents.long()), "parents is torch.int64 .*accepted: torch.int32"),
        (TreeMask(parents=parents[:23]), r"parents .*\(23,\).*accepted: torch.int32 \[>= 24\]"),
        (TreeMask(parents=[0]), r"parents=\[0\]; accepted: a tensor"),
        (TreeMask(visible=seen[:, :0]), r"accepted: torch.bool \[>= 24, 1 to 16\]"),
        (TreeMask(visible=torch.ones(24, 17, dtype=torch.bool, device=device)), "1 to 16"),
        (TreeMask(visible=seen.to(torch.uint8)), "visible is torch.uint8"),
    ):
        with pytest.raises(PlanMismatch, match=text):
            plan_batch(attn, batch, mask=mask)


def test_a_mask_stands_alone(device):
    """Nothing else may say what queries see, and ALiBi has no distances under a mask."""
    case = Case(((1, 30), (20, 4)), alibi="linear")
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    mask = custom(batch, random_masks(batch), False)
    tree = TreeMask(parents=torch.zeros(24, dtype=torch.int32, device=device))
    spans = torch.zeros(2, 1, 2, dtype=torch.int32, device=device)
    flags = torch.ones(2, dtype=torch.int32, device=device)
    for beside, options, text in (
        (mask, {"spans": spans}, "CustomMask with spans; accepted: None"),
        (tree, {"spans": spans}, "TreeMask with spans"),
        (mask, {"causal": flags}, "CustomMask with flags of causal requests"),
        (tree, {"causal": False}, "TreeMask with causal=False; accepted: True"),
    ):
        with pytest.raises(PlanMismatch, match=text):
            plan_batch(attn, batch, mask=beside, **options)
    windowed = make_attention(dataclasses.replace(case, window=20), device)
    with pytest.raises(
        PlanMismatch, match="CustomMask with window=20; accepted: an object without"
    ):
        plan_batch(windowed, batch, mask=mask)
    for beside in (mask, tree):
        plan_batch(attn, batch, mask=beside)
        with pytest.raises(PlanMismatch, match="alibi_slopes with a plan that is not causal"):
            attn.run(batch.q, batch.kv_cache, **batch.features)


def test_starts_that_do_not_fit(device):
    case = Case(((4, 0), (2, 0)))
    q, k, v, q_starts, k_starts = make_ragged(case, ((4, 30), (2, 10)), device)
    attn = make_attention(case, device)
    ints = {"dtype": torch.int32, "device": device}
    starts, keys = torch.tensor(q_starts, **ints), torch.tensor(k_starts, **ints)
    table = torch.zeros(2, 3, **ints)
    sizes = {"num_tokens": 6, "max_query_len": 4}
    for args, options, text in (
        ((None, None), {"kv_start_loc": keys}, "num_keys=None with kv_start_loc"),
        ((None, None), {"kv_start_loc": keys, "num_keys": -1}, "num_keys=-1 with kv_start_loc"),
        ((None, None), {"kv_start_loc": keys[:2], "num_keys": 40}, r"accepted: .* \(3,\)"),
        ((None, None), {"kv_start_loc": keys.long(), "num_keys": 40}, "torch.int64"),
        ((None, None), {"kv_start_loc": [0], "num_keys": 40}, r"kv_start_loc=\[0\]"),
        ((None, None), {"num_keys": 40}, "num_keys=40 without kv_start_loc"),
        ((keys[1:], table), {"kv_start_loc": keys}, r"block_table has shape \(2, 3\)"),
        ((keys[1:], table[0]), {"kv_start_loc": keys, "num_keys": 3}, "num_keys=3 with a block"),
        ((keys[1:], table[0]), {}, r"block_table has shape \(3,\)"),
    ):
        with pytest.raises(PlanMismatch, match=text):
            attn.plan(starts, *args, **sizes, **options)
    attn.plan(starts, None, None, **sizes, kv_start_loc=keys, num_keys=40)
    with pytest.raises(PlanMismatch, match="k has 39 rows; the plan covers 40"):
        attn.run(q, (k[:39], v))


def test_a_refused_plan_leaves_nothing_to_run(device):
    """Its batch may be in the buffers already: the plan before it must not run on that."""
    case = Case(((4, 0), (2, 0)))
    q, k, v, q_starts, k_starts = make_ragged(case, ((4, 30), (2, 10)), device)
    attn = make_attention(case, device)
    ints = {"dtype": torch.int32, "device": device}
    starts, keys = torch.tensor(q_starts, **ints), torch.tensor(k_starts, **ints)
    sizes = {"num_tokens": 6, "max_query_len": 4}
    plan = attn.plan(starts, None, None, **sizes, kv_start_loc=keys, num_keys=40)
    attn.run(q, (k, v))
    others = torch.tensor([0, 10, 40], **ints)
    with pytest.raises(PlanMismatch, match="num_keys=-1"):
        attn.plan(starts, None, None, **sizes, kv_start_loc=others, num_keys=-1)
    for stale in (None, plan):
        with pytest.raises(PlanMismatch, match=r"stale plan: made as number 1, .* or refused"):
            attn.run(q, (k, v), plan=stale)


def test_the_bound_on_units_of_shared_keys():
    config = policy.choose(policy.Geometry(8, 2, 64, 64, 2), policy.INTERPRETER)
    for lengths in ([0, 0, 0], [1, 64, 65], [1000, 0, 1], [64, 64, 64]):
        units = sum(plan_rule.decode_units(1, n, config) for n in lengths)
        assert units <= plan_rule.decode_units_of_all(3, 1, sum(lengths), config)
