"""Everything that shows how tilewise behaves in operation, in one go: ``operate.py --out FOLDER``.

Runs the parts side by side on one GPU, each with a time limit of its own, and prints a table:

``roofline``   ``tilewise bench roofline``, before anything else uses the GPU
``cold``       cold and warm starts, with an empty Triton cache and against FLASH_ATTN
``cold_more``  two servers at once on one empty cache
``read_only``  a home that cannot be written
``jit``        ``--jit-monitor-mode=error`` under a long varied load, and FLASH_ATTN's
``load``       many requests of all kinds; memory must stand still
``kill``       a killed worker, a restart, two servers on one host
``settings``   garbage in every variable
``config``     bad ``--attention-config``, oversized prompts
``disk``       a full disk

Result files and logs are written into the folder as they come. Without a GPU, ``--smoke`` runs
small sizes of what an engine on the CPU can do.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewise.bench.report import project_commit

HERE = Path(__file__).resolve().parent
# What a part has after it was told to end, to kill its servers.
GRACE_SECONDS = 8.0
POLL_SECONDS = 0.25


@dataclass
class Part:
    """One process, when it may start and how long it may take.

    Attributes
    ----------
    after : str
        Name of the part that must have ended first; empty: none.
    share : float
        Of the whole time: when it is ended at the latest.
    """

    name: str
    command: list[str]
    result: str
    after: str = ""
    share: float = 1.0
    process: subprocess.Popen[bytes] | None = None
    seconds: float = 0.0
    state: str = "waits"

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or never will begin."""
        return self.state not in ("waits", "runs")


def script(name: str, *arguments: object) -> list[str]:
    """Command line of a script beside this one."""
    return [sys.executable, "-u", str(HERE / name), *map(str, arguments)]


def all_parts(out: Path, work: Path, asked: argparse.Namespace) -> list[Part]:
    """Every part, with sizes for a GPU or for a smoke run."""
    # Asked for once: files of one run must agree on it, whatever is edited meanwhile.
    found = project_commit(asked.commit)
    commit = ["--commit", found] if found else []
    smoke = asked.smoke

    def abuse(part: str, cases: str, *more: object) -> Part:
        result = f"abuse_{part}.json"
        return Part(
            part,
            script("abuse.py", "--cases", cases, "--out", out / result, "--folder", work / part,
                   "--shared-gpu", *commit, *more),
            result, after="roofline",
        )  # fmt: skip

    def cold(part: str, parts: str) -> Part:
        result = f"{part}.json" if part != "cold" else "cold_start.json"
        return Part(
            part,
            script("cold_start.py", "--parts", parts, "--out", out / result, "--folder",
                   work / part, *commit),
            result, after="roofline",
        )  # fmt: skip

    roofline = [
        sys.executable, "-m", "tilewise.bench.roofline", "--out", str(out / "roofline.json"),
        *commit,
    ]  # fmt: skip
    if smoke:
        roofline = [sys.executable, "-m", "tilewise.bench.roofline", "--help"]
    load_requests = 20 if smoke else asked.requests
    parts = [
        Part("roofline", roofline, "roofline.json", share=0.2),
        cold("cold", "pairs"),
        Part(
            "jit",
            script("jit_monitor.py", "--out", out / "jit_monitor.json", "--folder", work / "jit",
                   "--seconds", 1 if smoke else asked.jit_seconds, *commit),
            "jit_monitor.json", after="roofline",
        ),
        abuse("load", "load", "--requests", load_requests, "--load-seconds", asked.load_seconds),
        abuse("kill", "killed,two_servers"),
        abuse("settings", "settings"),
        abuse("config", "oversized" if smoke else "attention_config,oversized"),
        abuse("disk", "full_disk"),
        replace(cold("cold_more", "at_once"), after="cold"),
        replace(cold("cold_read_only", "read_only"), name="read_only", after="jit"),
    ]  # fmt: skip
    if smoke:
        # One after another: a small machine starts one engine at a time.
        for before, part in itertools.pairwise(parts):
            part.after = before.name
    return parts


