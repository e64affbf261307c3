"""``tilewise bench serve``: attention backends under ``vllm serve`` and ``vllm bench serve``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from tilewise.bench import report, workloads
from tilewise.bench.gpu import GpuMonitor, ceilings_of_own_process
from tilewise.bench.serve_client import healthy
from tilewise.bench.workloads import WORKLOADS, Workload

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
DEFAULT_BACKENDS = "TILEWISE,FLASH_ATTN,TRITON_ATTN"
DEFAULT_WORKLOADS = "s_1k_128_c64,s_16k_256_c16"
# Figures of the JSON of `vllm bench serve` that a row keeps beside those of the schema.
MORE_FIELDS = ("completed", "failed", "duration", "total_input_tokens", "total_output_tokens")
# vLLM's FlashInfer sampler compiles for minutes at first use; nothing here may reach the network.
SERVER_ENV = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of ``tilewise bench serve``."""
    parser = argparse.ArgumentParser(prog="tilewise bench serve", description=__doc__)
    parser.add_argument(
        "--backends", default=DEFAULT_BACKENDS, metavar="NAMES", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--workloads", default=DEFAULT_WORKLOADS, metavar="NAMES",
        help=f"of {', '.join(WORKLOADS)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--runs", type=int, default=1, help="repeats on each server (%(default)s)")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N",
        help="servers on the GPU together, started at once and measured in turn (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="result file")
    parser.add_argument(
        "--append", action="store_true", help="keep the rows that the result file has"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep logs here (default: temporary)"
    )
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (0: any free one)")
    parser.add_argument("--model", type=Path, help="model folder (default: the Llama 3.1 8B shape)")
    parser.add_argument(
        "--max-model-len", type=int, default=0, help="(default: what the workloads need)"
    )
    parser.add_argument(
        "--serve-args", default="", metavar="TEXT",
        help="more arguments for every server, e.g. --serve-args='-cc.cudagraph_mode=FULL'",
    )  # fmt: skip
    parser.add_argument(
        "--start-timeout", type=float, default=420.0, help="seconds (default: %(default)s)"
    )
    parser.add_argument(
        "--run-timeout", type=float, default=300.0,
        help="seconds for one workload (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--no-ceilings", action="store_true", help="skip matmul and copy rates")
    parser.add_argument("--commit", help="commit to record, where the checkout has no git folder")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    return parser


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

    def server_command(self) -> list[str]:
        """Return the server's command line."""
        return workloads.server_command(
            self.model, self.backend, self.port, self.max_model_len, self.extra
        )

    def result_file(self, workload: Workload, run: int) -> Path:
        """Return where the client leaves the figures of one workload."""
        return self.folder / f"{self.backend}_{workload.name}_{run}.json"

    def client_commands(self) -> list[tuple[str, list[str]]]:
        """Return the client's commands in order, each with its name."""
        return [
            (
                f"{workload.name}#{run}",
                workloads.client_arguments(
                    workload, self.model, self.port, self.result_file(workload, run)
                ),
            )
            for workload, run in self.runs
        ]


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


def _start(command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **SERVER_ENV},
        start_new_session=True,
    )


def log_tail(path: Path, lines: int = 12) -> str:
    """Return the last lines of a log, errors first if it names any."""
    text = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    errors = [line for line in text if "Error" in line or "ERROR" in line]
    return "\n".join([*errors[-lines:], "---", *text[-lines:]])[-4000:]


