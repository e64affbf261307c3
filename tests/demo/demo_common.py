"""What the steps of the demo share: folders, the environment of their processes, and output."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:  # rich only makes the output prettier
    Console = Table = None  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parents[2]
DEMO_DIR = Path(__file__).resolve().parent
DEFAULT_CACHE = ROOT / ".demo"

# The question that the offline engine and the server are both asked.
FIRST_QUESTION = "What is the capital of France? Answer in one sentence."
MODEL_NAME = "SmolLM2-135M-Instruct"
BACKEND = "TILEWISE"

_console = Console(highlight=False, soft_wrap=True) if Console else None


def say(text: str = "") -> None:
    """Print one line at once, whoever reads our output."""
    if _console:
        _console.print(text, markup=False)
    else:
        print(text)
    sys.stdout.flush()


def heading(text: str) -> None:
    """Print the title of a step."""
    if _console:
        _console.print(f"\n[bold cyan]== {text}[/]")
    else:
        print(f"\n== {text}")
    sys.stdout.flush()


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a small table, with rich's lines if rich is there."""
    cells = [[str(cell) for cell in row] for row in rows]
    if _console and Table:
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in cells:
            colour = {"PASS": "green", "FAIL": "red"}.get(row[-1])
            table.add_row(*row, style=colour)
        _console.print(table, markup=False, soft_wrap=False)
    else:
        widths = [max(len(r[i]) for r in [list(columns), *cells]) for i in range(len(columns))]
        print(title)
        for row in [list(columns), *cells]:
            print("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()


class Checks:
    """The checks of one step: printed as they are made, kept for the summary."""

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []

    def add(self, name: str, passed: bool, detail: str = "") -> bool:
        """Record one check and print its verdict."""
        self.results.append({"name": name, "passed": bool(passed), "detail": detail})
        say(f"  [{'PASS' if passed else 'FAIL'}] {name}{': ' + detail if detail else ''}")
        return bool(passed)

    @property
    def passed(self) -> bool:
        """Whether there was at least one check and none failed."""
        return bool(self.results) and all(r["passed"] for r in self.results)


def write_report(path: Path, checks: Checks, started: float, **extra: Any) -> None:
    """Leave what a step found for the summary: its checks, its time, its facts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "passed": checks.passed,
        "seconds": round(time.monotonic() - started, 1),
        "checks": checks.results,
        **extra,
    }
    path.write_text(json.dumps(report, indent=1))


def pick_device(asked: str) -> str:
    """Return "gpu" or "cpu"; "auto" takes the GPU if torch sees one."""
    if asked != "auto":
        return asked
    probe = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 3)"
    return "gpu" if subprocess.run([sys.executable, "-c", probe]).returncode == 0 else "cpu"


def engine_environment(device: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which vLLM runs on `device`.

    Parameters
    ----------
    device : str
        "gpu", or "cpu" for the test platform with Triton's interpreter.
    base : Mapping[str, str] or None
        The environment to start from, this process's own by default.
    """
    env = dict(os.environ if base is None else base)
    # Ours, not the package's: tilewise would warn of a name that it does not know.
    env.pop("TILEWISE_DEMO_MODEL", None)
    env.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_STREAM="ext://sys.stderr",
        PYTHONSAFEPATH="1",
        TOKENIZERS_PARALLELISM="false",
    )
    if device == "cpu":
        # An empty list of devices, set: unset would make vLLM think that Triton is absent.
        env.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", TILEWISE_CPU_PLATFORM="1")
    else:
        # The sampler of FlashInfer would be compiled for minutes first.
        env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        for name in ("TRITON_INTERPRET", "TILEWISE_CPU_PLATFORM"):
            env.pop(name, None)
    return env


def log_tail(path: Path, lines: int = 25) -> str:
    """Return the end of a log file, for a failure's report."""
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
