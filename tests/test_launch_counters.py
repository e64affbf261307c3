"""Whatever a launcher launches is counted, once and under its own name."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from cases import Case, make_attention, make_batch, plan_batch
from masked import random_masks
from prefix_batches import make_shared

import tilewise.kernels
from tilewise import BlockSparseAttention, CustomMask, PagedAttention, TreeMask, counters
from tilewise.kernels.launch import Launcher
from tilewise.masks import flatten_masks

# numpy's remark on the poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BATCH = Case(((20, 43), (5, 64), (1, 200)))
DRAFTS = Case(((5, 64), (3, 10)), decode_query_len=5)


def name_of(kernel: str) -> str:
    """Label of a kernel's launches, from the name of its function."""
    return {"_write_kv_kernel": "cache_write"}.get(kernel, kernel[1:].removesuffix("_kernel"))


@pytest.fixture
def launched(monkeypatch) -> Counter:
    """What goes through launchers during a test."""
    found: Counter[str] = Counter()
    launch = Launcher.__call__

    def note(self, *args, **kwargs):
        found[name_of(self.kernel.fn.__name__)] += 1
        launch(self, *args, **kwargs)

    monkeypatch.setattr(Launcher, "__call__", note)
    return found


def counted(before: dict[str, int]) -> dict[str, int]:
    """Launches by kernel since ``before``."""
    grown = Counter(counters.snapshot())
    grown.subtract(before)
    names = {name: re.fullmatch(r"launches\{kernel=(\w+)\}", name) for name in grown}
    return {match[1]: grown[name] for name, match in names.items() if match and grown[name]}


def run_masked(device, case, mask) -> None:
    batch, attn = make_batch(case, device), make_attention(case, device)
    plan_batch(attn, batch, mask=mask(batch))
    for _ in range(2):
        attn.run(batch.q, batch.kv_cache)


def by_element(packed):
    return lambda batch: CustomMask(flatten_masks(random_masks(batch), packed))


def parents(batch):
    return TreeMask(torch.full((len(batch.q),), -1, dtype=torch.int32, device=batch.q.device))


def visible(batch):
    return TreeMask(visible=torch.ones(len(batch.q), 5, dtype=torch.bool, device=batch.q.device))


@pytest.mark.parametrize(
    ("case", "mask", "expected"),
    [
        (BATCH, lambda batch: None, {"plan": 1, "prefill": 2, "decode": 2}),
        (BATCH, by_element(False), {"mask_starts": 1, "plan": 1, "prefill": 2, "decode": 2}),
        (BATCH, by_element(True), {"mask_starts": 1, "plan": 1, "prefill": 2, "decode": 2}),
        (DRAFTS, parents, {"tree_words": 1, "plan": 1, "decode": 2}),
        (DRAFTS, visible, {"tree_words": 1, "plan": 1, "decode": 2}),
    ],
    ids=["none", "bytes", "bits", "parents", "visible"],
)
def test_of_a_plan_and_two_layers(device, launched, case, mask, expected):
    before = counters.snapshot()
    run_masked(device, case, mask)
    assert counted(before) == launched == expected


def test_of_a_block_sparse_matrix(device, launched):
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    columns = torch.tensor([0, 1], dtype=torch.int32, device=device)
    attn = BlockSparseAttention(
        4, 2, 64, block_size=(16, 64), dtype=torch.float32, max_block_rows=2, device=device
    )  # fmt: skip
    before = counters.snapshot()
    mask = torch.ones(2, 16, 64, dtype=torch.bool, device=device)
    attn.plan(starts, columns, num_rows=32, num_cols=128, mask=mask)
    assert counted(before) == launched == {"mask_starts": 1, "plan": 1}


def test_of_shared_prefixes(device, launched):
    case = Case(((1, 700), (1, 640), (1, 900)), num_q_heads=8)
    batch = make_shared(case, [((0, 1, 2), 9)], device)
    attn = make_attention(case, device, shared_prefixes="always")
    before = counters.snapshot()
    plan_batch(attn, batch)
    attn.run(batch.q, batch.kv_cache)
    expected = {"prefix_keys": 1, "prefix_groups": 1, "plan": 1, "prefix_decode": 1}
    assert counted(before) == launched == expected


@pytest.mark.vllm
def test_of_decode_context_parallelism(device, launched):
    pytest.importorskip("vllm")
    from tilewise.integration.context_parallel import Alone, ShardedAttention, Shards

    attn = PagedAttention(
        8, 1, 64, page_size=16, dtype=torch.float32, max_num_reqs=2, max_num_tokens=8,
        device=device,
    )  # fmt: skip
    shards = Shards(2, 0)
    sharded = ShardedAttention(shards, Alone(shards), attn)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([5, 9], dtype=torch.int32, device=device)
    table = torch.zeros(2, 1, dtype=torch.int32, device=device)
    before = counters.snapshot()
    sharded.plan(starts, seq_lens, table, num_tokens=2, max_query_len=1)
    assert counted(before) == launched == {"shard_lengths": 1, "plan": 1}


@pytest.mark.vllm
def test_every_launched_kernel_has_a_name_that_metrics_know():
    pytest.importorskip("vllm")
    from tilewise import metrics_page
    from tilewise.integration.step_metrics import KERNELS

    sources = Path(tilewise.kernels.__file__).parent.glob("*.py")
    kernels = {
        name_of(kernel)
        for source in sources
        for kernel in re.findall(r" = Launcher\((\w+)\)", source.read_text())
    }
    assert set(KERNELS) == kernels
    assert len(KERNELS) == len(kernels)
    described = set(re.findall(r"`(\w+)`", metrics_page.LABELS["kernel"]))
    assert described == kernels
