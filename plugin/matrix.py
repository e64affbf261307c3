"""``python -m tilewise.matrix``: the README's support matrix, made from ``tilewise.support``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tilewise import support
from tilewise.marked import not_there, replace_between, write_or_check

BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"


def matrix() -> str:
    """Return the table in markdown."""
    lines = ["| Feature | Computed by | Reason given |", "|---|---|---|"]
    for row in sorted(support.TABLE, key=lambda row: not row.native):
        if row.native:
            who = "**tilewise**"
        elif row.targets == support.VLLM_CHOICE:
            who = "the backend that vLLM chooses"
        else:
            who = " or ".join(row.targets) or "nobody: vLLM does not start"
        if row.note:
            who += f" ({row.note})"
        quoted = re.sub(r"\{\w+\}", "…", re.sub(r"\(.*\)", "(…)", row.reason))
        lines.append(f"| {row.label} | {who} | {f'`{quoted}`' if not row.native else ''} |")
    return "\n".join(lines)


def replace_section(text: str) -> str:
    """Return ``text`` with the matrix between the markers.

    Raises
    ------
    ValueError
        When the markers are not there exactly once.
    """
    note = "Made by `python -m tilewise.matrix`; do not edit."
    return replace_between(text, BEGIN, END, f"{note}\n\n{matrix()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the README's matrix; with ``--check`` only say whether it is up to date."""
    parser = argparse.ArgumentParser(prog="python -m tilewise.matrix", description=__doc__)
    parser.add_argument(
        "--readme", type=Path, default=Path("README.md"), metavar="FILE.md",
        help="the page to rewrite (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    args = parser.parse_args(argv)
    if absent := not_there(args.readme):
        print(absent, file=sys.stderr)
        return 2
    text = args.readme.read_text(encoding="utf-8")
    new = replace_section(text)
    return write_or_check(args.readme, text, new, "the support table", args.check)


if __name__ == "__main__":
    raise SystemExit(main())
