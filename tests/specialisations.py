"""Which specialisations Triton is asked for: by a warm-up, and by the batches of a server.

``specialisations.py JOB`` runs without a GPU and without the interpreter: a driver is played, and a
hook stops every launch where Triton would compile. The job is a JSON list of layers (see
``LAYER``); one JSON line each, with the kernels ``warmed`` and the specialisations ``missing``.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

LAYER = {
    "arch": 90, "heads": [32, 8], "head_size": 128, "page": 64, "dtype": "bfloat16",
    "layout": "nhd", "max_num_reqs": 8, "max_num_tokens": 257, "window": None, "sinks": False,
    "soft_cap": None, "alibi": False, "kv_cache_dtype": "auto", "scales": 1, "pads": None,
    "images": False, "quantised": False, "fp8_attention": "off",
    "shared": False,  # whether requests may share pages
    "ranks": 1,  # that share every sequence's keys
    "batch_invariant": False,
    "causal": "always",  # or "never", or "some": batches that are, that are not, and in part
    "encoder": False,  # whose keys are its batch's rows
    "declines": False,  # quantised outputs, as layers with the Gluon prefill do
    "drafts": 0,  # a server that drafts does not know which requests are short
}  # fmt: skip
QUERY_LENS = [
    [1], [1, 1], [1] * 7, [2], [3, 1], [15], [16], [16] * 3, [17], [18, 1], [31], [64], [33, 1, 5],
    [100, 1], [128], [200, 17, 1],
]  # fmt: skip


CAUSAL = {"always": (True,), "never": (False,), "some": (True, False, "tensor")}


def make_layer(spec: dict, device: torch.device):
    """A layer, its PagedAttention in a stand-in for a builder, and its cache."""
    from tilewise import PagedAttention
    from tilewise.integration.context_parallel import Alone, ShardedAttention, Shards
    from tilewise.integration.impl import TilewiseImpl

    (q, kv), size, page = spec["heads"], spec["head_size"], spec["page"]
    dtype = getattr(torch, spec["dtype"])
    impl = TilewiseImpl(
        num_heads=q, head_size=size, scale=size**-0.5, num_kv_heads=kv,
        sliding_window=spec["window"], logits_soft_cap=spec["soft_cap"],
        sinks=torch.zeros(q, dtype=dtype, device=device) if spec["sinks"] else None,
        alibi_slopes=[0.5] * q if spec["alibi"] else None, kv_cache_dtype=spec["kv_cache_dtype"],
        attn_type="encoder_only" if spec["encoder"] else "decoder",
    )  # fmt: skip
    if spec["declines"]:
        impl.may_quantise_output = lambda: False
    if impl.alibi_slopes is not None:
        impl.alibi_slopes = impl.alibi_slopes.to(device)
    attn = PagedAttention(
        q * spec["ranks"], kv, size, page_size=page, dtype=dtype, max_num_reqs=spec["max_num_reqs"],
        max_num_tokens=spec["max_num_tokens"], device=device, window=spec["window"],
        kv_dtype=impl.kv_dtype, batch_invariant=spec["batch_invariant"],
        decode_query_len=1 + spec["drafts"], shared_prefixes=spec["shared"],
        fp8_matmul=impl.fp8_matmul, rotated_keys=impl.rotated_keys,
    )  # fmt: skip
    shape = (9, page, kv, 2 * size) if spec["layout"] == "nhd" else (9, kv, page, 2 * size)
    cache = torch.zeros(shape, dtype=dtype if impl.kv_dtype is None else torch.uint8, device=device)
    cache = cache.transpose(1, 2) if spec["layout"] == "nhd" else cache
    scales = [torch.ones(spec["scales"], dtype=torch.float32, device=device) for _ in range(2)]
    layer = SimpleNamespace(
        impl=impl, _k_scale=scales[0], _v_scale=scales[1], use_mm_prefix=spec["images"]
    )
    sharded = None
    if spec["ranks"] > 1:
        shards = Shards(spec["ranks"], 1, 4)
        sharded = ShardedAttention(shards, Alone(shards), attn)
    builder = SimpleNamespace(
        attn=attn,
        sharded=sharded,
        is_warm=False,
        quantises_output=spec["quantised"],
        every_attn=(attn,),
        causal_kinds=CAUSAL[spec["causal"]],
    )
    return builder, layer, cache


def rows_of(spec: dict, tokens: int, device: torch.device, gate: int):
    """Queries, keys and values as models pass them: parts of one matrix, and tensors apart."""
    (q, kv), size = spec["heads"], spec["head_size"]
    dtype = getattr(torch, spec["dtype"])
    widths = [q * size, kv * size, kv * size]
    packed = torch.zeros(tokens, sum(widths) + gate * size, dtype=dtype, device=device)
    parts = packed.split([*widths, gate * size], dim=-1)[:3]
    heads = (q, kv, kv)
    views = [x.view(-1, h, size) for x, h in zip(parts, heads, strict=True)]
    apart = [x.contiguous().view(-1, h, size) for x, h in zip(parts, heads, strict=True)]
    # Rotary embedding makes queries and keys anew, or not; values stay where they are.
    yield views
    yield apart
    yield [apart[0], apart[1], views[2]]
    yield [apart[0], views[1], views[2]]


def serve(spec: dict, builder, layer, cache, device: torch.device, offsets=(0, 1)) -> int:
    """Plan, write and attend for batches of every kind; returns how many."""
    from tilewise.integration.metadata import TilewiseMetadata

    impl, attn, served = layer.impl, builder.attn, 0
    width = 3
    # How many images the prompt with most of them has.
    counts = (0, 1, 3, 16) if spec["images"] else (0,)
    for query_lens, offset, gate, count in itertools.product(QUERY_LENS, offsets, (0, 1), counts):
        tokens, reqs = sum(query_lens), len(query_lens)
        if tokens > spec["max_num_tokens"] or reqs > spec["max_num_reqs"]:
            continue
        ints = {"dtype": torch.int32, "device": device}
        # Slices of larger buffers, as of micro-batches: addresses of any alignment.
        starts = torch.zeros(offset + reqs + 1, **ints)[offset:]
        starts[1:] = torch.tensor(query_lens, **ints).cumsum(0)
        lengths = torch.zeros(offset + reqs, **ints)[offset:]
        lengths[:] = torch.tensor(query_lens, **ints) + 7
        lengths.clamp_(max=width * spec["page"])
        table = torch.zeros(offset + reqs, width + offset, **ints)[offset:]
        spans = torch.zeros(offset + reqs * count * 2, **ints)[offset:].view(reqs, count, 2)
        spans = spans if count else None
        slots = torch.full((offset + tokens,), -1, dtype=torch.int64, device=device)[offset:]
        planner = attn if builder.sharded is None else builder.sharded
        bounds = {
            "num_tokens": tokens, "max_query_len": max(query_lens),
            "has_decode": min(query_lens) <= 16 or spec["drafts"] > 0,
        }  # fmt: skip
        if spans is not None:
            bounds["spans"] = spans
        own = (starts, None, None) if spec["encoder"] else (starts, lengths, table)
        kinds = [{"causal": kind} for kind in builder.causal_kinds]
        for kind in kinds:
            if kind["causal"] == "tensor":
                kind["causal"] = torch.zeros(offset + reqs, **ints)[offset:]
        if builder.sharded is not None:
            kinds = [{"has_context": True}, {"has_context": False}]
        for kind, (query, key, value) in itertools.product(
            kinds, rows_of(spec, tokens, device, gate)
        ):
            plan = planner.plan(*own, **bounds, **kind)
            sharded = None if builder.sharded is None else plan
            metadata = TilewiseMetadata(
                tokens, reqs, max(query_lens), int(lengths.max()), starts, lengths, table, slots,
                attn, plan if sharded is None else sharded.plan, sharded=sharded,
                mm_prefix_range_tensor=spans,
            )  # fmt: skip
            output = torch.empty(tokens, query.shape[1] * query.shape[2], dtype=query.dtype,
                                 device=device).view(query.shape)  # fmt: skip
            impl.do_kv_cache_update(layer, key, value, cache, slots)
            impl.forward(layer, query, key, value, cache, metadata, output)
            if spec["quantised"] and not spec["declines"]:
                scales = torch.ones(offset + 1, dtype=torch.float32, device=device)
                quantised = torch.empty_like(output, dtype=torch.float8_e4m3fn)
                impl.forward(
                    layer, query, key, value, cache, metadata, quantised, scales[offset:]
                )  # fmt: skip
            served += 1
    return served


class Recorder:
    """Plays a CUDA driver, and notes what Triton would compile instead of compiling it."""

    def __init__(self, arch: int) -> None:
        import triton
        from triton import knobs

        self.arch = arch
        self.seen: dict[str, set[str]] = {}
        knobs.runtime.jit_cache_hook = self._note
        triton.runtime.driver.set_active(self)

    def get_current_device(self) -> int:
        return self.arch  # one for each architecture: Triton keeps the target with the device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def _note(self, *, key, fn, **_) -> bool:
        self.seen.setdefault(fn.name, set()).add(key)
        return True

    def take(self) -> dict[str, set[str]]:
        """What was asked for since the last time."""
        seen, self.seen = self.seen, {}
        return seen


def examine(spec: dict) -> dict:
    """Warm a layer up, serve it, and say what the warm-up had left out."""
    from tilewise import attention
    from tilewise.arch import ARCHITECTURES
    from tilewise.integration import start_up

    os.environ["TILEWISE_FP8_ATTENTION"] = spec["fp8_attention"]
    recorder = Recorder(spec["arch"])
    attention.resolve = torch.device
    attention.describe = lambda device: ARCHITECTURES[spec["arch"]]
    device = torch.device("cpu")
    if spec["pads"] is not None:
        start_up.row_pads = lambda head_size: tuple(spec["pads"])
    builder, layer, cache = make_layer(spec, device)
    if spec["encoder"]:
        start_up.warm_up_encoder(builder, layer, builder.attn)
    else:
        start_up.warm_up(builder, layer, cache)
    warmed = recorder.take()
    served = serve(spec, builder, layer, cache, device)
    missing = {
        name: sorted(keys - warmed.get(name, set())) for name, keys in recorder.take().items()
    }
    return {
        "warmed": {name: len(keys) for name, keys in warmed.items()},
        "missing": {name: keys for name, keys in missing.items() if keys},
        "served": served,
    }


def main(path: str) -> None:
    for spec in json.loads(Path(path).read_text()):
        print(json.dumps(examine(LAYER | spec)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
