"""Steps, graph modes, splits and compilations as the counters see them; what counting costs."""

import contextlib
import json
import os
import random
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context

from tilewise import counters, exporter, launches, plan_rule, policy
from tilewise.integration import impl, step_metrics
from tilewise.integration.step_metrics import StepMetrics, estimate_splits

pytestmark = pytest.mark.vllm

H200 = policy.Device(arch=90, num_sms=132, shared_memory=227 * 1024)
CONFIG = policy.choose(policy.Geometry(32, 8, 128, 64, 2), H200)


@pytest.fixture(autouse=True)
def fresh():
    """Counters at zero; whatever exports them in this process, of other tests, waits."""
    with contextlib.ExitStack() as stack:
        for exports in exporter._exporters.values():
            stack.enter_context(exports._lock)
        counters.reset()
        yield
        counters.reset()


def make_plan(tokens=4, tiles=0, has_decode=True):
    return SimpleNamespace(num_tokens=tokens, max_prefill_tiles=tiles, has_decode=has_decode)


def make_batch(query_lens, seq_lens):
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    bound = torch.tensor(seq_lens, dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc_cpu=starts, num_reqs=len(query_lens), seq_lens_cpu_upper_bound=bound
    )


def run_in(mode: str | None, steps: StepMetrics, layers: int = 2) -> None:
    """Call layers as a forward pass of this mode does; None outside any."""
    context = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode[mode]) if mode else None
    with override_forward_context(context):
        for _ in range(layers):
            steps.ran()


def test_a_step_whose_layers_python_never_calls_was_replayed():
    steps, batch = StepMetrics(CONFIG), make_batch([1], [5])
    for mode in ("FULL", "PIECEWISE", "NONE", None, "replay", "replay", "PIECEWISE"):
        steps.planned(make_plan(), batch)
        if mode != "replay":
            run_in(mode, steps)
    found = counters.snapshot()
    modes = {mode: found.get(f"graph_steps{{mode={mode}}}", 0) for mode in step_metrics.GRAPH_MODES}
    # The last step is counted when the next one is planned.
    assert modes == {"capture": 1, "piecewise": 1, "none": 2, "full": 2}
    assert found["steps{path=decode}"] == sum(modes.values()) + 1
    steps.planned(make_plan(), batch)
    assert counters.snapshot()["graph_steps{mode=piecewise}"] == 2


def test_steps_of_a_drafter_are_no_steps_of_a_graph_mode():
    steps, batch = StepMetrics(CONFIG, drafts=True), make_batch([1], [5])
    for mode in ("PIECEWISE", "NONE", "replay"):
        steps.planned(make_plan(), batch)
        if mode != "replay":
            run_in(mode, steps)
    steps.planned(make_plan(), batch)
    found = counters.snapshot()
    assert not any(name.startswith("graph_steps") and n for name, n in found.items())
    assert found["steps{path=decode}"] == 4


def test_paths_and_tokens():
    steps, batch = StepMetrics(CONFIG), make_batch([1], [5])
    for tokens, tiles, has_decode in ((3, 0, True), (70, 2, True), (80, 3, False), (5, 0, True)):
        steps.planned(make_plan(tokens, tiles, has_decode), batch)
    found = counters.snapshot()
    assert {k: v for k, v in found.items() if k.startswith(("steps", "tokens"))} == {
        "steps{path=decode}": 2, "tokens{path=decode}": 8,
        "steps{path=mixed}": 1, "tokens{path=mixed}": 70,
        "steps{path=prefill}": 1, "tokens{path=prefill}": 80,
    }  # fmt: skip


@pytest.mark.parametrize("config", [CONFIG, policy.batch_invariant(CONFIG)], ids=["", "invariant"])
@pytest.mark.parametrize("seed", range(20))
def test_splits_are_those_of_the_policy(seed, config):
    draw = random.Random(seed)
    count = draw.choice([1, 2, 7, 40])
    query_lens = [draw.choice([0, 1, 1, 1, 4, 16, 17, 300]) for _ in range(count)]
    seq_lens = [q and q + draw.randrange(8000) for q in query_lens]
    plan = plan_rule.plan_batch(query_lens, seq_lens, config)
    wanted = [
        max(plan_rule.kv_splits(plan, r, q, config))
        for r, q in enumerate(query_lens)
        if 0 < q <= policy.DECODE_MAX_QUERY_LEN
    ]
    assert estimate_splits(query_lens, seq_lens, config) == wanted[: step_metrics.SAMPLE_REQUESTS]


