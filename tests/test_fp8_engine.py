"""fp8 caches in vLLM: what the layer and the builder make of it, and an engine's tokens.

The reference is Hugging Face's model with its keys and values rounded to fp8: they are rounded
where they are read, which comes to the same as rounding them where they are written.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from agreement import compare, greedy_reference
from reference import paged_attention
from test_builder import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    engine_config,
    make_batch,
    make_impl,
)
from test_engine import (
    JOB_SCRIPT,
    JOB_TIMEOUT,
    SMALL_ENGINE,
    prompts_of,
    run_job,
)
from tiny_model import TinyLlama
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tilewise.errors import UnsupportedConfig
from tilewise.integration.builder import TilewiseMetadataBuilder

pytestmark = pytest.mark.vllm
ON_THE_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="an engine on the CPU")

TOKENS = 8
PROMPTS = prompts_of([1, 3, 17, 90, 130], seed=11)
# Two tokens, one of prefill and one of decode: each row can end in a tie only once.
HALF_PROMPTS, HALF_TOKENS = prompts_of([*range(2, 34), 40, 49, 66, 90], seed=5), 2
# One of them in `make test`: an engine costs half a minute.
KINDS = ["fp8", pytest.param("fp8_e5m2", marks=pytest.mark.slow)]
DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def round_cache(monkeypatch, dtype):
    """Make Hugging Face's Llama attend to keys and values rounded to ``dtype``."""
    from transformers.models.llama import modeling_llama

    eager = modeling_llama.eager_attention_forward

    def forward(module, query, key, value, *args, **kwargs):
        key, value = (x.to(dtype).to(x.dtype) for x in (key, value))
        return eager(module, query, key, value, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", forward)


class AttentionLayer(AttentionLayerBase):
    """As much of a layer as the builder looks at."""

    def __init__(self, impl):
        self.impl = impl

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


@pytest.mark.slow
@ON_THE_CPU
@pytest.mark.parametrize("kv_cache_dtype", KINDS)
def test_tokens_equal_hugging_face_over_a_rounded_cache(kv_cache_dtype, tmp_path, monkeypatch):
    """And differ from those over the model's own cache, or the test would show nothing."""
    model = TinyLlama(num_heads=6, num_kv_heads=2, hidden_size=96, seed=4).write(tmp_path / "model")
    rounds = [{"prompts": PROMPTS, "max_tokens": TOKENS}]
    job = {
        "model": str(model),
        "engine": {**SMALL_ENGINE, "dtype": "float32", "kv_cache_dtype": kv_cache_dtype},
        "rounds": rounds,
    }
    result = run_job(tmp_path, job)
    assert result["backends"] == ["TilewiseBackend"]
    assert result["start_counters"]["self_checks{result=passed}"] == 1
    tokens = result["rounds"][0]["tokens"]
    assert compare(greedy_reference(model, PROMPTS, TOKENS), tokens).num_equal < len(PROMPTS)
    round_cache(monkeypatch, DTYPES[kv_cache_dtype])
    agreement = compare(greedy_reference(model, PROMPTS, TOKENS), tokens)
    assert agreement.num_equal == len(PROMPTS), str(agreement)


def check_half_precision(run, engine, folder, monkeypatch):
    """fp16 tokens over an fp8 cache: the agreement rule, and a control that breaks it.

    Not bf16: its own rounding moves so many keys to another fp8 value that most rows end in ties.
    """
    shape = TinyLlama(num_heads=4, head_dim=128, dtype=torch.float16, seed=2)
    model = shape.write(folder / "model")
    spec = {"prompts": HALF_PROMPTS, "max_tokens": HALF_TOKENS, "fresh": True}
    engine = {**engine, "max_num_seqs": 32, "dtype": "float16", "kv_cache_dtype": "fp8"}
    rounds = [spec, {**spec, "sabotage": "zeros"}]
    result = run(folder, {"model": str(model), "engine": engine, "rounds": rounds})
    assert result["backends"] == ["TilewiseBackend"]
    round_cache(monkeypatch, torch.float8_e4m3fn)
    reference = greedy_reference(model, HALF_PROMPTS, HALF_TOKENS, torch.float16)
    good, zeros = (compare(reference, done["tokens"]) for done in result["rounds"])
    assert good.agrees, str(good)
    assert not zeros.agrees, str(zeros)


@pytest.mark.slow
@ON_THE_CPU
def test_fp16_tokens_agree(tmp_path, monkeypatch):
    check_half_precision(run_job, SMALL_ENGINE, tmp_path, monkeypatch)


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_fp16_tokens_agree_on_the_gpu(tmp_path, monkeypatch):
    """Piecewise graphs: attention runs between them, where the control can exchange it."""

    def run(folder, job):
        (folder / "job.json").write_text(json.dumps(job))
        files = [str(JOB_SCRIPT), str(folder / "job.json"), str(folder / "result.json")]
        environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_GPU_SYNC_CHECK": "error"}
        environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_CACHE_ROOT": str(folder / "cache")}
        done = subprocess.run(
            [sys.executable, *files], env={**os.environ, **environ}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=JOB_TIMEOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"engine job failed:\n{done.stdout[-6000:]}"
        return json.loads((folder / "result.json").read_text())

    graphs = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    engine = {
        "attention_backend": "TILEWISE", "max_model_len": 512, "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.02,
        "compilation_config": graphs,
    }  # fmt: skip
    check_half_precision(run, engine, tmp_path, monkeypatch)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("shape", [(), (KV_HEADS,)])
@pytest.mark.parametrize("query_lens", [[1, 5], [20, 1]])
def test_the_layer_passes_its_scales_on(kv_cache_dtype, shape, query_lens, device):
    """Written through one layer and read through it: what torch rounds and scales."""
    if device.type != "cpu":
        pytest.skip("runs on CPU tensors, in the interpreter")
    dtype = torch.float8_e5m2 if kv_cache_dtype.endswith("e5m2") else torch.float8_e4m3fn
    torch.manual_seed(0)
    heads = torch.arange(1.0, 1 + KV_HEADS) if shape else torch.tensor(1.0)
    layer = SimpleNamespace(_k_scale=0.037 * heads, _v_scale=0.011 / heads)
    impl = make_impl(kv_cache_dtype=kv_cache_dtype)
    config = engine_config()
    config.model_config.dtype = torch.bfloat16
    config.compilation_config.static_forward_context["layer.0"] = AttentionLayer(impl)
    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.uint8
    )
    builder = TilewiseMetadataBuilder(spec, ["layer.0"], config, torch.device("cpu"))
    assert (builder.attn.dtype, builder.attn.kv_dtype) == (torch.bfloat16, dtype)

    batch = make_batch(query_lens)
    table, lens = batch.block_table_tensor, batch.seq_lens.tolist()
    n = torch.cat([torch.arange(length) for length in lens])
    row = torch.repeat_interleave(torch.arange(len(lens)), batch.seq_lens)
    slots = table[row, n // PAGE].long() * PAGE + n % PAGE
    key, value = torch.randn(2, len(n), KV_HEADS, HEAD_DIM).to(torch.bfloat16)
    cache = torch.full((16, KV_HEADS, PAGE, 2 * HEAD_DIM), 0x7F, dtype=torch.uint8)
    impl.do_kv_cache_update(layer, key, value, cache, slots)

    query = torch.randn(sum(query_lens), HEADS, HEAD_DIM).to(torch.bfloat16)
    metadata = builder.build(0, batch)
    output = impl.forward(layer, query, None, None, cache, metadata, torch.empty_like(query))
    largest = torch.finfo(dtype).max
    dense = torch.full((2, 16, KV_HEADS, PAGE, HEAD_DIM), float("nan"))
    for half, x, scale in ((0, key, layer._k_scale), (1, value, layer._v_scale)):
        scale = scale[:, None] if shape else scale
        rounded = (x.float() / scale).clamp(-largest, largest).to(dtype).float() * scale
        dense[half][slots // PAGE, :, slots % PAGE] = rounded
    expected, _ = paged_attention(
        query, dense[0], dense[1], batch.query_start_loc.tolist(), lens, table, HEAD_DIM**-0.5
    )
    torch.testing.assert_close(output.float(), expected, atol=1e-2, rtol=1e-2)
    other = SimpleNamespace(_k_scale=layer._k_scale * 2, _v_scale=layer._v_scale)
    wrong = impl.forward(other, query, None, None, cache, metadata, torch.empty_like(query))
    assert (wrong.float() - expected).abs().max() > 0.1, "the layer's scales do not matter"


def test_caches_that_differ_within_a_group_are_refused():
    config = engine_config()
    for i, name in enumerate(("fp8", "fp8_e5m2")):
        layer = AttentionLayer(make_impl(kv_cache_dtype=name))
        config.compilation_config.static_forward_context[f"layer.{i}"] = layer
    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.uint8
    )
    with pytest.raises(
        UnsupportedConfig, match=r"'layer.0': torch.float8_e4m3fn, 'layer.1': torch"
    ):
        TilewiseMetadataBuilder(spec, ["layer.0", "layer.1"], config, torch.device("cpu"))


def test_queries_come_in_the_models_dtype():
    """vLLM quantises queries only for layers that ask for it."""
    assert make_impl(kv_cache_dtype="fp8").supports_quant_query_input is False
