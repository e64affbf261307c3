"""``tilewise bench serve``: attention backends under ``vllm serve`` and ``vllm bench serve``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tilewise.bench import options, report, workloads
from tilewise.bench.gpu import GpuMonitor, ceilings_of_own_process
from tilewise.bench.serve_plan import SETTINGS, ResultFile, Turn, groups_of, turns_of
from tilewise.bench.serve_run import Job, ServerRun
from tilewise.bench.workloads import WORKLOADS, Workload

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
DEFAULT_BACKENDS = "TILEWISE,FLASH_ATTN,TRITON_ATTN"
DEFAULT_WORKLOADS = "s_1k_128_c64,s_16k_256_c16"
EPILOG = """
Exit codes: 0; 1 if any workload of any backend failed; 2 for a wrong command line or no GPU. With
--out, rows are saved one by one, and an HTML page and a markdown table lie beside the file at the
end.
After an interruption, the same command with --resume does what is missing or failed.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of ``tilewise bench serve``."""
    parser = argparse.ArgumentParser(
        prog="tilewise bench serve", description=__doc__, epilog=EPILOG
    )
    parser.add_argument(
        "--backends", default=DEFAULT_BACKENDS, metavar="NAMES",
        help="by commas: TILEWISE, CUSTOM or another that `vllm serve --attention-backend` takes, "
        "in capitals; BACKEND@VARIABLE=VALUE sets a TILEWISE_ or VLLM_ variable for one of them "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--workloads", default=DEFAULT_WORKLOADS, metavar="NAMES",
        help=f"of {', '.join(WORKLOADS)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", default="", metavar="N,N,...",
        help="run every workload with each of these many requests at a time (default: its own)",
    )  # fmt: skip
    parser.add_argument(
        "--runs", type=int, default=3, metavar="N",
        help="repeats, each with other prompts (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--at-once", type=int, default=2, metavar="N",
        help="servers on the GPU together, sharing its memory and measured in turn (default: "
        "%(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="result file (default: none)")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--append", action="store_true", help="add runs to those that the result file has"
    )
    kept.add_argument(
        "--resume", action="store_true",
        help="as --append, and leave out what the file has without an error",
    )  # fmt: skip
    parser.add_argument(
        "--logs", type=Path, metavar="DIR",
        help="logs of servers and clients (default: beside --out, else temporary)",
    )  # fmt: skip
    parser.add_argument(
        "--port", type=int, default=0, metavar="N",
        help="port on 127.0.0.1, the next servers' follow (default: any free ones)",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=Path, metavar="DIR",
        help="model folder (default: the Llama 3.1 8B shape, random weights)",
    )  # fmt: skip
    parser.add_argument(
        "--max-model-len", type=int, default=0, metavar="TOKENS",
        help="longest prompt and answer of a server (default: what the workloads need)",
    )  # fmt: skip
    parser.add_argument(
        "--serve-args", default="", metavar="TEXT",
        help="more arguments for every server, e.g. --serve-args='-cc.cudagraph_mode=FULL' "
        "(default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--start-timeout", type=float, default=420.0, metavar="S",
        help="seconds that a server may take to start (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--run-timeout", type=float, default=300.0, metavar="S",
        help="seconds that one workload may take (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--no-ceilings", action="store_true", help="skip matmul and copy rates")
    parser.add_argument(
        "--dry-run", action="store_true",
        help="print the commands and stop; MODEL and FOLDER stand for what a real run makes",
    )  # fmt: skip
    options.add_record(parser, "print the result as JSON at the end")
    return parser


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((workloads.HOST, 0))
        return int(probe.getsockname()[1])


def pick_workloads(names: str, concurrency: str = "") -> list[Workload]:
    """Return the named workloads, at the given concurrencies if there are any.

    Raises
    ------
    ValueError
        For an unknown name, or a concurrency that is no positive whole number.
    """
    wanted = [name for name in names.split(",") if name]
    unknown = [name for name in wanted if name not in WORKLOADS]
    if unknown or not wanted:
        raise ValueError(f"unknown workload {unknown or names!r}; known: {', '.join(WORKLOADS)}")
    chosen = [WORKLOADS[name] for name in wanted]
    if not concurrency:
        return chosen
    counts = [part.strip() for part in concurrency.split(",")]
    wrong = [part for part in counts if not (part.isdecimal() and int(part) > 0)]
    if wrong:
        raise ValueError(f"--concurrency {wrong[0]!r}; accepted: positive whole numbers, by commas")
    derived = [w.at_concurrency(int(part)) for w in chosen for part in counts]
    return list({w.name: w for w in derived}.values())


def _memory_share(at_once: int) -> list[str]:
    """Return the server's share of the GPU's memory where it is not alone."""
    return ["--gpu-memory-utilization", f"{0.9 / at_once:.2f}"] if at_once > 1 else []


class Session:
    """One run of the command: its jobs, its result file, its progress."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        if args.runs < 1 or args.at_once < 1:
            raise ValueError(f"--runs {args.runs} --at-once {args.at_once}; accepted: 1 and more")
        if args.resume and args.out is None:
            raise ValueError("--resume needs --out, the file to go on with")
        self.args = args
        self.folder = folder
        self.chosen = pick_workloads(args.workloads, args.concurrency)
        backends = list(dict.fromkeys(name for name in args.backends.split(",") if name))
        if not backends:
            raise ValueError("--backends names none; accepted: names of vLLM's attention backends")
        named = [workloads.split_backend(name)[0] for name in backends]
        if len({bool(workload.prefix_len) for workload in self.chosen}) > 1:
            raise ValueError(
                f"--workloads {args.workloads}: servers cache prefixes for some of them; accepted: "
                "workloads with prefixes, or without"
            )
        # Last, since it imports vLLM.
        accepted = workloads.accepted_backends()
        if unknown := [name for name in named if name not in accepted]:
            raise ValueError(f"--backends {unknown[0]!r}; accepted: {', '.join(accepted)}")
        self.settings = {name: _plain(getattr(args, name)) for name in SETTINGS}
        self.file = ResultFile.open(args.out, keep=args.append or args.resume)
        # Runs that are added are runs of their own, with prompts of their own.
        first = self.file.next_run if args.append else 0
        groups = [
            turns_of(group, self.chosen, args.runs, first)
            for group in groups_of(backends, args.at_once)
        ]
        self.skipped = 0
        if args.resume:
            self.file.check_settings(self.settings)
            planned = sum(map(len, groups))
            groups = [self.file.settle(turns) for turns in groups]
            self.skipped = planned - sum(map(len, groups))
        self.groups = [turns for turns in groups if turns]
        self.env: dict[str, Any] = {}

    def jobs(self, turns: Sequence[Turn], group: str, dry: bool = False) -> dict[str, Job]:
        """Return the job of each backend that has turns; its model is there unless ``dry``."""
        model = self.args.model or (Path("MODEL") if dry else self.folder / "model")
        if self.args.model is None and not dry and not model.exists():
            workloads.write_model(model)
        longest = max(workload.longest for workload in self.chosen)
        return {
            backend: Job(
                backend=backend,
                runs=[(turn.workload, turn.run) for turn in turns if turn.backend == backend],
                model=model,
                port=self.args.port + number if self.args.port else free_port(),
                folder=Path("FOLDER") if dry else self.folder,
                # vLLM refuses prompts of more characters than max_model_len times its longest
                # token; the tokenizer's words and blanks come close to that, hence a quarter more.
                max_model_len=self.args.max_model_len or -(-longest * 5 // 4 // 256) * 256,
                extra=[*_memory_share(self.args.at_once), *shlex.split(self.args.serve_args)],
                group=group,
            )
            for number, backend in enumerate(dict.fromkeys(turn.backend for turn in turns))
        }

    def print_commands(self, as_json: bool) -> None:
        """Print what would be started; MODEL and FOLDER are what the command makes."""
        found = [
            {
                "server": job.server_line(),
                "clients": [
                    shlex.join([*workloads.VLLM_CLI, *arguments])
                    for _, arguments in job.client_commands()
                ],
            }
            for turns in self.groups
            for job in self.jobs(turns, "", dry=True).values()
        ]
        if as_json:
            print(json.dumps(found, indent=1))
            return
        for one in found:
            print(one["server"])
            for client in one["clients"]:
                print("  ", client)

    def run(self, env: dict[str, Any], monitor: GpuMonitor) -> None:
        """Do all turns; whatever was measured is on disk when this returns or raises."""
        total = sum(map(len, self.groups))
        if self.skipped:
            print(f"{self.skipped} turns are done already, {total} to go", flush=True)
        done, spent = 0, 0.0
        for number, turns in enumerate(self.groups):
            jobs = self.jobs(turns, f"{env['date']}#{number}")
            with self._servers(jobs, monitor) as servers:
                for turn in turns:
                    began = time.monotonic()
                    row = servers[turn.backend].measure()
                    # On disk before anybody hears of it.
                    env["clocks"] = monitor.summary()
                    self.file.add(env, row)
                    done, spent = done + 1, spent + time.monotonic() - began
                    left = spent / done * (total - done)
                    print(f"[{done}/{total}] {_line(row)}; {_minutes(left)}", flush=True)

    @contextlib.contextmanager
    def _servers(self, jobs: dict[str, Job], monitor: GpuMonitor) -> Iterator[dict[str, ServerRun]]:
        """Start the servers of one group and end them, whatever happens.

        vLLM sizes its cache by the memory it finds, so servers start one after the other; with
        the size given they may start together.
        """
        together = "--kv-cache-memory-bytes" in self.args.serve_args
        servers = {
            backend: ServerRun(job, self.args.start_timeout, self.args.run_timeout, monitor)
            for backend, job in jobs.items()
        }
        try:
            for server in servers.values():
                server.start()
                if not together:
                    server.wait_up()
            if together:
                for server in servers.values():
                    server.wait_up()
            yield servers
        finally:
            for server in servers.values():
                server.stop()


def _require_device() -> None:
    """Raise where no server could start: all of them would fail one after the other.

    Raises
    ------
    ValueError
        Without a CUDA device, but on the platform of the CPU tests.
    """
    import torch

    from tilewise.settings import load_settings

    if not torch.cuda.is_available() and not load_settings(os.environ).cpu_platform:
        raise ValueError("no CUDA device to serve on; --dry-run prints the commands")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _minutes(seconds: float) -> str:
    """Return what is left to measure, in words; servers that are yet to start come on top."""
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def _line(row: report.Row) -> str:
    name = f"{row['workload']} {row['backend']} run {row['run']}"
    if row.get("error"):
        return f"{name}: {row['error'].splitlines()[0]}"
    return (
        f"{name}: {row['request_throughput']:.2f} req/s, TTFT {row['p50_ttft_ms']:.0f} ms, "
        f"TPOT {row['p50_tpot_ms']:.2f} ms"
    )


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _log_folder(args: argparse.Namespace, temporary: str) -> Path:
    if args.logs is not None:
        return Path(args.logs)
    if args.out is None or args.dry_run:
        return Path(temporary)
    return Path(args.out).with_name(args.out.stem + "-logs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns
    -------
    int
        0; 1 if any workload of any backend failed; 2 for a wrong command line or no GPU.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="tilewise-serve-") as temporary:
        folder = _log_folder(args, temporary)
        try:
            session = Session(args, folder)
            if not args.dry_run:
                _require_device()
        except ValueError as error:
            print(error, file=sys.stderr)
            return EXIT_USAGE
        folder.mkdir(parents=True, exist_ok=True)
        if args.dry_run:
            session.print_commands(args.json)
            return EXIT_OK
        answer = sys.stdout
        # With --json, standard output is the result alone.
        with contextlib.redirect_stdout(sys.stderr if args.json else answer):
            code = _run(session, argv)
            rows = session.file.rows
            text = report.result_text(session.env, rows) if args.json else report.serve_table(rows)
        print(text, file=answer)
        return code


def _run(session: Session, argv: Sequence[str]) -> int:
    args = session.args
    # A terminated run must still end its servers, which `finally` does for exceptions only.
    signal.signal(signal.SIGTERM, _raise_exit)
    command = ["tilewise", "bench", "serve", *argv]
    env = report.describe_environment(command, args.commit) | report.describe_gpu()
    env["settings"] = session.settings
    session.env = env
    if session.groups and env["gpu"] is not None and not args.no_ceilings:
        env.update(ceilings_of_own_process())
    try:
        session.run(env, GpuMonitor.start())
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        if args.out is not None and args.out.exists():
            report.write_pages(args.out)
    rows = session.file.rows
    return EXIT_FAILED if any(row.get("error") for row in rows) else EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
