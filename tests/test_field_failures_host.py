"""Field failures K to Q: drafts, compilation, compilers, cliffs, benchmarks (tests/README.md)."""

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import Case, check, make_attention, make_batch, run_and_check

from tilewise import plan_rule, policy
from tilewise.bench import serve_run, workloads
from tilewise.kernels import cache_write, decode, plan, prefill

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

ROOT = Path(__file__).resolve().parent.parent
BF16 = torch.bfloat16
H200 = policy.Device(arch=90, num_sms=132, shared_memory=227 * 1024)
KERNELS = (prefill._prefill_kernel, decode._decode_kernel, plan._plan_kernel,
           cache_write._write_kv_kernel)  # fmt: skip


# -- K: speculative decoding ----------------------------------------------------------------------


@pytest.mark.parametrize("query_len", [2, 4, 8, 16])
@pytest.mark.parametrize("keys", [32_768, 50_000])
def test_k1_verification_stays_split(query_len, keys):
    """Several tokens at a long context: all workers share the keys, as for one token."""
    config = policy.choose(policy.Geometry(32, 8, 128, 64, 2), H200, query_len)
    batch = plan_rule.plan_batch([query_len], [keys], config)
    assert batch.header[0] == 0, "no prefill tile"
    assert batch.header[1] >= 7 / 8 * plan_rule.most_workers(1, config)
    assert min(plan_rule.kv_splits(batch, 0, query_len, config)) >= 8


def test_k2_the_order_of_requests_is_free(device):
    """The tail of a chunk before, between and after verifications and prefills."""
    case = Case(((1, 100), (4, 90), (4, 20), (30, 5)), decode_query_len=4)
    for shift in range(4):
        requests = case.requests[shift:] + case.requests[:shift]
        run_and_check(dataclasses.replace(case, requests=requests), device)


# -- L: compilation -------------------------------------------------------------------------------

