"""Cheap counters of what ran, kept in this process; one dictionary update per event."""

from collections import Counter

_counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()


def add(name: str, n: int = 1, **labels: str) -> None:
    """Count ``n`` events of ``name`` with these labels."""
    _counts[name, tuple(labels.items())] += n


def snapshot() -> dict[str, int]:
    """Return all counters as ``{"launches{kernel=prefill}": 12, ...}``."""
    return {
        name + ("{" + ",".join(f"{k}={v}" for k, v in labels) + "}" if labels else ""): n
        for (name, labels), n in sorted(_counts.items())
    }


def reset() -> None:
    """Forget all counts (tests)."""
    _counts.clear()
