"""What a metadata builder tells the counters: steps, the graphs they ran in, splits, compilations.

Everything here is host work of a few microseconds a step and asks the device nothing.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

import torch
import triton
import vllm
from triton import knobs
from vllm.forward_context import get_forward_context, is_forward_context_available

import tilewise
from tilewise import counters, plan_rule, policy

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from tilewise.attention import Plan

# Splits are estimated for so many requests of every so many steps with decodes, and of the steps
# whose number is a power of two, so that a young server shows some.
SAMPLE_EVERY = 256
SAMPLE_REQUESTS = 16
GRAPH_MODES = ("full", "piecewise", "none", "capture")
PATHS = ("decode", "prefill", "mixed")
KERNELS = (
    "plan", "prefix_keys", "prefix_groups", "shard_lengths", "mask_starts", "tree_words",
    "prefill", "hopper_prefill", "hopper_prefill_kv8", "hopper_prefill_fp8",
    "decode", "hopper_decode", "prefix_decode", "cache_write",
)  # fmt: skip
PHASES = ("warmup", "serving")
# Methods of vLLM's workers that run before anything is served.
_BEFORE_SERVING = frozenset(
    {
        "load_model", "determine_available_memory", "initialize_from_config",
        "compile_or_warm_up_model",
    }
)  # fmt: skip


class StepMetrics:
    """Counts the steps of one builder and, of each, how its layers ran.

    A step that vLLM replays from a full CUDA graph calls no layer from Python. So a step that is
    followed by the next one without `ran` was replayed whole. Steps of a drafter are counted as
    steps only: it runs several for each of the model's, some in graphs and some not.

    Parameters
    ----------
    config : policy.Config
        Of the builder's layers.
    shards : int
        Ranks that share each request's keys.
    drafts : bool
        All of the builder's layers are a drafter's.
    """

    def __init__(self, config: policy.Config, shards: int = 1, drafts: bool = False) -> None:
        self._config, self._shards, self._drafts = config, shards, drafts
        # How the newest step's layers run, once one of them was called from Python.
        self.mode: str | None = None
        self._pending = False
        self._decode_steps = 0
        # Counters that exist before they move, or Prometheus would not see the first events.
        for mode in GRAPH_MODES:
            counters.add("graph_steps", 0, mode=mode)
        for path in PATHS:
            counters.add("steps", 0, path=path)
            counters.add("tokens", 0, path=path)
        for kernel in KERNELS:
            counters.add("launches", 0, kernel=kernel)

    def planned(self, plan: Plan, batch: CommonAttentionMetadata) -> None:
        """Count a step, and what became of the one before it."""
        path = path_of(plan)
        counters.add("steps", path=path)
        counters.add("tokens", plan.num_tokens, path=path)
        if self._pending and not self._drafts:
            counters.add("graph_steps", mode=self.mode or "full")
        self._pending, self.mode = True, None
        if plan.has_decode:
            self._decode_steps += 1
            n = self._decode_steps
            if n % SAMPLE_EVERY == 0 or n & (n - 1) == 0:
                self._sample(batch)

    def ran(self) -> None:
        """Note that a layer of the model was called from Python in the newest step.

        Layers ask for ``mode`` first: all but the first of a step need not call.
        """
        if self.mode is None:
            self.mode = _graph_mode()

    def _sample(self, batch: CommonAttentionMetadata) -> None:
        bounds = getattr(batch, "seq_lens_cpu_upper_bound", None)
        if bounds is None:
            return  # the host knows no lengths
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
        query_lens = [end - start for start, end in itertools.pairwise(starts)]
        # Of each, this rank has its share.
        seq_lens = [-(-n // self._shards) for n in bounds[: batch.num_reqs].tolist()]
        for splits in estimate_splits(query_lens, seq_lens, self._config):
            counters.observe("kv_splits", splits)


def is_drafted(layer: Any) -> bool:
    """Whether vLLM says of an attention layer that it belongs to a drafter."""
    return bool(getattr(layer, "is_draft_layer", False))


def path_of(plan: Plan) -> str:
    """Return which kernels the layers of a step launch."""
    if not plan.max_prefill_tiles:
        return "decode"
    return "mixed" if plan.has_decode else "prefill"


def estimate_splits(query_lens: list[int], seq_lens: list[int], config: policy.Config) -> list[int]:
    """Return how many workers share an item of each of the first decode requests, at most.

    Parameters
    ----------
    query_lens, seq_lens : list of int, one per request
        New tokens, and an upper bound of context plus new tokens.
    config : policy.Config
        The layer's.

    Returns
    -------
    list of int
        For the first `SAMPLE_REQUESTS` requests of 1 to 16 new tokens; as `plan_rule.kv_splits` has
        it for the whole batch.
    """
    total = items = longest = 0
    blocks: int | None = None
    spans: list[tuple[int, int, int]] = []
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        if query_len > policy.DECODE_MAX_QUERY_LEN:
            blocks = (blocks or 0) + plan_rule.prefill_blocks(query_len, seq_len, config)
        if not 0 < query_len <= policy.DECODE_MAX_QUERY_LEN:
            continue
        units = plan_rule.decode_units(query_len, seq_len, config)
        count = plan_rule.decode_items(query_len, config)
        spans.append((total, total + units, units // count))
        total += units
        items += count
        longest = max(longest, units // count)
    active = plan_rule.decode_workers(len(query_lens), total, items, longest, blocks, config)
    if config.pieces is not None:
        lengths = (length for _, _, length in spans[:SAMPLE_REQUESTS])
        return [config.pieces.count(length - config.item_overhead) for length in lengths]

    def workers(first: int, length: int) -> int:
        last = plan_rule.owner(first + length - 1, total, active)
        return last - plan_rule.owner(first, total, active) + 1

    return [
        max(workers(item, length) for item in range(begin, end, length))
        for begin, end, length in spans[:SAMPLE_REQUESTS]
    ]


def _graph_mode() -> str:
    """Return the CUDA-graph mode of the forward pass that calls a layer from Python."""
    if not is_forward_context_available():
        return "none"
    mode = get_forward_context().cudagraph_runtime_mode.name.lower()
    # A full graph calls layers while it is captured, and never when it is replayed.
    return "capture" if mode == "full" else mode


def describe_process() -> None:
    """Say which versions run here, and count compilations from now on; once is enough."""
    counters.put(
        "build_info", 1, version=tilewise.__version__, vllm=vllm.__version__,
        torch=torch.__version__, triton=triton.__version__,
    )  # fmt: skip
    if not isinstance(knobs.compilation.listener, CompilationCounter):
        knobs.compilation.listener = CompilationCounter(knobs.compilation.listener)
        for phase in PHASES:
            for cached in ("false", "true"):
                counters.add("compilations", 0, phase=phase, cached=cached)


class CompilationCounter:
    """Triton's compilation listener: counts our kernels, then calls the listener before it."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, *, src: Any, cache_hit: bool, **others: Any) -> None:
        """Take note of one kernel that was compiled or found in Triton's cache."""
        module = getattr(getattr(src, "fn", None), "__module__", "")
        if module.startswith("tilewise."):
            # Of a warm-up too, whose launches do not count.
            cached = "true" if cache_hit else "false"
            counters.add("compilations", always=True, phase=_phase(), cached=cached)
        if self._before is not None:
            self._before(src=src, cache_hit=cache_hit, **others)


def _phase() -> str:
    """Return whether the worker warms up, by who called; compiling is rare and takes long."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _BEFORE_SERVING:
            return "warmup"
        frame = frame.f_back  # type: ignore[assignment]
    return "serving"
