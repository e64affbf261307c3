"""``tilewise bench host``."""

from __future__ import annotations

import json

import pytest
import torch

from tilewise.bench import host, timing


@pytest.fixture
def on_cpu(monkeypatch, device):
    """The command without a GPU: few rounds of the interpreter, plain calls in place of graphs."""
    if device.type != "cpu":
        pytest.skip("runs on CPU tensors, in the interpreter")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "GraphTimer", timing.HostTimer)
    small = {
        "DEVICE": "cpu", "NUM_Q_HEADS": 4, "NUM_KV_HEADS": 1, "HEAD_DIM": 16,
        "ROUNDS": 2, "WARM_CALLS": 0, "IN_GRAPH": 1, "BURST_MS": 0.0,
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(host, name, value)


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert host.main(["--out", str(tmp_path / "host.json")]) == host.EXIT_USAGE
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "host.json").exists()


@pytest.mark.parametrize("words", [["--requests", "0"], ["--calls", "1"]])
def test_sizes_without_sense_are_named(words, capsys):
    assert host.main(words) == host.EXIT_USAGE
    assert " ".join(words) in capsys.readouterr().err


def test_rounds_turn_and_build_stands_at_both_ends(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host, "ROUNDS", 3)
    monkeypatch.setattr(host, "WARM_CALLS", 1)
    log = []
    calls = {name: lambda name=name: log.append(name) for name in "abc"}
    times = host.host_rounds(calls, lambda: log.append("build"), 1)
    # Every call twice: the first warms and does not count.
    one, other = ("build", *"abc", "build"), ("build", *"cba", "build")
    assert log == [name for turn in (one, other, one) for name in turn for _ in range(2)]
    assert {name: len(found) for name, found in times.items()} == {
        "a": 3, "b": 3, "c": 3, host.FIRST: 3, host.LAST: 3, host.BUILD: 6,
    }  # fmt: skip
    assert times[host.BUILD] == times[host.FIRST] + times[host.LAST]
    assert set(host.host_rounds(calls, None, 2)) == set("abc")


