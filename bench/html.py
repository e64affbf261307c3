"""``tilewise bench report``: one self-contained HTML page for a result file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewise.bench import html_kernels, html_serve
from tilewise.bench.html_parts import Page, environment_section
from tilewise.bench.summary import kind_of

EXIT_OK, EXIT_USAGE = 0, 2
TEMPLATE = Path(__file__).resolve().parent / "page.html"
BUILDERS: dict[str, Callable[[Mapping[str, Any]], Page]] = {
    "kernels": html_kernels.page,
    "serve": html_serve.page,
}


def build_page(result: Mapping[str, Any]) -> Page:
    """Return the parts of the page of a result of ``bench kernels`` or ``bench serve``.

    Raises
    ------
    ValueError
        For content that is no such result.
    """
    kind = kind_of(result)
    if kind not in BUILDERS:
        raise ValueError(f"a {kind} result has no page of its own; see `tilewise bench {kind}`")
    page = BUILDERS[kind](result)
    page.sections.append(environment_section(result["env"]))
    return page


def render(page: Page) -> str:
    """Return the page as one HTML document that loads nothing."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=page.title,
        lead=page.lead,
        warnings=page.warnings,
        cards=page.cards,
        sections=[section.for_template() for section in page.sections],
    )


def write_report(path: Path, result: Mapping[str, Any]) -> list[Path]:
    """Write ``path`` with ``.html`` and ``.md`` in place of its suffix; return both paths."""
    page = build_page(result)
    pages = [path.with_suffix(".html"), path.with_suffix(".md")]
    pages[0].write_text(render(page), encoding="utf-8")
    pages[1].write_text(page.markdown(), encoding="utf-8")
    return pages


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of ``tilewise bench report``."""
    parser = argparse.ArgumentParser(
        prog="tilewise bench report", description=__doc__,
        epilog="Exit codes: 0; 2 for a file that cannot be read or is no result.",
    )  # fmt: skip
    parser.add_argument(
        "result",
        type=Path,
        metavar="RESULT.json",
        help="result file of `tilewise bench kernels` or `tilewise bench serve`",
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE.html", help="the page (default: beside RESULT.json)"
    )
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="also write the figures there as PNG files (default: none)",
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    parser.add_argument(
        "--json", action="store_true", help="print medians, ratios, intervals and failures as JSON"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page.

    Returns
    -------
    int
        0; 2 for a file that cannot be read or is no result.
    """
    args = build_parser().parse_args(argv)
    try:
        result = json.loads(args.result.read_text(encoding="utf-8"))
        page = build_page(result)
    except (OSError, ValueError) as error:
        print(f"{args.result}: {error}", file=sys.stderr)
        return EXIT_USAGE
    out = args.out or args.result.with_suffix(".html")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(page), encoding="utf-8")
    if args.plots is not None:
        from tilewise.bench.plots import save_all

        save_all(page.figures(), args.plots)
    if args.json:
        print(json.dumps(page.summary, indent=1))
    elif args.markdown:
        print(page.markdown())
    else:
        print(out)
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
