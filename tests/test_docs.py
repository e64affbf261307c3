"""The pages under docs/ keep their promises: links, files, options, messages and metrics exist."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tilewise import settings
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


def test_the_figure_of_the_data_flow_says_what_there_is():
    """Its files, tensors and metrics exist, all metrics are in it, and it has a background."""
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    (alt, target), *_ = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", page)
    assert "CUDA graph" in alt
    figure = ElementTree.parse(ROOT / "docs" / target).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    width, height = map(int, figure.attrib["viewBox"].split()[2:])
    ground = figure.find(f"{svg}rect")
    assert ground.attrib["fill"] == "#ffffff"
    assert (int(ground.attrib["width"]), int(ground.attrib["height"])) == (width - 2, height - 2)
    text = "\n".join("".join(node.itertext()) for node in figure.iter(f"{svg}text"))
    files = re.findall(r"\w+/\w+\.py", text)
    assert len(files) >= 6
    assert [name for name in files if not (ROOT / name).exists()] == []
    names = {m.name.removeprefix("tilewise_") for m in METRICS.values()}
    words = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", re.sub(r"\w+/\w+\.py", "", text)))
    handed = (ROOT / "integration" / "metadata.py").read_text()
    tensors = {
        word for word in words - names if re.search(rf"^    {word}: torch.Tensor", handed, re.M)
    }
    assert tensors == {"query_start_loc", "seq_lens", "block_table", "slot_mapping"}
    assert words - tensors <= names
    assert names <= set(re.findall(r"\w+", text))


def commands(page: Path) -> list[str]:
    blocks = [body for language, body in FENCE.findall(page.read_text()) if language == "bash"]
    lines = [line.split("#")[0] for body in blocks for line in body.splitlines()]
    inline = re.findall(r"`(tilewise bench [^`]+)`", prose(page).replace("\n", " "))
    return [line.strip() for line in (*lines, *inline) if line.strip().startswith("tilewise bench")]


SUITES = sorted({line.split()[2] for page in DOCS for line in commands(page)})


@pytest.mark.parametrize("suite", SUITES)
def test_bench_commands_know_their_options(suite):
    done = subprocess.run(
        [sys.executable, "-m", "tilewise.cli", "bench", suite, "--help"],
        env=os.environ | {"PYTHONSAFEPATH": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for page in DOCS:
        for line in commands(page):
            if line.split()[2] == suite:
                given = r"'--serve-args=[^']*'|--serve-args=('[^']*'|\S+)"  # of vLLM's server
                line = re.sub(given, "--serve-args", line)
                for option in re.findall(r"--[\w-]+", line):
                    assert option in done.stdout, line


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
