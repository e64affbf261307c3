"""From the counters of a worker process to vLLM's ``/metrics``.

vLLM's API server exposes the registry of its own process, where no worker counts. Two ways lead
there, chosen by what vLLM set up:

* One API server (the default): each worker rewrites a small file once a second in a folder whose
  name its environment inherited, and a collector in the API server's registry reads the folder.
* Several API servers: vLLM sets ``PROMETHEUS_MULTIPROC_DIR`` and serves what prometheus_client
  collects from the files of all processes; there the worker leaves such files.

Nothing here may disturb serving: a folder that cannot be written is said once and tried again.
``tilewise.sinks`` writes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tilewise import counters, side_port
from tilewise.counters import METRICS
from tilewise.settings import load_settings
from tilewise.sinks import GAUGE_FILES, FileSink, NativeSink

FOLDER_VARIABLE = "TILEWISE_METRICS_DIR"
NATIVE_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# When this server began, for the processes that follow. Not a setting, hence another prefix.
SINCE_VARIABLE = "_TILEWISE_METRICS_SINCE"
PERIOD_SECONDS = 1.0
# Clocks of files are coarser than the system's.
SLACK_SECONDS = 1.0
# Nobody who lives leaves a file alone for that long.
ABANDONED_SECONDS = 3600.0

logger = logging.getLogger("vllm.tilewise")

_registered_pid: int | None = None
_exporters: dict[int, Exporter] = {}


def prepare() -> None:
    """Set up the API server's side; called in every process that loads the plug-in.

    The first process makes the folder and removes it when it ends; its children inherit the name.
    """
    global _registered_pid
    first = SINCE_VARIABLE not in os.environ
    if first:
        os.environ[SINCE_VARIABLE] = repr(time.time())
        if os.environ.get(NATIVE_VARIABLE):
            _sweep_native(Path(os.environ[NATIVE_VARIABLE]))
    if os.environ.get(FOLDER_VARIABLE, "auto") in ("auto", ""):
        try:
            folder = tempfile.mkdtemp(prefix="tilewise-metrics-")
        except OSError as error:
            logger.warning("tilewise: no folder for metrics (%s); /metrics goes without", error)
            return
        os.environ[FOLDER_VARIABLE] = folder
        atexit.register(_remove, folder, os.getpid())
    elif first:
        _sweep(Path(os.environ[FOLDER_VARIABLE]), "*.json", "*.part")
    if _registered_pid is None:
        from prometheus_client import REGISTRY

        REGISTRY.register(FolderCollector())
        _registered_pid = os.getpid()
    side_port.listen(load_settings(os.environ).metrics_port, collect_all)


def collect_all() -> Iterator[Any]:
    """Yield our families from wherever this server's workers leave them."""
    if not os.environ.get(NATIVE_VARIABLE):
        yield from FolderCollector().collect()
        return
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    yield from (f for f in registry.collect() if f.name.startswith("tilewise_"))


def _sweep(folder: Path, *patterns: str) -> None:
    """Remove what servers left in a folder that outlives them, or it grows with every restart."""
    oldest = time.time() - ABANDONED_SECONDS
    for path in _files(folder, *patterns):
        with contextlib.suppress(OSError):  # another server removed it, or may not write here
            if path.stem.isdigit() and path.stat().st_mtime < oldest:
                path.unlink()


def _sweep_native(folder: Path) -> None:
    """Remove gauges of servers that are gone: this one may have fewer ranks, which replace theirs.

    A server that lives writes its own anew within a second. Counters stay, and add up.
    """
    _sweep(folder, "*.part")
    for path in _files(folder, GAUGE_FILES):
        with contextlib.suppress(OSError):
            path.unlink()


def _files(folder: Path, *patterns: str) -> list[Path]:
    """Files of a folder by their names; none if the name is one of no folder."""
    try:
        found = os.listdir(folder)
    except OSError:  # not there yet, or too long a name, of which Path.glob would raise
        return []
    return [folder / name for name in found if any(fnmatchcase(name, x) for x in patterns)]


def _since() -> float:
    """When this server began, as a file's time; 0 where nobody said it."""
    try:
        return float(os.environ.get(SINCE_VARIABLE, "0")) - SLACK_SECONDS
    except ValueError:
        return 0.0


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the registration, not the duty
        shutil.rmtree(folder, ignore_errors=True)


def start(labels: Mapping[str, str]) -> None:
    """Export this process's counters from now on; once per process, however often it is called.

    Without a folder and without native metrics (the plug-in was never registered) there is nobody
    to export to, and nothing happens.

    Parameters
    ----------
    labels : Mapping[str, str]
        ``engine`` and ``rank``, added to every sample.
    """
    pid = os.getpid()
    nowhere = not os.environ.get(NATIVE_VARIABLE) and not os.environ.get(FOLDER_VARIABLE)
    if pid not in _exporters and not nowhere:
        _exporters[pid] = Exporter(dict(labels))
        _exporters[pid].start()


def flush() -> None:
    """Export what stands now (tests, end of process)."""
    exporter = _exporters.get(os.getpid())
    if exporter is not None:
        exporter.flush()


