"""The roofline: closed forms, naive attention's result, the plot, the command without a GPU."""

import json
from pathlib import Path

import browser
import pytest
import torch

from tilewise.bench import report, roofline
from tilewise.bench.cases import CASES, Case, shrink

pytest.importorskip("matplotlib", reason="needs matplotlib (pip install 'tilewise[bench]')")

from tilewise.bench import roofline_plot
from tilewise.bench.inputs import CaseInputs
from tilewise.bench.naive import Naive, naive_bytes

BY_NAME = {case.name: case for case in CASES}
KERNELS = Path(__file__).resolve().parent.parent / "bench" / "results" / "h200" / "kernels.json"


def known_rows() -> tuple[dict, list]:
    """Rows as the command makes them, ours from measured times, the naive one made up."""
    result = json.loads(KERNELS.read_text())
    times = {(r["case"], r["provider"]): r["median_us"] for r in result["rows"]}
    prefill, decode = BY_NAME["pf_8x2k"], BY_NAME["dec_b64_8k"]
    work = roofline.matmul_work(8192)
    env = result["env"]
    rows = [
        roofline.make_row("matmul", "matmul", "n = 8192", work,
                          work.flops / env["matmul_tflops"] / 1e6),
        roofline.make_row("naive attention", "naive", "pf_8x2k", roofline.naive_work(prefill), 4e3),
        roofline.make_row("our prefill", "prefill", "pf_8x2k", roofline.attention_work(prefill),
                          times["pf_8x2k", "tilewise"]),
        roofline.make_row("our decode", "decode", "dec_b64_8k", roofline.attention_work(decode),
                          times["dec_b64_8k", "tilewise"]),
    ]  # fmt: skip
    return env, rows


def test_intensities_by_hand():
    assert roofline.matmul_work(8192).intensity == pytest.approx(8192 / 3)
    # One query reads each key and value once: 4 D Hq / (2 D Hkv * 2 bytes) = Hq / Hkv at length.
    decode = roofline.attention_work(BY_NAME["dec_b64_8k"])
    assert decode.intensity == pytest.approx(32 / 8, rel=1e-3)
    assert decode.intensity < 4
    # 8 prompts of 2048: 2 D Hq L (L + 1) over 2 bytes of 2 L D (Hq + Hkv).
    prefill = roofline.attention_work(BY_NAME["pf_8x2k"])
    assert prefill.intensity == pytest.approx(32 * 2049 / (2 * (32 + 8)))
    naive = roofline.naive_work(BY_NAME["pf_8x2k"])
    assert naive.flops == prefill.flops
    assert naive.intensity == pytest.approx(128 * 2049 / (6 * (128 + 2048)))
    assert naive_bytes(BY_NAME["pf_8x2k"]) == 12 * 8 * 32 * (2048 * 128 + 2048 * 2048)


def test_the_roof_bends_at_the_ridge():
    assert roofline.roof(100, 700, 4) == 400
    assert roofline.roof(175, 700, 4) == roofline.roof(1e4, 700, 4) == 700


def test_a_row_agrees_with_itself():
    row = roofline.make_row("x", "prefill", "c", roofline.Work(8_000_000, 2_000_000), 2.0)
    assert (row["intensity"], row["tflops"], row["tbps"]) == (4.0, 4.0, 1.0)
    assert set(roofline.ROOFLINE_FIELDS) <= set(row)


def test_naive_attention_is_right_and_a_wrong_mask_is_noticed(monkeypatch, device):
    case = shrink(BY_NAME["pf_32x512"], 40, 3)
    case = Case("even", "prefill", (40, 40), (40, 40), case.num_q_heads, case.num_kv_heads, 64)
    inputs = CaseInputs(case, str(device), layers=2)
    (build,) = Naive().candidates(case, inputs).values()
    inputs.poison_outputs()
    build().calls[0]()
    assert inputs.check().passed, inputs.check()
    monkeypatch.setattr(torch.Tensor, "triu", lambda x, d: torch.triu(x, d + 1))
    (build,) = Naive().candidates(case, inputs).values()
    build().calls[0]()
    assert not inputs.check().passed


def test_naive_attention_refuses_what_it_cannot_do():
    assert Naive().unsupported(BY_NAME["pf_8x2k"]) is None
    for name in ("pf_ragged", "pf_chunk2k_64k", "dec_b8_4k", "pf_sink_w128_1x8k"):
        assert "naive attention" in Naive().unsupported(BY_NAME[name])


