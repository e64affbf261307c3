"""Sections of texts that are made from code: what stands between two markers is rewritten."""

from __future__ import annotations

from pathlib import Path


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


def write_or_check(path: Path, old: str, new: str, source: str, check: bool) -> int:
    """Write ``new``, or with ``check`` only say whether ``old`` is it.

    Parameters
    ----------
    path : Path
        The file that held ``old``.
    source : str
        What the section is made from, for the message.

    Returns
    -------
    int
        Exit code: 1 for a stale file that was checked, else 0.
    """
    if check:
        print("up to date" if new == old else f"{path} does not match {source}")
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0