def test_splits_are_sampled():
    steps = StepMetrics(CONFIG)
    batch = make_batch([1] * 3 + [50], [9000, 10, 70, 50])
    assert step_metrics.SAMPLE_EVERY == 256
    for _ in range(3 * 256):
        steps.planned(make_plan(), batch)
        steps.planned(make_plan(50, 1, has_decode=False), batch)
    one = [("kv_splits", n) for n in estimate_splits([1] * 3, [9000, 10, 70], CONFIG)]
    assert len(one) == 3
    # 1, 2, 4 ... 128, 256, 512 and 768
    assert counters.drain() == 11 * one
    batch.seq_lens_cpu_upper_bound = None
    StepMetrics(CONFIG).planned(make_plan(), batch)
    assert counters.drain() == []


def test_counting_costs_less_than_20_microseconds_a_step():
    """The mean over whole sampling periods, of the largest batches; the best of three tries.

    Of 64 layers that all run from Python: a write to the cache, a prefill and a decode in each.
    """
    steps = StepMetrics(CONFIG)
    batch = make_batch([1] * 256, [4000 + i for i in range(256)])
    plan, count = make_plan(256), 4 * step_metrics.SAMPLE_EVERY
    tries = []
    for _ in range(3):
        started = time.process_time()
        for _ in range(count):
            steps.planned(plan, batch)
            counters.observe("build_seconds", 1e-4)
            for _ in range(64):
                impl._CACHE_WRITE.n += 1
                if steps.mode is None:
                    steps.ran()
                launches._PREFILL.n += 1
                launches._DECODE.n += 1
        tries.append((time.process_time() - started) / count)
        counters.drain()
    assert counters.snapshot()["launches{kernel=cache_write}"] == 3 * count * 64
    assert min(tries) < 20e-6, tries


def test_a_pause_takes_back_what_cells_counted():
    cell = counters.cell("launches", kernel="decode")
    assert cell is launches._DECODE
    cell.n += 3
    with counters.paused():
        cell.n += 1
        assert counters.snapshot() == {"launches{kernel=decode}": 3}
        with counters.paused():
            cell.n += 1
        assert counters.snapshot() == {"launches{kernel=decode}": 3}
    assert cell.n == 3
    counters.add("launches", 2, kernel="decode")
    assert counters.snapshot() == {"launches{kernel=decode}": 5}
    counters.reset()
    assert (cell.n, counters.totals()) == (0, [])


def test_nothing_grows_with_the_steps():
    steps, batch = StepMetrics(CONFIG), make_batch([1], [100])

    def run(count):
        for _ in range(count):
            steps.planned(make_plan(), batch)
            steps.ran()
            counters.observe("build_seconds", 1e-4)

    def held():
        """Bytes that were asked for in our own files: other tests have left threads."""
        ours = tracemalloc.Filter(True, str(Path(counters.__file__).parent / "*"))
        traces = tracemalloc.take_snapshot().filter_traces([ours]).traces
        return sum(trace.size for trace in traces)

    tracemalloc.start()
    try:
        run(20_000)  # fills what is bounded
        before = held()
        assert before > 10_000
        run(50_000)
        grown = held() - before
    finally:
        tracemalloc.stop()
    assert grown < 64 * 1024
    assert len(counters.totals()) < 30


