"""A server asks Triton for nothing that the warm-up has not compiled.

Without a GPU, by the specialisations that Triton is asked for; on one, by what it compiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

import specialisations
from specialisations import LAYER

pytestmark = pytest.mark.vllm

SCRIPT = Path(specialisations.__file__)
LAYERS = {
    "llama": {},
    "ampere": {"arch": 80},
    "small_pages": {"page": 16},
    "few_requests": {"max_num_reqs": 1},
    "few_tokens": {"max_num_tokens": 16},
    "one_token": {"max_num_tokens": 1, "max_num_reqs": 1},
    "heads_outer": {"layout": "hnd"},
    "one_kv_head": {"heads": [8, 1]},
    "one_head": {"heads": [1, 1], "head_size": 64},
    "fp32": {"dtype": "float32", "head_size": 64},
    "window_sinks": {"window": 128, "sinks": True, "head_size": 64},
    "window_cap": {"window": 4096, "soft_cap": 50.0},
    "alibi": {"alibi": True},
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8_ampere_small_pages": {"kv_cache_dtype": "fp8_e5m2", "arch": 80, "page": 16},
    "fp8_per_head_72": {
        "kv_cache_dtype": "fp8",
        "scales": 3,
        "heads": [9, 3],
        "head_size": 72,
        "window": 128,
    },
    "fp8_products": {"kv_cache_dtype": "fp8", "fp8_attention": "fp8"},
    "fp8_rotated": {"kv_cache_dtype": "fp8", "fp8_attention": "rotated", "quantised": True},
    "fp8_products_64": {"kv_cache_dtype": "fp8", "fp8_attention": "rotated", "head_size": 64},
    "quantised": {"quantised": True},
    "quantised_fp8": {"quantised": True, "kv_cache_dtype": "fp8", "arch": 80},
    "images": {"images": True, "head_size": 256, "window": 1024},
    "images_quantised": {"images": True, "quantised": True, "arch": 80},
    "images_ampere": {"images": True, "arch": 80, "page": 16},
    # Heads of which 16 elements are no divisor: rows may be divisible, or not.
    "odd_heads_72": {"heads": [9, 3], "head_size": 72},
    "even_over_odd_72": {"heads": [10, 5], "head_size": 72},
    "odd_88_ampere": {"heads": [5, 5], "head_size": 88, "arch": 80},
    "two_requests": {"max_num_reqs": 2},
    "one_drafted_request": {"max_num_reqs": 1, "drafts": 4},
    "drafts": {"drafts": 3},
    "drafts_fp8_window": {"drafts": 4, "kv_cache_dtype": "fp8", "window": 128},
    "invariant": {"batch_invariant": True},
    "invariant_fp8_ampere": {"batch_invariant": True, "kv_cache_dtype": "fp8", "arch": 80},
    "wide_heads": {"head_size": 512, "heads": [8, 1]},
    "quantised_declined": {"quantised": True, "declines": True},
    "encoder": {"encoder": True, "causal": "never", "heads": [12, 12], "head_size": 64},
    "encoder_window": {"encoder": True, "causal": "never", "head_size": 64, "window": 128},
    "encoder_72_ampere": {
        "encoder": True,
        "causal": "never",
        "heads": [9, 9],
        "head_size": 72,
        "arch": 80,
    },
    "encoder_quantised": {"encoder": True, "causal": "never", "quantised": True},
    "encoder_one_request": {"encoder": True, "causal": "never", "max_num_reqs": 1},
    "never_causal": {"causal": "never"},
    "causal_in_part": {"causal": "some"},
    "causal_in_part_fp8": {"causal": "some", "kv_cache_dtype": "fp8", "arch": 80},
    "shared_prefixes": {"shared": True},
    "shared_prefixes_few_tokens": {"shared": True, "max_num_tokens": 16, "page": 16},
    "shared_prefixes_one_request": {"shared": True, "max_num_reqs": 1},
    "shared_prefixes_ampere": {"shared": True, "arch": 80, "images": True, "page": 16},
    "shared_prefixes_fp8": {"shared": True, "kv_cache_dtype": "fp8", "quantised": True},
    "shared_prefixes_72": {"shared": True, "heads": [9, 3], "head_size": 72},
    "shared_keys": {"heads": [16, 1], "ranks": 2},
    "shared_keys_sinks": {"heads": [8, 1], "head_size": 64, "ranks": 4, "sinks": True},
    "shared_keys_72": {"heads": [5, 1], "head_size": 72, "ranks": 2, "soft_cap": 30.0},
    "shared_keys_fp8_ampere": {"heads": [8, 1], "ranks": 2, "kv_cache_dtype": "fp8", "arch": 80},
}


def examine(folder, specs):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    (folder / "job.json").write_text(json.dumps(specs))
    command = [sys.executable, str(SCRIPT), str(folder / "job.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    if torch.cuda.is_available():
        pytest.skip("describes GPUs to a process that has none")
    rows = examine(tmp_path_factory.mktemp("layers"), list(LAYERS.values()))
    return dict(zip(LAYERS, rows, strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_serving_needs_nothing_new(results, name):
    result = results[name]
    assert result["missing"] == {}
    assert result["served"] >= 4
    prefill = any("prefill" in kernel for kernel in result["warmed"])
    assert prefill == ((LAYER | LAYERS[name])["max_num_tokens"] > 16)
    needed = {"_plan_kernel", "_decode_kernel", "_write_kv_kernel"}
    if LAYERS[name].get("encoder"):
        needed.remove("_write_kv_kernel")  # they have no cache
    assert needed <= result["warmed"].keys()


def test_as_little_as_possible_is_compiled(results):
    """One of each kernel, but where rows have two kinds of strides."""
    llama = dict(results["llama"]["warmed"])
    # Beside a decode, and alone.
    assert llama.pop("_hopper_prefill_kernel") == 2
    assert set(llama.values()) == {1}
    assert "_hopper_decode_kernel" in llama
    assert "_prefill_kernel" not in results["llama"]["warmed"]
    assert set(results["fp8"]["warmed"].values()) == {1}
    assert "_prefill_kernel" in results["fp8"]["warmed"]
    assert "_hopper_prefill_fp8_kernel" in results["fp8_products"]["warmed"]
    assert "_prefill_kernel" not in results["fp8_products"]["warmed"]
    assert results["odd_heads_72"]["warmed"]["_write_kv_kernel"] == 4
    assert results["odd_heads_72"]["warmed"]["_decode_kernel"] == 2


def test_quantised_outputs_are_compiled_where_they_are_taken(results):
    assert results["quantised_declined"]["warmed"] == results["llama"]["warmed"]
    assert results["quantised"]["warmed"]["_decode_kernel"] == 2


def test_a_warm_up_of_one_kind_of_rows_is_found_wanting(tmp_path):
    (row,) = examine(tmp_path, [{**LAYERS["even_over_odd_72"], "pads": [0]}])
    assert "_write_kv_kernel" in row["missing"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["llama", "small_pages", "few_requests", "odd_heads_72", "window_sinks", "fp8",
             "fp8_per_head_72", "images", "shared_keys", "shared_keys_72", "two_requests",
              "one_drafted_request", "invariant", "causal_in_part", "encoder", "shared_prefixes",
              "shared_prefixes_72"],
)  # fmt: skip
def test_nothing_compiles_while_serving(name, monkeypatch):
    from triton import knobs

    from tilewise.integration import start_up

    monkeypatch.setattr(start_up, "_compiled", set())
    spec, device = LAYER | LAYERS[name], torch.device("cuda", 0)
    builder, layer, cache = specialisations.make_layer(spec, device)
    if spec["encoder"]:
        start_up.prepare_encoder(builder, layer)
    else:
        start_up.prepare(builder, layer, cache)
    compiled = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda *, repr, **_: compiled.append(repr)
    )
    assert specialisations.serve(spec, builder, layer, cache, device) > 4
    torch.cuda.synchronize()
    assert compiled == []


def test_layers_whose_caps_take_other_kernels_are_prepared_apart():
    """A cap is an argument of its kernels, but its size chooses between them."""
    from tilewise.integration import start_up

    def kind(softcap, dtype):
        spec = LAYER | {"soft_cap": softcap, "dtype": dtype}
        return start_up._kind(*specialisations.make_layer(spec, torch.device("cpu")))

    for dtype, of_one_kind in (
        ("bfloat16", [(None,), (20.0, 50.0), (51.0, 2048.0), (3000.0, 1e5)]),
        ("float16", [(None,), (20.0, 50.0, 51.0, 2048.0), (3000.0, 1e5)]),
    ):
        kinds = [{kind(cap, dtype) for cap in caps} for caps in of_one_kind]
        assert [len(found) for found in kinds] == [1] * len(kinds)
        assert len(set.union(*kinds)) == len(kinds)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "fp8"])
def test_the_check_takes_less_than_a_second(name, monkeypatch):
    import time

    from tilewise.integration import self_check, start_up

    monkeypatch.setattr(start_up, "_compiled", set())
    builder, layer, cache = specialisations.make_layer(
        LAYER | LAYERS[name], torch.device("cuda", 0)
    )
    start_up.prepare(builder, layer, cache)
    started = time.perf_counter()
    self_check.check(layer.impl, layer, builder.attn, cache)
    assert time.perf_counter() - started < 1.0