class Graph:
    """A timer whose every replay takes as long; the first of a burst do not count."""

    layers = 32

    def __init__(self, log, name, microseconds):
        self.log, self.name, self.microseconds = log, name, microseconds

    def burst(self, count):
        self.log.append(self.name)
        return [1e6] * (count // 3) + [self.microseconds] * (count - count // 3)


def test_what_a_captured_plan_adds_is_a_difference_of_each_round(monkeypatch):
    monkeypatch.setattr(host, "ROUNDS", 2)
    log, batch = [], "decode of 4 requests"
    plan, without, with_plan = (
        kind.format(batch) for kind in (host.ON_GPU, host.WITHOUT, host.WITH)
    )
    took = {plan: 2.0, without: 6.0, with_plan: 7.5}
    timers = {name: Graph(log, name, us) for name, us in took.items()}
    times = host.device_rounds(timers, [batch])
    assert times.pop(host.CAPTURED.format(batch)) == [1.5, 1.5]
    assert {name: set(found) for name, found in times.items()} == {
        name: {us} for name, us in took.items()
    }
    # `interleave` looks how long each takes, then times them.
    one, other = [plan, without, with_plan], [with_plan, without, plan]
    assert log == [*one, *one, *other, *other]


def test_rows_have_median_spread_and_no_guess_beyond_the_largest():
    (row,) = host.make_rows({"plan": [float(i) for i in range(1, 12)]}, "host", 8)
    assert tuple(row) == host.HOST_FIELDS
    assert list(row.values()) == ["plan", 8, "host", 6.0, 5.0, 10.9]


def test_the_table_ends_with_both_ways_to_start_a_plan():
    times = {host.PLAN: [60.0] * 4, host.LAUNCH: [30.0, 31.0, 32.0, 33.0]}
    captured = {host.CAPTURED.format("decode of 8 requests"): [2.0, 2.5]}
    rows = host.make_rows(times, "host", 8) + host.make_rows(captured, "device", 8)
    *lines, last = host.table(rows).splitlines()
    assert len(lines) == 1 + len(rows)
    assert last == (
        "A plan of a decode of 8 requests costs the host 31.50 us (spread 1.50) launched in "
        "every step, or the GPU 2.25 us (spread 0.50) captured."
    )


def test_a_plan_s_launch_writes_what_the_plan_writes(on_cpu):
    step = host.Step(3, 1)
    launch = step.plan_launch()
    planned = step.planned
    buffers = step.attn._buffers
    written = (buffers.header, buffers.cu_work, buffers.worker_record)
    before = [x.clone() for x in written]
    for x in written:
        x.fill_(-7)
    launch()
    # No new plan: layers go on with the one they have.
    assert step.planned is planned
    step.run()
    for x, expected in zip(written, before, strict=True):
        assert torch.equal(x, expected)


def test_few_requests_are_no_second_decode(on_cpu):
    names = [step.name for step in host.make_steps(2)]
    assert names == ["decode of 2 requests", "prefill of 2 requests"]


def test_the_whole_command(on_cpu, monkeypatch, tmp_path, capsys):
    built = []
    monkeypatch.setattr(host, "build_call", lambda requests: lambda: built.append(requests))
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: True)
    out = tmp_path / "host.json"
    assert host.main(["--requests", "2", "--calls", "2", "--out", str(out)]) == host.EXIT_OK
    result = json.loads(out.read_text())
    assert result["env"]["suite"] == {"rounds": 2, "in_graph": 1}
    clocks = {row["call"]: row["clock"] for row in result["rows"]}
    decode, prefill = "decode of 2 requests", "prefill of 2 requests"
    assert clocks == {
        decode: "host", prefill: "host", "cache write": "host", "plan": "host",
        "plan's launch": "host", "build, first in a round": "host",
        "build, last in a round": "host", "build": "host",
        f"plan on the GPU: {decode}": "device", f"plan on the GPU: {prefill}": "device",
        f"in a graph: {decode}": "device", f"in a graph: plan and {decode}": "device",
        f"plan captured before {decode}": "device",
    }  # fmt: skip
    assert built == [2] * 4
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(clocks)
    assert last.startswith(f"A plan of a {decode} costs the host ")


def test_without_vllm_there_is_no_build_and_it_says_so(on_cpu, monkeypatch, capsys):
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    rows = host.measure(1, 2)
    assert not [row for row in rows if row["call"].startswith(host.BUILD)]
    assert "vLLM is not installed" in capsys.readouterr().err


@pytest.mark.vllm
def test_build_is_that_of_vllm_s_builder(on_cpu):
    metadata = host.build_call(3)()
    assert (metadata.num_reqs, metadata.plan.num_reqs) == (3, 3)
    assert metadata.plan.has_decode


@pytest.mark.gpu
def test_it_times_every_call(tmp_path):
    out = tmp_path / "host.json"
    assert host.main(["--requests", "40", "--calls", "30", "--out", str(out)]) == host.EXIT_OK
    rows = {row["call"]: row for row in json.loads(out.read_text())["rows"]}
    few, many = "decode of 16 requests", "decode of 40 requests"
    assert {"plan", "plan's launch", "cache write", many, "prefill of 16 requests"} <= set(rows)
    for name in (few, many, "prefill of 16 requests"):
        assert host.ON_GPU.format(name) in rows
    for row in rows.values():
        assert set(host.HOST_FIELDS) == set(row)
        assert row["median_us"] <= row["p99_us"]
        # What a captured plan adds is a difference, which other work on the GPU moves.
        assert row["median_us"] > 0.3 or row["call"].startswith(host.CAPTURED.format(""))
    assert {host.CAPTURED.format(name) for name in (few, many)} <= set(rows)
