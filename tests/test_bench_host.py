"""``tilewise bench host``."""

from __future__ import annotations

import json

import pytest
import torch

from tilewise.bench import host


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert host.main(["--out", str(tmp_path / "host.json")]) == host.EXIT_USAGE
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "host.json").exists()


@pytest.mark.parametrize("words", [["--requests", "0"], ["--calls", "1"]])
def test_sizes_without_sense_are_named(words, capsys):
    assert host.main(words) == host.EXIT_USAGE
    assert " ".join(words) in capsys.readouterr().err


@pytest.mark.gpu
def test_it_times_every_call(tmp_path):
    out = tmp_path / "host.json"
    assert host.main(["--requests", "40", "--calls", "30", "--out", str(out)]) == host.EXIT_OK
    rows = {row["call"]: row for row in json.loads(out.read_text())["rows"]}
    assert {"plan", "cache write", "decode of 40 requests", "prefill of 16 requests"} <= set(rows)
    for row in rows.values():
        assert set(host.HOST_FIELDS) <= set(row)
        assert 1 < row["median_us"] <= row["p99_us"]
