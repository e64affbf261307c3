"""Write the figures of the abuse into ``docs/robustness.md``, from the result files.

``python tests/abuse/abuse_page.py`` rewrites what stands between the page's markers; ``--check``
only says whether it is in step (exit code 1 if not).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tilewise.marked import replace_between

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "robustness.md"
RESULTS = ("bench/results/cpu/abuse.json", "bench/results/h200/abuse.json")
BEGIN, END = "<!-- abuse:begin -->", "<!-- abuse:end -->"


def figures(name: str, case: dict[str, Any]) -> str:
    """What a case has to say in the table, in a few words."""
    if name == "load":
        answers, memory, counts = case["answers"], case["memory"]["growth_mib"], case["counts"]
        kept = ", ".join(
            f"{key.removesuffix('_mib')} {grown:+.1f}" for key, grown in memory.items()
        )
        ties = f", {answers['ties']} ended in a tie" if answers["ties"] else ""
        hung_up = counts.get("left", 0) + counts.get("left_at_once", 0)
        return (
            f"{case['requests']} requests in {case['seconds']:.0f} s, {hung_up} clients hung up, "
            f"{counts.get('status 400', 0)} refused; {answers['equal']} of {answers['compared']} "
            f"sampled answers equal{ties}, {answers['mismatches']} wrong; growth in MiB: {kept}"
        )
    if name == "killed":
        return (
            f"{case['counts'].get('errors', 0)} clients got an error, the server ended "
            f"{case['ended_after_s']:.0f} s after the last of them, the next one was up in "
            f"{case['restart_seconds']:.0f} s"
        )
    if name == "full_disk":
        missed = case["steps_after"] - case["steps_before"]
        disk = case.get("disk", "a limit on the worker's files")
        return (
            f"{disk}: {sum_kinds(case)} requests; {missed:.0f} steps came to `/metrics` afterwards"
        )
    if name == "two_servers":
        both = " and ".join(str(sum_kinds(server)) for server in case["servers"])
        answers = case["answers"]
        ties = f", {answers['ties']} ended in a tie" if answers["ties"] else ""
        return f"{both} requests; {answers['equal']} of {answers['compared']} equal{ties}"
    codes = case.get("exit_codes")
    if codes is not None:
        return f"{len(codes)} starts, all ended with a message"
    return f"{len(case['tokens_or_status'])} lengths, answered or refused with status 400"


def sum_kinds(case: dict[str, Any]) -> int:
    """Requests of a case, of whatever kind."""
    other = ("status", "errors")
    return sum(n for kind, n in case["counts"].items() if not kind.startswith(other))


TITLES = {
    "load": "Load of all kinds",
    "killed": "Worker killed under load",
    "full_disk": "Full disk for the metrics files",
    "two_servers": "Two servers on one host, one killed",
    "oversized": "Oversized prompts",
    "settings": "Garbage in `TILEWISE_*`",
    "attention_config": "Bad `--attention-config`, bad page size",
}


def render(root: Path) -> str:
    """Return the table of every result file that is there."""
    found = {
        path: json.loads((root / path).read_text()) for path in RESULTS if (root / path).exists()
    }
    lines = []
    for path, result in found.items():
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        env = result.get("env", {})
        runs = [case.get("run", {}) for case in result["cases"].values()]
        commits = [str(run.get("commit", env.get("commit")))[:12] for run in runs]
        when = f"; {env['date'][:10]}, commit {', '.join(dict.fromkeys(commits))}" if env else ""
        lines += [f"**{result['device']}** ({versions}{when}; [result](../{path}))", ""]
        lines += ["| abuse | what came of it |", "|---|---|"]
        for name, case in result["cases"].items():
            said = f"**failed**: {'; '.join(case['problems'])}"
            if not case["problems"]:
                said = figures(name, case)
            lines.append(f"| {TITLES[name]} | {said} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> int:
    """Rewrite the page or check it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    asked = parser.parse_args()
    text = PAGE.read_text()
    made = replace_between(text, BEGIN, END, render(ROOT))
    if asked.check:
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