MANY_STEPS = """
    import json, os, resource, sys
    from pathlib import Path
    from types import SimpleNamespace

    import torch

    from tilewise import counters, exporter, policy
    from tilewise.integration.step_metrics import StepMetrics, describe_process

    folder, steps, periods = Path(sys.argv[1]), int(sys.argv[2]), 100
    describe_process()
    exporter.PERIOD_SECONDS = 1e6  # the thread writes once, then we say when
    exporter.start({"engine": "0", "rank": "0"})
    exporter.flush()
    device = policy.Device(arch=90, num_sms=132, shared_memory=227 * 1024)
    metrics = StepMetrics(policy.choose(policy.Geometry(32, 8, 128, 64, 2), device))
    plan = SimpleNamespace(num_tokens=4, max_prefill_tiles=0, has_decode=True)
    batch = SimpleNamespace(
        query_start_loc_cpu=torch.tensor([0, 1], dtype=torch.int32), num_reqs=1,
        seq_lens_cpu_upper_bound=torch.tensor([100], dtype=torch.int32),
    )

    def held():
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        return resident, sum(path.stat().st_size for path in folder.iterdir())

    seen = []
    for _ in range(periods):
        for _ in range(steps // periods):
            metrics.planned(plan, batch)
            metrics.ran()
            counters.observe("build_seconds", 1e-4)
        exporter.flush()
        seen.append(held())
    print(json.dumps([counters.snapshot(), len(list(folder.iterdir())), seen]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("variable", [exporter.FOLDER_VARIABLE, exporter.NATIVE_VARIABLE])
def test_a_million_steps_leave_memory_and_files_as_they_are(variable, tmp_path):
    """A process of its own, which writes every 10,000 steps, by file and natively."""
    steps, others = 10**6, (exporter.FOLDER_VARIABLE, exporter.NATIVE_VARIABLE)
    env = {k: v for k, v in os.environ.items() if k not in others} | {variable: str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MANY_STEPS), str(tmp_path), str(steps)],
        env=env, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found, num_files, seen = json.loads(done.stdout.splitlines()[-1])
    assert found["steps{path=decode}"] == steps
    assert num_files == (1 if variable == exporter.FOLDER_VARIABLE else 3)
    # The first tenth fills what is bounded; the allocator may still take a page here and there.
    resident, size = zip(*seen[len(seen) // 10 :], strict=True)
    assert max(resident) - resident[0] < 1 << 20, resident
    # Numbers in a text have more digits when they are larger; binary ones have not.
    assert size[-1] - size[0] < (256 if variable == exporter.FOLDER_VARIABLE else 1), size


def test_counters_exist_before_they_move():
    StepMetrics(CONFIG)
    found = {(name, *dict(labels).values()): value for name, labels, value in counters.totals()}
    assert set(found.values()) == {0}
    assert {("steps", "mixed"), ("launches", "decode"), ("graph_steps", "full")} <= set(found)
    assert counters.snapshot() == {}


def test_build_info_names_the_versions():
    step_metrics.describe_process()
    step_metrics.describe_process()
    (info,) = [(dict(labels), n) for name, labels, n in counters.totals() if name == "build_info"]
    assert info[1] == 1
    assert tuple(info[0]) == counters.METRICS["build_info"].labels
    assert info[0]["torch"] == torch.__version__


def test_a_pause_of_counting_does_not_hide_compilations():
    counter = step_metrics.CompilationCounter(None)
    source = SimpleNamespace(fn=SimpleNamespace(__module__="tilewise.kernels.plan"))
    with counters.paused():
        counter(src=source, cache_hit=False, metadata={})
    assert counters.snapshot()["compilations{phase=serving,cached=false}"] == 1


def test_the_methods_that_mark_the_warm_up_exist():
    from vllm.v1.worker.gpu_worker import Worker

    for name in step_metrics._BEFORE_SERVING:
        assert callable(getattr(Worker, name)), name


def test_compilations_are_counted_by_phase(tmp_path):
    """Triton compiles, in a process without the interpreter: kernels of ours, and another's."""
    script = tmp_path / "compile.py"
    script.write_text(
        textwrap.dedent(
            """
            import json
            import triton
            import triton.language as tl
            from triton import knobs
            from triton.backends.compiler import GPUTarget
            from triton.compiler import ASTSource

            from tilewise import counters
            from tilewise.integration import step_metrics
            from tilewise.kernels.cache_write import _write_kv_kernel
            from tilewise.kernels.plan import _plan_kernel

            seen = []
            knobs.compilation.listener = lambda **kwargs: seen.append(kwargs["cache_hit"])
            step_metrics.describe_process()
            step_metrics.describe_process()

            @triton.jit
            def first(x_ptr):
                tl.store(x_ptr, 1)

            @triton.jit
            def second(x_ptr):
                tl.store(x_ptr, 2)

            @triton.jit
            def foreign(x_ptr):
                tl.store(x_ptr, 3)

            # Small kernels in the place of ours.
            first.__module__ = _plan_kernel.__module__
            second.__module__ = _write_kv_kernel.__module__

            def compile(kernel):
                target = GPUTarget("cuda", 90, 32)
                triton.compile(ASTSource(kernel, {"x_ptr": "*i32"}, {}), target)

            def compile_or_warm_up_model():
                compile(first)

            compile_or_warm_up_model()
            compile(first)
            compile(second)
            compile(foreign)
            print(json.dumps([counters.snapshot(), seen]))
            """
        )
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, seen = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "compilations{phase=warmup,cached=false}": 1,
        "compilations{phase=serving,cached=false}": 1,
        "compilations{phase=serving,cached=true}": 1,
    }
    assert seen == [False, True, False, False], "the listener before ours is still called"
