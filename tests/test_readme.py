"""The README keeps its promises: what it names exists; `test_docs.py` runs and parses the rest."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import tomllib
import torch

from tilewise import settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
HOW_IT_WORKS = ROOT / "docs" / "how-it-works.md"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def code_blocks(language: str) -> list[str]:
    return [body for name, body in FENCE.findall(README) if name == language]


def prose() -> str:
    return FENCE.sub("", README)


def section(title: str) -> str:
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert match, f"README.md has no section {title!r}"
    return match[1]


def test_the_variables_are_those_of_the_settings():
    rows = re.findall(
        r"^\| `(TILEWISE_\w+)` \| `([^`]*)` \|", section("Environment variables"), re.M
    )
    named = dict(rows)
    assert len(named) == len(rows)
    known = {settings.PREFIX + field.name.upper(): field for field in fields(settings.Settings)}
    assert named.keys() == known.keys()
    for name, default in named.items():
        loaded = settings.load_settings({name: default})
        assert getattr(loaded, known[name].name) == known[name].default, name
    # The demo's own variable never reaches the package.
    elsewhere = set(re.findall(r"TILEWISE_[A-Z]\w*", README)) - known.keys()
    assert elsewhere == {"TILEWISE_DEMO_MODEL"}


def test_the_links_lead_somewhere():
    for page in (ROOT / "README.md", HOW_IT_WORKS):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith("#"):
                heading = target[1:].replace("-", " ")
                assert re.search(rf"^#+ {heading}$", page.read_text(), re.M | re.I), target
            elif not target.startswith("http"):
                linked, _, heading = target.partition("#")
                assert (page.parent / linked).exists(), f"{page.name} links to {target}"
                text = (page.parent / linked).read_text() if heading else ""
                heading = heading.replace("-", " ")
                assert re.search(rf"^#+ {heading}$" if heading else "", text, re.M | re.I), target


def test_the_files_that_the_texts_name_exist():
    folders = "plugin|kernels|integration|bench|tests|docs"
    for text in (prose(), HOW_IT_WORKS.read_text()):
        for name in re.findall(rf"`((?:{folders})/[\w/.-]*)`", text):
            if not name.startswith("bench/results"):
                assert (ROOT / name).exists(), name


def test_the_extras_and_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"'\.\[(\w+)\]'", README))
    assert extras <= project["optional-dependencies"].keys()
    assert f"Python {project['requires-python'].removeprefix('>=')} or later" in README
    (vllm,) = project["optional-dependencies"]["vllm"]
    low, end = re.fullmatch(r"vllm>=0\.(\d+),<0\.(\d+)", vllm).groups()
    assert f"0.{low} or 0.{int(end) - 1}" in README


@pytest.mark.vllm
def test_vllm_says_what_the_limits_quote():
    """The reasons in the table are the ones that the backend gives."""
    from tilewise.integration.backend import TilewiseBackend

    good = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None,
        "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": (9, 0), "attn_type": "decoder",
    }  # fmt: skip
    cases = [
        {"kv_cache_dtype": "nvfp4"}, {"use_rswa": True}, {"head_size": 84}, {"block_size": 24},
        {"device_capability": (7, 5)}, {"use_mla": True},
        {"use_mm_prefix": True, "use_non_causal": True},
        {"use_dcp": True, "has_sliding_window": True},
    ]  # fmt: skip
    quoted = re.findall(r"`([^`]+)`", FENCE.sub("", section("Limits")))
    assert TilewiseBackend.validate_configuration(**good) == []
    for case in cases:
        (reason,) = TilewiseBackend.validate_configuration(**good | case)
        patterns = [re.escape(text).replace("…", ".+") for text in quoted]
        assert any(re.fullmatch(p, reason) for p in patterns), f"README does not quote {reason!r}"


def test_numbers_of_speed_stand_only_between_the_markers():
    before, rest = README.split("<!-- results:begin -->")
    _, after = rest.split("<!-- results:end -->")
    units = r"\d\s*(TFLOP|TB/s|GB/s|tok(ens)?/s|req/s|[µm]s\b|%|\S\s+(fast|slow))"
    assert not re.search(units, before + after)
