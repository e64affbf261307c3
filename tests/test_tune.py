"""Measured tiles: the table, how the policy reads it, and the command that writes it."""

import dataclasses
import json

import pytest

from tilewise import cli, policy, tuned
from tilewise.arch import ARCHITECTURES
from tilewise.bench import tune
from tilewise.bench.timing import Summary
from tilewise.bench.tune_candidates import Subject, candidates, gain, is_better, subjects
from tilewise.errors import UnsupportedConfig
from tilewise.geometry import Geometry, shared_memory

A100, ADA, H200 = (ARCHITECTURES[arch] for arch in (80, 89, 90))
LLAMA = Geometry(32, 8, 128, 64, 2)
PREFILL, DECODE = Subject("prefill", 128, 64), Subject("decode", 128, 64)


def table_of(subject: Subject, device: policy.Device, **changes) -> tuned.Table:
    """A table that has the rule's tiles of a kind with changes."""
    rule = subject.tiles(subject.config(device, tuned.NONE))
    tiles = dataclasses.replace(rule, **changes)
    return tuned.NONE.with_tiles(device.arch, subject.kind(device), tiles)


# -- the table and the policy ---------------------------------------------------------------------


@pytest.mark.parametrize("subject", [PREFILL, DECODE])
@pytest.mark.parametrize("device", [A100, ADA, H200], ids=lambda d: f"sm_{d.arch}")
def test_the_plain_kernels_take_what_was_measured(subject, device):
    before = policy.choose(LLAMA, device, plain=True, table=tuned.NONE)
    rule = subject.tiles(before)
    changes = {"num_warps": 12 - rule.num_warps, "block_n": 32, "num_stages": 1, "tail_stages": 1}
    table = table_of(subject, device, **changes)
    after = policy.choose(LLAMA, device, plain=True, table=table)
    assert rule.num_warps in (4, 8)
    assert subject.tiles(after) == dataclasses.replace(rule, **changes, lazy_rescale=False)
    other = PREFILL if subject is DECODE else DECODE
    assert other.tiles(after) == other.tiles(before)
    # Of this architecture alone, and of pages, sizes and dtypes that were measured.
    elsewhere = A100 if device is H200 else H200
    assert policy.choose(LLAMA, elsewhere, plain=True, table=table) == policy.choose(
        LLAMA, elsewhere, plain=True, table=tuned.NONE
    )
    for change in ({"page_size": 16}, {"head_dim": 64}, {"element_size": 4, "kv_element_size": 4}):
        geometry = dataclasses.replace(LLAMA, **change)
        assert policy.choose(geometry, device, plain=True, table=table) == policy.choose(
            geometry, device, plain=True, table=tuned.NONE
        ), change


def test_workers_follow_from_measured_tiles():
    wide = table_of(DECODE, A100, block_n=128, num_stages=2)
    before = policy.choose(LLAMA, A100, plain=True, table=tuned.NONE)
    after = policy.choose(LLAMA, A100, plain=True, table=wide)
    assert after.decode.block_n == 128
    assert after.num_workers < before.num_workers
    assert shared_memory(after.decode, LLAMA) <= A100.shared_memory


def test_gluon_kernels_and_their_twins_stay():
    for subject in (PREFILL, DECODE):
        table = table_of(subject, H200, num_warps=8, num_stages=2)
        assert policy.choose(LLAMA, H200, table=table) == policy.choose(
            LLAMA, H200, table=tuned.NONE
        )


def test_windows_and_products_of_fp8_stay():
    table = table_of(PREFILL, A100, num_stages=4)
    assert policy.choose(LLAMA, A100, window=100, table=table).prefill == (
        policy.choose(LLAMA, A100, window=100, table=tuned.NONE).prefill
    )
    fp8 = dataclasses.replace(LLAMA, kv_element_size=1)
    measured = table_of(Subject("prefill", 128, 64, "fp8_e4m3"), ADA, num_stages=4, block_n=32)
    assert policy.choose(fp8, ADA, table=measured).prefill.num_stages == 4
    assert policy.choose(fp8, ADA, fp8_matmul=True, table=measured).prefill == (
        policy.choose(fp8, ADA, fp8_matmul=True, table=tuned.NONE).prefill
    )