VARYING_INTEGERS = {"num_reqs", "max_tiles", "num_tokens", "stride_bt_b"}
VARYING_POINTERS = {"query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "slot_mapping_ptr"}
LIST_PARAMETERS = """
import json
from tilewise.kernels import cache_write, decode, plan, prefill
kernels = (prefill._prefill_kernel, decode._decode_kernel, plan._plan_kernel,
           cache_write._write_kv_kernel)
print(json.dumps([
    [p.name, bool(p.do_not_specialize), bool(p.do_not_specialize_on_alignment)]
    for kernel in kernels for p in kernel.params if not p.is_constexpr
]))
"""


def test_l3_what_varies_with_the_batch_is_not_compiled_in():
    """Neither values nor alignments: each would be a compilation in the middle of serving."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", LIST_PARAMETERS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    parameters = json.loads(done.stdout)
    names = {name for name, _, _ in parameters}
    assert names >= VARYING_INTEGERS | VARYING_POINTERS
    for name, value_free, alignment_free in parameters:
        if name in VARYING_INTEGERS:
            assert value_free, name
        if name in VARYING_INTEGERS | VARYING_POINTERS:
            assert alignment_free or value_free, name
        # Strides of tensors stay compiled in: without them there are no wide loads (L4).
        if name.startswith("stride_") and name not in VARYING_INTEGERS:
            assert not value_free, name
            assert not alignment_free, name


def compiled_variants():
    return sum(len(cache[0]) for k in KERNELS for cache in k.device_caches.values())


def shifted(x):
    """The same integers at an address that is no multiple of 16."""
    return torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 48, 64])
def test_l1_nothing_compiles_after_the_first_batches(page_size):
    """Other lengths, other numbers of requests and tokens, other alignments: the same kernels.

    After one batch of few and one of many requests, which have decode kernels of their own.
    """
    first = Case(((20, 50), (1, 100)), 32, 8, 128, page_size=page_size, dtype=BF16)
    attn = make_attention(first, "cuda", max_num_reqs=300, max_num_tokens=4000)
    layers = []
    for i, requests in enumerate(
        (
            first.requests,
            ((1, 1000),) * 257,
            ((1, 0),),
            ((16, 16),),
            ((17, 0),) * 16,
            ((1, 200),) * 100,
            ((333, 3000),),
        )
    ):
        case = dataclasses.replace(first, requests=requests, pad_tokens=0)
        batch = make_batch(case, "cuda")
        for move in (torch.clone, shifted):
            attn.plan(
                move(batch.query_start_loc), move(batch.seq_lens), move(batch.block_table),
                num_tokens=batch.num_tokens, max_query_len=max(q for q, _ in requests),
            )  # fmt: skip
            check(batch, attn.run(batch.q, batch.kv_cache))
            key = torch.zeros((batch.num_tokens, 8, 128), dtype=BF16, device="cuda")
            slots = torch.full((batch.num_tokens,), -1, dtype=torch.int64, device="cuda")
            cache_write.write_kv_cache(batch.k_cache, batch.v_cache, key, key, move(slots))
            if i > 0:
                layers.append(compiled_variants())
    assert layers[0] > 0
    assert layers == layers[:1] * len(layers)


def package_sources():
    return [p for d in ("kernels", "plugin", "integration") for p in (ROOT / d).glob("*.py")]


def test_l8_only_triton_compiles():
    """No compiler of C++ or CUDA is wanted at run time, so none can be missing."""
    builders_of_extensions = ("cpp_extension", "nvrtc", "cffi", "distutils", "setuptools", "numba")
    for path in package_sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            for name in names:
                assert not set(name.split(".")) & set(builders_of_extensions), (path, name)


def test_d17_nothing_is_tuned_at_run_time():
    """An autotuner that first runs inside a capture would end it."""
    decorated = 0
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for decorator in getattr(node, "decorator_list", ()):
                text = ast.unparse(decorator)
                decorated += "jit" in text
                assert "autotune" not in text, (path, node.name)
                assert "heuristics" not in text, (path, node.name)
    assert decorated > 10


# -- M: compilers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_m6_any_number_of_stages_gives_the_same_numbers(stages, use_tma, device):
    """A compiler that pipelines wrongly shows here; the interpreter has no pipeline."""
    case = Case(((20, 300), (1, 400), (3, 200)), dtype=torch.float16)
    config = make_attention(case, device).config
    tiles = {"num_stages": stages, "tail_stages": min(stages, 2), "use_tma": use_tma}
    config = dataclasses.replace(
        config,
        prefill=dataclasses.replace(config.prefill, **tiles),
        decode=dataclasses.replace(config.decode, **tiles),
    )
    run_and_check(case, device, config=config)


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("element_size", [2, 4])
def test_m2_tiles_follow_the_devices_memory(arch, head_dim, element_size):
    """What was tuned where a block has 227 KB must shrink where it has 99."""
    geometry = policy.Geometry(32, 8, head_dim, 64, element_size)
    for shared in (99 * 1024, 163 * 1024, 227 * 1024):
        config = policy.choose(geometry, policy.Device(arch, 100, shared))
        for tiles in (config.prefill, config.decode):
            assert policy.shared_memory(tiles, geometry) <= shared


# -- N: cliffs in speed ---------------------------------------------------------------------------


def share(config, query_lens, seq_lens):
    """Units of the busiest worker over those of an even share among all workers."""
    _, active, total = plan_rule.plan_batch(query_lens, seq_lens, config).header
    return policy.cdiv(total, active) * plan_rule.most_workers(len(query_lens), config) / total


def best_cost(config, most, total, items):
    """Least time, in units, over the worker counts that fill SMs evenly: walking and merging."""
    counts = [*range(1, config.num_sms + 1), most]
    return min(total / w + w / items / 16 for w in counts)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("keys", [8192, 32_768, 220_000])
def test_n2_splits_follow_the_ranks_own_heads(kv_heads, keys):
    """At no number of requests or KV heads does splitting end: always near the best cut."""
    config = policy.choose(policy.Geometry(4 * kv_heads, kv_heads, 128, 64, 2), H200)
    for requests in (1, 2, 7, 8, 9, 12, 13, 32, 36, 64):
        _, active, total = plan_rule.plan_batch([1] * requests, [keys] * requests, config).header
        items = requests * kv_heads
        cost = policy.cdiv(total, active) + active / items / 16
        most = plan_rule.most_workers(requests, config)
        assert cost <= 1.2 * best_cost(config, most, total, items) + 1, (requests, active)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_n3_more_keys_of_one_request_get_more_workers(kv_heads):
    """No fixed number of splits: they grow with the length until every SM has one."""
    config = policy.choose(policy.Geometry(8 * kv_heads, kv_heads, 128, 64, 2), H200)
    workers = [
        plan_rule.plan_batch([1], [keys], config).header[1]
        for keys in (1024, 8192, 32_768, 131_072, 2**20)
    ]
    assert workers == sorted(workers)
    assert workers[2] > 8 * kv_heads
    assert workers[-1] >= 7 / 8 * H200.num_sms


def test_n4_one_long_request_among_short_ones():
    """248k keys beside 63 short requests: nobody waits for one worker."""
    config = policy.choose(policy.Geometry(32, 8, 128, 64, 2), H200)
    lens = [248_000, *[300 + 37 * i for i in range(63)]]
    for order in (lens, lens[::-1], lens[32:] + lens[:32]):
        assert share(config, [1] * 64, order) <= 8 / 7 * 1.02


@pytest.mark.parametrize("requests", [64, 256, 1024])
def test_n5_large_batches_are_not_cut_to_pieces(requests):
    """Pieces to merge are bounded by the workers, whatever the batch."""
    config = policy.choose(policy.Geometry(32, 8, 128, 64, 2), H200)
    batch = plan_rule.plan_batch([1] * requests, [4000] * requests, config)
    splits = [s for r in range(requests) for s in plan_rule.kv_splits(batch, r, 1, config)]
    assert sum(splits) <= len(splits) + batch.header[1] - 1
    assert max(splits) <= 2


@pytest.mark.parametrize("group", [3, 5, 6, 7, 12])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_n10_odd_ratios_take_the_same_path(group, head_dim):
    """Tiles of a ratio are those of the next power of two: the copy engine, stages and all."""
    odd = policy.choose(policy.Geometry(2 * group, 2, head_dim, 64, 2), H200)
    even = policy.choose(
        policy.Geometry(2 * policy.next_power_of_2(group), 2, head_dim, 64, 2), H200
    )
    assert odd.decode == even.decode
    assert odd.prefill == even.prefill
    assert odd.hopper_prefill is not None
    assert odd.hopper_prefill == even.hopper_prefill
    assert odd.prefill_block_q == even.prefill_block_q
    assert odd.num_workers == even.num_workers


# -- Q: benchmarks --------------------------------------------------------------------------------

ROW = workloads.WORKLOADS["s_1k_128_c64"]
FIGURES = {
    "total_input_tokens": ROW.num_prompts * ROW.input_len,
    "total_output_tokens": ROW.num_prompts * ROW.output_len,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        ({"total_input_tokens": 5828 * ROW.num_prompts}, "input tokens"),
        ({"total_input_tokens": None}, "input tokens"),
        ({"total_output_tokens": ROW.num_prompts}, "output tokens"),
    ],
)
def test_q3_lengths_other_than_asked_for_are_an_error(change, named):
    """Prompts shorter than wanted, or one token where a hundred were due."""
    found = serve_run.wrong_totals(ROW, FIGURES | change)
    assert found is None if named is None else named in found


def test_q1_no_request_is_answered_from_a_cache():
    """Servers run without prefix caching, clients warm up first and always reach full length."""
    server = workloads.server_command(Path("m"), "TILEWISE", 1, 2048, [])
    assert "--no-enable-prefix-caching" in server
    client = workloads.client_arguments(ROW, Path("m"), 1, Path("f.json"))
    assert "--ignore-eos" in client
    assert int(client[client.index("--num-warmups") + 1]) >= 1
