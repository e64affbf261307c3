"""Run by test_fallback in a process of its own: real attention layers on vLLM's faked GPU platform.

Usage: ``fallback_probe.py MODEL RESULT``. Each scenario builds layers as a model does and reports
whose they are; nothing is computed.
"""

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock
from unittest.mock import patch

import torch

# PYTHONSAFEPATH keeps a script's own folder off the path.
sys.path.insert(0, str(Path(__file__).parent))

from selection_probe import load_cuda_platform

HEADS, HEAD_SIZE, KV_HEADS = 4, 64, 2


# Features that these scenarios take for foreign, whatever tilewise computes by now.
FOREIGN = ("sliding_window", "sinks", "soft_cap", "alibi", "alibi_sqrt", "attn_type",
           "chunked_local", "prefix_lm")  # fmt: skip


def set_native(**native):
    from tilewise import support

    support.TABLE = tuple(
        replace(row, native=native.get(row.key, row.native)) for row in support.TABLE
    )
    support._BY_KEY = {row.key: row for row in support.TABLE}


class Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Scenario:
    """One engine configuration with layers in it."""

    def __init__(self, model, environ=None, **user):
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs

        args = {"dtype": "bfloat16", "attention_backend": "TILEWISE", **user}
        with patch.object(torch.accelerator, "device_count", lambda: 1):
            self.config = EngineArgs(model=str(model), **args).create_engine_config()
        self.current = set_current_vllm_config(self.config)
        self.environ = patch.dict(os.environ, environ or {})
        self.log = Log()
        self.layers = {}

    def __enter__(self):
        from tilewise import counters

        self.environ.__enter__()
        self.current.__enter__()
        torch.set_default_dtype(torch.bfloat16)
        logging.getLogger("vllm.tilewise").addHandler(self.log)
        counters.reset()
        return self

    def __exit__(self, *error):
        logging.getLogger("vllm.tilewise").removeHandler(self.log)
        torch.set_default_dtype(torch.float32)
        self.current.__exit__(*error)
        self.environ.__exit__(*error)

    def add(self, cls=None, name=None, **features):
        from vllm.model_executor.layers.attention import Attention

        name = name or f"model.layers.{len(self.layers)}.self_attn.attn"
        layer = (cls or Attention)(
            HEADS, HEAD_SIZE, scale=0.125, num_kv_heads=KV_HEADS, prefix=name,
            cache_config=self.config.cache_config, **features,
        )  # fmt: skip
        self.layers[name] = layer
        return layer

    def report(self, **more):
        from tilewise import counters

        for layer in list(self.layers.values())[:2]:
            layer.process_weights_after_loading(torch.bfloat16)
        return {
            "impls": [type(layer.impl).__name__ for layer in self.layers.values()],
            "backends": [layer.attn_backend.__name__ for layer in self.layers.values()],
            "bases": [
                [base.__name__ for base in layer.attn_backend.__mro__]
                for layer in self.layers.values()
            ],
            "counters": counters.snapshot(),
            "log": self.log.lines,
            **more,
        }


def refusal(scenario, cls=None, **features):
    """The error that a layer ends with; its type first."""
    try:
        scenario.add(cls, **features)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def alternating(model):
    with Scenario(model) as s:
        for index in range(6):
            s.add(per_layer_sliding_window=None if index % 2 else 128)
        return s.report()


def alibi(model):
    with Scenario(model) as s:
        s.add()
        s.add(alibi_slopes=[0.5] * HEADS)
        s.add(alibi_slopes=[0.5] * HEADS, use_alibi_sqrt=True)
        return s.report()


def alike_to_the_selector(model):
    """What the selector keeps for one layer must not be the answer for another."""
    with Scenario(model) as s:
        s.add(per_layer_sliding_window=128)
        s.add(per_layer_sliding_window=128, logits_soft_cap=30.0)
        s.add(per_layer_sliding_window=128)
        s.add(logits_soft_cap=30.0)
        s.add()
        return s.report()


def features(model):
    from vllm.model_executor.layers.attention import (
        ChunkedLocalAttention,
        CrossAttention,
        EncoderOnlyAttention,
        PrefillPrefixLMAttention,
        RSWAAttention,
    )

    with Scenario(model) as s:
        s.add(sinks=torch.zeros(HEADS))
        s.add(chunk_lookback=1)
        s.add(chunk_lookback=-1)
        s.add(ChunkedLocalAttention, attention_chunk_size=128)
        s.add(CrossAttention)
        s.add(EncoderOnlyAttention)
        s.add(PrefillPrefixLMAttention)
        s.add(kv_sharing_target_layer_name="model.layers.2.self_attn.attn")
        s.add(RSWAAttention, rswa_window=16)
        return s.report()


def impl_refuses(model):
    """The table says that we do it, the implementation that we do not: still another backend."""

    def refuse(self, *args, **kwargs):
        if args[7]:
            raise UnsupportedFeature("no soft cap today")
        original(self, *args, **kwargs)

    from tilewise.errors import UnsupportedFeature
    from tilewise.integration.impl import TilewiseImpl

    original = TilewiseImpl.__init__
    set_native(soft_cap=True)
    with Scenario(model) as s, patch.object(TilewiseImpl, "__init__", refuse):
        s.add(logits_soft_cap=30.0)
        s.add()
        found = s.report()
    set_native(soft_cap=False)
    return found


