"""The page about masks names what exists; `test_docs.py` runs its examples."""

import re
from pathlib import Path

import tilewise
from tilewise import policy

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "masks.md").read_text()


def test_what_the_page_names_exists():
    for name in re.findall(r"`tilewise\.(\w+)`", PAGE):
        assert name in tilewise.__all__
    assert "policy.why_plain_batch" in PAGE
    assert policy.why_plain_batch(True, True) is None
