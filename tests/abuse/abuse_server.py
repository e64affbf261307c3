"""A server to be abused: started, watched from outside, killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil
from abuse_run import LIVE

HERE = Path(__file__).resolve().parent
MIB = 2**20
# The console script, as `python -m` would put this folder on the path.
VLLM = [
    sys.executable,
    "-c",
    "from vllm.entrypoints.cli.main import main; raise SystemExit(main())",
]
CPU_ENVIRONMENT = {
    "TILEWISE_CPU_PLATFORM": "1",
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
COMMON_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Started from the checkout, a server would take its folder `kernels` for another package.
    "PYTHONSAFEPATH": "1",
}


def engine_environment(gpu: bool, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server, without what a surrounding test run has set for engines."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TILEWISE_", "_TILEWISE_", "PROMETHEUS_"))
        and name != "VLLM_ENABLE_V1_MULTIPROCESSING"
    }
    if gpu:
        kept.pop("TRITON_INTERPRET", None)
    return {**kept, **COMMON_ENVIRONMENT, **({} if gpu else CPU_ENVIRONMENT), **(more or {})}


def free_port() -> int:
    """A port that nobody listens to now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """``vllm serve`` with tilewise in a process group of its own.

    Parameters
    ----------
    model : Path
        Checkpoint.
    folder : Path
        Log and metrics files; made here.
    arguments : list of str
        Of ``vllm serve``, besides model, name and port.
    gpu : bool
        Whether it runs on one.
    environ : Mapping[str, str], optional
        More environment.
    alone : bool
        Whether nothing else uses the GPU: all its memory is then this server's.
    child_setup : callable, optional
        Called in the new process before it becomes the server.
    without : iterable of str
        Variables that it does not inherit.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        arguments: list[str],
        gpu: bool,
        environ: Mapping[str, str] | None = None,
        alone: bool = True,
        child_setup: Callable[[], None] | None = None,
        without: Iterable[str] = (),
    ) -> None:
        self.alone = alone
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics_folder = folder / "metrics"
        self.metrics_folder.mkdir(exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server-{self.port}.log"
        command = [
            *VLLM, "serve", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1",
            "--port", str(self.port), "--worker-extension-cls", "abuse_worker.Memory", *arguments,
        ]  # fmt: skip
        environment = {
            "TILEWISE_METRICS_DIR": str(self.metrics_folder), "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.getenv("PYTHONPATH")])]),
            **(environ or {}),
        }  # fmt: skip
        inherited = engine_environment(gpu, environment)
        inherited = {name: text for name, text in inherited.items() if name not in set(without)}
        self.started = time.monotonic()
        # Through a pipe: a limit on file sizes must not hit the log.
        self.process = subprocess.Popen(
            command, env=inherited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=child_setup,
        )  # fmt: skip
        LIVE.add(self.process.pid)
        self._copier = threading.Thread(target=self._copy_log, daemon=True)
        self._copier.start()

    def _copy_log(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("wb") as out:
            for line in self.process.stdout:
                out.write(line)
                out.flush()

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def wait_until_up(self, timeout: float) -> float:
        """Wait for ``/health``; how many seconds it took from the start of the process."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if self.healthy():
                return time.monotonic() - self.started
            time.sleep(0.2)
        raise RuntimeError(f"the server did not come up:\n{self.text()[-4000:]}")

    def healthy(self) -> bool:
        """Whether ``/health`` says so."""
        try:
            return self.get("/health", 10) is not None
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def get(self, path: str, timeout: float = 30) -> str:
        """Body of a page."""
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int], num_tokens: int, timeout: float = 120) -> list[int]:
        """Greedy tokens of one request, alone."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        (choice,) = self.post("/v1/completions", body, timeout)["choices"]  # type: ignore[misc]
        return list(choice["token_ids"])

    def post(self, path: str, body: dict[str, object], timeout: float = 30) -> dict[str, object]:
        """Answer to a JSON body."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return dict(json.loads(answer.read()))

    def worker(self, timeout: float = 60) -> psutil.Process:
        """The process that runs the model: the living one that writes metrics."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            alive = [int(path.stem) for path in self.metrics_folder.glob("*.json")]
            ours = {child.pid: child for child in self._family()}
            for pid in alive:
                if pid in ours:
                    return ours[pid]
            time.sleep(0.2)
        raise RuntimeError(f"no worker of {self.url} writes metrics")

    def _family(self) -> list[psutil.Process]:
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def memory(self) -> dict[str, float]:
        """MiB held by the API server, by its worker, and of the GPU by torch and its processes.

        Where a container hides the GPU's processes, they count as long as this one is alone there.
        """
        worker = self.worker()
        family = self._family()
        api = psutil.Process(self.process.pid)
        held = {"api_mib": _private(api), "worker_mib": _private(worker)}
        (torch_holds,) = self.post("/collective_rpc", {"method": "held_by_torch"})["results"]  # type: ignore[misc]
        held |= torch_holds
        used = _gpu_memory({process.pid for process in family}, self.alone)
        return held if used is None else {**held, "gpu_mib": used}

    def stop(self, timeout: float = 60) -> int:
        """Ask it to end; its exit code. Whatever is left of its group is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise RuntimeError(f"SIGTERM did not end the server in {timeout} s") from None
        self.kill()
        return int(self.process.returncode)

    def kill(self) -> None:
        """End the whole process group, however it is."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        LIVE.discard(self.process.pid)
        self.process.wait()
        self._copier.join(10)


def _private(process: psutil.Process) -> float:
    """MiB that only this process holds: shared pages would be counted many times."""
    return float(process.memory_full_info().uss) / MIB


def _gpu_memory(pids: set[int], alone: bool) -> float | None:
    """MiB that these processes hold on GPUs; where pids are hidden, that of the whole GPU, or None.

    The latter is that of these processes only where they are alone.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--format=csv,noheader,nounits"]
    done = subprocess.run(
        [*query, "--query-compute-apps=pid,used_memory"], capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    rows = [line.split(", ") for line in done.stdout.splitlines() if ", " in line]
    known = [(int(pid), float(used)) for pid, used in rows if pid.isdigit() and used.isdigit()]
    own = [used for pid, used in known if pid in pids]
    if own or not alone:
        return sum(own) if own else None
    done = subprocess.run(
        [*query, "--query-gpu=memory.used"], capture_output=True, text=True, timeout=30,
        check=False,
    )  # fmt: skip
    return sum(float(line) for line in done.stdout.split()) if done.returncode == 0 else None
