"""Sections of texts that are made from code: what stands between two markers is rewritten."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EXIT_CODES = (
    "Exit codes: 0; 1 if --check finds the page stale; 2 for a wrong command line or a file that "
    "is not there."
)


def page_parser(prog: str, about: str | None, option: str, page: Path) -> argparse.ArgumentParser:
    """Return the command line of what rewrites a page's section from a folder of results."""
    parser = argparse.ArgumentParser(prog=prog, description=about, epilog=EXIT_CODES)
    parser.add_argument(
        "--results", type=Path, default=Path("bench/results/h200"), metavar="FOLDER",
        help="folder of the result files (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        option, dest="page", type=Path, default=page, metavar="FILE.md",
        help="the page to rewrite (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print as JSON which page it is and whether it was stale",
    )
    return parser


def replace_between(text: str, begin: str, end: str, body: str) -> str:
    """Return ``text`` with ``body`` on lines of its own between the markers.

    Raises
    ------
    ValueError
        When the markers are not there exactly once.
    """
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the file must hold {begin} and {end} once each")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{body}\n{end}{rest.partition(end)[2]}"


def not_there(*paths: Path) -> str:
    """Say which of a checkout's files or folders is missing; empty if none is."""
    for path in paths:
        if not path.exists():
            return f"{path} is not there; accepted: what --help names, from the root of a checkout"
    return ""


def write_or_check(
    path: Path, old: str, new: str, source: str, check: bool, as_json: bool = False
) -> int:
    """Write ``new``, or with ``check`` only say whether ``old`` is it.

    Parameters
    ----------
    path : Path
        The file that held ``old``.
    source : str
        What the section is made from, for the message.
    as_json : bool
        Print ``{"page", "source", "stale", "written"}``.

    Returns
    -------
    int
        Exit code: 1 for a stale file that was checked, else 0.
    """
    stale = new != old
    if not check:
        path.write_text(new, encoding="utf-8")
    if as_json:
        told = {"page": str(path), "source": source, "stale": stale, "written": not check}
        print(json.dumps(told))
    elif check:
        print(f"{path} does not match {source}" if stale else "up to date")
    return int(check and stale)
