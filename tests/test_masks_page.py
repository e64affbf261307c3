"""The page about masks keeps its promises: its examples run, one after another, as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

import tilewise
from tilewise import policy

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "masks.md").read_text()


def test_the_examples_run(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(blocks) == 5
    script = tmp_path / "examples.py"
    script.write_text("\n".join(blocks))
    env = dict(os.environ)
    if not torch.cuda.is_available():
        env.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, str(script)], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all as PyTorch\n"


def test_what_the_page_names_exists():
    for name in re.findall(r"`tilewise\.(\w+)`", PAGE):
        assert name in tilewise.__all__
    assert "policy.why_plain_batch" in PAGE
    assert policy.why_plain_batch(True, True) is None
