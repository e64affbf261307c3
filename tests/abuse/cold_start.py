"""How long a server takes to start, and our part of it: ``cold_start.py --out RESULT.json``.

A start has a home directory of its own, so that what Triton, PyTorch and vLLM keep there is empty
the first time and warm the second. Backends start side by side, under the same load. Then two
servers start at once on one empty home, and each backend in a home that cannot be written.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# The checkout itself must not be there: its folder `kernels` would hide another package.
sys.path[:] = [
    str(HERE),
    str(HERE.parent),
    *(p for p in sys.path if Path(p or ".").resolve() != ROOT),
]

import torch  # noqa: E402
from abuse_run import Clocks, describe_run, end_on_sigterm, write  # noqa: E402
from abuse_server import Server  # noqa: E402
from tiny_model import TinyLlama  # noqa: E402

PROMPT = list(range(5, 45))
OURS, CONTROL = "TILEWISE", "FLASH_ATTN"
# Largest accepted part of our compilation in a start, seconds.
LIMITS = {"cold": 30.0, "warm": 3.0}
# Whatever moves a cache out of the home.
CACHE_VARIABLES = (
    "TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "FLASHINFER_WORKSPACE_BASE",
)  # fmt: skip
# Those that together move every cache of a server.
MOVED = tuple(name for name in CACHE_VARIABLES if name != "TRITON_CACHE_DIR")
# What logs say, and under which names its seconds go into the result.
LINES = {
    "our_compilation_s": r"tilewise's kernels are compiled \(([\d.]+) s\)",
    "our_check_s": r"agree with PyTorch on the KV cache \(([\d.]+) s\)",
    "torch_compile_s": r"torch\.compile took ([\d.]+) s",
    "graph_capture_s": r"Graph capturing finished in ([\d.]+) secs",
}
CAP_DAC_OVERRIDE, PR_CAPBSET_DROP = 1, 24


def read_times(log: str) -> dict[str, float]:
    """Seconds that a server's log gives to each stage, all lines of a stage together."""
    return {
        name: round(sum(map(float, re.findall(pattern, log))), 2) for name, pattern in LINES.items()
    }


def obey_permissions() -> None:
    """Take from this process, and from what it runs, root's right to write anywhere."""
    if os.geteuid() == 0:
        # Fails where root has lost the right to drop rights; `is_read_only` tells.
        ctypes.CDLL(None, use_errno=True).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def is_read_only(folder: Path) -> bool:
    """Whether processes after ``obey_permissions`` cannot write there."""
    command = [
        sys.executable, "-c", f"import tempfile; tempfile.TemporaryFile(dir={str(folder)!r})"
    ]  # fmt: skip
    done = subprocess.run(
        command, stderr=subprocess.DEVNULL, preexec_fn=obey_permissions, check=False
    )
    return done.returncode != 0


def environment_of(home: Path) -> dict[str, str]:
    """Environment of a start that keeps all its caches below ``home``."""
    # Packages of the user's own home must be found from the new one.
    return {"HOME": str(home), "PYTHONUSERBASE": site.getuserbase()}


