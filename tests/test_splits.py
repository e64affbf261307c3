"""Three cuts of a decode batch: their records, their models, and the command."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import cli, plan_rule, policy
from tilewise.arch import ARCHITECTURES
from tilewise.bench import report, split_rules, splits
from tilewise.bench.cases import CASES, Case, shrink

# numpy's remarks on poison that masked tiles read and select away; the GPU has no such voice.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BY_NAME = {case.name: case for case in CASES}
H200 = ARCHITECTURES[90]


def config_for(heads=(8, 2), window=0):
    geometry = policy.Geometry(*heads, 128, 64, 2)
    config = policy.choose(geometry, H200, window=window, plain=True)
    return dataclasses.replace(config, window=window)


def walked(found, query_lens, config):
    """Key tiles of each item that the kernel would walk, and by which program: its arithmetic."""
    seen = {}
    items = split_rules.items_of(query_lens, found.cu_work, config)
    starts = {item.begin: item for item in items}
    for program, (unit, end, *_) in enumerate(found.records):
        while unit < end:
            item = starts[max(b for b in starts if b <= unit)]
            tiles = item.length - config.item_overhead
            begin = unit - item.begin
            stop = min(item.length, begin + end - unit)
            lo, hi = begin * tiles // item.length, stop * tiles // item.length
            seen.setdefault(item.begin, []).append((program, lo, hi))
            unit += stop - begin
    return {item.begin: (item, seen.get(item.begin, [])) for item in items}


@settings(deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 16), st.integers(0, 3000)), min_size=1, max_size=6),
    count=st.integers(1, 20),
    window=st.sampled_from([0, 100]),
)
def test_splits_walk_every_tile_once(requests, count, window):
    config = config_for(window=window)
    query_lens = [q for q, _ in requests]
    seq_lens = [q + c for q, c in requests]
    found = split_rules.cut("fixed", query_lens, seq_lens, config, count)
    items = walked(found, query_lens, config)
    assert len(found.records) == count * len(items)
    for item, parts in items.values():
        tiles = item.length - config.item_overhead
        assert [lo for _, lo, _ in parts] == [0, *(hi for _, _, hi in parts[:-1])]
        assert parts[-1][2] == tiles
        sizes = [hi - lo for _, lo, hi in parts]
        assert set(sizes[:-1]) <= {policy.cdiv(tiles, count)}
        assert 0 < sizes[-1] <= policy.cdiv(tiles, count)
        # Who shares an item follow each other, and all of them know.
        programs = [program for program, _, _ in parts]
        assert programs == list(range(programs[0], programs[0] + len(parts)))
        assert {found.shared[p] for p in programs} == {(programs[0], len(parts))}
    busy = sum(found.work) - sum(1 for _, p in items.values() for _ in p) * config.item_overhead
    merged = sum(len(p) for _, p in items.values() if len(p) > 1) / split_rules.PIECES_A_UNIT
    assert busy == pytest.approx(sum(i.length - config.item_overhead for i, _ in items.values())
                                 + merged)  # fmt: skip


def test_even_stretches_are_the_plans():
    config = config_for()
    lengths = [1] * 5, [100, 3000, 1, 64, 900]
    found = split_rules.cut("even", *lengths, config, 0)
    plan = plan_rule.plan_batch(*lengths, config)
    assert found.records == plan.worker_record
    assert found.cu_work == plan.cu_work
    assert found.shared is None
    assert sum(found.work) >= plan.header[2]


def test_the_heuristic_by_hand():
    rule = split_rules.heuristic_splits
    assert rule(106, 132, 64) == 1  # 80 % of the places are taken
    assert rule(105, 132, 64) > 1
    assert rule(8, 264, 1) == 1  # nothing to split
    # One item on 4 places: 4 splits fill a wave; 3 fill 75 %, which is not within 85 % of it.
    assert rule(1, 4, 64) == 4
    # Three items on 8: 2 splits fill 6 of 8 places; 5 fill 15 of 16, 8 fill three waves.
    assert rule(3, 8, 64) == 5
    # 8 items on 264 places: 33 splits fill all; 29 are the first to fill more than 85 % of them.
    assert rule(8, 264, 2048) == 29
    # Splits that leave a split as many tiles as fewer splits do are no choice: 4 tiles by 3 and 4.
    assert rule(1, 4, 3) == 3
    assert rule(1, 100, 2048, most=16) <= 16


def test_the_heuristic_does_not_see_other_lengths():
    """What even stretches are for: one long request among many short ones."""
    config = config_for((32, 8))
    kv_lens = [256] * 31 + [131072]
    found = {r: split_rules.cut(r, [1] * 32, kv_lens, config, 8) for r in split_rules.RULES}
    assert found["heuristic"].splits == 1
    idle = {r: split_rules.modelled_idle(c, config.num_workers) for r, c in found.items()}
    assert idle["heuristic"] > 0.9
    assert idle["even"] < 0.1


def cut_of(work):
    return split_rules.Cut("fixed", 1, (), (), (), tuple(work))


def test_modelled_idle_by_hand():
    assert split_rules.modelled_idle(cut_of([5.0, 5.0]), 2) == 0
    assert split_rules.modelled_idle(cut_of([6.0, 2.0]), 2) == pytest.approx(4 / 12)
    # In their order: 1 and 3 start, the 2 follows the 1, and the 1 follows whichever ends first.
    assert split_rules.modelled_idle(cut_of([1.0, 3.0, 2.0, 1.0]), 2) == pytest.approx(1 / 8)
    assert split_rules.modelled_idle(cut_of([4.0]), 4) == 0.75
    assert split_rules.modelled_idle(cut_of([4.0, 0.0, 0.0]), 1) == 0
    assert split_rules.modelled_idle(cut_of([]), 4) == 0


def test_measured_idle_by_hand():
    idle = split_rules.measured_idle
    assert idle([(10, 20, 0), (10, 20, 1)], 2) == 0
    assert idle([(10, 20, 0), (10, 15, 1)], 2) == 0.25
    assert idle([(10, 20, 7)], 4) == 0.75
    # Programs that overlap on an SM count once; a gap between two counts.
    assert idle([(10, 16, 0), (12, 18, 0), (19, 20, 0)], 1) == pytest.approx(0.1)
    assert idle([(10, 20, 0), (0, 0, 0)], 1) == 0
    assert idle([(0, 0, 0)], 2) == 0


def test_cuts_that_are_none():
    config = config_for()
    with pytest.raises(ValueError, match="17 query tokens; accepted: 1 to 16"):
        split_rules.cut("even", [17], [20], config, 1)
    with pytest.raises(ValueError, match="rule 'odd'; accepted: fixed, heuristic, even"):
        split_rules.cut("odd", [1], [20], config, 1)


# -- the kernel under every cut -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spec8_b8_32k", "dec_fp8_b8_4k"])
def test_every_cut_gives_the_result(name, device):
    """In the interpreter cases shrink, and get more splits than they have tiles."""
    args = splits.build_parser().parse_args(["--fixed", "1", "3", "--layers", "1", "--smoke"])
    case = shrink(BY_NAME[name], 300, 2)
    rows = splits.run_case(case, args, None)
    assert [row["rule"] for row in rows] == ["fixed 1", "fixed 3", "heuristic", "even"]
    assert all(row["gate"] == "passed" and row["rel_error"] < 0.2 for row in rows)


# What is merged then is whatever the memory held.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) enc:RuntimeWarning")
def test_a_cut_that_leaves_tiles_out_fails(device, monkeypatch, capsys):
    whole = split_rules.cut

    def without_the_first(*args):
        found = whole(*args)
        return dataclasses.replace(found, records=((0,) * 8, *found.records[1:]))

    monkeypatch.setattr(splits, "cut", without_the_first)
    assert splits.main(["--smoke", "--cases", "dec_b8_4k"]) == splits.EXIT_GATE
    assert "gate: " in capsys.readouterr().out


@pytest.mark.gpu
def test_clocks_and_times_of_a_small_case():
    args = splits.build_parser().parse_args(["--rounds", "2", "--burst-ms", "2", "--layers", "4"])
    case = Case("small", "decode", (1,) * 12, tuple(200 * i + 1 for i in range(12)))
    rows = splits.run_case(case, args, None)
    assert all(row["gate"] == "passed" for row in rows)
    for row in rows:
        assert row["median_us"] > 0
        assert 0 <= row["sm_idle"] < 1
        assert 0 < row["clock_step_ns"] < 5_000
        assert row["to_even"] > 0


# -- the command ----------------------------------------------------------------------------------


def test_the_model_of_all_decodes(tmp_path, capsys):
    out = tmp_path / "splits.json"
    assert cli.main(["bench", "splits", "--model", "--fixed", "4", "16", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert report.schema_errors(result, splits.FIELDS) == []
    assert "nothing ran" in result["env"]["model"]
    decodes = [case.name for case in CASES if case.kind == "decode"]
    assert [row["case"] for row in result["rows"]] == [n for n in decodes for _ in range(4)]
    assert all(row["gate"] == "not run" for row in result["rows"])
    assert all(name in text for name in decodes)
    by = {(row["case"], row["rule"]): row["modelled_idle"] for row in result["rows"]}
    for name in ("dec_zipf_b128", "dec_zipf_b256", "dec_ragged64"):
        assert by[name, "even"] < 0.02 < by[name, "heuristic"]
    assert splits.main(["--from", str(out)]) == 0
    assert capsys.readouterr().out == text


def test_a_smoke_run_writes_what_it_checked(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("the interpreter's run; the GPU has its own")
    out = tmp_path / "splits.json"
    assert splits.main(["--smoke", "--cases", "dec_zipf_b32", "--json", "--out", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(out.read_text())
    assert {row["gate"] for row in result["rows"]} == {"passed"}
    assert {row["median_us"] for row in result["rows"]} == {None}
    assert "nothing was timed" in result["env"]["smoke"]


def test_the_table_compares_with_ours():
    rows = splits.model_case(BY_NAME["dec_zipf_b32"], H200, [8])
    for row, us in zip(rows, (30.0, 60.0, 20.0), strict=True):
        row |= {"median_us": us, "spread_us": 0.1, "sm_idle": 0.25, "gate": "passed"}
    splits._compare({row["rule"]: row for row in rows})
    assert [row["to_even"] for row in rows] == [1.5, 3.0, 1.0]
    text = splits.table_text(rows)
    assert "3.00x" in text
    assert "25.0%" in text


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--cases", "pf_8x2k", "--model"], "pf_8x2k: no decode; accepted: cases of decodes"),
        (["--cases", "nothing", "--model"], "no case matches 'nothing'"),
        (["--fixed", "0", "--model"], "--fixed 0; accepted: 1 to 128"),
        (["--from", "absent.json"], "absent.json"),
    ],
)
def test_what_does_not_fit_is_said(argv, text, capsys):
    assert splits.main(argv) == splits.EXIT_USAGE
    assert text in capsys.readouterr().err


def test_without_a_gpu_nothing_is_measured(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert splits.main([]) == splits.EXIT_USAGE
    assert "--model and --smoke need none" in capsys.readouterr().err
