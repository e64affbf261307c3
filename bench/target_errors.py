"""Our errors beside FA3's, for the page of targets: both against fp64, on the same inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FIGURES = {"rel_error": "the relative error", "worst_row": "the worst row's"}
HEAD = (
    "| case | ours | FA3 | ratio | worst row, ours | FA3 | ratio |",
    "|---|---:|---:|---:|---:|---:|---:|",
)


@dataclass(frozen=True, slots=True)
class Errors:
    """One case: figures of ours and of FA3, by name of the figure; those that the run has."""

    case: str
    ours: dict[str, float]
    theirs: dict[str, float]

    def ratio(self, figure: str) -> float | None:
        """Ours as a multiple of FA3's."""
        if figure not in self.ours or not self.theirs.get(figure):
            return None
        return self.ours[figure] / self.theirs[figure]

    def line(self) -> str:
        """A row of the table."""
        cells = [self.case]
        for figure in FIGURES:
            for found in (self.ours.get(figure), self.theirs.get(figure)):
                cells.append("-" if found is None else f"{found:.3e}")
            ratio = self.ratio(figure)
            cells.append("-" if ratio is None else f"{ratio:.3f}")
        return f"| {' | '.join(cells)} |"


def _figures(row: dict[str, Any] | None) -> dict[str, float]:
    row = row or {}
    return {name: row[name] for name in FIGURES if row.get(name) is not None}


def pairs(result: dict[str, Any], ours: dict[str, str]) -> Iterator[Errors]:
    """Yield every case that both have figures of.

    Parameters
    ----------
    result : dict
        A run of ``tilewise bench kernels``.
    ours : dict of str to str
        Our providers, and what is added to a case's name for each. One whose figures are those of
        the first is left out.
    """
    rows = {(row["case"], row["provider"]): row for row in result["rows"]}
    for case in dict.fromkeys(row["case"] for row in result["rows"]):
        theirs = _figures(rows.get((case, "fa3")))
        seen: list[dict[str, float]] = []
        for provider, name in ours.items():
            figures = _figures(rows.get((case, provider)))
            if figures and theirs and figures not in seen:
                yield Errors(case + name, figures, theirs)
            seen.append(figures)


def errors_section(result: dict[str, Any], source: str, ours: dict[str, str]) -> list[str]:
    """Return the lines of the section: how often and how far ours are above FA3's, and the table.

    Parameters
    ----------
    result : dict
        A run of ``tilewise bench kernels``.
    source : str
        What the run is called on the page.
    ours : dict of str to str
        As of ``pairs``.
    """
    found = list(pairs(result, ours))
    if not found:
        return []
    counts = []
    for figure, name in FIGURES.items():
        ratios = {pair.case: ratio for pair in found if (ratio := pair.ratio(figure)) is not None}
        if not ratios:
            continue
        above = sum(ratio > 1 for ratio in ratios.values())
        most = max(ratios, key=lambda case: ratios[case])
        counts.append(
            f"{name} is above FA3's (a ratio above 1.00) in {above} of {len(ratios)} rows, and at "
            f"most {ratios[most]:.3f} times FA3's, in {most}"
        )
    text = f"Against fp64 on sampled rows and heads, from {source}: {'; '.join(counts)}."
    cases = dict.fromkeys(row["case"] for row in result["rows"])
    # The names of our other ways begin with the case.
    lacking = [case for case in cases if case not in {pair.case.split()[0] for pair in found}]
    if lacking:
        text += f" Without figures there: {', '.join(lacking)}."
    return ["", "## Errors", "", text, "", *HEAD, *(pair.line() for pair in found)]