class ServerRun:
    """One server with its client: `start`, `measure`, `stop`; `measure` fills `rows`."""

    def __init__(
        self, job: Job, start_timeout: float, run_timeout: float, monitor: GpuMonitor | None = None
    ) -> None:
        self.job = job
        self.monitor = monitor or GpuMonitor()
        self.start_timeout = start_timeout
        self.run_timeout = run_timeout
        self.rows: list[report.Row] = []
        self.server_log = job.folder / f"server_{job.backend}.log"
        self.client_log = job.folder / f"client_{job.backend}.log"
        self._status = job.folder / f"status_{job.backend}.jsonl"
        self._gate = job.folder / f"gate_{job.backend}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._job_file = job.folder / f"job_{job.backend}.json"
        self._up = False

    def start(self) -> None:
        """Start the server and its client, which waits for the server and for its turn."""
        self._status.write_text("")
        self._gate.unlink(missing_ok=True)
        content = {
            "port": self.job.port,
            "gate": str(self._gate),
            "status": str(self._status),
            "commands": self.job.client_commands(),
        }
        self._job_file.write_text(json.dumps(content))
        client = [sys.executable, "-m", "tilewise.bench.serve_client", str(self._job_file)]
        with self.server_log.open("wb") as server_log, self.client_log.open("wb") as client_log:
            self._processes.append(_start(self.job.server_command(), server_log))
            self._processes.append(_start(client, client_log))

    def measure(self) -> list[report.Row]:
        """Let the client go and collect every workload."""
        self._gate.touch()
        self._collect(*self._processes)
        return self.rows

    def stop(self) -> None:
        """End both processes."""
        for process in reversed(self._processes):
            stop_group(process)
        self._processes.clear()

    def _collect(self, server: subprocess.Popen[bytes], client: subprocess.Popen[bytes]) -> None:
        started = time.monotonic()
        why = self._wait(server, client, self.start_timeout, lambda: healthy(self.job.port))
        self._up = why is None
        print(f"{self.job.backend}: server {why or 'up'}, {time.monotonic() - started:.0f} s")
        for index, (workload, run) in enumerate(self.job.runs):
            if why is None:
                why = self._wait(
                    server, client, self.run_timeout, lambda count=index + 1: self._done() >= count
                )
            self.rows.append(self._row(workload, run, index, why))
            print(_line(self.rows[-1]), flush=True)

    def _done(self) -> int:
        return len(self._status.read_text().splitlines())

    def _wait(
        self,
        server: subprocess.Popen[bytes],
        client: subprocess.Popen[bytes],
        timeout: float,
        ready: Any,
    ) -> str | None:
        """Return None once ready, else what happened instead."""
        deadline = time.monotonic() + timeout
        while not ready():
            if server.poll() is not None:
                return f"exited with {server.returncode}"
            if client.poll() is not None and not ready():
                return f"client exited with {client.returncode}"
            if time.monotonic() > deadline:
                return f"not done after {timeout:.0f} s"
            if self._up:
                self.monitor.sample()
            time.sleep(0.25)
        return None

    def _row(self, workload: Workload, run: int, index: int, why: str | None) -> report.Row:
        row: report.Row = dict.fromkeys(report.SERVE_FIELDS)
        row.update(workload=workload.name, backend=self.job.backend, run=run)
        if why is not None:
            tails = f"server log:\n{log_tail(self.server_log)}"
            row["error"] = f"{why}\n{tails}\nclient log:\n{log_tail(self.client_log)}"
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
        elif wrong := _wrong_lengths(workload, figures):
            row["error"] = wrong
        return row


def _wrong_lengths(workload: Workload, figures: dict[str, Any]) -> str | None:
    """Say which total is not what the workload asks for; lengths that vary have none to check."""
    if workload.range_ratio:
        return None
    for kind, length in (("input", workload.input_len), ("output", workload.output_len)):
        wanted, got = workload.num_prompts * length, figures.get(f"total_{kind}_tokens")
        if got != wanted:
            return f"{got} {kind} tokens in all, {wanted} were asked for"
    return None


def _line(row: report.Row) -> str:
    name = f"  {row['workload']} {row['backend']} run {row['run']}"
    if row.get("request_throughput") is None:
        return f"{name}: {row['error'].splitlines()[0]}"
    return (
        f"{name}: {row['request_throughput']:.2f} req/s, TTFT {row['p50_ttft_ms']:.0f} ms, "
        f"TPOT {row['p50_tpot_ms']:.2f} ms"
    )


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((workloads.HOST, 0))
        return int(probe.getsockname()[1])


