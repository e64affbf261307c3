"""``tilewise bench host``: what one call costs on the host, and what a plan costs on the GPU.

Eager steps, and whatever a step does outside its CUDA graph, can be no faster than Python starts
it: the plan and vLLM's metadata once a step, the cache write and the attention once a layer. Calls
are timed one by one, without a synchronisation between them; a batch of short requests keeps the
GPU ahead of the host.

A plan itself runs on the GPU: its time there is that of CUDA graphs full of plans, which could not
be captured if a plan waited for the device. At the end stand the two ways to start it: launched
once a step, on the host's time, or captured before the first layer, on the time of every replay.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from tilewise.bench import options, report

if TYPE_CHECKING:
    from tilewise.bench.timing import Timer

EXIT_OK, EXIT_USAGE = 0, 2
HOST_FIELDS = ("call", "requests", "clock", "median_us", "spread_us", "p99_us")
DEVICE = "cuda"
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 64
CONTEXT = 100
ROUNDS, WARM_CALLS = 10, 20
# Of a graph: so many that the GPU, and not the host that starts the graph, sets the pace.
IN_GRAPH, BURST_MS = 32, 10.0
PLAN, LAUNCH, BUILD = "plan", "plan's launch", "build"
FIRST, LAST = f"{BUILD}, first in a round", f"{BUILD}, last in a round"
ON_GPU, CAPTURED = "plan on the GPU: {}", "plan captured before {}"
WITHOUT, WITH = "in a graph: {}", "in a graph: plan and {}"


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of ``tilewise bench host``."""
    parser = argparse.ArgumentParser(
        prog="tilewise bench host",
        description=str(__doc__),
        epilog="Exit codes: 0; 2 for a wrong command line or no GPU.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--requests", type=int, default=256, metavar="N",
        help="requests of the batch, a token each (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--calls", type=int, default=500, metavar="N",
        help="timed calls of each kind, in ten turns (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("host.json"), metavar="FILE.json",
        help="result file (default: %(default)s)",
    )  # fmt: skip
    options.add_record(parser)
    return parser


def time_calls(call: Callable[[], object], calls: int) -> list[float]:
    """Return the host's microseconds in each of so many calls, after some that do not count."""
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
    return times