@pytest.mark.parametrize(
    ("changes", "geometry", "device"),
    [
        # More heads share a KV head than the tile has rows.
        ({"block_m": 64}, Geometry(128, 1, 128, 64, 2), A100),
        # Another GPU of the architecture has less shared memory.
        ({"block_n": 128, "num_stages": 4}, LLAMA, dataclasses.replace(A100, shared_memory=99_000)),
    ],
)
def test_a_tile_that_does_not_fit_leaves_the_rule(changes, geometry, device):
    table = table_of(PREFILL, A100, **changes)
    assert policy.choose(geometry, device, plain=True, table=table).prefill == (
        policy.choose(geometry, device, plain=True, table=tuned.NONE).prefill
    )


def test_the_copy_engine_needs_whole_tiles_in_pages():
    table = table_of(PREFILL, H200, block_n=128)  # pages of 64 hold no tile of 128 keys
    assert policy.choose(LLAMA, H200, plain=True, table=table).prefill.block_n == 64


def test_the_table_that_came_along():
    table = tuned.load()
    assert table.text() == tuned.PATH.read_text(), "written by hand? use `tilewise tune`"
    assert policy.choose(LLAMA, A100) == policy.choose(LLAMA, A100, table=table)
    # Tests in the interpreter do not depend on what was measured.
    assert policy.choose(LLAMA, policy.INTERPRETER) == policy.choose(
        LLAMA, policy.INTERPRETER, table=tuned.NONE
    )


def test_files_are_read_as_they_were_written(tmp_path):
    table = table_of(PREFILL, A100, block_n=32).with_tiles(
        80, DECODE.kind(A100), dataclasses.replace(candidates(DECODE, A100)[0], num_warps=8)
    )
    table = table.with_measurement(80, {"gpu": "an A100", "triton": "3.8.0"})
    path = tmp_path / "table.json"
    path.write_text(table.text())
    read = tuned.load(path)
    assert read.text() == table.text()
    assert policy.choose(LLAMA, A100, table=read) == policy.choose(LLAMA, A100, table=table)
    assert json.loads(table.text())["architectures"]["80"]["measured"]["gpu"] == "an A100"
    # A kind that went back to the rule is gone, and so is an architecture without any.
    for subject in (PREFILL, DECODE):
        table = table.with_tiles(80, subject.kind(A100), None)
    assert json.loads(table.text()) == {"architectures": {}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kernel": "plan"}, "kernel 'plan'"),
        ({"block_n": 48}, "block_n 48"),
        ({"rows": 32}, "decode with 32 rows"),
        ({"swizzle": 3}, "swizzle"),
        (None, "architectures"),
    ],
)
def test_files_that_are_no_tables_are_named(tmp_path, change, named):
    text = json.loads(table_of(DECODE, A100).text())
    if change is None:
        text = {}
    else:
        text["architectures"]["80"]["tiles"][0].update(change)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(text))
    with pytest.raises(UnsupportedConfig, match=named) as error:
        tuned.load(path)
    assert str(path) in str(error.value)


# -- candidates and the verdict -------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_candidates_fit_and_begin_with_the_rule(arch):
    device = ARCHITECTURES[arch]
    for subject in subjects(tuned.KERNELS, [64, 128, 256], [64, 16, 48], ["bf16", "fp8_e4m3"]):
        found = candidates(subject, device)
        assert found[0] == subject.tiles(subject.config(device, tuned.NONE))
        assert len(found) == len(set(found)) > 4, subject.name
        kind = subject.kind(device)
        for tiles in found:
            assert shared_memory(tiles, subject.geometry) <= device.shared_memory
            # The policy launches each of them.
            table = tuned.NONE.with_tiles(arch, kind, tiles)
            launched = subject.tiles(subject.config(device, table))
            assert tune.chosen_of(launched) == tune.chosen_of(tiles)


@pytest.mark.parametrize(
    ("other", "better"),
    [
        ({"a": 90.0, "b": 9.0}, True),
        ({"a": 98.0, "b": 9.8}, False),  # within what runs differ by
        ({"a": 50.0, "b": 11.0}, False),  # a batch loses
        ({"a": 90.0, "b": 10.05}, True),
    ],
)
def test_what_is_better(other, better):
    rule = {"a": 100.0, "b": 10.0}
    assert is_better(rule, other) is better
    assert gain(rule, {"a": 50.0, "b": 20.0}) == pytest.approx(1.0)


# -- the command ----------------------------------------------------------------------------------