class Exporter:
    """A thread that brings the counters out once a second."""

    def __init__(self, labels: dict[str, str]) -> None:
        # Now: the variables may be gone when the thread writes.
        native = os.environ.get(NATIVE_VARIABLE)
        self._sink = (
            NativeSink(Path(native), labels)
            if native
            else FileSink(Path(os.environ[FOLDER_VARIABLE]), labels)
        )
        self._lock = threading.Lock()
        self._failed = self._closed = False
        self._owner = os.getpid()

    def start(self) -> None:
        """Start the thread; it ends with the process, after one last flush."""
        atexit.register(self.close)
        threading.Thread(target=self._loop, name="tilewise-metrics", daemon=True).start()

    def _loop(self) -> None:
        waiter = threading.Event()
        while True:
            self.flush()
            waiter.wait(PERIOD_SECONDS)

    def close(self) -> None:
        """Write for the last time: this process may remove the folder next."""
        if os.getpid() != self._owner:
            return  # forked: the thread that may hold the lock is not here
        self.flush()
        with self._lock:
            self._closed = True

    def flush(self) -> None:
        """Write once; a folder that is gone or full is reported once."""
        with self._lock:
            if self._closed:
                return
            try:
                self._sink.write(counters.totals(), counters.drain())
            except OSError as error:
                if not self._failed:
                    logger.warning("tilewise: metrics cannot be written (%s)", error)
                self._failed = True
            else:
                self._failed = False


class FolderCollector:
    """Prometheus collector over the files of all workers."""

    def collect(self) -> Iterator[Any]:
        """Yield one family for each metric that any worker has."""
        from prometheus_client import core

        kinds = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        families: dict[str, Any] = {}

        def family(name: str, process: Mapping[str, str]) -> Any:
            if name not in families:
                spec = METRICS[name]
                families[name] = kinds[spec.kind](
                    spec.name, spec.help, labels=[*process, *spec.labels]
                )
            return families[name]

        for process in self._processes():
            own = process["labels"]
            for name, labels, value in process["totals"]:
                values = [*own.values(), *(labels[key] for key in METRICS[name].labels)]
                family(name, own).add_metric(values, value)
            for name, cells in process["histograms"].items():
                counts, seconds = cells[:-1], cells[-1]
                bounds = [*map(str, METRICS[name].buckets), "+Inf"]
                sums = [sum(counts[: i + 1]) for i in range(len(counts))]
                buckets = list(zip(bounds, sums, strict=True))
                family(name, own).add_metric(list(own.values()), buckets, sum_value=seconds)
        yield from families.values()

    def _processes(self) -> list[dict[str, Any]]:
        """Return the newest file of each engine and rank; older ones are of dead workers.

        What nobody has written since this server began was left by another one, which may have had
        more ranks.
        """
        folder, since = os.environ.get(FOLDER_VARIABLE), _since()
        newest: dict[tuple[str, ...], tuple[float, dict[str, Any]]] = {}
        for path in _files(Path(folder), "*.json") if folder else ():
            try:
                written = path.stat().st_mtime
                if written < since:
                    continue
                content = json.loads(path.read_text("utf-8"))
            except OSError:
                continue  # its worker replaced or removed it meanwhile
            except ValueError as error:
                _skip(path, str(error))
                continue
            wrong = _what_is_wrong(content)
            if wrong:
                _skip(path, wrong)
                continue
            key = tuple(content["labels"].values())
            if key not in newest or newest[key][0] < written:
                newest[key] = (written, content)
        return [content for _, content in newest.values()]


_skipped: set[Path] = set()


def _skip(path: Path, why: str) -> None:
    """Say once that a file in the folder is not one of ours; ``/metrics`` goes on without it."""
    if path not in _skipped:
        _skipped.add(path)
        logger.warning("tilewise leaves %s out of the metrics: %s", path, why)


def _what_is_wrong(content: Any) -> str | None:
    """Why a file's content is not what this version writes; None if it is."""
    if not isinstance(content, dict) or not content.keys() >= {"labels", "totals", "histograms"}:
        return "not written by tilewise"
    labels, totals, histograms = content["labels"], content["totals"], content["histograms"]
    if not _are_labels(labels) or list(labels) != ["engine", "rank"]:
        return f"labels {labels}"
    if not isinstance(totals, list) or not isinstance(histograms, dict):
        return "not written by tilewise"
    wrong = [
        *(str(cell) for cell in totals if not _is_total(cell)),
        *(name for name, cells in histograms.items() if not _is_histogram(name, cells)),
    ]
    return f"another version's metrics: {', '.join(sorted(wrong))[:200]}" if wrong else None


def _is_total(cell: Any) -> bool:
    """Whether one entry of a file is a counter or gauge as this version has it."""
    if not isinstance(cell, list) or len(cell) != 3:
        return False
    name, labels, value = cell
    metric = METRICS.get(name) if isinstance(name, str) else None
    if metric is None or metric.kind == "histogram" or not _are_labels(labels):
        return False
    return set(labels) == set(metric.labels) and _is_number(value)


def _is_histogram(name: str, cells: Any) -> bool:
    """Whether a file's histogram has the buckets of this version."""
    metric = METRICS.get(name)
    if metric is None or metric.kind != "histogram" or not isinstance(cells, list):
        return False
    return len(cells) == len(metric.buckets) + 2 and all(map(_is_number, cells))


def _are_labels(labels: Any) -> bool:
    return isinstance(labels, dict) and all(isinstance(value, str) for value in labels.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
