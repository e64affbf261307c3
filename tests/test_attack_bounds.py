"""Attacks on the Gluon prefills: addresses, strides, extremes, in buffers of known bytes."""

import dataclasses
import itertools

import pytest
import torch
from attacks import (
    BF16,
    DEVICE,
    FP16,
    LLAMA,
    LLAMA_FP8,
    MODELS,
    NAN,
    bits,
    gluon_launches,
    move_pages,
    prepared,
    ragged,
    run,
    run_gluon,
)
from cases import NOWHERE, Batch, Case, check, make_attention, make_batch, plan_batch, reference
from test_hopper import needs_hopper

from tilewise.errors import PlanMismatch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_hopper():
    needs_hopper()


# Addresses: 64 bits, strides, guards.


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_pages_beyond_two_to_31_elements_match_reference(layout):
    batch, attn = prepared(Case(ragged(40, 4, 10, 600), layout=layout, **LLAMA))
    move_pages(batch, 17000)
    assert (17000 - 400) * batch.kv_cache.stride(0) > 2**31
    plan_batch(attn, batch)
    out, lse = run_gluon(attn, batch)
    check(batch, out, lse)


def test_rows_beyond_two_to_31_elements_match_reference():
    """Queries and outputs are columns of one buffer of 2**32 elements."""
    batch, attn = prepared(Case(((900, 100), (17, 0), (1, 300), (200, 63)), **LLAMA))
    rows, heads, dim = batch.q.shape
    wide = torch.empty((rows, 2**32 // rows // 64 * 64), dtype=BF16, device=DEVICE)
    assert (batch.num_tokens - 130) * wide.stride(0) > 2**31
    q, out = (wide[:, i * heads * dim :][:, : heads * dim].view(rows, heads, dim) for i in (0, 1))
    q.copy_(batch.q)
    out.fill_(7.0)
    batch.q = q
    run_gluon(attn, batch, out=out)
    check(batch, out)
    assert (out[batch.num_tokens :] == 7.0).all()
    del wide, q, out


@pytest.mark.parametrize("layout", ["heads", "slots", "heads first"])
@pytest.mark.parametrize("model", ["llama", "qwen", "gpt_oss", "gemma", "fp8", "kv8"])
def test_no_byte_but_its_rows_changes(model, layout):
    """Outputs in frames of known bytes; queries, cache, lengths and table stay as they were."""
    given = MODELS[model]
    group = given["num_q_heads"] // given["num_kv_heads"]
    case = Case(ragged(50, group, 16, 200), pad_tokens=70, pad_requests=1, **given)
    batch, attn = prepared(case)
    rows, heads, dim = batch.q.shape
    # A stride of 8 elements more is 16 bytes more, but another specialisation: once is enough.
    more = 8 if model == "llama" else 16
    shapes = {
        "heads": (rows + 2, heads + 3, dim), "slots": (rows + 2, heads, dim + more),
        "heads first": (heads + 2, rows + 2, dim),
    }  # fmt: skip
    frame = torch.full(shapes[layout], 7.0, dtype=batch.q.dtype, device=DEVICE)
    views = {
        "heads": frame[1:-1, 1 : heads + 1], "slots": frame[1:-1, :, :dim],
        "heads first": frame[1:-1, 1:-1].transpose(0, 1),
    }  # fmt: skip
    wanted, _ = run_gluon(attn, batch)
    read = [batch.q, batch.kv_cache, batch.block_table]
    copies = [x.clone() for x in read]
    run_gluon(attn, batch, out=views[layout])
    n = batch.num_tokens
    assert torch.equal(views[layout][:n], wanted[:n])
    views[layout][:n] = 7.0
    assert (frame == 7.0).all()
    for x, before in zip(read, copies, strict=True):
        assert torch.equal(bits(x), bits(before))


@pytest.mark.parametrize("what", ["out address", "out rows", "keys address", "values stride"])
def test_what_is_not_aligned_goes_to_the_plain_twin(what):
    batch, attn = prepared(Case(ragged(60, 4, 8, 200, decodes=False), **LLAMA))
    plan_batch(attn, batch, has_decode=False)
    rows, heads, dim = batch.q.shape
    out = torch.full_like(batch.q, 7.0)
    frame = torch.full((rows * heads * (dim + 4) + 8,), 7.0, dtype=BF16, device=DEVICE)
    k, v = batch.k_cache, batch.v_cache
    caches: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = batch.kv_cache
    if what == "out address":
        out = frame[4 : 4 + out.numel()].view(out.shape)
    elif what == "out rows":
        out = frame[: rows * heads * (dim + 4)].view(rows, heads, dim + 4)[..., :dim]
    elif what == "keys address":
        memory = torch.full((k.numel() + 4,), NAN, dtype=BF16, device=DEVICE)
        caches = memory[4:].view(k.shape).copy_(k), v
    else:
        memory = torch.full((*v.shape[:3], dim + 4), NAN, dtype=BF16, device=DEVICE)
        caches = k, memory[..., :dim].copy_(v)
    before = gluon_launches()
    attn.run(batch.q, caches, out=out)
    assert gluon_launches() == before
    check(batch, out)
    assert (out[batch.num_tokens :] == 7.0).all()
    out[: batch.num_tokens] = 7.0
    assert (frame == 7.0).all()


def test_key_and_value_caches_of_two_layouts_match_reference():
    """One descriptor has pages of heads, the other heads of a page."""
    batch, attn = prepared(Case(ragged(61, 4, 8, 400), **LLAMA))
    pair = batch.k_cache.contiguous(), batch.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    assert pair[0].stride() != pair[1].stride()
    before = gluon_launches()
    out, lse = attn.run(batch.q, pair, return_lse=True)
    assert gluon_launches() == before + 1
    check(batch, out, lse)


@pytest.mark.parametrize("what", ["q", "out"])
def test_tensors_of_too_few_rows_are_refused(what):
    batch, attn = prepared(Case(((40, 3), (33, 0)), **LLAMA))
    short = batch.q[: batch.num_tokens - 1]
    out = short.clone() if what == "out" else None
    before = gluon_launches()
    with pytest.raises(PlanMismatch, match=f"{what} has {len(short)} rows"):
        attn.run(short if what == "q" else batch.q, batch.kv_cache, out=out)
    assert gluon_launches() == before


# Neighbours and numbers.


@pytest.mark.parametrize("poison", [NAN, float("inf"), 3e38], ids=["nan", "inf", "huge"])
@pytest.mark.parametrize(
    "model", ["llama", "qwen", "gemma", "fp8", "kv8", "capped", "capped_fp16", "capped_kv8"]
)
def test_poisoned_queries_of_one_request_leave_others_bits(model, poison):
    """Boxes reach into the next request's rows: these are computed, and matter to nobody.

    Of capped logits a warp computes all rows in one of two ways, which differ in bits.
    """
    fp16 = LLAMA | {"dtype": FP16, "softcap": 50.0}
    given = fp16 if model == "capped_fp16" else MODELS[model]
    poison = min(poison, 6e4) if model == "capped_fp16" and poison == 3e38 else poison
    group = given["num_q_heads"] // given["num_kv_heads"]
    # Past a block of keys or more, where none is masked.
    batch, attn = prepared(Case(ragged(70, group, 16, 900, decodes=False), **given))
    wanted, wanted_lse = (x.clone() for x in run_gluon(attn, batch))
    for r, (begin, end) in enumerate(itertools.pairwise(batch.qsl)):
        if r % 2:
            batch.q[begin:end] = poison
    out, lse = run_gluon(attn, batch)
    for r, (begin, end) in enumerate(itertools.pairwise(batch.qsl)):
        if r % 2 == 0:
            assert torch.equal(out[begin:end], wanted[begin:end])
            assert torch.equal(lse[begin:end], wanted_lse[begin:end])


@pytest.mark.parametrize("model", ["llama", "gemma", "fp8", "kv8"])
def test_key_that_is_no_number_reaches_later_rows_alone(model):
    given = MODELS[model]
    batch, attn = prepared(Case(((200, 100), (200, 100)), **given))
    wanted = run_gluon(attn, batch)[0].clone()
    at = 217
    size = batch.case.page_size
    batch.k_cache[int(batch.block_table[0, at // size]), :, at % size] = NAN
    out, _ = run_gluon(attn, batch)
    n = batch.num_tokens
    same = (bits(out[:n]) == bits(wanted[:n])).flatten(1).all(1).tolist()
    assert all(same[: at - 100])
    assert all(same[200:])
    assert not any(same[at - 100 : 200])


def one_hot(case: Case, logit: float, seed: int) -> tuple[Batch, list[torch.Tensor]]:
    """A batch whose rows each see one key far above all others; and which, for each request.

    Keys are random signs, so that different ones are nearly orthogonal; a row's query is the key of
    a position drawn for it, its logit with that key ``logit``.
    """
    batch = make_batch(case, DEVICE, seed)
    gen = torch.Generator().manual_seed(seed)
    dim, size = case.head_dim, case.page_size
    # No power of two: its products with a scale are to be rounded.
    step = (logit * dim**-0.5) ** 0.5 if case.kv_dtype is None else 1.875
    targets = []
    for r, (query_len, context) in enumerate(case.requests):
        seq_len = query_len + context
        signs = torch.randint(0, 2, (seq_len, case.num_kv_heads, dim), generator=gen) * 2.0 - 1
        signs = (signs * step).to(DEVICE)
        at = torch.arange(seq_len, device=DEVICE)
        pages = batch.block_table[r][at // size].long()
        batch.k_cache[pages, :, at % size] = signs.to(batch.k_cache.dtype)
        draw = torch.rand(query_len, generator=gen)
        wanted = (draw * (context + 1 + torch.arange(query_len))).long().to(DEVICE)
        rows = signs[wanted].repeat_interleave(batch.group, 1)
        batch.q[batch.qsl[r] : batch.qsl[r + 1]] = rows.to(case.dtype)
        targets.append(wanted)
    return batch, targets


def check_one_hot(batch, targets, out, v_scale=1.0):
    """Each row is the value of its key, but for one rounding of the weight and one of the sum."""
    size = batch.case.page_size
    eps = 2**-3 if batch.case.kv_dtype is not None else torch.finfo(batch.case.dtype).eps
    for r, wanted in enumerate(targets):
        pages = batch.block_table[r][wanted // size].long()
        values = batch.v_cache[pages, :, wanted % size].float() * v_scale
        values = values.repeat_interleave(batch.group, 1)
        rows = out[batch.qsl[r] : batch.qsl[r + 1]].float()
        error = (rows - values).abs() - 2 * eps * values.abs()
        assert error.max() <= 1e-5, f"request {r}: off by {error.max()}"


HOT = ((300, 400), (129, 0), (65, 63), (17, 1000))


@pytest.mark.parametrize(
    ("dtype", "logit"),
    [(BF16, 1e4), (BF16, 8e6), (BF16, 1e9), (FP16, 1e4), (FP16, 1e6), (FP16, 8e6)],
)
def test_huge_logits_pick_their_key(dtype, logit):
    """Also where pages, rows and heads go: each output row is one known row of the cache."""
    case = Case(HOT, **(LLAMA | {"dtype": dtype}))
    batch, targets = one_hot(case, logit, 5)
    if dtype == FP16:  # near the largest number
        batch.v_cache.copy_(torch.where(batch.v_cache > 0, 6e4, -6e4).where(
            ~batch.v_cache.isnan(), NAN))  # fmt: skip
    attn = make_attention(case, DEVICE)
    plan_batch(attn, batch)
    out, lse = run_gluon(attn, batch)
    check_one_hot(batch, targets, out)
    n = batch.num_tokens
    torch.testing.assert_close(lse[:n], torch.full_like(lse[:n], logit), rtol=2e-2, atol=0)


@pytest.mark.parametrize("k_scale", [1e3, 1e5, 3e6, 1e8])
@pytest.mark.parametrize("matmul", [False, True], ids=["widened", "products"])
@pytest.mark.parametrize("plain", [False, True], ids=["gluon", "plain twin"])
def test_fp8_scale_may_be_anything(plain, matmul, k_scale):
    """A product rounded in the maximum, and not in the difference, would give 2**(its rounding)."""
    case = Case(HOT, **LLAMA_FP8)
    batch, targets = one_hot(case, 0.0, 6)
    steps = 1 + 0.0137 * torch.arange(case.num_kv_heads, device=DEVICE)
    batch.features["k_scale"] = k_scale * steps
    batch.features["v_scale"] = torch.full_like(steps, 0.25)
    attn = make_attention(case, DEVICE, fp8_matmul=matmul)
    plan_batch(attn, batch)
    if plain:
        attn.config = dataclasses.replace(attn.config, hopper_prefill=None, hopper_prefill_fp8=None)
        out, _ = run(attn, batch)
    else:
        out, _ = run_gluon(attn, batch)
    check_one_hot(batch, targets, out, v_scale=0.25)


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_sinks_of_any_size_match_reference(model):
    """Sinks of -inf and of -1e4 weigh nothing, of 1e4 everything; rows without keys as well."""
    case = Case(((200, -50), (129, 300), (65, 0)), sinks=0.0, **MODELS[model])
    batch, attn = prepared(case)
    sinks = batch.features["sinks"]
    sinks[0], sinks[1], sinks[2] = float("-inf"), -1e4, 1e4
    out, lse = run_gluon(attn, batch)
    check(batch, out, lse)
    n = batch.num_tokens
    assert (out[:n, 2] == 0).all()
    assert (lse[:50, 0] == float("-inf")).all()
    assert (out[:50] == 0).all()


# Batches that are not what they were, or lie oddly.


@pytest.mark.parametrize("change", ["no rows", "fewer rows", "more rows", "few keys", "no keys"])
@pytest.mark.parametrize("model", ["llama", "gpt_oss", "fp8", "kv8"])
def test_lengths_that_changed_since_the_plan_leave_no_tensor_and_no_counter(model, change):
    """Results are wrong then; but the launch ends, nobody else's memory changes, the next is right.

    Pages stay those of the table, since "few keys" is fewer and "more rows" are still its own.
    """
    given = MODELS[model]
    batch, attn = prepared(Case(((200, 100), (65, 300), (129, 0)), pad_tokens=60, **given))
    wanted = run_gluon(attn, batch)[0][: batch.num_tokens].clone()
    starts, lens = batch.query_start_loc, batch.seq_lens
    attn.plan(starts, lens, batch.block_table, num_tokens=len(batch.q), max_query_len=200)
    if change.endswith("keys"):
        lens.fill_(3 if change == "few keys" else 0)
    else:
        new = {"no rows": [0, 0, 0, 0], "fewer rows": [0, 17, 18, 18], "more rows": [0, 230, 325]}
        rows = [*new[change], len(batch.q)][:4]
        starts.copy_(torch.tensor(rows, dtype=torch.int32))
    frame = torch.full((3, *batch.q.shape), 7.0, dtype=batch.q.dtype, device=DEVICE)
    run_gluon(attn, batch, out=frame[1])
    assert (frame[0] == 7.0).all()
    assert (frame[2] == 7.0).all()
    if change == "no rows":
        assert (frame[1] == 7.0).all()
    plan_batch(attn, batch)
    assert torch.equal(run_gluon(attn, batch)[0][: batch.num_tokens], wanted)


@pytest.mark.parametrize("model", ["llama", "gemma", "fp8", "kv8"])
def test_lengths_and_table_at_odd_addresses_give_the_same_bits(model):
    """Slices of larger buffers, of which no address or stride is a multiple of 16 bytes."""
    given = MODELS[model]
    group = given["num_q_heads"] // given["num_kv_heads"]
    batch, attn = prepared(Case(ragged(80, group, 12, 300), **given))
    wanted, wanted_lse = (x[: batch.num_tokens].clone() for x in run_gluon(attn, batch))
    reqs, width = batch.block_table.shape
    ints = {"dtype": torch.int32, "device": DEVICE}
    starts = torch.full((reqs + 8,), NOWHERE, **ints)[3:][: reqs + 1].copy_(batch.query_start_loc)
    lens = torch.full((reqs + 8,), NOWHERE, **ints)[5:][:reqs].copy_(batch.seq_lens)
    odd = width + 7 + width % 2  # an odd stride
    table = torch.full((reqs, odd), NOWHERE, **ints)[:, 3:][:, :width].copy_(batch.block_table)
    assert table.stride(0) % 2 == 1
    longest = max(query for query, _ in batch.case.requests)
    attn.plan(starts, lens, table, num_tokens=len(batch.q), max_query_len=longest)
    out, lse = run_gluon(attn, batch)
    assert torch.equal(out[: batch.num_tokens], wanted)
    assert torch.equal(lse[: batch.num_tokens], wanted_lse)


@pytest.mark.parametrize("model", ["kv8", "capped_kv8"])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-20])
def test_rows_of_next_to_nothing_see_all_keys_alike(model, size):
    """Their factor times a small scale of keys must not come to 0: masked logits are -inf."""
    batch, attn = prepared(Case(((70, 300), (129, 0)), **MODELS[model]))
    batch.q[::3] = size
    heads = batch.case.num_kv_heads
    batch.features["k_scale"] = torch.full((heads,), 1e-7, device=DEVICE)
    out, lse = run_gluon(attn, batch)
    check(batch, out, lse)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("softcap", [0.1, 60.0, 2048.0, 3e3, 1e4])
def test_any_cap_matches_reference(softcap, dtype):
    """Small ones, which all logits reach, and large ones, whose error in 2**x would leave fp16."""
    case = Case(ragged(71, 4, 8, 700), **(LLAMA | {"dtype": dtype, "softcap": softcap}))
    batch, attn = prepared(case)
    for size in (1.0, 40.0):
        batch.q *= size
        before = gluon_launches()
        out, _ = run(attn, batch)
        assert (gluon_launches() > before) == (softcap <= 2048.0)
        if size == 1.0 or dtype == BF16:
            check(batch, out)  # the sum of weights errs with the logits: no LSE
            continue
        # The unit's 2**-11 of a logit, up to 6 sigma, moves a row by twice that of the values;
        # weights and the row itself are rounded to fp16 besides.
        expected, _ = reference(batch, torch.float32)
        values = batch.v_cache[~batch.v_cache.isnan()].abs().max()
        error = (out.float() - expected)[: batch.num_tokens].abs().max()
        assert error <= 2**-10 * (1 + min(softcap, 6 * size)) * values