def host_rounds(
    calls: Mapping[str, Callable[[], object]], build: Callable[[], object] | None, count: int
) -> dict[str, list[float]]:
    """Time calls on the host in turns, each turn in the opposite order of the one before.

    Parameters
    ----------
    calls : mapping of str to callable
    build : callable or None
        Timed at both ends of every turn: the two differ by what the host does meanwhile.
    count : int
        Calls of each kind in a turn.

    Returns
    -------
    dict of str to list of float
        Microseconds by name, of ``build`` by place and together.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        order = [*calls.items()][:: -1 if turn % 2 else 1]
        if build is not None:
            order = [(FIRST, build), *order, (LAST, build)]
        for name, call in order:
            times.setdefault(name, []).extend(time_calls(call, count))
    if build is not None:
        times[BUILD] = times[FIRST] + times[LAST]
    return times


def device_rounds(timers: Mapping[str, Timer], captured: Sequence[str]) -> dict[str, list[float]]:
    """Time graphs in turns, each turn in the opposite order of the one before.

    Parameters
    ----------
    timers : mapping of str to Timer
    captured : sequence of str
        Batches whose graph is there with a plan and without.

    Returns
    -------
    dict of str to list of float
        Microseconds by name; of a captured plan what it adds, one figure a turn.
    """
    from tilewise.bench.timing import interleave

    times: dict[str, list[float]] = {name: [] for name in timers}
    times |= {CAPTURED.format(batch): [] for batch in captured}
    for turn in range(ROUNDS):
        order = [*timers][:: -1 if turn % 2 else 1]
        burst = interleave({name: timers[name] for name in order}, 1, BURST_MS)
        for name, samples in burst.items():
            times[name] += samples
        for batch in captured:
            without = statistics.median(burst[WITHOUT.format(batch)])
            added = statistics.median(burst[WITH.format(batch)]) - without
            times[CAPTURED.format(batch)].append(added)
    return times


def make_rows(times: Mapping[str, Sequence[float]], clock: str, requests: int) -> list[report.Row]:
    """Return a row of the result for each list of times; none may be empty or of one only."""
    from tilewise.bench.timing import summarize

    rows = []
    for call, samples in times.items():
        summary = summarize(samples)
        # The other method guesses beyond the largest of few samples.
        p99 = statistics.quantiles(samples, n=100, method="inclusive")[-1]
        figures = (summary.median_us, summary.spread_us, p99)
        values = (call, requests, clock, *(round(figure, 2) for figure in figures))
        rows.append(dict(zip(HOST_FIELDS, values, strict=True)))
    return rows


class Batch:
    """Requests of one new token each, or of a few more, over a paged cache."""

    def __init__(self, requests: int, query_len: int) -> None:
        import torch

        ints: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
        data: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
        pages = -(-(CONTEXT + query_len) // PAGE_SIZE)
        self.requests, self.query_len, self.tokens = requests, query_len, requests * query_len
        self.query_start_loc = torch.arange(0, self.tokens + 1, query_len, **ints)
        self.seq_lens = torch.full((requests,), CONTEXT + query_len, **ints)
        self.block_table = torch.arange(requests * pages, **ints).view(requests, pages)
        self.slots = torch.arange(self.tokens, dtype=torch.int64, device=DEVICE)
        shape = (requests * pages, NUM_KV_HEADS, PAGE_SIZE, 2 * HEAD_DIM)
        self.kv_cache = torch.zeros(shape, **data)
        self.q = torch.zeros((self.tokens, NUM_Q_HEADS, HEAD_DIM), **data)
        self.new = torch.zeros((2, self.tokens, NUM_KV_HEADS, HEAD_DIM), **data)
        self.out = torch.empty_like(self.q)


class Step:
    """A batch with the object that plans and computes it, by the newest plan."""

    def __init__(self, requests: int, query_len: int) -> None:
        import torch

        from tilewise.attention import PagedAttention

        self.is_decode = query_len == 1
        self.name = f"{'decode' if self.is_decode else 'prefill'} of {requests} requests"
        self.batch = batch = Batch(requests, query_len)
        self.attn = PagedAttention(
            NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, page_size=PAGE_SIZE, dtype=torch.bfloat16,
            max_num_reqs=batch.requests, max_num_tokens=batch.tokens, device=DEVICE,
        )  # fmt: skip
        self.plan()

    def plan(self) -> None:
        """Plan, as vLLM's builder does once a step."""
        batch = self.batch
        self.planned = self.attn.plan(
            batch.query_start_loc, batch.seq_lens, batch.block_table, num_tokens=batch.tokens,
            max_query_len=batch.query_len, has_decode=self.is_decode,
        )  # fmt: skip

    def plan_launch(self) -> Callable[[], object]:
        """Return the launch alone that a plan makes: what a captured plan would spare the host."""
        from tilewise.kernels.plan import plan_on_device

        with mock.patch("tilewise.attention.plan_on_device", wraps=plan_on_device) as seen:
            self.plan()
        return partial(plan_on_device, *seen.call_args.args, **seen.call_args.kwargs)

    def run(self) -> None:
        """Compute one layer."""
        batch = self.batch
        self.attn.run(batch.q, batch.kv_cache, out=batch.out, plan=self.planned)

    def plan_and_run(self) -> None:
        """Plan, then compute one layer."""
        self.plan()
        self.run()

    def write(self) -> None:
        """Write the new keys and values of one layer."""
        from tilewise.kernels.cache_write import write_kv_cache

        k, v = self.batch.kv_cache.split(HEAD_DIM, dim=-1)
        write_kv_cache(k, v, self.batch.new[0], self.batch.new[1], self.batch.slots)