def late_news(model):
    """A layer class that asks for a backend first and knows of its soft cap later."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import subclass_attention_backend
    from vllm.v1.attention.selector import get_attn_backend

    class Late(Attention):
        def __init__(self, *args, **kwargs):
            backend = get_attn_backend(HEAD_SIZE, torch.get_default_dtype(), "auto")
            backend = subclass_attention_backend("Late_", backend, backend.get_builder_cls())
            super().__init__(*args, **kwargs, logits_soft_cap=30.0, attn_backend=backend)

    with Scenario(model) as s:
        s.add(Late)
        return s.report()


def selected_elsewhere(model):
    """Somebody asks the selector without a layer, several times."""
    from vllm.v1.attention.selector import get_attn_backend

    with Scenario(model) as s:
        for _ in range(3):
            found = get_attn_backend(HEAD_SIZE, torch.bfloat16, "auto", has_sliding_window=True)
            mla = get_attn_backend(576, torch.bfloat16, "auto", use_mla=True)
        ours = get_attn_backend(HEAD_SIZE, torch.bfloat16, "auto")
        names = [found.get_name(), mla.get_name(), ours.get_name()]
        return s.report(names=names)


def nobody(model):
    with Scenario(model) as s:
        s.add(per_layer_sliding_window=128)
        return s.report(
            option=refusal(s, mystery=3.0),
            head_size_v=refusal(s, head_size_v=32, logits_soft_cap=30.0),
            wrong=_type_error(s),
            log=s.log.lines,
        )


def _type_error(scenario):
    from vllm.model_executor.layers.attention import Attention

    try:
        Attention(1)
    except TypeError as error:
        return str(error)
    return "accepted"


def fatal(model):
    with Scenario(model, {"TILEWISE_FALLBACK": "error"}) as s:
        s.add()
        return s.report(
            window=refusal(s, per_layer_sliding_window=128, logits_soft_cap=30.0),
            alibi=refusal(s, alibi_slopes=[0.5] * HEADS),
        )


def somebody_elses(model):
    """The same layers with another backend named: as if we were not there."""
    with Scenario(model, {"TILEWISE_FALLBACK": "error"}, attention_backend="TRITON_ATTN") as s:
        s.add(per_layer_sliding_window=128)
        s.add(alibi_slopes=[0.5] * HEADS)
        s.add(logits_soft_cap=30.0)
        return s.report()


def unnamed(model):
    with Scenario(model, {"TILEWISE_FALLBACK": "error"}, attention_backend=None) as s:
        s.add(per_layer_sliding_window=128)
        return s.report()


def per_kind(model):
    """vLLM's own choice for a kind of layers goes first."""
    kinds = {"backend": "CUSTOM", "backend_per_kind": {"sliding_window": "TRITON_ATTN"}}
    user = {"attention_backend": None, "attention_config": kinds}
    with Scenario(model, {"TILEWISE_FALLBACK": "error"}, **user) as s:
        s.add(per_layer_sliding_window=128)
        s.add()
        return s.report()


def groups(model):
    """What vLLM makes of a model with two backends: groups, pages, layout, CUDA graphs."""
    found = {}
    for name, feature in {
        "alibi": {"alibi_slopes": [0.5] * HEADS},
        "soft_cap": {"logits_soft_cap": 30.0},
        "sliding_window": {"per_layer_sliding_window": 128},
        "sinks": {"sinks": torch.zeros(HEADS)},
    }.items():
        for size in (None, 64, 128):
            user = {} if size is None else {"block_size": size}
            with Scenario(model, **user) as s:
                for index in range(4):
                    s.add(**(feature if index % 2 else {}))
                found[f"{name}-{size}"] = engine_side(s)
    return found


def engine_side(scenario):
    """Take the layers through the steps between a loaded model and its first batch."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec, init_attn_backend

    try:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
    except ImportError:  # vLLM 0.32
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    config = scenario.config
    current_platform.update_block_size_for_backend(config)
    backends = [layer.attn_backend for layer in scenario.layers.values()]
    layouts = get_supported_kv_cache_layouts(backends)
    config.cache_config.kv_cache_layout = layouts[0].name
    planned = get_kv_cache_groups(config, get_kv_cache_spec(config))
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=planned)
    # Builders only allocate here; no kernel runs, so the interpreter is not asked for.
    with mock.patch("tilewise.device._prepare_interpreter"):
        made, graphs, sizes = init_attn_backend(cache, config, torch.device("cpu"))
    made = [group for groups in made for group in groups]
    return {
        "block_size": config.cache_config.block_size,
        "kernel_block_sizes": sizes,
        "built_for": sorted(
            builder.kv_cache_spec.block_size
            for group in made
            for builder in group.metadata_builders
        ),
        "groups": {group.backend.get_name(): group.layer_names for group in made},
        "graphs": graphs.min_cg_support.name,
        "layout": layouts[0].name,
    }


def installed_once(model):
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention import selector

    import tilewise

    before = Attention.__init__, selector._cached_get_attn_backend
    tilewise.register()
    tilewise.register()
    return {"same": before == (Attention.__init__, selector._cached_get_attn_backend)}


SCENARIOS = (
    alternating, alibi, alike_to_the_selector, features, impl_refuses, late_news,
    selected_elsewhere, nobody, fatal, somebody_elses, unnamed, per_kind, groups, installed_once,
)  # fmt: skip


def main(model: str, result_path: str) -> None:
    platform = load_cuda_platform()
    from vllm.v1.attention.backends import flashinfer

    set_native(**dict.fromkeys(FOREIGN, False))
    # The only things that FLASHINFER's layers ask of a real GPU.
    flashinfer.get_device_sm_count = lambda device: 132
    flashinfer._get_multi_ctas_kv_counter_buffer = lambda *args: None
    flashinfer.get_trtllm_gen_multi_ctas_kv_counter_bytes = lambda *args: 0
    assert platform.capability == (9, 0)
    only = os.environ.get("SCENARIO")
    result = {s.__name__: s(model) for s in SCENARIOS if only in (None, s.__name__)}
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
