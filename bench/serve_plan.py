"""Which workload runs on which server when, and what an earlier run has already done."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.bench import report
from tilewise.bench.workloads import Workload

# What must not differ between a run and its continuation, by the name of its option.
SETTINGS = ("model", "serve_args", "max_model_len", "at_once")


@dataclass(frozen=True)
class Turn:
    """One workload, once, on one backend's server."""

    backend: str
    workload: Workload
    run: int

    @property
    def key(self) -> tuple[str, str, int]:
        """What identifies the turn in a result file."""
        return self.workload.name, self.backend, self.run


def groups_of(backends: Sequence[str], at_once: int) -> list[list[str]]:
    """Return the backends whose servers stand on the GPU together, in order."""
    return [list(backends[i : i + at_once]) for i in range(0, len(backends), at_once)]


def turns_of(
    backends: Sequence[str], chosen: Sequence[Workload], runs: int, first_run: int = 0
) -> list[Turn]:
    """Return the turns of servers that stand together: one backend after the other.

    Who begins changes with every run and workload, so that drift of the machine favours nobody.
    """
    turns = []
    for run in range(first_run, first_run + runs):
        for number, workload in enumerate(chosen):
            shift = (run + number) % len(backends)
            order = [*backends[shift:], *backends[:shift]]
            turns += [Turn(backend, workload, run) for backend in order]
    return turns


@dataclass
class ResultFile:
    """Rows and environments of a result file, saved after every row.

    Every row names its run by date; ``env["runs"]`` holds the environment of each.
    """

    path: Path | None
    rows: list[report.Row] = field(default_factory=list)
    runs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | None, keep: bool) -> ResultFile:
        """Return the file, with the rows that it has if they are to be kept.

        Raises
        ------
        ValueError
            If the file that is to be continued is no result file.
        """
        found = cls(path)
        if path is None or not keep or not path.exists():
            return found
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            found.rows = list(old["rows"])
            found.runs = dict(old["env"].get("runs", {}))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no result file that could be continued: {error}") from None
        return found

    @property
    def next_run(self) -> int:
        """The first run number that no row has."""
        return 1 + max((row["run"] for row in self.rows), default=-1)

    def settle(self, turns: Iterable[Turn]) -> list[Turn]:
        """Return the turns still to be done, and forget their failed rows."""
        done = {_key(row) for row in self.rows if not row.get("error")}
        todo = [turn for turn in turns if turn.key not in done]
        again = {turn.key for turn in todo}
        self.rows = [row for row in self.rows if _key(row) not in again]
        return todo

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse to continue a run that was made otherwise.

        Raises
        ------
        ValueError
            Names the option, what the file has and what was asked for.
        """
        for run in self.runs.values():
            for name, old in run.get("settings", {}).items():
                if name in settings and settings[name] != old:
                    option = "--" + name.replace("_", "-")
                    raise ValueError(
                        f"{self.path} was made with {option} {old!r}, not {settings[name]!r}; "
                        "give the same, or another --out"
                    )

    def add(self, env: Mapping[str, Any], row: report.Row) -> None:
        """Append a row of the run that `env` describes, and save."""
        key = str(env["date"])
        self.rows.append({**row, "env": key})
        self.save(env)

    def save(self, env: Mapping[str, Any]) -> None:
        """Write everything in one step; without a path, nothing."""
        self.runs[str(env["date"])] = dict(env)
        if self.path is not None and self.rows:
            report.write_result(self.path, {**env, "runs": self.runs}, self.rows)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["workload"], row["backend"], row["run"]