def make_steps(requests: int) -> list[Step]:
    """Return decodes of so many requests and of few, and a prefill of few."""
    few = max(1, min(requests, 132 // NUM_KV_HEADS))
    shapes = dict.fromkeys([(requests, 1), (few, 1), (few, 32)])
    return [Step(*shape) for shape in shapes]


def host_calls(steps: Sequence[Step]) -> dict[str, Callable[[], object]]:
    """Return the calls of the plan/run API by name; those of no layer are the first step's."""
    calls: dict[str, Callable[[], object]] = {step.name: step.run for step in steps}
    first = steps[0]
    return calls | {"cache write": first.write, PLAN: first.plan, LAUNCH: first.plan_launch()}


def graph_timers(steps: Sequence[Step]) -> dict[str, Timer]:
    """Return graphs by name: of every step's plans, and of layers of decodes with and without.

    Plans of prefills are not captured beside layers: vLLM's full graphs hold decodes.
    """
    from tilewise.bench.timing import GraphTimer

    timers: dict[str, Timer] = {}
    for step in steps:
        timers[ON_GPU.format(step.name)] = GraphTimer([step.plan], IN_GRAPH)
        if step.is_decode:
            timers[WITHOUT.format(step.name)] = GraphTimer([step.run], IN_GRAPH)
            timers[WITH.format(step.name)] = GraphTimer([step.plan_and_run], IN_GRAPH)
    return timers


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
        cache_config=SimpleNamespace(enable_prefix_caching=True),
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
    builder: Any = TilewiseBackend.get_builder_cls()(spec, ["layer"], config, torch.device(DEVICE))
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


def measure(requests: int, calls: int) -> list[report.Row]:
    """Return the rows of all calls, the host's first."""
    build = None
    if importlib.util.find_spec("vllm") is not None:
        build = build_call(requests)
    else:
        print(f"{BUILD}: not measured, vLLM is not installed", file=sys.stderr)
    steps = make_steps(requests)
    on_host = host_rounds(host_calls(steps), build, -(-calls // ROUNDS))
    captured = [step.name for step in steps if step.is_decode]
    on_device = device_rounds(graph_timers(steps), captured)
    return make_rows(on_host, "host", requests) + make_rows(on_device, "device", requests)


def table(rows: Sequence[report.Row]) -> str:
    """Return all rows as text, and below them the two ways to start a plan."""
    lines = [f"{'call':45} {'clock':6} {'median us':>9} {'spread':>8} {'p99':>8}"]
    lines += [
        f"{row['call']:45} {row['clock']:6} {row['median_us']:9.2f} {row['spread_us']:8.2f} "
        f"{row['p99_us']:8.2f}"
        for row in rows
    ]
    by_name = {row["call"]: row for row in rows}
    launch, prefix = by_name[LAUNCH], CAPTURED.format("")
    for call, row in by_name.items():
        if call.startswith(prefix):
            lines.append(
                f"A plan of a {call.removeprefix(prefix)} costs the host {launch['median_us']:.2f} "
                f"us (spread {launch['spread_us']:.2f}) launched in every step, or the GPU "
                f"{row['median_us']:.2f} us (spread {row['spread_us']:.2f}) captured."
            )
    return "\n".join(lines)


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
        print("no CUDA device to measure: no time of the host, no plan on a GPU", file=sys.stderr)
        return EXIT_USAGE
    env = report.describe_environment(["tilewise", "bench", "host", *argv], args.commit)
    env |= report.describe_gpu()
    env["suite"] = {"rounds": ROUNDS, "in_graph": IN_GRAPH}
    rows = measure(args.requests, args.calls)
    report.write_result(args.out, env, rows)
    print(report.result_text(env, rows) if args.json else table(rows))
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
