"""The same cases on the GPU, then CUDA graphs: capture once, replay with other lengths."""

import random

import pytest
import torch
from cases import Case, check, make_attention, make_batch, poison_scratch, run_and_check
from test_kernels import AROUND_A_PAGE, BF16, FP16, FP32, INTERPRETER_CASES, MIXED

pytestmark = pytest.mark.gpu

LONG = ((1, 8191), (1, 4096), (1, 1), (300, 5000), (16, 3000), (0, 0), (2000, 0))
GPU_CASES = [
    *INTERPRETER_CASES,
    *(Case(LONG, 32, 8, d, dtype=t) for d in (64, 96, 128, 256) for t in (BF16, FP16)),
    *(Case(LONG, 32, 8, 128, page_size=p, dtype=BF16) for p in (16, 32, 48, 128, 528)),
    *(Case(LONG, hq, hkv, 128, dtype=BF16) for hq, hkv in ((32, 1), (8, 8), (28, 4), (71, 1))),
    Case(LONG, 32, 8, 128, dtype=BF16, layout="hnd"),
    Case(LONG, 32, 8, 128, dtype=BF16, layout="cross_layer"),
    Case(LONG, 8, 2, 128, dtype=FP32),
    Case(tuple((1, 13 * i % 900) for i in range(300)), 32, 8, 128, dtype=BF16),
    Case(tuple((1 + i % 4, 97 * i % 5000) for i in range(64)), 32, 8, 128, dtype=BF16,
         decode_query_len=4),
    Case(((1, 131071),), 32, 8, 128, dtype=BF16),
]  # fmt: skip


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_matches_reference(case):
    run_and_check(case, "cuda")


def test_two_launches_repeat_bit_for_bit():
    batch = make_batch(Case(LONG, 32, 8, 128, dtype=BF16), "cuda")
    attn = make_attention(batch.case, "cuda")
    outs = []
    for _ in range(3):
        poison_scratch(attn)
        attn.plan(
            batch.query_start_loc, batch.seq_lens, batch.block_table,
            num_tokens=batch.q.shape[0], max_query_len=2000,
        )  # fmt: skip
        outs.append(attn.run(batch.q, batch.kv_cache)[: batch.num_tokens])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


class Captured:
    """A graph of ``layers`` runs over persistent inputs, replayed with any batch that fits."""

    def __init__(self, num_reqs: int, num_tokens: int, max_query_len: int, max_pages: int) -> None:
        self.case = Case(((1, 0),), 32, 8, 128, dtype=BF16)
        self.num_reqs, self.num_tokens = num_reqs, num_tokens
        self.max_query_len = max_query_len
        self.attn = make_attention(
            self.case, "cuda", max_num_reqs=num_reqs, max_num_tokens=num_tokens
        )
        ints = {"dtype": torch.int32, "device": "cuda"}
        self.qsl = torch.zeros(num_reqs + 1, **ints)
        self.lens = torch.zeros(num_reqs, **ints)
        self.table = torch.zeros((num_reqs, max_pages), **ints)
        self.q = torch.zeros((num_tokens, 32, 128), dtype=BF16, device="cuda")
        self.out = torch.zeros_like(self.q)
        self.cache = torch.full(
            (num_reqs * max_pages + 8, 64, 8, 256), float("nan"), dtype=BF16, device="cuda"
        ).permute(0, 2, 1, 3)
        self.graph = torch.cuda.CUDAGraph()

    def plan(self) -> None:
        self.attn.plan(
            self.qsl, self.lens, self.table,
            num_tokens=self.num_tokens, max_query_len=self.max_query_len,
        )  # fmt: skip

    def capture(self) -> None:
        """Capture as vLLM does: every request has one query token and one key."""
        self.qsl.copy_(torch.arange(self.num_reqs + 1).clamp(max=self.num_tokens))
        self.lens.fill_(1)
        self.cache[0] = 0.0
        self.plan()
        self.attn.run(self.q, self.cache, out=self.out, return_lse=True)
        torch.cuda.synchronize()
        self.plan()
        with torch.cuda.graph(self.graph):
            _, self.lse = self.attn.run(self.q, self.cache, out=self.out, return_lse=True)
        self.cache[0] = float("nan")

    def replay(self, requests: tuple[tuple[int, int], ...], seed: int) -> None:
        """Load a batch into the captured inputs, plan eagerly, replay, compare."""
        idle = self.num_reqs - len(requests)
        case = Case(requests, 32, 8, 128, dtype=BF16, pad_requests=idle, pad_tokens=0)
        batch = make_batch(case, "cuda", seed)
        n, width = batch.num_tokens, batch.block_table.shape[1]
        self.cache.fill_(float("nan"))
        self.cache[: len(batch.kv_cache)] = batch.kv_cache
        self.qsl.copy_(batch.query_start_loc)
        self.lens.copy_(batch.seq_lens)
        self.table.fill_(2_147_480_000)
        self.table[:, :width] = batch.block_table
        self.q.fill_(float("nan"))
        self.q[:n] = batch.q
        self.out.fill_(7.0)
        poison_scratch(self.attn)
        self.plan()
        self.graph.replay()
        torch.cuda.synchronize()
        check(batch, self.out, self.lse)
        assert (self.out[n:] == 7.0).all()
        assert not self.attn._buffers.arrivals.any()


def test_decode_graph_serves_every_length():
    captured = Captured(num_reqs=32, num_tokens=32, max_query_len=1, max_pages=130)
    captured.capture()
    rng = random.Random(0)
    captured.replay(((1, 0),), 1)
    captured.replay(((1, 8191),), 2)
    for seed in range(6):
        count = rng.randint(1, 32)
        captured.replay(tuple((1, rng.randint(0, 8000)) for _ in range(count)), seed)


def test_mixed_graph_serves_any_mixture():
    captured = Captured(num_reqs=16, num_tokens=1024, max_query_len=1024, max_pages=70)
    captured.capture()
    captured.replay(((1024, 0),), 1)
    captured.replay(((1, 4000), (1000, 3000)), 2)
    captured.replay(tuple((1, 100 * i) for i in range(16)), 3)
    captured.replay(((17, 0), (16, 100), (1, 0), (500, 64), (15, 1)), 4)
    captured.replay(((4, 4000), (200, 0), (200, 2000)), 5)


def test_spec_decode_graph():
    captured = Captured(num_reqs=16, num_tokens=80, max_query_len=5, max_pages=70)
    captured.capture()
    captured.replay(tuple((5, 250 * i) for i in range(16)), 1)
    captured.replay(((5, 4000), (1, 0), (3, 77)), 2)


def test_around_a_page_and_mixed_without_a_sync():
    """plan() and run() enqueue work and nothing else."""
    for requests in (AROUND_A_PAGE, MIXED):
        batch = make_batch(Case(requests, 32, 8, 128, dtype=BF16), "cuda")
        attn = make_attention(batch.case, "cuda")
        qsl, lens = batch.query_start_loc, batch.seq_lens
        out = torch.empty_like(batch.q)
        for _ in range(2):  # the second pass has nothing left to compile
            torch.cuda.set_sync_debug_mode("error" if _ else "default")
            try:
                attn.plan(qsl, lens, batch.block_table, num_tokens=len(batch.q), max_query_len=40)
                attn.run(batch.q, batch.kv_cache, out=out)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        check(batch, out)
