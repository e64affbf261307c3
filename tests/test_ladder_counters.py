"""Counters of the ladder, from Nsight Compute, of which a script takes the place."""

import os
import stat

import pytest

from tilewise.bench.ladder import counters

COLUMNS = ["ID", "Process ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"]


def launch(number: int, kernel: str, dram: str, sectors: str, unit: str = "byte") -> list[str]:
    """Lines of one launch as ncu writes them."""
    metrics = ((counters.DRAM, unit, dram), (counters.L2, "sector", sectors))
    return [",".join(f'"{cell}"' for cell in (number, 1, kernel, *metric)) for metric in metrics]


TABLE = [
    "==PROF== Connected to process 1",
    ",".join(f'"{name}"' for name in COLUMNS),
    *launch(0, "ladder_marker_kernel", "64", "1"),
    *launch(1, "_scores_kernel", "1,000", "10"),
    *launch(2, "_softmax_kernel", "2000", "20"),
    *launch(3, "ladder_marker_kernel", "64", "1"),
    *launch(4, "_flash2_kernel", "1.5", "3", unit="Kbyte"),
    "==PROF== Disconnected from process 1",
]


def test_counters_add_up_between_markers():
    assert counters.parse(TABLE) == [
        {"dram_bytes": 3000, "l2_bytes": 30 * 32}, {"dram_bytes": 1500, "l2_bytes": 3 * 32}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (["==ERROR== no"], "no table in what ncu wrote"),
        ([*TABLE[:2], *launch(0, counters.MARKER, "1", "1"), *launch(1, "k", "1", "1", "furlong")],
         "unit 'furlong'; known: byte"),
        ([*TABLE[:2], *launch(0, counters.MARKER, "1", "1"), *launch(1, "k", "n/a", "1")],
         "value 'n/a'; a number was expected"),
        (['"ID","Kernel Name"', '"0","k"'], "no 'Metric Name'"),
    ],
)  # fmt: skip
def test_what_ncu_did_not_write_is_said(lines, what):
    with pytest.raises(ValueError, match=what):
        counters.parse(lines)


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Return a function that puts a command named ncu on the path, made of shell lines."""

    def put(script: str) -> None:
        ncu = tmp_path / "ncu"
        # Its log file is the third word of the command.
        ncu.write_text(f"#!/bin/sh\n{script}\n")
        ncu.chmod(ncu.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


def test_counters_come_from_ncu(fake_ncu, tmp_path):
    (tmp_path / "table").write_text("\n".join(TABLE))
    fake_ncu(f"cp {tmp_path}/table $3")
    found, why = counters.measure(2, timeout=30)
    assert why is None
    assert [rung["dram_bytes"] for rung in found] == [3000, 1500]
    assert counters.measure(3, timeout=30) == ([], "ncu saw 2 rungs of 3")


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ('echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"; exit 1',
         "ERR_NVGPUCTRPERM"),
        ('echo "==WARNING== No kernels were profiled." > $3', "No kernels were profiled"),
        ("exit 3", "ncu exited with 3"),
        ("exec sleep 30", "more than the 1 s that were left"),
    ],
)  # fmt: skip
def test_why_there_are_no_counters_is_said(script, what, fake_ncu):
    fake_ncu(script)
    found, why = counters.measure(13, timeout=1)
    assert found == []
    assert what in why


def test_a_machine_without_ncu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(counters, "PLACES", ())
    assert counters.measure(13, timeout=1) == ([], "no ncu on this machine")