def test_the_plot_holds_every_kernel_ridge_and_ceiling(tmp_path):
    env, rows = known_rows()
    figure = roofline_plot.roofline(env, rows)
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    texts = " ".join(text.get_text() for text in axes.texts)
    for row in rows:
        assert row["name"] in texts
    (legend,) = figure.legends
    entries = " ".join(text.get_text() for text in legend.get_texts())
    for row in rows:
        assert f"{row['name']} ({row['case']}): {row['intensity']:,.1f} FLOP/byte" in entries
    matmul, copy = env["matmul_tflops"], env["copy_tbps"]
    assert f"ridge {matmul / copy:.0f} FLOP/byte" in texts
    assert f"matmul {matmul:g} TFLOP/s" in texts
    assert f"copy {copy:g} TB/s" in texts
    xs, ys = axes.lines[0].get_data()
    assert list(ys) == pytest.approx([xs[0] * copy, matmul, matmul])
    left, right = axes.get_xlim()
    low, high = axes.get_ylim()
    for row in rows:
        assert left < row["intensity"] < right
        assert low < row["tflops"] < high
    wrong = [*rows, {**dict.fromkeys(roofline.ROOFLINE_FIELDS), "name": "odd", "error": "gate: x"}]
    (axes,) = roofline_plot.roofline(env, wrong).axes
    assert "odd" not in " ".join(text.get_text() for text in axes.texts)


def test_labels_stand_inside_the_plot_and_apart():
    env, rows = known_rows()
    figure = roofline_plot.roofline(env, rows)
    figure.canvas.draw()
    (axes,) = figure.axes
    frame = figure.bbox
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(frame.contains(*box.min) and frame.contains(*box.max) for box in boxes)
    for i, box in enumerate(boxes):
        clashes = [axes.texts[j].get_text() for j in range(i) if boxes[j].overlaps(box)]
        assert not clashes, (axes.texts[i].get_text(), clashes)


def test_a_result_is_plotted_again(tmp_path, capsys):
    env, rows = known_rows()
    source = tmp_path / "r.json"
    report.write_result(source, env, rows)
    assert roofline.main(["--from", str(source)]) == roofline.EXIT_OK
    out = capsys.readouterr().out
    assert f"ridge {env['matmul_tflops'] / env['copy_tbps']:.0f} FLOP/byte" in out
    assert "our decode" in out
    assert browser.png_size(tmp_path / "r.png") == (1350, 1020)
    plot = tmp_path / "new" / "p.png"
    assert roofline.main(["--from", str(source), "--plot", str(plot), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows
    assert browser.png_size(plot) == (1350, 1020)


def test_a_wrong_result_is_said_and_fails(tmp_path, capsys):
    env, rows = known_rows()
    rows.append({**dict.fromkeys(roofline.ROOFLINE_FIELDS), "name": "odd", "error": "gate: off"})
    report.write_result(tmp_path / "r.json", env, rows)
    assert roofline.main(["--from", str(tmp_path / "r.json")]) == roofline.EXIT_GATE
    assert "odd: gate: off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "no JSON"),
        ("[]", "no object"),
        ('{"env": {}, "rows": [{"name": "a"}]}', "row 0: no 'kind'"),
        ('{"env": {"copy_tbps": 4.0}, "rows": []}', "no 'matmul_tflops' in its env"),
    ],
)
def test_what_is_no_result_is_refused(content, what, tmp_path, capsys):
    path = tmp_path / "r.json"
    path.write_text(content)
    assert roofline.main(["--from", str(path)]) == roofline.EXIT_USAGE
    assert what in capsys.readouterr().err
    assert roofline.main(["--from", str(tmp_path / "absent.json")]) == roofline.EXIT_USAGE


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--prefill", "dec_b8_4k"], "--prefill 'dec_b8_4k'; accepted: pf_1x16k"),
        (["--decode", "none"], "--decode 'none'; accepted: dec_b1_1k"),
        (["--prefill", "pf_ragged"], "whole prompts of one length"),
    ],
)
def test_usage_errors_name_the_value(arguments, what, capsys):
    assert roofline.main(arguments) == roofline.EXIT_USAGE
    assert what in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_needs_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert roofline.main([]) == roofline.EXIT_USAGE
    assert "no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.alone
def test_the_command_on_the_device(tmp_path):
    out = tmp_path / "roofline.json"
    assert roofline.main(["--out", str(out), "--rounds", "2"]) == roofline.EXIT_OK
    env, rows = roofline.load(out)
    found = {row["name"]: row for row in rows}
    assert set(found) == {"matmul", "naive attention", "our prefill", "our decode"}
    assert found["our prefill"]["median_us"] < found["naive attention"]["median_us"]
    for row in rows:
        ceiling = roofline.roof(row["intensity"], env["matmul_tflops"], env["copy_tbps"])
        # A kernel that reads only may pass the copy, which writes as well.
        assert 0 < row["tflops"] < 1.25 * ceiling, row
    assert (tmp_path / "roofline.png").exists()
