"""One server with its client, as `tilewise bench serve` starts, measures and ends them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tilewise.bench import report, workloads
from tilewise.bench.gpu import GpuMonitor
from tilewise.bench.serve_client import healthy
from tilewise.bench.workloads import Workload

# Figures of the JSON of `vllm bench serve` that a row keeps beside those of the schema.
MORE_FIELDS = (
    "completed", "failed", "duration", "total_input_tokens", "total_output_tokens",
    "p90_ttft_ms", "p90_tpot_ms",
)  # fmt: skip
# Counters of the server that a row keeps, as what a workload added to them.
SERVER_COUNTERS = {
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}
# vLLM's FlashInfer sampler compiles for minutes at first use; nothing here may reach the network.
SERVER_ENV = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",
}


@dataclass
class Job:
    """One server's part of the run: which workloads, where, and what becomes of them."""

    backend: str
    runs: list[tuple[Workload, int]]
    model: Path
    port: int
    folder: Path
    max_model_len: int
    extra: list[str]
    group: str = ""

    def server_command(self) -> list[str]:
        """Return the server's command line."""
        return workloads.server_command(
            self.model, self.backend, self.port, self.max_model_len, self.extra,
            self.shares_prefixes,
        )  # fmt: skip

    def server_line(self) -> str:
        """Return what a shell would be told to start the server."""
        assigned = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*assigned, shlex.join(self.server_command())])

    def result_file(self, workload: Workload, run: int) -> Path:
        """Return where the client leaves the figures of one workload."""
        return self.folder / f"{self.stem}_{workload.name}_{run}.json"

    def client_commands(self) -> list[tuple[str, list[str]]]:
        """Return the client's commands in order, each with its name."""
        return [
            (
                f"{workload.name}#{run}",
                workloads.client_arguments(
                    workload, self.model, self.port, self.result_file(workload, run), seed=run
                ),
            )
            for workload, run in self.runs
        ]

    @property
    def stem(self) -> str:
        """The backend in names of files."""
        return re.sub(r"[^\w.-]", "-", self.backend)

    @property
    def environ(self) -> dict[str, str]:
        """What this server finds in its environment besides."""
        return workloads.split_backend(self.backend)[1]

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts have beginnings in common, which the server is then to reuse."""
        return any(workload.prefix_len for workload, _ in self.runs)

    @property
    def caches_prefixes(self) -> bool:
        """Whether the server was asked to reuse prefixes, which is off otherwise."""
        return self.shares_prefixes or "--enable-prefix-caching" in self.extra


def stop_group(process: subprocess.Popen[bytes], grace: float = 20.0) -> None:
    """End a process and all of its group: politely, then for sure."""
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    # Workers can outlive their leader.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _start(
    command: Sequence[str], log: IO[bytes], environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **SERVER_ENV, **(environ or {})},
        start_new_session=True,
    )


def log_tail(path: Path, lines: int = 12) -> str:
    """Return the last lines of a log, errors first if it names any."""
    text = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    errors = [line for line in text if "Error" in line or "ERROR" in line]
    return "\n".join([*errors[-lines:], "---", *text[-lines:]])[-4000:]


def read_counters(port: int) -> dict[str, float]:
    """Return the server's counters of `SERVER_COUNTERS`; those it does not have are left out."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
    except (urllib.error.URLError, OSError):
        return {}  # the row says so by having none; a dead server is noticed elsewhere
    found = {}
    for key, name in SERVER_COUNTERS.items():
        values = [
            float(t.rsplit(" ", 1)[1]) for t in lines if t.startswith((f"{name}{{", f"{name} "))
        ]
        if values:
            found[key] = sum(values)
    return found


def wrong_totals(workload: Workload, figures: Mapping[str, Any]) -> str | None:
    """Say which total of tokens is not the workload's; None if all are, or lengths vary."""
    if workload.range_ratio:
        return None
    for kind, length in (("input", workload.input_len), ("output", workload.output_len)):
        wanted, found = workload.num_prompts * length, figures.get(f"total_{kind}_tokens")
        if found != wanted:
            return f"{found} {kind} tokens in all; the workload has {wanted}"
    return None


