"""Cheap counts of what ran, kept in this process.

One dictionary update or list append per event on the hot path; ``tilewise.exporter`` reads them
from a thread and brings them to ``/metrics``.
"""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metric:
    """One metric as Prometheus sees it: type, exported name, help text and label names."""

    kind: str
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS = {
    "steps": Metric(
        "counter", "tilewise_steps", "Steps planned, by what they launch per layer.", ("path",)
    ),
    "tokens": Metric(
        "counter", "tilewise_tokens",
        "Tokens of the planned steps, padding of CUDA graphs included.", ("path",),
    ),
    "launches": Metric(
        "counter", "tilewise_kernel_launches",
        "Kernels launched from Python; replays of a full CUDA graph launch theirs without.",
        ("kernel",),
    ),
    "fallback_layers": Metric(
        "counter", "tilewise_fallback_layers",
        "Attention layers handed to another backend.", ("reason", "target"),
    ),
    "graph_steps": Metric(
        "counter", "tilewise_graph_steps",
        "Planned steps by the CUDA-graph mode in which the model's layers, not a drafter's, then "
        "ran, counted when the next step is planned: full (replayed, nothing launched from "
        "Python), piecewise, none, or capture.", ("mode",),
    ),
    "compilations": Metric(
        "counter", "tilewise_kernel_compilations",
        "Kernels of ours that Triton compiled (cached=\"false\") or loaded from its cache, while "
        "the engine warmed up or while it served.", ("phase", "cached"),
    ),
    "kv_splits": Metric(
        "histogram", "tilewise_kv_splits",
        "Workers that share one decode request's keys of a KV head, estimated for the first "
        "requests of some steps: the first, second, fourth and so on, then every 256th.", (),
        (1, 2, 4, 8, 16, 32, 64, 128, 256),
    ),
    "build_info": Metric(
        "gauge", "tilewise_build_info", "Always 1; its labels are the versions that run.",
        ("version", "vllm", "torch", "triton"),
    ),
    "build_seconds": Metric(
        "histogram", "tilewise_build_seconds", "Host time of planning one step.", (),
        (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1),
    ),
    "workspace_bytes": Metric(
        "gauge", "tilewise_workspace_bytes", "Device memory of the plan and split-KV buffers."
    ),
    "self_checks": Metric(
        "counter", "tilewise_self_checks",
        "Comparisons of the kernels with plain PyTorch at start-up, one a layer geometry.",
        ("result",),
    ),
}  # fmt: skip

_counts: Counter[tuple[str, Labels]] = Counter()
_gauges: Counter[tuple[str, Labels]] = Counter()
# Bounded, so that a process whose exporter never starts does not grow.
_observed: deque[tuple[str, float]] = deque(maxlen=10_000)
_paused = False


def add(name: str, n: int = 1, *, always: bool = False, **labels: str) -> None:
    """Count ``n`` events of ``name`` with these labels, unless paused and not ``always``."""
    if always or not _paused:
        _counts[name, tuple(labels.items())] += n


@contextmanager
def paused() -> Iterator[None]:
    """Count nothing meanwhile: launches of a warm-up serve nobody."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def grow(name: str, n: int, **labels: str) -> None:
    """Raise a gauge by ``n`` (lower it where negative)."""
    _gauges[name, tuple(labels.items())] += n


def put(name: str, value: int, **labels: str) -> None:
    """Set a gauge."""
    _gauges[name, tuple(labels.items())] = value


def observe(name: str, value: float) -> None:
    """Remember one value of a histogram until it is drained."""
    _observed.append((name, value))


def drain() -> list[tuple[str, float]]:
    """Take the observed values out, oldest first."""
    return [_observed.popleft() for _ in range(len(_observed))]


def totals() -> list[tuple[str, Labels, int]]:
    """Return all counters and gauges as they stand."""
    return [(n, labels, value) for (n, labels), value in (*_counts.items(), *_gauges.items())]


def snapshot() -> dict[str, int]:
    """Return the counters that are not 0 as ``{"launches{kernel=prefill}": 12, ...}``."""
    return {
        name + ("{" + ",".join(f"{k}={v}" for k, v in labels) + "}" if labels else ""): n
        for (name, labels), n in sorted(_counts.items())
        if n
    }


def reset() -> None:
    """Forget everything (tests)."""
    _counts.clear()
    _gauges.clear()
    _observed.clear()