class Played:
    """Stands for `tune.Bench`: times by tile, of which one kind is wrong and one does not build."""

    def __init__(self, subject, device, args):
        self.subject = subject

    @staticmethod
    def time_of(tiles):
        return 50.0 if (tiles.num_warps, tiles.num_stages) == (8, 2) else 100.0 + tiles.num_stages

    def check(self, tiles):
        rule = self.subject.tiles(self.subject.config(A100, tuned.NONE))
        if tiles != rule and tiles.num_stages == 3:
            return {}, "gate: error 1.0"
        if tiles != rule and tiles.num_stages == 4:
            return {}, "does not compile: OutOfResources"
        return {"a": self.time_of(tiles), "b": 2 * self.time_of(tiles)}, ""

    def compare(self, finalists):
        return [
            {n: Summary(f * self.time_of(t), 0.1, 5) for n, f in (("a", 1), ("b", 2))}
            for t in finalists
        ]


@pytest.fixture
def played(monkeypatch, tmp_path):
    """The command on a GPU that is not there; returns a function that runs it."""
    monkeypatch.setattr(tune, "Bench", Played)
    monkeypatch.setattr(tune.report, "describe_gpu", lambda: {"gpu": "NVIDIA A100", "cuda": "13"})
    monkeypatch.setattr("tilewise.device.describe", lambda device: A100)
    monkeypatch.setattr("tilewise.device.resolve", lambda device: device)
    path = tmp_path / "table.json"
    path.write_text(tuned.NONE.text())

    def run(*argv):
        return tune.main(["--head-dims", "128", "--page-sizes", "64", "--table", str(path), *argv])

    run.path = path
    return run


def test_the_fastest_right_tiles_get_into_the_table(played, capsys, tmp_path):
    out = tmp_path / "times.json"
    assert played("--out", str(out), "--commit", "abc") == tune.EXIT_GATE  # some were wrong
    table = tuned.load(played.path)
    for subject in (PREFILL, DECODE):
        taken = subject.tiles(policy.choose(LLAMA, A100, table=table))
        assert (taken.num_warps, taken.num_stages) == (8, 2)
    assert table.measured[80]["gpu"] == "NVIDIA A100"
    assert table.measured[80]["commit"] == "abc"
    text = capsys.readouterr().out
    assert "taken" in text
    assert "gave wrong results" in text
    rows = json.loads(out.read_text())["rows"]
    assert set(tune.FIELDS) <= set(rows[0])
    wrong = [row for row in rows if row["gate"] == "failed"]
    assert wrong
    assert not any(row["taken"] for row in wrong)


def test_what_is_already_best_is_not_written(played, monkeypatch):
    monkeypatch.setattr(Played, "time_of", staticmethod(lambda tiles: 100.0))
    before = table_of(DECODE, A100, num_warps=8)
    played.path.write_text(before.text())
    played("--kernels", "decode")
    assert tuned.load(played.path).tiles.get(80, {}) == {}, "the rule is as good: it stays"


def test_a_dry_run_and_an_end_of_time_leave_the_table(played, capsys):
    before = played.path.read_text()
    played("--dry-run")
    assert played.path.read_text() == before
    assert played("--budget-seconds", "-1") == tune.EXIT_OK
    assert "out of time before prefill, D 128" in capsys.readouterr().err
    assert played.path.read_text() == before


def test_a_rule_that_is_wrong_ends_the_run(played, monkeypatch, capsys):
    monkeypatch.setattr(Played, "check", lambda self, tiles: ({}, "gate: error 1.0"))
    assert played() == tune.EXIT_USAGE
    assert "the rule's own tiles: gate: error 1.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--kernels", "plan"], "--kernels plan; accepted: prefill, decode"),
        (["--head-dims", "96"], "--head-dims 96; accepted: 64, 128, 256"),
        (["--page-sizes", "40"], "--page-sizes 40; accepted: multiples of 16"),
        (["--kv-dtypes", "int4"], "--kv-dtypes int4; accepted: bf16, fp8_e4m3"),
    ],
)
def test_bad_arguments_are_named(argv, named, capsys):
    assert tune.main(argv) == tune.EXIT_USAGE
    assert named in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(tune.report, "describe_gpu", lambda: {"gpu": None})
    assert cli.main(["tune"]) == tune.EXIT_USAGE
    assert "no CUDA device to measure" in capsys.readouterr().err


def test_the_bench_runs_the_kernels(capsys, device):
    """Two decode tiles over small batches, for real: built, checked against fp64, called again."""
    before = tuned.PATH.read_text()
    argv = ["tune", "--smoke", "--kernels", "decode", "--head-dims", "64", "--page-sizes", "16"]
    assert cli.main([*argv, "--json"]) == tune.EXIT_OK
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 6  # two tiles, three batches
    assert {row["gate"] for row in rows} == {"passed"}
    assert tuned.PATH.read_text() == before, "a smoke run writes no table"