class ServerRun:
    """One server with its client: `start`, `wait_up`, `measure` for each turn, `stop`.

    Whatever goes wrong becomes the error of a row; after a server or client that is gone or hangs,
    the rows that follow have the same error.
    """

    def __init__(
        self, job: Job, start_timeout: float, run_timeout: float, monitor: GpuMonitor | None = None
    ) -> None:
        self.job = job
        self.monitor = monitor or GpuMonitor()
        self.start_timeout = start_timeout
        self.run_timeout = run_timeout
        self.rows: list[report.Row] = []
        self.server_log = job.folder / f"server_{job.stem}.log"
        self.client_log = job.folder / f"client_{job.stem}.log"
        self._status = job.folder / f"status_{job.stem}.jsonl"
        self._gate = job.folder / f"gate_{job.stem}"
        self._job_file = job.folder / f"job_{job.stem}.json"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._why: str | None = None

    def start(self) -> None:
        """Start the server and its client, which waits for the server and for its turn."""
        self._status.write_text("")
        self._open_gate(0)
        content = {
            "port": self.job.port,
            "gate": str(self._gate),
            "status": str(self._status),
            "commands": self.job.client_commands(),
        }
        self._job_file.write_text(json.dumps(content))
        client = [sys.executable, "-m", "tilewise.bench.serve_client", str(self._job_file)]
        # A resumed run adds to the logs of the one before it.
        with self.server_log.open("ab") as server_log, self.client_log.open("ab") as client_log:
            server_log.write(f"$ {self.job.server_line()}\n".encode())
            server_log.flush()
            command = self.job.server_command()
            self._processes.append(_start(command, server_log, self.job.environ))
            self._processes.append(_start(client, client_log))

    def wait_up(self) -> str | None:
        """Wait until the server answers; return None, or what happened instead."""
        started = time.monotonic()
        self._why = self._wait(self.start_timeout, lambda: healthy(self.job.port), loaded=False)
        state = self._why or "up"
        print(f"{self.job.backend}: server {state}, {time.monotonic() - started:.0f} s", flush=True)
        return self._why

    def measure(self) -> report.Row:
        """Let the client do its next workload and return the row."""
        index = len(self.rows)
        before = read_counters(self.job.port) if self._why is None else {}
        if self._why is None:
            self._open_gate(index + 1)
            self._why = self._wait(self.run_timeout, lambda: self._done() > index, loaded=True)
        row = self._row(index)
        after = read_counters(self.job.port) if self._why is None else {}
        row.update({key: after[key] - before.get(key, 0.0) for key in after})
        hits = row.get("prefix_cache_hits", 0)
        if hits and not self.job.caches_prefixes and "error" not in row:
            row["error"] = f"{hits:.0f} tokens came from the prefix cache, which should be off"
        self.rows.append(row)
        return row

    def stop(self) -> None:
        """End both processes."""
        for process in reversed(self._processes):
            stop_group(process)
        self._processes.clear()

    def _open_gate(self, count: int) -> None:
        """Allow the client this many of its commands."""
        draft = self._gate.with_suffix(".part")
        draft.write_text(str(count))
        os.replace(draft, self._gate)

    def _done(self) -> int:
        return len(self._status.read_text().splitlines())

    def _wait(self, timeout: float, ready: Callable[[], bool], loaded: bool) -> str | None:
        """Return None once ready, else what happened instead."""
        server, client = self._processes
        deadline = time.monotonic() + timeout
        while not ready():
            if server.poll() is not None:
                return f"exited with {server.returncode}"
            if client.poll() is not None and not ready():
                return f"client exited with {client.returncode}"
            if time.monotonic() > deadline:
                return f"not done after {timeout:.0f} s"
            if loaded:
                self.monitor.sample()
            time.sleep(0.25)
        return None

    def _row(self, index: int) -> report.Row:
        workload, run = self.job.runs[index]
        row: report.Row = dict.fromkeys(report.SERVE_FIELDS)
        row.update(workload=workload.name, backend=self.job.backend, run=run, group=self.job.group)
        row["shape"] = {k: v for k, v in asdict(workload).items() if k != "name"}
        if self._why is not None:
            tails = f"server log:\n{log_tail(self.server_log)}"
            row["error"] = f"{self._why}\n{tails}\nclient log:\n{log_tail(self.client_log)}"
            return row
        status = json.loads(self._status.read_text().splitlines()[index])
        path = self.job.result_file(workload, run)
        if status["code"] or not path.exists():
            row["error"] = f"client failed ({status['code']})\n{log_tail(self.client_log)}"
            return row
        figures = json.loads(path.read_text())
        for name in (*report.SERVE_FIELDS[3:], *MORE_FIELDS):
            row[name] = figures.get(name)
        if figures.get("failed") or figures.get("completed") != workload.num_prompts:
            row["error"] = f"{figures.get('completed')} of {workload.num_prompts} completed"
        elif wrong := wrong_totals(workload, figures):
            row["error"] = wrong
        return row
