"""The pages under docs/ keep their promises: links, files, options, messages and metrics exist."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tilewise import cli, settings
from tilewise.counters import METRICS

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [pytest.param(path, id=path.stem) for path in DOCS]
EVERYTHING = [
    pytest.param(path, id=path.stem)
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md", *DOCS)
]
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


# -- examples -------------------------------------------------------------------------------------

# What the examples of a page print, all of them in one process, on a GPU or in the interpreter.
PRINTED = {
    "README": r"largest difference: \S+\n", "masks": r"all as PyTorch\n",
    "ladder": r"(2\.00|1\.99)\d+\n",
}  # fmt: skip
# Blocks that no test runs, by a line of each, and why.
NOT_RUN = {'llm = LLM("MODEL", attention_backend="TILEWISE")': "needs a GPU and a model of vLLM's"}


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text()) if name in languages]


@pytest.mark.parametrize("page", [page for page in EVERYTHING if blocks(page.values[0], "python")])
def test_python_examples_run(page, tmp_path):
    run = [body for body in blocks(page, "python") if not any(line in body for line in NOT_RUN)]
    script = tmp_path / "examples.py"
    script.write_text("\n".join(run))
    env = dict(os.environ)
    if not torch.cuda.is_available():
        env.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, str(script)], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTED[page.stem], done.stdout)


def test_examples_that_are_not_run_are_few_and_python():
    everything = [body for page in EVERYTHING for body in blocks(page.values[0], "python")]
    for line in NOT_RUN:
        (body,) = (body for body in everything if line in body)
        compile(body, line, "exec")
    # What is not run must not hide behind a fence without a language.
    unnamed = [body for page in EVERYTHING for body in blocks(page.values[0], "", "py")]
    assert [body for body in unnamed if re.search(r"^(from|import) \w", body, re.M)] == []


# -- commands -------------------------------------------------------------------------------------

PROGRAMS = {"tilewise", "python", "make", "vllm", "pip", "curl", "prometheus"}


def commands(page: Path, *programs: str) -> list[tuple[str, ...]]:
    """The words of a page's command lines: those in fences, and those quoted whole in a text."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    quoted = re.findall(r"`([a-z]+ [^`]+)`", re.sub(r"\s+", " ", prose(page)))
    lines += [line for line in quoted if not re.search(r"…|^python (-c|-m$)", line)]
    found = (tuple(shlex.split(line, comments=True)) for line in lines)
    return [words for words in found if words and (not programs or words[0] in programs)]


def test_fences_start_programs_that_a_test_knows():
    for page in EVERYTHING:
        for line in "\n".join(blocks(page.values[0], "bash")).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            assert not words or words[0] in PROGRAMS, line
        # A command in a fence without a language would be looked at by nobody.
        for body in blocks(page.values[0], ""):
            assert not re.search(rf"^({'|'.join(PROGRAMS)}) [\w-]", body, re.M), body


OURS = sorted(
    {words for page in EVERYTHING for words in commands(page.values[0], "tilewise", "python")}
)


def parse(lines) -> list[str]:
    """What is wrong with each command line, by the programs' own parsers."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "parse_commands.py")], input=json.dumps(lines),
        env=os.environ | {"PYTHONSAFEPATH": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_our_commands_parse():
    assert len(OURS) >= 40
    wrong = {" ".join(words): said for words, said in zip(OURS, parse(OURS), strict=True) if said}
    assert wrong == {}


def test_commands_that_are_wrong_do_not_parse():
    """The test above could fail: an option, a value, a command, a script, a needed option."""
    wrong = [
        ["tilewise", "bench", "kernels", "--iterations", "3"],
        ["tilewise", "bench", "kernels", "--smok"],
        ["tilewise", "bench", "kernels", "--rounds", "many"],
        ["tilewise", "bench", "plan"],
        ["tilewise", "doctor", "MODEL", "MODEL"],
        ["python", "tests/abuse/abuse.py"],
    ]
    assert all(parse(wrong))


SERVED = [words for words in OURS if words[:3] == ("tilewise", "bench", "serve")]


@pytest.mark.vllm
@pytest.mark.parametrize("words", SERVED, ids=" ".join)
def test_serve_knows_what_it_is_asked_for(words, capsys):
    """Beyond the parser: workloads, backends and variables, by what would be started."""
    assert cli.main([*words[1:], "--dry-run"]) == 0
    assert "--attention-backend TILEWISE" in capsys.readouterr().out


def test_make_has_the_targets():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    named = {words[1] for page in EVERYTHING for words in commands(page.values[0], "make")}
    assert {"demo", "test", "test-gpu", "check"} <= named <= targets


@pytest.mark.vllm
def test_vllm_has_the_options():
    """`vllm serve` lines parse, and options that are not ours are of vLLM's server."""
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    lines = [words for page in EVERYTHING for words in commands(page.values[0], "vllm")]
    serve = {words for words in lines if words[1] == "serve"}
    assert serve
    for words in serve:
        parser.parse_args(list(words[2:]))
    known = {option for action in parser._actions for option in action.option_strings}
    ours = SOURCES + "".join(path.read_text() for path in (ROOT / "tests" / "abuse").glob("*.py"))
    for page in (ROOT / "README.md", *DOCS):
        # Without commands, whose options are looked at above or are of other programs.
        text = re.sub(r"`[a-z][^`]*`", "", prose(page).partition("<!-- results:begin")[0])
        for option in re.findall(r"`(--[a-z][\w-]+)", text):
            positive = option.replace("--no-", "--")
            assert {option, positive} & known or f'"{option}"' in ours, f"{page.name}: {option}"


# -- messages -------------------------------------------------------------------------------------


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
        and not re.match(r"(-|tilewise (bench|doctor)|python|vllm |pip |attention_config)", text)
    ]
    assert len(messages) >= 10
    for text in messages:
        parts = [part.strip() for part in re.split(r"…|\bN\b|\b\d[\d.]*\b|'[^']*'", text)]
        missing = [part for part in parts if len(part) > 2 and part not in code]
        assert not missing, (text, missing)
