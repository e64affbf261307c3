"""Where a worker's counters are written: a file of our own, or those of prometheus_client.

Both write whole files and put them in the place of the last ones. A disk without room is an OSError
then. Mapped files, with which prometheus_client shares values, make it a SIGBUS at the first page
that finds no block, and no handler saves the engine that runs in the same process.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewise.counters import METRICS, Labels

Totals = list[tuple[str, Labels, int]]
Observed = list[tuple[str, float]]

# How prometheus_client merges gauges. Files of "live" ones may go while somebody collects.
GAUGE_MODE = "livemostrecent"
GAUGE_FILES = f"gauge_{GAUGE_MODE}_tilewise-*.db"


def replace(path: Path, content: bytes) -> None:
    """Write a file in one step, so that a reader never sees half of it.

    Raises
    ------
    OSError
        If it cannot be written; the file before it stays.
    """
    draft = path.with_name(f"{os.getpid()}.part")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    except OSError:
        # Half a draft would hold the room that the next one needs.
        draft.unlink(missing_ok=True)
        raise


class Histograms:
    """Counts of each bucket, of what exceeds them all, and the sum, of everything observed."""

    def __init__(self) -> None:
        # There from the start, or Prometheus would not see the first values arrive.
        self.cells = {
            name: [0.0] * (len(metric.buckets) + 2)
            for name, metric in METRICS.items()
            if metric.kind == "histogram"
        }

    def add(self, observed: Observed) -> None:
        """Sort values into their buckets."""
        for name, value in observed:
            bounds, cells = METRICS[name].buckets, self.cells[name]
            cells[next((i for i, b in enumerate(bounds) if value <= b), len(bounds))] += 1
            cells[-1] += value


class FileSink:
    """Rewrites this process's file, which `tilewise.exporter.FolderCollector` reads."""

    def __init__(self, folder: Path, labels: Mapping[str, str]) -> None:
        self._path = folder / f"{os.getpid()}.json"
        self._labels = labels
        self._histograms = Histograms()

    def write(self, totals: Totals, observed: Observed) -> None:
        """Write all totals, and the buckets of everything observed so far."""
        self._histograms.add(observed)
        content = {
            "pid": os.getpid(),
            "labels": self._labels,
            "totals": [[name, dict(labels), value] for name, labels, value in totals],
            "histograms": self._histograms.cells,
        }
        replace(self._path, json.dumps(content).encode())


class NativeSink:
    """Rewrites files that prometheus_client's own collector merges with those of all processes."""

    def __init__(self, folder: Path, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._histograms = Histograms()
        # Not only a pid: prometheus_client maps files of that name itself where this process has
        # other metrics. What processes counted adds up, so a file is one's own for ever, though its
        # pid may come again in a folder that is kept. A gauge belongs to the engine's rank: a
        # worker takes over the file of the one before it, which may have been killed.
        process = f"tilewise-{os.getpid()}-{time.time_ns():x}"
        rank = "-".join(("tilewise", *labels.values()))
        self._paths = {
            "counter": folder / f"counter_{process}.db",
            "gauge": folder / f"gauge_{GAUGE_MODE}_{rank}.db",
            "histogram": folder / f"histogram_{process}.db",
        }
        self._images: dict[str, _Image] = {}

    def write(self, totals: Totals, observed: Observed) -> None:
        """Write all totals, and the buckets of everything observed so far."""
        self._histograms.add(observed)
        for kind, path in self._paths.items():
            # Not when constructed: what is refused here may be granted later, as with files.
            if kind not in self._images:
                self._images[kind] = _Image()
            image, now = self._images[kind], time.time()
            if kind == "histogram":
                self._put_histograms(image)
            for name, labels, value in totals:
                if METRICS[name].kind == kind:
                    suffix = "_total" if kind == "counter" else ""
                    image.put(name, suffix, {**self._labels, **dict(labels)}, value, now)
            replace(path, image.content())

    def _put_histograms(self, image: _Image) -> None:
        """Put every bucket, which the collector adds up, and the sums."""
        from prometheus_client.utils import floatToGoString

        for name, (*counts, total) in self._histograms.cells.items():
            image.put(name, "_sum", self._labels, total)
            for bound, count in zip((*METRICS[name].buckets, math.inf), counts, strict=True):
                le = floatToGoString(bound)  # type: ignore[no-untyped-call]
                image.put(name, "_bucket", {**self._labels, "le": le}, count)


class _Image:
    """A file of prometheus_client in memory, written by itself: its format is its own matter."""

    def __init__(self) -> None:
        from prometheus_client.mmap_dict import MmapedDict

        self._fd = os.memfd_create("tilewise-metrics")
        self._keys: dict[tuple[Any, ...], str] = {}
        try:
            self._values = MmapedDict(f"/proc/self/fd/{self._fd}")  # type: ignore[no-untyped-call]
        except OSError:
            os.close(self._fd)  # or every try leaves one behind
            raise

    def put(
        self, name: str, suffix: str, labels: Mapping[str, str], value: float, at: float = 0.0
    ) -> None:
        """Set one sample of a metric; the collector takes the newest of gauges by ``at``."""
        from prometheus_client.mmap_dict import mmap_key

        spec, known = METRICS[name], (name, suffix, *labels.items())
        if known not in self._keys:
            self._keys[known] = mmap_key(
                spec.name, spec.name + suffix, [*labels], [*labels.values()], spec.help
            )
        self._values.write_value(self._keys[known], value, at)  # type: ignore[no-untyped-call]

    def content(self) -> bytes:
        """Return what is in use, whose length stands at the beginning."""
        (used,) = struct.unpack("i", os.pread(self._fd, 4, 0))
        return os.pread(self._fd, used, 0)
