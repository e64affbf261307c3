"""What a result says of its run, and how a run ends early without leaving servers behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from tilewise.bench import report
from tilewise.bench.gpu import GpuMonitor

SAMPLE_SECONDS = 1.0
# Process groups that this process has started and not ended.
LIVE: set[int] = set()


class Clocks:
    """Samples the GPU's clocks and power once a second while the block runs."""

    def __init__(self) -> None:
        self._monitor = GpuMonitor.start()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def _loop(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self._monitor.sample()

    def __enter__(self) -> Clocks:
        self._monitor.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def summary(self) -> dict[str, list[float]]:
        """Minimum, median and maximum of each quantity; nothing without a GPU."""
        return self._monitor.summary()


def describe_run(script: str, commit: str | None) -> dict[str, Any]:
    """Commit, date, command, versions, GPU and processors.

    Parameters
    ----------
    script : str
        The file that was started, from the checkout's root.
    commit : str, optional
        To record where the checkout has no git folder.
    """
    command = ["python", script, *sys.argv[1:]]
    return {
        **report.describe_environment(command, commit),
        **report.describe_gpu(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def write(path: Path, result: Any) -> None:
    """Write a result in one step, so that a cut never leaves half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(draft, path)


def end_on_sigterm() -> None:
    """Let SIGTERM kill every server, so that whoever waits for one goes on, and end this process.

    Servers are process groups of their own, which a signal to this one does not reach.
    """

    def leave(*_: object) -> NoReturn:
        for group in list(LIVE):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
