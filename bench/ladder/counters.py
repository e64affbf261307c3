"""Bytes that cross the memory system, from Nsight Compute's counters.

``ncu`` runs this module as a child, which launches every rung once; the counters are of the GPU as
it is, at its own clocks. Between rungs the child launches a kernel of a name that no other has, so
that the launches of one rung can be told from those of the next, however many there are.

Caches are emptied before each launch. What a launch wrote and L2 still holds at its end has not
crossed to DRAM and is not counted: up to the size of L2.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import triton
import triton.language as tl

DRAM, L2 = "dram__bytes.sum", "lts__t_sectors_srcunit_tex.sum"
PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
# Bytes of one, by ncu's name for it.
UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "sector": 32}
HEADER = '"ID"'
Counted = dict[str, int]


@triton.jit
def ladder_marker_kernel(x_ptr):
    """Begins a rung in the list of launches; grid = (1,)."""
    tl.store(x_ptr, 1.0)


MARKER = "ladder_marker_kernel"


def find_ncu() -> str | None:
    """Return where Nsight Compute's command is, or None."""
    found = shutil.which("ncu")
    return found or next((place for place in PLACES if os.access(place, os.X_OK)), None)


def command(ncu: str, log: Path) -> list[str]:
    """Return the command that counts all rungs."""
    return [
        ncu, "--csv", "--log-file", str(log), "--print-units", "base", "--clock-control", "none",
        "--profile-from-start", "off", "--metrics", f"{DRAM},{L2}",
        sys.executable, "-m", "tilewise.bench.ladder.counters",
    ]  # fmt: skip


def measure(count: int, timeout: float) -> tuple[list[Counted], str | None]:
    """Count the bytes of all rungs.

    Parameters
    ----------
    count : int
        Rungs there are.
    timeout : float
        Seconds.

    Returns
    -------
    list of dict, str or None
        For each rung ``dram_bytes`` and ``l2_bytes``; none and the reason where it cannot be done.
    """
    ncu = find_ncu()
    if ncu is None:
        return [], "no ncu on this machine"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        try:
            done = subprocess.run(
                command(ncu, log), capture_output=True, text=True, timeout=timeout, check=False,
                env=os.environ | {"PYTHONSAFEPATH": "1"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [], f"ncu took more than the {timeout:.0f} s that were left"
        except OSError as error:
            return [], f"{ncu}: {error.strerror}"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if done.returncode or HEADER not in text:
        return [], _reason(text + done.stdout + done.stderr, done.returncode)
    try:
        found = parse(text.splitlines())
    except ValueError as error:
        return [], str(error)
    if len(found) != count:
        return [], f"ncu saw {len(found)} rungs of {count}"
    return found, None


def _reason(text: str, code: int) -> str:
    """Return the line in which ncu says why it failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "ERR" in line or "==ERROR==" in line]
    return (errors or lines[-1:] or [f"ncu exited with {code}"])[0][:300]


def parse(lines: Sequence[str]) -> list[Counted]:
    """Add up the counters of each rung.

    Parameters
    ----------
    lines : sequence of str
        What ncu wrote: its own messages, then a line of names and one for every counter of every
        launch.

    Returns
    -------
    list of dict
        ``dram_bytes`` and ``l2_bytes`` of what was launched after each marker.

    Raises
    ------
    ValueError
        For a unit or a number that is not known, or columns that are not there.
    """
    starts = [i for i, line in enumerate(lines) if line.startswith(HEADER)]
    if not starts:
        raise ValueError("no table in what ncu wrote")
    rungs: list[Counted] = []
    seen = None
    for row in _rows(lines[starts[0] :]):
        if MARKER in row["Kernel Name"]:
            if row["ID"] != seen:
                rungs.append({"dram_bytes": 0, "l2_bytes": 0})
            seen = row["ID"]
        elif rungs and row["Metric Name"] in (DRAM, L2):
            key = "dram_bytes" if row["Metric Name"] == DRAM else "l2_bytes"
            rungs[-1][key] += _bytes(row["Metric Value"], row["Metric Unit"])
    return rungs


def _rows(lines: Iterable[str]) -> Iterable[dict[str, str]]:
    wanted = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        missing = [name for name in wanted if row.get(name) is None]
        if missing:
            raise ValueError(f"ncu's table has no {missing[0]!r}")
        yield row


def _bytes(value: str, unit: str) -> int:
    if unit not in UNITS:
        raise ValueError(f"ncu's unit {unit!r}; known: {', '.join(UNITS)}")
    try:
        return round(float(value.replace(",", "")) * UNITS[unit])
    except ValueError:
        raise ValueError(f"ncu's value {value!r}; a number was expected") from None


def child() -> int:
    """Launch every rung once, after a marker, with the profiler on."""
    import torch

    from tilewise.bench.ladder.problem import Memory
    from tilewise.bench.ladder.rungs import MEASURED, rungs

    device = torch.device("cuda")
    mark = torch.zeros(1, device=device)
    ladder_marker_kernel[(1,)](mark)
    for rung in rungs(MEASURED, device):
        built = rung.build(Memory(device))
        built.call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        ladder_marker_kernel[(1,)](mark)
        built.call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del built
    return 0


if __name__ == "__main__":
    raise SystemExit(child())