class Starts:
    """Starts servers with one model and one set of arguments."""

    def __init__(self, folder: Path, gpu: bool, timeout: float) -> None:
        self.folder, self.gpu, self.timeout = folder, gpu, timeout
        if gpu:
            shape = TinyLlama(
                32, 8, 128, num_layers=4, hidden_size=1024, intermediate_size=2048,
                dtype=torch.bfloat16,
            )  # fmt: skip
            memory = ["--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.05"]
            self.arguments = ["--dtype", "bfloat16", "--max-model-len", "4096", *memory]
        else:
            shape = TinyLlama()
            self.arguments = [
                "--dtype", "float32", "--max-model-len", "256", "--enforce-eager",
                "--kv-cache-memory-bytes", str(16 << 20), "--max-num-batched-tokens", "64",
                "--max-num-seqs", "8",
            ]  # fmt: skip
        self.model = shape.write(folder / "model")

    def start(
        self,
        name: str,
        backend: str,
        home: Path,
        child_setup: Callable[[], None] | None = None,
        **environ: str,
    ) -> dict[str, Any]:
        """Start a server, ask it once, stop it; what it took, or why it did not come up."""
        row: dict[str, Any] = {"name": name, "backend": backend}
        began = time.monotonic()
        server = Server(
            self.model, self.folder / name, ["--attention-backend", backend, *self.arguments],
            self.gpu, environment_of(home) | environ, alone=False, child_setup=child_setup,
            without=[name for name in CACHE_VARIABLES if name not in environ],
        )  # fmt: skip
        try:
            row["seconds"] = round(server.wait_until_up(self.timeout), 1)
            row["tokens"] = server.complete(PROMPT, 4)
            row["exit_code"] = server.stop()
        except (RuntimeError, OSError) as error:
            row["error"] = str(error)[-1500:]
            # The end of a log says that the engine failed; what it failed of stands far above.
            causes = re.findall(r"\b\w*(?:Error|Exception): .*", server.text())
            row["causes"] = list(dict.fromkeys(cause[:300] for cause in causes))[:8]
            row["failed_after_s"] = round(time.monotonic() - began, 1)
        finally:
            server.kill()
        text = server.text()
        row |= read_times(text)
        row["self_checks"] = len(re.findall(LINES["our_check_s"], text))
        return row

    def together(self, *starts: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Several starts at the same time."""
        with ThreadPoolExecutor(len(starts)) as pool:
            rows = list(pool.map(lambda start: start(), starts))
        print_rows(rows)
        return rows

    def home(self, name: str) -> Path:
        """A new, empty home."""
        home = self.folder / f"home_{name}"
        home.mkdir()
        return home


def pairs(starts: Starts, backends: list[str]) -> list[dict[str, Any]]:
    """Each backend with an empty home, then again with what is in it now."""
    homes = {backend: starts.home(backend) for backend in backends}
    return [
        row
        for name in ("cold", "warm")
        for row in starts.together(
            *(partial(starts.start, name, backend, home) for backend, home in homes.items())
        )
    ]


def at_once(starts: Starts, _: list[str]) -> list[dict[str, Any]]:
    """Two servers on one empty home."""
    home = starts.home("shared")
    return starts.together(*(partial(starts.start, "at_once", OURS, home) for _ in range(2)))


def read_only(starts: Starts, backends: list[str]) -> list[dict[str, Any]]:
    """Each backend in a home that it cannot write, with none, three or all caches elsewhere."""
    home = starts.home("read_only")
    home.chmod(0o555)
    if not is_read_only(home):
        return [{"name": "read_only", "backend": OURS, "skipped": "root may write anywhere here"}]
    every = []
    for backend in backends:
        start = partial(starts.start, backend=backend, home=home, child_setup=obey_permissions)
        cache, moved = (starts.folder / f"{name}_{backend}" for name in ("cache", "moved"))
        every.append(partial(start, "read_only"))
        # vLLM imports FlashInfer for every backend, and the import makes a folder; torch.compile
        # takes Triton's default folder.
        three = ("VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "TRITON_HOME")
        every.append(partial(start, "read_only_three_moved", **dict.fromkeys(three, str(cache))))
        elsewhere = {name: str(moved / name.lower()) for name in MOVED}
        every.append(partial(start, "read_only_all_moved", **elsewhere))
    return starts.together(*every)


PARTS = {"pairs": pairs, "at_once": at_once, "read_only": read_only}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """One line for each start."""
    for row in rows:
        if "error" in row:
            print(f"  {row['name']} {row['backend']}: {row['error'][-400:]}", flush=True)
        elif "seconds" in row:
            times = ", ".join(f"{name} {row[name]:g}" for name in LINES)
            print(f"  {row['name']} {row['backend']}: {row['seconds']} s ({times})", flush=True)


def judge(rows: list[dict[str, Any]], gpu: bool) -> list[str]:
    """What is not as it should be; a backend of vLLM that fails is a control, and no problem."""
    problems = []
    ours = [row for row in rows if row["backend"] == OURS and "skipped" not in row]
    up_elsewhere = {row["name"] for row in rows if row["backend"] != OURS and "seconds" in row}
    for row in ours:
        label = f"{row['name']} {row['backend']}"
        if "error" in row:
            # In a home that cannot be written vLLM may not come up, whatever the backend.
            if row["name"] != "read_only" or row["name"] in up_elsewhere:
                said = " ".join(row["error"][-300:].split())
                problems.append(f"{label}: did not come up: …{said}")
            continue
        if row["exit_code"] != 0:
            problems.append(f"{label}: SIGTERM: exit code {row['exit_code']}")
        limit = LIMITS["warm" if row["name"] == "warm" else "cold"]
        if row["our_compilation_s"] > limit:
            problems.append(
                f"{label}: our kernels took {row['our_compilation_s']} s, accepted {limit:g}"
            )
        if gpu and row["our_compilation_s"] == 0:
            problems.append(f"{label}: the log does not say how long our kernels took")
        if row["self_checks"] == 0:
            problems.append(f"{label}: the log says nothing of a self-check")
    answers = {tuple(row["tokens"]) for row in ours if "tokens" in row}
    if len(answers) > 1:
        problems.append(f"the same prompt got {len(answers)} answers: {sorted(answers)}")
    return problems


def main() -> int:
    """Run the chosen parts; the exit code is 1 when something was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--backends", help=f"default: {OURS} and, on a GPU, {CONTROL}")
    parser.add_argument("--timeout", type=float, default=300, help="of a start (%(default)g s)")
    parser.add_argument("--commit", help="commit to record, where the checkout has no git folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--folder", type=Path, help="for homes and logs; default: temporary")
    asked = parser.parse_args()
    chosen = asked.parts.split(",")
    if unknown := sorted(set(chosen) - PARTS.keys()):
        parser.error(f"unknown parts {', '.join(unknown)}; known are {', '.join(PARTS)}")
    end_on_sigterm()
    gpu = torch.cuda.is_available()
    backends = (asked.backends or (f"{OURS},{CONTROL}" if gpu else OURS)).split(",")
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="tilewise-cold-"))
    starts = Starts(folder, gpu, asked.timeout)
    env = describe_run("tests/abuse/cold_start.py", asked.commit)
    env |= {"arguments": starts.arguments, "load_average": os.getloadavg()}
    rows: list[dict[str, Any]] = []
    with Clocks() as clocks:
        for name in chosen:
            print(f"{name} …", flush=True)
            rows += PARTS[name](starts, backends)
            env["clocks"] = clocks.summary()
            env["load_average_at_end"] = os.getloadavg()
            problems = judge(rows, gpu)
            write(asked.out, {"env": env, "rows": rows, "problems": problems})
    for problem in problems:
        print(f"  {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
