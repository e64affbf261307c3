"""The pages under docs/ keep their promises: links, files, options, messages and metrics exist."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from tilewise import cli, settings
from tilewise.counters import METRICS

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [pytest.param(path, id=path.stem) for path in DOCS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
SOURCES = "\n".join(
    path.read_text()
    for folder in ("plugin", "kernels", "integration", "bench")
    for path in sorted((ROOT / folder).glob("*.py"))
)


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text())


def test_the_readme_links_every_page():
    readme = (ROOT / "README.md").read_text()
    assert [path.name for path in DOCS if f"docs/{path.name}" not in readme] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        other = page.parent / name if name else page
        assert other.exists(), target
        if heading:
            title = heading.replace("-", " ")
            assert re.search(rf"^#+ {title}$", other.read_text(), re.M | re.I), target


@pytest.mark.parametrize("page", PAGES)
def test_files_and_variables_that_are_named_exist(page):
    text = page.read_text()
    for name in re.findall(r"`((?:plugin|kernels|integration|bench|tests|docs)/[\w/.-]*)`", text):
        assert (ROOT / name).exists(), name
    known = {settings.PREFIX + name.upper() for name in settings.Settings.__annotations__}
    assert set(re.findall(r"TILEWISE_[A-Z]\w*", text)) <= known


@pytest.mark.parametrize("page", PAGES)
def test_metrics_that_are_named_exist(page):
    names = {m.name for m in METRICS.values()}
    for name in re.findall(r"\btilewise_[a-z_]+", page.read_text()):
        stem = re.sub(r"_(total|bucket|sum|count)$", "", name)
        assert name in names or stem in names or name == "tilewise_", name


def commands(page: Path) -> list[str]:
    """Commands of ours, out of blocks and out of sentences."""
    blocks = [body for language, body in FENCE.findall(page.read_text()) if language == "bash"]
    lines = [line for body in blocks for line in body.splitlines()]
    inline = re.findall(r"`([^`]+)`", prose(page).replace("\n", " "))
    ours = re.compile(r"\s*tilewise (bench|doctor|tune)\b")
    return [line for line in (*lines, *inline) if ours.match(line)]


class Parsed(Exception):
    """A command line was understood; nothing was started."""


COMMANDS = [
    pytest.param(line, id=f"{page.stem}-{number}")
    for page in (ROOT / "README.md", *DOCS)
    for number, line in enumerate(dict.fromkeys(commands(page)))
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line, monkeypatch, capsys):
    """By the parser that answers them, with all their options and values."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    try:
        with pytest.raises(Parsed):
            cli.main(shlex.split(line, comments=True)[1:])
    except SystemExit:
        pytest.fail(f"{line}: {capsys.readouterr().err}")


def test_a_wrong_command_would_be_noticed(monkeypatch, capsys):
    for line in ("tilewise bench splits --smoked", "tilewise bench no-such-suite"):
        with pytest.raises(pytest.fail.Exception, match=r"invalid choice|unrecognized"):
            test_commands_are_understood(line, monkeypatch, capsys)


def plain(text: str) -> str:
    """Code or a quotation, without what differs between them: quotes, line breaks, fields."""
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    return re.sub(r"\{[^{}]*\}|%\w|%\.\d\w", "\0", text)


def test_messages_that_troubleshooting_quotes_are_ours():
    """What stands in backticks and reads like a message is in the code, … for whatever varies."""
    code = plain(SOURCES)
    page = ROOT / "docs" / "troubleshooting.md"
    quoted = [text.replace("\n  ", " ") for text in re.findall(r"`([^`]+)`", prose(page))]
    messages = [
        text
        for text in quoted
        if " " in text
        and not re.match(r"(-|tilewise bench|python|vllm |pip |attention_config)", text)
    ]
    assert len(messages) >= 10
    for text in messages:
        parts = [part.strip() for part in re.split(r"…|\bN\b|\b\d[\d.]*\b|'[^']*'", text)]
        missing = [part for part in parts if len(part) > 2 and part not in code]
        assert not missing, (text, missing)
