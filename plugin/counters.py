"""Cheap counts of what ran, kept in this process.

One addition, dictionary update or list append per event on the hot path; ``tilewise.exporter``
reads them from a thread and brings them to ``/metrics``.
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


class Cell:
    """One counter of what happens in every layer: ``cell.n += 1`` is all that an event costs."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


_counts: Counter[tuple[str, Labels]] = Counter()
_cells: dict[tuple[str, Labels], Cell] = {}
# What the cells held when counting was paused.
_held: dict[tuple[str, Labels], int] | None = None
_gauges: Counter[tuple[str, Labels]] = Counter()
# Bounded, so that a process whose exporter never starts does not grow.
_observed: deque[tuple[str, float]] = deque(maxlen=10_000)
_paused = False


def add(name: str, n: int = 1, *, always: bool = False, **labels: str) -> None:
    """Count ``n`` events of ``name`` with these labels, unless paused and not ``always``."""
    if always or not _paused:
        _counts[name, tuple(labels.items())] += n


def cell(name: str, **labels: str) -> Cell:
    """Return the counter of ``name`` with these labels, the same one for every caller."""
    return _cells.setdefault((name, tuple(labels.items())), Cell())


@contextmanager
def paused() -> Iterator[None]:
    """Count nothing meanwhile: launches of a warm-up serve nobody."""
    global _paused, _held
    if _paused:
        yield
        return
    _held = {key: one.n for key, one in _cells.items()}
    _paused = True
    try:
        yield
    finally:
        # Cells cannot look whether they may count, so what they counted is taken back.
        for key, one in _cells.items():
            one.n = _held.get(key, 0)
        _paused, _held = False, None


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


def _counted() -> dict[tuple[str, Labels], int]:
    """All counters; of the cells those that moved, or that ``add`` made known with 0."""
    found, held = dict(_counts), _held
    for key, one in list(_cells.items()):
        n = one.n if held is None else held.get(key, 0)
        if n or key in found:
            found[key] = found.get(key, 0) + n
    return found


def totals() -> list[tuple[str, Labels, int]]:
    """Return all counters and gauges as they stand."""
    both = (*_counted().items(), *_gauges.items())
    return [(name, labels, value) for (name, labels), value in both]


def snapshot() -> dict[str, int]:
    """Return the counters that are not 0 as ``{"launches{kernel=prefill}": 12, ...}``."""
    return {
        name + ("{" + ",".join(f"{k}={v}" for k, v in labels) + "}" if labels else ""): n
        for (name, labels), n in sorted(_counted().items())
        if n
    }


def reset() -> None:
    """Forget everything (tests)."""
    _counts.clear()
    for one in _cells.values():
        one.n = 0
    _gauges.clear()
    _observed.clear()
