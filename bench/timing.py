"""Timing on a GPU: CUDA graphs of many launches, interleaved rounds, medians."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tilewise.bench.gpu import GpuMonitor

Call = Callable[[], object]


class Timer(Protocol):
    """What `interleave` needs of something that can be timed."""

    layers: int

    def burst(self, count: int) -> list[float]:
        """Run `count` times; return microseconds of one layer for each run."""
        ...


class GraphTimer:
    """A CUDA graph of `layers` launches over rotating inputs, replayed back to back.

    Parameters
    ----------
    calls : sequence of callables
        One call for each copy of the inputs; each enqueues one attention layer.
    layers : int
        Launches in the graph.
    monitor : GpuMonitor, optional
        Sampled while replays are in flight, so that it sees loaded clocks.
    """

    def __init__(
        self, calls: Sequence[Call], layers: int, monitor: GpuMonitor | None = None
    ) -> None:
        self.layers = layers
        # The graph has addresses only: what the calls hold must live as long.
        self._calls = calls
        self._monitor = monitor
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(warm)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for layer in range(layers):
                calls[layer % len(calls)]()
        self._graph.replay()
        torch.cuda.synchronize()

    def burst(self, count: int) -> list[float]:
        """Replay `count` times; return microseconds of one layer for each replay."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self._graph.replay()
            event.record()
        if self._monitor is not None:
            self._monitor.sample()
        events[-1].synchronize()
        pairs = itertools.pairwise(events)
        return [1e3 * start.elapsed_time(end) / self.layers for start, end in pairs]


class HostTimer:
    """The same interface on the CPU, for dry runs: wall-clock time of plain calls."""

    def __init__(self, calls: Sequence[Call], layers: int) -> None:
        self.layers = layers
        self._calls = calls

    def burst(self, count: int) -> list[float]:
        """Call all layers `count` times; return microseconds of one layer for each."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            for layer in range(self.layers):
                self._calls[layer % len(self._calls)]()
            times.append(1e6 * (time.perf_counter() - start) / self.layers)
        return times


@dataclass(frozen=True)
class Summary:
    """Median and interquartile range, both in microseconds of one layer."""

    median_us: float
    spread_us: float
    samples: int


def summarize(times_us: Sequence[float]) -> Summary:
    """Return median and interquartile range of a list of times."""
    median = statistics.median(times_us)
    if len(times_us) < 4:
        return Summary(median, max(times_us) - min(times_us), len(times_us))
    low, _, high = statistics.quantiles(times_us, n=4, method="inclusive")
    return Summary(median, high - low, len(times_us))


def estimate_us(call: Call, device: torch.device) -> float:
    """Return the time of one warm call in microseconds: the least of three."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start)
    times = []
    for _ in range(4):
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        times.append(1e3 * start_event.elapsed_time(end_event))
    return min(times[1:])


def layers_for(one_us: float, max_layers: int, copies: int, graph_ms: float = 60.0) -> int:
    """Return how many launches a graph gets: all of them unless they take too long.

    A launch of a millisecond hides the cost of starting a graph by itself, so long cases lose
    nothing by having fewer layers.
    """
    affordable = int(1e3 * graph_ms / max(one_us, 1e-3))
    return min(max_layers, max(4, copies, affordable))


def interleave(timers: Mapping[str, Timer], rounds: int, burst_ms: float) -> dict[str, list[float]]:
    """Time all timers in turn, `rounds` times, each turn starting with another one.

    The first third of every burst is run but not counted: power and clocks still belong to the
    neighbour then.
    """
    times: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    counts = {}
    for name, timer in timers.items():
        replay_ms = 1e-3 * timer.layers * min(timer.burst(2))
        counts[name] = max(3, min(60, round(burst_ms / max(replay_ms, 1e-3))))
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            burst = timers[name].burst(counts[name])
            times[name] += burst[len(burst) // 3 :]
    return times
