"""``tilewise bench host``: what one call costs on the host, where nothing waits for the GPU.

Eager steps, and whatever a step does outside its CUDA graph, can be no faster than Python starts
it: the plan and vLLM's metadata once a step, the cache write and the attention once a layer. Calls
are timed one by one, without a synchronisation between them; a batch of short requests keeps the
GPU ahead of the host.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tilewise.bench import report

EXIT_OK, EXIT_USAGE = 0, 2
HOST_FIELDS = ("call", "requests", "median_us", "p99_us")
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 64
CONTEXT = 100
WARM_CALLS = 20


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of ``tilewise bench host``."""
    parser = argparse.ArgumentParser(
        prog="tilewise bench host",
        description=str(__doc__),
        epilog="Exit codes: 0; 2 for a wrong command line or no GPU.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=256, help="of the batch (%(default)s)")
    parser.add_argument("--calls", type=int, default=500, help="of each kind (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("host.json"), help="(%(default)s)")
    parser.add_argument("--commit", help="to record, where the checkout has no git folder")
    parser.add_argument("--json", action="store_true", help="print the result, not a table")
    return parser


def time_calls(call: Callable[[], object], calls: int) -> dict[str, float]:
    """Return median and 99th percentile of the host's microseconds in a call."""
    import torch

    for _ in range(WARM_CALLS):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        call()
        times.append(1e-3 * (time.perf_counter_ns() - began))
    torch.cuda.synchronize()
    p99 = statistics.quantiles(times, n=100)[-1]
    return {"median_us": round(statistics.median(times), 2), "p99_us": round(p99, 2)}


class Batch:
    """Requests of one new token each, or of a few more, over a paged cache."""

    def __init__(self, requests: int, query_len: int) -> None:
        import torch

        ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
        data: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        pages = -(-(CONTEXT + query_len) // PAGE_SIZE)
        self.requests, self.query_len, self.tokens = requests, query_len, requests * query_len
        self.query_start_loc = torch.arange(0, self.tokens + 1, query_len, **ints)
        self.seq_lens = torch.full((requests,), CONTEXT + query_len, **ints)
        self.block_table = torch.arange(requests * pages, **ints).view(requests, pages)
        self.slots = torch.arange(self.tokens, dtype=torch.int64, device="cuda")
        shape = (requests * pages, NUM_KV_HEADS, PAGE_SIZE, 2 * HEAD_DIM)
        self.kv_cache = torch.zeros(shape, **data)
        self.q = torch.zeros((self.tokens, NUM_Q_HEADS, HEAD_DIM), **data)
        self.new = torch.zeros((2, self.tokens, NUM_KV_HEADS, HEAD_DIM), **data)
        self.out = torch.empty_like(self.q)


def our_calls(requests: int) -> dict[str, Callable[[], object]]:
    """Return the calls of the plan/run API by name."""
    import torch

    from tilewise.attention import PagedAttention
    from tilewise.kernels.cache_write import write_kv_cache

    calls: dict[str, Callable[[], object]] = {}
    few = max(1, min(requests, 132 // NUM_KV_HEADS))
    for name, batch in (
        (f"decode of {requests} requests", Batch(requests, 1)),
        (f"decode of {few} requests", Batch(few, 1)),
        (f"prefill of {few} requests", Batch(few, 32)),
    ):
        attn = PagedAttention(
            NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, page_size=PAGE_SIZE, dtype=torch.bfloat16,
            max_num_reqs=batch.requests, max_num_tokens=batch.tokens, device="cuda",
        )  # fmt: skip

        def plan(attn: Any = attn, batch: Batch = batch) -> Any:
            return attn.plan(
                batch.query_start_loc, batch.seq_lens, batch.block_table,
                num_tokens=batch.tokens, max_query_len=batch.query_len,
                has_decode=batch.query_len == 1,
            )  # fmt: skip

        planned = plan()

        def run(attn: Any = attn, batch: Batch = batch, planned: Any = planned) -> None:
            attn.run(batch.q, batch.kv_cache, out=batch.out, plan=planned)

        def write(batch: Batch = batch) -> None:
            k, v = batch.kv_cache.split(HEAD_DIM, dim=-1)
            write_kv_cache(k, v, batch.new[0], batch.new[1], batch.slots)

        calls[name] = run
        if "cache write" not in calls:
            calls["cache write"] = write
            # A plan makes older ones stale: it has an object of its own.
            second = PagedAttention(
                NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, page_size=PAGE_SIZE, dtype=torch.bfloat16,
                max_num_reqs=batch.requests, max_num_tokens=batch.tokens, device="cuda",
            )  # fmt: skip
            calls["plan"] = partial(plan, second, batch)
    return calls


def build_call(requests: int) -> Callable[[], object]:
    """Return a call of ``build()`` of the metadata builder that vLLM uses, once a step."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from tilewise.integration.backend import TilewiseBackend

    batch = Batch(requests, 1)
    # What the builder reads of an engine's settings; a real one needs a model.
    config: Any = SimpleNamespace(
        speculative_config=None,
        use_v2_model_runner=True,
        scheduler_config=SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=8192),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            max_cudagraph_capture_size=512,
            static_forward_context={},
        ),
        model_config=SimpleNamespace(get_num_attention_heads=lambda _: NUM_Q_HEADS),
    )
    spec = FullAttentionSpec(
        block_size=PAGE_SIZE, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16
    )
    builder: Any = TilewiseBackend.get_builder_cls()(spec, ["layer"], config, torch.device("cuda"))
    described = CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=batch.query_start_loc.cpu(),
        seq_lens=batch.seq_lens,
        num_reqs=requests,
        num_actual_tokens=requests,
        max_query_len=1,
        max_seq_len=CONTEXT + 1,
        block_table_tensor=batch.block_table,
        slot_mapping=batch.slots,
    )
    return lambda: builder.build(0, described)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the result and print a table.

    Returns
    -------
    int
        0; 2 for a wrong command line or no GPU.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    for name in ("requests", "calls"):
        if getattr(args, name) < (2 if name == "calls" else 1):
            print(f"--{name} {getattr(args, name)}; accepted: more", file=sys.stderr)
            return EXIT_USAGE
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device to measure", file=sys.stderr)
        return EXIT_USAGE
    env = report.describe_environment(["tilewise", "bench", "host", *argv], args.commit)
    env |= report.describe_gpu()
    calls = our_calls(args.requests)
    if importlib.util.find_spec("vllm") is not None:
        calls["build"] = build_call(args.requests)
    rows = [
        {"call": name, "requests": args.requests, **time_calls(call, args.calls)}
        for name, call in calls.items()
    ]
    report.write_result(args.out, env, rows)
    if args.json:
        print(report.result_text(env, rows))
        return EXIT_OK
    for row in rows:
        print(f"{row['call']:24} {row['median_us']:8.1f} us, p99 {row['p99_us']:8.1f}")
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
