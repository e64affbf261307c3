"""The parts of a report page, the same for HTML and markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Keys of a result's environment that say which software ran.
VERSIONS = ("vllm", "torch", "triton", "flashinfer", "tilewise", "python", "cuda")
CLOCKS = {"sm_mhz": ("SM clock", "MHz"), "mem_mhz": ("memory clock", "MHz"),
          "power_w": ("power", "W")}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One cell of a table: text, a second line, a colour (``good``, ``bad``), a hover text."""

    text: str
    small: str = ""
    mark: str = ""
    title: str = ""
    wrap: bool = False


@dataclass(frozen=True)
class TableRow:
    """Cells of one row; ``first`` draws a heavier line above it."""

    cells: Sequence[Cell]
    first: bool = False


@dataclass(frozen=True)
class Table:
    """A table whose first ``left`` columns are text."""

    heads: Sequence[str]
    rows: Sequence[TableRow]
    left: int = 1

    def markdown(self) -> str:
        """Return the table in GitHub's markdown."""
        marks = ["---"] * self.left + ["---:"] * (len(self.heads) - self.left)
        lines = [_line(self.heads), "|" + "|".join(marks) + "|"]
        for row in self.rows:
            lines.append(_line([_joined(cell) for cell in row.cells]))
        return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


def _joined(cell: Cell) -> str:
    return f"{cell.text} ({cell.small})" if cell.small else cell.text


@dataclass
class Section:
    """A heading with text, figures, a table, things to unfold, facts and commands."""

    id: str
    title: str
    text: str = ""
    figures: list[tuple[str, Figure | None, str]] = field(default_factory=list)
    table: Table | None = None
    details: list[dict[str, str]] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def for_template(self) -> dict[str, Any]:
        """Return what the template reads, figures as SVG."""
        from tilewise.bench.plots import to_svg

        figures = [
            {"svg": to_svg(figure, name), "caption": caption}
            for name, figure, caption in self.figures
            if figure is not None
        ]
        return {**self.__dict__, "figures": figures}

    def markdown(self) -> str:
        """Return the section without its figures and unfolded details."""
        parts = [f"## {self.title}", self.text, self.table.markdown() if self.table else ""]
        parts.append("\n".join(f"- {name}: {value}" for name, value in self.facts))
        parts += [f"```\n{command}\n```" for command in self.commands]
        return "\n\n".join(part for part in parts if part)


@dataclass
class Page:
    """A whole report; ``summary`` holds the figures behind it."""

    title: str
    lead: str
    summary: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    cards: list[dict[str, str]] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Yield the figures that there are, with their names."""
        for section in self.sections:
            for name, figure, _ in section.figures:
                if figure is not None:
                    yield name, figure

    def markdown(self) -> str:
        """Return the page as markdown."""
        head = [f"# {self.title}", self.lead, *(f"**{text}**" for text in self.warnings)]
        head.append("\n".join(f"- {card['value']}: {card['text']}" for card in self.cards))
        body = [section.markdown() for section in self.sections]
        return "\n\n".join(part for part in (*head, *body) if part) + "\n"


def number(value: float | None) -> str:
    """Return a figure with about three digits, or a dash."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def ratio_cell(value: float | None, small: str = "") -> Cell:
    """Return a ratio whose colour says on which side of 1 it lies (2 % are neither)."""
    if value is None:
        return Cell("-", small)
    mark = "good" if value >= 1.02 else "bad" if value < 0.98 else ""
    return Cell(f"{value:.2f}x", small, mark)


def machine(env: Mapping[str, Any]) -> str:
    """Return GPU, software and day in one line."""
    gpu = env.get("gpu") or "no GPU"
    limit = env.get("power_limit")
    parts = [f"{gpu} ({limit} limit)" if limit else str(gpu)]
    names = {"vllm": "vLLM", "torch": "torch", "triton": "Triton"}
    parts += [f"{text} {env[key]}" for key, text in names.items() if env.get(key)]
    if env.get("commit"):
        parts.append(f"commit {str(env['commit'])[:10]}")
    return ", ".join([*parts, str(env.get("date", ""))[:10]])


def environment_section(env: Mapping[str, Any]) -> Section:
    """Return GPU, clocks, versions, commit and the command of every run in the file."""
    runs = env.get("runs") or {str(env.get("date")): env}
    facts = [("GPU", str(env.get("gpu") or "none"))]
    for key, text in (("driver", "driver"), ("power_limit", "power limit")):
        if env.get(key):
            facts.append((text, str(env[key])))
    if env.get("matmul_tflops"):
        facts.append(("matmul ceiling", f"{env['matmul_tflops']} TFLOP/s, bf16, measured"))
    if env.get("copy_tbps"):
        facts.append(("copy ceiling", f"{env['copy_tbps']} TB/s, read and written, measured"))
    for when, run in runs.items():
        clocks = run.get("clocks") or {}
        found = [
            f"{CLOCKS[k][0]} {_span(v, CLOCKS[k][1])}" for k, v in clocks.items() if k in CLOCKS
        ]
        text = "; ".join(found) or "not sampled"
        facts.append(("under load" if len(runs) == 1 else f"under load, {when}", text))
    facts += [(name, str(env[name])) for name in VERSIONS if env.get(name)]
    facts.append(("commit", str(env.get("commit") or "unknown")))
    facts.append(("date", ", ".join(runs)))
    if env.get("note"):
        facts.append(("note", str(env["note"])))
    commands = list(
        dict.fromkeys(str(run["command"]) for run in runs.values() if run.get("command"))
    )
    return Section("environment", "Environment", facts=facts, commands=commands)


def _span(values: Sequence[float], unit: str) -> str:
    low, middle, high = values
    return f"{middle:,.0f} {unit} (least {low:,.0f}, most {high:,.0f})"