def merge(path: Path, env: dict[str, Any], rows: list[report.Row], append: bool) -> None:
    """Write the result file; with `append`, after the rows that it has.

    Every row names its run by date; ``env["runs"]`` holds the environment of each.
    """
    key = str(env["date"])
    rows = [{**row, "env": key} for row in rows]
    runs = {key: dict(env)}
    if append and path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        rows = [*old["rows"], *rows]
        runs = {**old["env"].get("runs", {}), **runs}
    report.write_result(path, {**env, "runs": runs}, rows)


def _pick_workloads(names: str) -> list[Workload]:
    wanted = [name for name in names.split(",") if name]
    unknown = [name for name in wanted if name not in WORKLOADS]
    if unknown or not wanted:
        raise ValueError(f"unknown workload {unknown or names!r}; known: {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in wanted]


def _memory_share(at_once: int) -> list[str]:
    """Return the server's share of the GPU's memory where it is not alone."""
    return ["--gpu-memory-utilization", f"{0.9 / at_once:.2f}"] if at_once > 1 else []


def make_jobs(args: argparse.Namespace, folder: Path) -> list[Job]:
    """Return one job for each backend."""
    chosen = _pick_workloads(args.workloads)
    model = args.model or workloads.write_model(folder / "model")
    longest = max(workload.longest for workload in chosen)
    return [
        Job(
            backend=backend,
            runs=[(workload, run) for run in range(args.runs) for workload in chosen],
            model=model,
            port=args.port or free_port(),
            folder=folder,
            # vLLM refuses prompts of more characters than max_model_len times its longest token;
            # the tokenizer's words and blanks come close to that, hence the quarter more.
            max_model_len=args.max_model_len or -(-longest * 5 // 4 // 256) * 256,
            extra=[*_memory_share(args.at_once), *shlex.split(args.serve_args)],
        )
        for backend in args.backends.split(",")
        if backend
    ]


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns
    -------
    int
        0; 1 if any workload of any backend failed; 2 for a wrong command line.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="tilewise-serve-") as temporary:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            jobs = make_jobs(args, folder)
        except ValueError as error:
            print(error, file=sys.stderr)
            return EXIT_USAGE
        if args.dry_run:
            for job in jobs:
                print(shlex.join(job.server_command()))
                for _, arguments in job.client_commands():
                    print("  ", shlex.join([*workloads.VLLM_CLI, *arguments]))
            return EXIT_OK
        return _run_jobs(args, argv, jobs)


def _run_jobs(args: argparse.Namespace, argv: Sequence[str], jobs: list[Job]) -> int:
    # A terminated run must still end its servers, which `finally` does for exceptions only.
    signal.signal(signal.SIGTERM, _raise_exit)
    command = ["tilewise", "bench", "serve", *argv]
    env = report.describe_environment(command, args.commit) | report.describe_gpu()
    if env["gpu"] is not None and not args.no_ceilings:
        env.update(ceilings_of_own_process())
    monitor = GpuMonitor.start()
    rows: list[report.Row] = []
    for start in range(0, len(jobs), args.at_once):
        together = [
            ServerRun(job, args.start_timeout, args.run_timeout, monitor)
            for job in jobs[start : start + args.at_once]
        ]
        try:
            for run in together:
                run.start()
            for run in together:
                run.measure()
        finally:
            for run in together:
                run.stop()
            found = [row for run in together for row in run.rows]
            rows += found
            env["clocks"] = monitor.summary()
            if args.out is not None:
                merge(args.out, env, found, append=args.append or start > 0)
    print(report.serve_table(rows))
    return EXIT_FAILED if any(row.get("error") for row in rows) else EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
