"""Attacks on the Gluon prefills: races between tiles, ragged edges, strides, extremes.

What the other modules hold to the reference once is launched here by the hundred, beside noise on
another stream, in buffers whose every other byte is known, and on batches drawn around the
kernels' own edges: 64 rows of a warpgroup, 128 of a tile, blocks of keys, pages.
"""

import dataclasses
import itertools
import random

import pytest
import torch
from cases import NOWHERE, Batch, Case, check, make_attention, make_batch, plan_batch
from test_fp8_matmul import run_and_check as run_and_check_fp8
from test_hopper import needs_hopper

from tilewise import counters, policy
from tilewise.errors import PlanMismatch

pytestmark = pytest.mark.gpu

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
NAN = float("nan")
DEVICE = "cuda"
GLUON = ("hopper_prefill", "hopper_prefill_fp8")
LLAMA = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16}
LLAMA_FP8 = LLAMA | {"kv_dtype": E4M3, "kv_scales": "head"}
QWEN = LLAMA | {"num_q_heads": 28, "num_kv_heads": 4}
GPT_OSS = {"num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64, "dtype": BF16, "sinks": 1.0}
GEMMA = {"num_q_heads": 8, "num_kv_heads": 4, "head_dim": 256, "dtype": BF16}
MODELS = {
    "llama": LLAMA,
    "qwen": QWEN,
    "gpt_oss": GPT_OSS | {"page_size": 256},
    "gemma": GEMMA,
    "fp8": LLAMA_FP8,
}


@pytest.fixture(autouse=True)
def _needs_hopper():
    needs_hopper()


def ragged(seed, group, count=24, longest=700, decodes=True):
    """Requests around the edges of tiles, blocks and pages, and none at all between them."""
    rng = random.Random(seed)
    tokens = 64 // policy.next_power_of_2(group)  # of a warpgroup
    edges = [n for k in (1, 2, 4, 5) for n in (k * tokens - 1, k * tokens, k * tokens + 1)]
    edges += [63, 64, 65, 127, 128, 129]
    queries = [n for n in edges if n > policy.DECODE_MAX_QUERY_LEN] + [17]
    contexts = [0, 1, 62, 63, 64, 65, 126, 127, 128, 129, 255, 256, 257]
    found = []
    for _ in range(count):
        query = rng.choice(queries)
        if decodes and rng.random() < 0.3:
            query = rng.choice([0, 0, 1, 1, 2, 15, 16])
        found.append((query, rng.choice([*contexts, rng.randint(0, longest)])))
    # Whoever is drawn, a tile of one row is among them.
    return (*found, (2 * tokens * -(-17 // (2 * tokens)) + 1, 0))


def gluon_launches():
    counted = counters.snapshot()
    return sum(counted.get(f"launches{{kernel={name}}}", 0) for name in GLUON)


def prepared(case, seed=0, **overrides):
    """The case's batch, and an object that has planned it."""
    batch = make_batch(case, DEVICE, seed)
    if case.kv_dtype is not None:
        overrides.setdefault("fp8_matmul", True)
    attn = make_attention(case, DEVICE, **overrides)
    plan_batch(attn, batch)
    return batch, attn


def bits(x):
    """What is there, NaN or not."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def run(attn, batch, **options):
    return attn.run(batch.q, batch.kv_cache, return_lse=True, **(batch.features | options))


def run_gluon(attn, batch, **options):
    """One run, which must be one launch of a Gluon prefill that leaves its counters at zero."""
    before = gluon_launches()
    out, lse = run(attn, batch, **options)
    assert gluon_launches() == before + 1
    assert attn._buffers.header[3:].tolist() == [0, 0]
    return out, lse


def move_pages(batch, pages):
    """The same batch in a cache of so many pages, at its far end."""
    held = len(batch.kv_cache)
    kind = batch.kv_cache
    order = sorted(range(4), key=lambda axis: (-kind.stride(axis), axis))
    shape = [(pages, *kind.shape[1:])[axis] for axis in order]
    memory = torch.full(shape, NAN, dtype=BF16, device=DEVICE).to(kind.dtype)
    moved = memory.permute([order.index(axis) for axis in range(4)])
    moved[pages - held :] = kind
    batch.kv_cache = moved
    table = batch.block_table
    batch.block_table = torch.where(table == NOWHERE, table, table + pages - held)


class Noise:
    """Another stream that keeps SMs, L2 and the copy engines busy at its own pace."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.a = torch.randn(1536, 1536, dtype=BF16, device=DEVICE)
        self.memory = torch.zeros(2, 2**25, dtype=torch.uint8, device=DEVICE)
        self.stream.wait_stream(torch.cuda.current_stream())

    def __call__(self, i):
        with torch.cuda.stream(self.stream):
            if i % 3:
                self.a @ self.a
            else:
                self.memory[0].copy_(self.memory[1])

    def join(self):
        torch.cuda.current_stream().wait_stream(self.stream)


# Races: what a tile leaves, the next tile's copies must not have touched.

SHORT = {  # many tiles of one or two blocks a program: queries are handed over most often
    "llama": (200, 40), "qwen": (160, 40), "gpt_oss": (200, 40), "gemma": (100, 20),
    "fp8": (200, 40),
}  # fmt: skip


@pytest.mark.parametrize("decodes", [False, True], ids=["prefills", "mixed"])
@pytest.mark.parametrize("model", MODELS)
def test_stress_launches_repeat_every_bit_beside_noise(model, decodes):
    count, longest = SHORT[model]
    given = MODELS[model]
    group = given["num_q_heads"] // given["num_kv_heads"]
    requests = ragged(7, group, count, longest, decodes)
    batch, attn = prepared(Case(requests, **given))
    first, first_lse = run_gluon(attn, batch)
    if model == "fp8":
        run_and_check_fp8(batch.case, DEVICE)
    else:
        check(batch, first, first_lse)
    rows = slice(0, batch.num_tokens)
    wanted, wanted_lse = bits(first[rows]).clone(), bits(first_lse[rows]).clone()
    noise = Noise()
    out = torch.empty_like(first)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(250):
        noise(i)
        if i % 50 == 49:
            plan_batch(attn, batch)
        out.fill_(NAN)
        _, lse = run(attn, batch, out=out)
        wrong += (bits(out[rows]) != wanted).sum() + (bits(lse[rows]) != wanted_lse).sum()
    noise.join()
    assert int(wrong) == 0
    assert attn._buffers.header[3:].tolist() == [0, 0]


@pytest.mark.parametrize("model", ["llama", "fp8"])
def test_stress_launches_back_to_back_with_other_queries(model):
    """No fill, no comparison between launches: only the kernels' own order keeps them apart."""
    requests = ragged(11, 4, 150, 60)
    batch, attn = prepared(Case(requests, **MODELS[model]))
    given = [batch.q, batch.q.flip(1).contiguous(), -batch.q, batch.q * 0.5]
    wanted = []
    for q in given:
        batch.q = q
        wanted.append(run_gluon(attn, batch)[0][: batch.num_tokens].clone())
    outs = [torch.full_like(given[0], NAN) for _ in range(40)]
    for i, out in enumerate(outs):
        batch.q = given[i % 4]
        run(attn, batch, out=out)
    for i, out in enumerate(outs):
        assert torch.equal(out[: batch.num_tokens], wanted[i % 4]), i


@pytest.mark.parametrize("models", [("llama", "llama"), ("llama", "qwen"), ("fp8", "gpt_oss")])
def test_two_objects_on_two_streams_do_not_meet(models):
    held = []
    for i, model in enumerate(models):
        given = MODELS[model]
        group = given["num_q_heads"] // given["num_kv_heads"]
        batch, attn = prepared(Case(ragged(20 + i, group, 60, 300), **given), seed=i)
        first = run_gluon(attn, batch)[0][: batch.num_tokens].clone()
        outs = [torch.full_like(batch.q, NAN) for _ in range(30)]
        held.append((batch, attn, first, outs, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for i in range(30):
        for batch, attn, _, outs, stream in held:
            with torch.cuda.stream(stream):
                if i % 10 == 5:
                    plan_batch(attn, batch)
                run(attn, batch, out=outs[i])
    torch.cuda.synchronize()
    for batch, attn, first, outs, _ in held:
        assert all(torch.equal(out[: batch.num_tokens], first) for out in outs)
        assert attn._buffers.header[3:].tolist() == [0, 0]


@pytest.mark.parametrize("model", ["llama", "gpt_oss", "fp8"])
def test_graph_of_several_layers_serves_other_lengths(model):
    """Four layers in a graph, each beside the next; replays give the bits of eager runs."""
    given = MODELS[model]
    group = given["num_q_heads"] // given["num_kv_heads"]
    batches = [
        make_batch(Case(ragged(seed, group, 20, 500), pad_requests=2, **given), DEVICE, seed)
        for seed in (30, 31, 32)
    ]
    tokens = max(len(b.q) for b in batches)
    pages = max(len(b.kv_cache) for b in batches)
    width = max(b.block_table.shape[1] for b in batches)
    for b in batches:
        move_pages(b, pages)
    attn = make_attention(
        batches[0].case, DEVICE, max_num_reqs=64, max_num_tokens=tokens,
        fp8_matmul=given.get("kv_dtype") is not None,
    )  # fmt: skip
    heads, dim = given["num_q_heads"], given["head_dim"]
    q = torch.zeros(tokens, heads, dim, dtype=given["dtype"], device=DEVICE)
    outs = [torch.empty_like(q) for _ in range(4)]
    cache = torch.empty_like(batches[0].kv_cache)
    starts, lens = batches[0].query_start_loc, batches[0].seq_lens
    table = torch.empty(len(lens), width, dtype=torch.int32, device=DEVICE)
    features = {name: x.clone() for name, x in batches[0].features.items()}

    def load(b):
        cache.copy_(b.kv_cache)
        starts.copy_(b.query_start_loc)
        lens.copy_(b.seq_lens)
        for name, x in features.items():
            x.copy_(b.features[name])
        table.fill_(NOWHERE)
        table[:, : b.block_table.shape[1]] = b.block_table
        q.fill_(NAN)
        q[: len(b.q)] = b.q
        for out in outs:
            out.fill_(7.0)
        attn.plan(starts, lens, table, num_tokens=tokens, max_query_len=512)

    def layers():
        for i, out in enumerate(outs):
            attn.run(q if i % 2 == 0 else -q, cache, out=out, return_lse=True, **features)

    load(batches[0])
    layers()
    load(batches[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for b in (batches[1], batches[2], batches[0], batches[1]):
        load(b)
        layers()
        eager = [out.clone() for out in outs]
        load(b)
        graph.replay()
        for out, wanted in zip(outs, eager, strict=True):
            assert torch.equal(bits(out), bits(wanted))
            assert (out[b.num_tokens :] == 7.0).all()
        if model != "fp8":
            check(b, outs[0])


# Ragged edges, ratios, pages.

RATIOS = [(3, 3, 1, 128, BF16), (5, 10, 2, 64, FP16), (6, 12, 2, 128, FP16), (12, 12, 1, 64, BF16)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ratio", RATIOS, ids=lambda r: f"ratio{r[0]}-d{r[3]}")
def test_ratios_at_ragged_edges_match_reference(ratio, seed):
    group, heads, kv_heads, dim, dtype = ratio
    requests = ragged(100 + seed, group, 16, 900, decodes=False)
    batch, attn = prepared(Case(requests, heads, kv_heads, dim, dtype=dtype), seed)
    plan_batch(attn, batch, has_decode=False)
    out, lse = run_gluon(attn, batch, out=torch.full_like(batch.q, 7.0))
    check(batch, out, lse)
    assert (out[batch.num_tokens :] == 7.0).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", ["llama", "qwen", "gpt_oss", "gemma"])
def test_ragged_batches_match_reference(model, seed):
    given = MODELS[model]
    group = given["num_q_heads"] // given["num_kv_heads"]
    case = Case(ragged(200 + seed, group, 20, 2000), pad_requests=seed % 3, **given)
    batch, attn = prepared(case, seed)
    out, lse = run_gluon(attn, batch, out=torch.full_like(batch.q, 7.0))
    check(batch, out, lse)
    assert (out[batch.num_tokens :] == 7.0).all()


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_fp8_ragged_batches_match_reference(seed, rotated):
    case = Case(ragged(300 + seed, 4, 20, 1500), pad_requests=seed, **LLAMA_FP8)
    before = gluon_launches()
    run_and_check_fp8(case, DEVICE, rotated=rotated)
    assert gluon_launches() == before + 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("model", "window"), [("llama", 700), ("gpt_oss", 1100), ("gemma", 256)])
def test_windows_and_sinks_over_several_tiles_match_reference(model, window, seed):
    """Windows that end within blocks and pages; what lies left of them is NaN and page NOWHERE."""
    given = MODELS[model] | {"sinks": 1.5, "window": window}
    group = given["num_q_heads"] // given["num_kv_heads"]
    requests = [
        *ragged(400 + seed, group, 12, 3000, decodes=False),
        (window + 65, window - 1),
        (300, 2 * window),
    ]
    batch, attn = prepared(Case(tuple(requests), **given), seed)
    plan_batch(attn, batch, has_decode=False)
    out, lse = run_gluon(attn, batch)
    check(batch, out, lse)


@pytest.mark.parametrize(
    ("given", "page_size"), [(GEMMA, 192), (GPT_OSS, 512)], ids=["d256-p192", "d64-p512"]
)
def test_pages_of_several_blocks_match_reference(given, page_size):
    requests = ((page_size - 1, 1), (17, page_size), (129, 2 * page_size - 5), (65, 3 * page_size))
    batch, attn = prepared(Case(requests, page_size=page_size, **given))
    plan_batch(attn, batch, has_decode=False)
    out, lse = run_gluon(attn, batch)
    check(batch, out, lse)


@pytest.mark.parametrize("page_size", [16, 48, 528])
def test_pages_the_boxes_do_not_take_go_to_the_plain_kernel(page_size):
    requests = ((129, 700), (17, page_size), (33, page_size - 1))
    batch, attn = prepared(Case(requests, 28, 4, 128, page_size, FP16))
    plan_batch(attn, batch, has_decode=False)
    assert attn.config.hopper_prefill is None
    before = gluon_launches()
    out, lse = run(attn, batch)
    assert gluon_launches() == before
    check(batch, out, lse)


@pytest.mark.parametrize("dim", [72, 192])
def test_heads_between_with_sinks_and_a_window_go_to_the_plain_kernel(dim):
    requests = ((129, 700), (17, 64), (33, 63), (65, 1))
    batch, attn = prepared(Case(requests, 10, 2, dim, dtype=FP16, sinks=1.0, window=300))
    plan_batch(attn, batch, has_decode=False)
    assert attn.config.hopper_prefill is None
    out, lse = run(attn, batch)
    check(batch, out, lse)


def test_long_context_of_a_small_chunk_matches_reference():
    """Beyond 64k keys: 1033 pages, 517 blocks of keys for one tile."""
    batch, attn = prepared(Case(((65, 66000), (17, 0)), **LLAMA))
    out, lse = run_gluon(attn, batch)
    check(batch, out, lse)


@pytest.mark.parametrize("query_len", [17, 63, 64])
def test_cache_of_one_page_matches_reference(query_len):
    """The descriptor has one page, whose stride means nothing."""
    batch, attn = prepared(Case(((query_len, 64 - query_len),), **LLAMA))
    page = int(batch.block_table[0, 0])
    batch.kv_cache = batch.kv_cache[page : page + 1].clone()
    batch.block_table[0, 0] = 0
    plan_batch(attn, batch)
    out, lse = run_gluon(attn, batch)
    check(batch, out, lse)


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
@pytest.mark.parametrize("model", ["llama", "qwen", "gpt_oss", "gemma", "fp8"])
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
@pytest.mark.parametrize("model", ["llama", "qwen", "gemma", "fp8"])
def test_poisoned_queries_of_one_request_leave_others_bits(model, poison):
    """Boxes reach into the next request's rows: these are computed, and matter to nobody."""
    given = MODELS[model]
    group = given["num_q_heads"] // given["num_kv_heads"]
    batch, attn = prepared(Case(ragged(70, group, 16, 300, decodes=False), **given))
    wanted, wanted_lse = (x.clone() for x in run_gluon(attn, batch))
    for r, (begin, end) in enumerate(itertools.pairwise(batch.qsl)):
        if r % 2:
            batch.q[begin:end] = poison
    out, lse = run_gluon(attn, batch)
    for r, (begin, end) in enumerate(itertools.pairwise(batch.qsl)):
        if r % 2 == 0:
            assert torch.equal(out[begin:end], wanted[begin:end])
            assert torch.equal(lse[begin:end], wanted_lse[begin:end])


@pytest.mark.parametrize("model", ["llama", "gemma", "fp8"])
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
@pytest.mark.parametrize("plain", [False, True], ids=["gluon", "plain twin"])
def test_fp8_scale_may_be_anything(plain, k_scale):
    """A product rounded in the maximum, and not in the difference, would give 2**(its rounding)."""
    case = Case(HOT, **LLAMA_FP8)
    batch, targets = one_hot(case, 0.0, 6)
    steps = 1 + 0.0137 * torch.arange(case.num_kv_heads, device=DEVICE)
    batch.features["k_scale"] = k_scale * steps
    batch.features["v_scale"] = torch.full_like(steps, 0.25)
    attn = make_attention(case, DEVICE, fp8_matmul=True)
    plan_batch(attn, batch)
    if plain:
        attn.config = dataclasses.replace(attn.config, hopper_prefill_fp8=None)
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
@pytest.mark.parametrize("model", ["llama", "gpt_oss", "fp8"])
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


@pytest.mark.parametrize("model", ["llama", "gemma", "fp8"])
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
