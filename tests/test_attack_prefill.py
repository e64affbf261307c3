"""Attacks on the Gluon prefills: races between tiles, ragged edges.

What the other modules hold to the reference once is launched here by the hundred, beside noise on
another stream, and on batches drawn around the kernels' own edges: 64 rows of a warpgroup, 128 of a
tile, blocks of keys, pages.
"""

import pytest
import torch
from attacks import (
    BF16,
    DEVICE,
    E4M3,
    FP16,
    GEMMA,
    GPT_OSS,
    LLAMA,
    LLAMA_FP8,
    MODELS,
    NAN,
    Noise,
    bits,
    gluon_launches,
    move_pages,
    prepared,
    ragged,
    run,
    run_gluon,
)
from cases import NOWHERE, Case, check, make_attention, make_batch, plan_batch
from test_fp8_matmul import run_and_check as run_and_check_fp8
from test_hopper import needs_hopper

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_hopper():
    needs_hopper()


# Races: what a tile leaves, the next tile's copies must not have touched.

SHORT = {  # many tiles of one or two blocks a program: queries are handed over most often
    "llama": (200, 40), "qwen": (160, 40), "gpt_oss": (200, 40), "gemma": (100, 20),
    "fp8": (200, 40), "kv8": (200, 40), "capped": (200, 40), "capped_kv8": (200, 40),
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
        # A capped row of one key has its logit as LSE, with the 2**-11 of the tangent's unit.
        check(batch, first, None if "softcap" in given else first_lse)
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


@pytest.mark.parametrize("model", ["llama", "fp8", "kv8"])
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


@pytest.mark.parametrize(
    "models", [("llama", "llama"), ("llama", "qwen"), ("fp8", "gpt_oss"), ("kv8", "llama")]
)
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


@pytest.mark.parametrize("model", ["llama", "gpt_oss", "fp8", "kv8"])
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
        fp8_matmul=given.get("kv_dtype") == E4M3,
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
def test_heads_between_with_sinks_and_a_window_match_reference(dim):
    """Of padded heads the kernel takes windows as of those that they are padded to."""
    requests = ((129, 700), (17, 64), (33, 63), (65, 1))
    batch, attn = prepared(Case(requests, 10, 2, dim, dtype=FP16, sinks=1.0, window=300))
    plan_batch(attn, batch, has_decode=False)
    assert (attn.config.hopper_prefill is not None) == (dim == 192)
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