def start(part: Part, out: Path) -> None:
    """Start a part, in a session of its own, with a log file."""
    with (out / "logs" / f"{part.name}.log").open("wb") as log:
        part.process = subprocess.Popen(
            part.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    part.seconds, part.state = time.monotonic(), "runs"


def end(part: Part, state: str) -> None:
    """Note how a part has ended, and end it if it has not."""
    assert part.process is not None
    if part.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            part.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            part.process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(part.process.pid, signal.SIGKILL)
    part.process.wait()
    part.seconds, part.state = time.monotonic() - part.seconds, state


def run_all(parts: list[Part], out: Path, seconds: float) -> None:
    """Run the parts until all have ended or their time is over."""
    began = time.monotonic()
    by_name = {part.name: part for part in parts}
    try:
        while not all(part.is_over for part in parts):
            now = time.monotonic() - began
            for part in parts:
                late = now > part.share * seconds
                before = by_name.get(part.after)  # none where it is not among those chosen
                if part.state == "waits":
                    if late:
                        part.state = "never began"
                    elif before is None or before.is_over:
                        start(part, out)
                elif part.state == "runs":
                    code = part.process.poll() if part.process else None
                    if code is not None:
                        end(part, "fine" if code == 0 else f"exit code {code}")
                        print_part(part, out)
                    elif late:
                        end(part, f"cut after {part.share * seconds:g} s")
                        print_part(part, out)
            time.sleep(POLL_SECONDS)
    finally:
        for part in parts:
            if part.state == "runs":
                end(part, "interrupted")


def print_part(part: Part, out: Path) -> None:
    """One line for a part that has ended, and the end of its log if it is not fine."""
    print(f"{part.name:10} {part.state:20} {part.seconds:6.1f} s", flush=True)
    if part.state != "fine":
        log = (out / "logs" / f"{part.name}.log").read_text(errors="replace")
        print("".join(f"    {line[:300]}\n" for line in log.splitlines()[-12:]), end="", flush=True)


def read(path: Path) -> Any:
    """A result file, or None where it is missing."""
    return json.loads(path.read_text()) if path.exists() else None


def summary(out: Path) -> list[str]:
    """What the result files say, in a few lines."""
    lines = []
    for path in sorted(out.glob("cold*.json")):
        for row in read(path)["rows"]:
            if "seconds" in row:
                lines.append(
                    f"{row['name']:20} {row['backend']:12} up in {row['seconds']:6.1f} s, our "
                    f"kernels {row['our_compilation_s']:.1f} s, check {row['our_check_s']:.2f} s"
                )
            else:
                what = row.get("skipped") or row["error"].strip().splitlines()[-1][:160]
                lines.append(f"{row['name']:20} {row['backend']:12} {what}")
    for row in (read(out / "jit_monitor.json") or {"rows": []})["rows"]:
        lines.append(
            f"jit {row['server']:16} {row['mode']:6} {row.get('requests', 0):5} requests, ours "
            f"{row['compiled_ours'] or 'none'}, others {row['compiled_others'] or 'none'}"
            f"{', ' + str(row['problems'])[:200] if row['problems'] else ''}"
        )
    merged = read(out / "abuse.json") or {"cases": {}}
    for name, case in merged["cases"].items():
        said = "; ".join(case["problems"])[:300] if case["problems"] else "fine"
        lines.append(f"abuse {name:20} {said}")
    load = merged["cases"].get("load", {})
    if "memory" in load:
        lines.append(f"load: {load['requests']} requests, growth {load['memory']['growth_mib']}")
    return lines


def merge_abuse(out: Path) -> None:
    """Put the abuse's files into one."""
    sources = sorted(out.glob("abuse_*.json"))
    if sources:
        command = script("abuse.py", "--merge", *sources, "--out", out / "abuse.json")
        subprocess.run(command, check=False, timeout=60)


def main() -> int:
    """Run the chosen parts; 1 when one was not fine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--parts", help="default: all; names separated by commas")
    parser.add_argument("--seconds", type=float, default=400, help="time of all (%(default)g)")
    parser.add_argument("--requests", type=int, default=10_000, help="of the load (%(default)s)")
    parser.add_argument("--load-seconds", type=float, default=200, help="of the load (%(default)g)")
    parser.add_argument("--jit-seconds", type=float, default=110, help="of a load (%(default)g)")
    parser.add_argument("--commit", help="commit to record, where the checkout has no git folder")
    parser.add_argument("--work", type=Path, help="for models and server logs; default: in --out")
    parser.add_argument("--smoke", action="store_true", help="small sizes, on the CPU")
    asked = parser.parse_args()
    out = asked.out.resolve()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    parts = all_parts(out, (asked.work or out / "work").resolve(), asked)
    if asked.parts:
        chosen = asked.parts.split(",")
        if unknown := sorted(set(chosen) - {part.name for part in parts}):
            parser.error(f"unknown parts {', '.join(unknown)}; see --help")
        parts = [part for part in parts if part.name in chosen]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run_all(parts, out, asked.seconds)
    merge_abuse(out)
    print("\n".join(summary(out)))
    return int(any(part.state != "fine" for part in parts))


if __name__ == "__main__":
    sys.exit(main())
