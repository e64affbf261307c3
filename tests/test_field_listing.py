"""tests/README.md names, for every kind of field failure, tests that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
KINDS = "ABCDEFGHIJKLMNOPQ"
REFERENCE = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
NAMED_FOR_A_KIND = re.compile(r"test_([a-q])\d+_")


def sections():
    """``{kind: text}`` of the list of field failures."""
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (\w)\. .*$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def names_in(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name[:5] == "test_"}


def test_every_kind_is_listed_in_order():
    assert "".join(sections()) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_tests_that_exist(kind):
    listed = REFERENCE.findall(sections()[kind])
    assert listed
    assert sections()[kind].count("::") == len(listed), "a reference that cannot be read"
    for file, name in listed:
        assert name in names_in(TESTS / file), f"{file}::{name}"


def test_every_test_named_for_a_kind_is_listed_under_it():
    listed = {kind: set(REFERENCE.findall(text)) for kind, text in sections().items()}
    named = [
        (match[1].upper(), path.name, name)
        for path in sorted(TESTS.glob("test_*.py"))
        for name in sorted(names_in(path))
        if (match := NAMED_FOR_A_KIND.match(name))
    ]
    assert len(named) > 60
    missing = [item for item in named if item[1:] not in listed[item[0]]]
    assert missing == []
