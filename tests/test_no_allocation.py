"""plan(), run() and what vLLM calls every step allocate nothing once they are warm.

On the GPU the allocator says so. On the CPU every torch operation is watched for results in memory
that none of its arguments has; what the interpreter does inside a launch does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import Case, make_attention, make_batch, plan_batch, spans_tensor
from test_kernels import MIXED
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewise.masks import CustomMask, TreeMask

# Square roots of distances that the mask then hides.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BASE = Case(MIXED, 8, 2, 64)
CASES = {
    "mixed": BASE,
    "half": replace(BASE, head_dim=128, dtype=torch.bfloat16),  # in Gluon on Hopper
    "decodes": replace(BASE, requests=((1, 40), (1, 70), (1, 5))),
    "verification": replace(BASE, requests=((4, 40), (4, 70)), decode_query_len=4),
    "features": replace(BASE, window=20, softcap=15.0, sinks=0.5, pad_requests=2),
    "alibi": replace(BASE, alibi="sqrt"),
    "fp8": replace(BASE, kv_dtype=torch.float8_e4m3fn, kv_scales="head"),
    "spans": Case(((30, 10), (1, 20)), 8, 2, 64, spans=(((12, 20),), ())),
    "flags": Case(((30, 10), (1, 20)), 8, 2, 64, causal=(0, 1)),
}


class Watched(TorchDispatchMode):
    """Notes the operations whose results lie in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside_launch = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not self.inside_launch:
            given = {memory_of(x) for x in tree_leaves((args, kwargs)) if is_tensor(x)}
            if any(memory_of(x) not in given for x in tree_leaves(result) if is_tensor(x)):
                self.found.append(str(func))
        return result


def is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def allocations(device, monkeypatch) -> Callable[[Callable[[], None]], object]:
    """Return a function that calls another and says what that allocated: nothing is 0 or []."""
    return on_the_gpu if device.type == "cuda" else watch_launches(monkeypatch)


def on_the_gpu(call: Callable[[], None]) -> int:
    """How many blocks the allocator handed out meanwhile."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before


def watch_launches(monkeypatch) -> Callable[[Callable[[], None]], list[str]]:
    from triton.runtime.interpreter import GridExecutor

    watched, launch = Watched(), GridExecutor.__call__

    def launched(self, *args, **named):
        watched.inside_launch = True
        try:
            return launch(self, *args, **named)
        finally:
            watched.inside_launch = False

    monkeypatch.setattr(GridExecutor, "__call__", launched)

    def operations(call: Callable[[], None]) -> list[str]:
        watched.found = []
        with watched:
            call()
        return watched.found

    return operations


def planned(batch, attn, **overrides) -> Callable[[], None]:
    """A step of two layers on tensors that are made here, as vLLM's are before a step."""
    case, device = batch.case, batch.q.device
    out = torch.zeros_like(batch.q)
    starts, lens = batch.query_start_loc, batch.seq_lens
    options = {"num_tokens": len(batch.q), "max_query_len": max(q for q, _ in case.requests)}
    if case.spans is not None:
        options["spans"] = spans_tensor(batch)
    if case.causal is not True:
        options["causal"] = torch.tensor(case.causal, dtype=torch.int32, device=device)
    options |= overrides

    def step() -> None:
        attn.plan(starts, lens, batch.block_table, **options)
        for _ in range(2):
            attn.run(batch.q, batch.kv_cache, out=out, **batch.features)

    return step


@pytest.mark.parametrize("name", CASES)
def test_plan_and_run(name, device, allocations):
    batch = make_batch(CASES[name], device)
    step = planned(batch, make_attention(batch.case, device))
    step()  # compiles
    assert not allocations(step)


def test_decodes_that_share_pages(device, allocations):
    case = Case(((1, 90), (1, 80), (1, 70)), 8, 2, 64, dtype=torch.bfloat16)
    batch = make_batch(case, device)
    batch.block_table[1:, 0] = batch.block_table[0, 0]
    attn = make_attention(case, device, shared_prefixes="always")
    assert plan_batch(attn, batch).shared
    step = planned(batch, attn)
    step()
    assert not allocations(step)


@pytest.mark.parametrize("kind", ["bits", "parents"])
def test_masks(kind, device, allocations):
    case = Case(((5, 20), (3, 9)), 8, 2, 64)
    batch = make_batch(case, device)
    if kind == "bits":
        elements = sum(new * (new + context) for new, context in case.requests)
        packed = -(-elements // 8) + len(case.requests)
        mask = CustomMask(torch.full((packed,), 255, dtype=torch.uint8, device=device))
    else:
        mask = TreeMask(parents=torch.full((len(batch.q),), -1, dtype=torch.int32, device=device))
    step = planned(batch, make_attention(case, device), mask=mask)
    step()
    assert not allocations(step)


@pytest.mark.vllm
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [20, 1, 3], [40, 0, 0]])
def test_a_step_of_vllm(query_lens, device, allocations):
    """build(), then each layer's cache write and attention."""
    if device.type != "cpu":
        pytest.skip("the batches of test_builder.py lie in the CPU's memory")
    import test_builder as vllm_batches

    batch = vllm_batches.make_batch(query_lens, context=0)
    builder, impl = vllm_batches.make_builder(mode="FULL"), vllm_batches.make_impl()
    shape = (sum(query_lens), vllm_batches.HEADS, vllm_batches.HEAD_DIM)
    query, output = torch.randn(2, *shape)
    keys = torch.randn(shape[0], vllm_batches.KV_HEADS, vllm_batches.HEAD_DIM)
    slots = torch.arange(shape[0])
    cache = torch.zeros(
        16, vllm_batches.PAGE, vllm_batches.KV_HEADS, 2 * vllm_batches.HEAD_DIM
    ).transpose(1, 2)

    def step() -> None:
        metadata = builder.build(0, batch)
        for _ in range(2):
            impl.do_kv_cache_update(None, keys, keys, cache, slots)
            impl.forward(None, query, keys, keys, cache, metadata, output)

    step()
    assert not allocations(step)


def test_an_allocation_is_noticed(device, allocations):
    """run() without `out` makes one, and is how a user would have it."""
    batch = make_batch(CASES["decodes"], device)
    attn = make_attention(batch.case, device)
    plan_batch(attn, batch)

    def call() -> None:
        attn.run(batch.q, batch.kv_cache)

    call()
    found = allocations(call)
    assert found == (1 if device.type == "cuda" else ["aten.empty.memory_format"])
