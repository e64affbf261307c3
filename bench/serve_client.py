"""Runs several ``vllm bench serve`` commands in one process, once a server is healthy.

Starting vLLM's client takes half a minute of imports; one process for all workloads of a server
pays that once, and pays it while the server starts. Not a command of its own: `serve` starts it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def healthy(port: int, timeout: float = 2.0) -> bool:
    """Return whether the server at a local port answers ``/health``."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=timeout) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main(argv: list[str]) -> int:
    """Run the commands of a job file; append one status line for each.

    Parameters
    ----------
    argv : list of str
        The job file: ``{"port": int, "gate": path, "status": path, "commands": [[name,
        [argument, ...]]]}``. The gate file holds how many commands may run so far; nothing is
        sent before the server is healthy.
    """
    job = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    # The client itself needs no device; importing it here overlaps with the server's start.
    vllm_cli = importlib.import_module("vllm.entrypoints.cli.main")
    importlib.import_module("vllm.benchmarks.serve")
    gate = Path(job["gate"])
    with Path(job["status"]).open("a", encoding="utf-8") as status:
        for index, (name, arguments) in enumerate(job["commands"]):
            while not (int(gate.read_text()) > index and healthy(job["port"])):
                time.sleep(0.1)
            print(f"=== {name}", flush=True)
            sys.argv = ["vllm", *arguments]
            code: int | str | None = 0
            try:
                vllm_cli.main()
            except SystemExit as error:
                code = error.code
            status.write(json.dumps({"name": name, "code": code or 0}) + "\n")
            status.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
