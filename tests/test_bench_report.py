"""Report pages: what they say agrees with the result files, and they look right in a browser."""

import copy
import html.parser
import json
import math
import re
import statistics
import subprocess
import sys
import zlib
from pathlib import Path

import browser
import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib (pip install 'tilewise[bench]')")
pytest.importorskip("jinja2", reason="needs jinja2 (pip install 'tilewise[bench]')")
pytest.importorskip("scipy", reason="needs scipy (pip install 'tilewise[bench]')")

from tilewise.bench import html as report_html
from tilewise.bench import (
    html_parts,
    html_serve,
    plots,
    publish,
    report,
    serve_plan,
    summary,
    workloads,
)
from tilewise.bench.report import write_pages

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results" / "h200"
VOID_TAGS = {"meta", "link", "br", "img", "input", "hr", "wbr"}


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def several_runs() -> dict:
    """A result with three interleaved runs, several concurrencies and failures of every kind."""
    chosen = [workloads.WORKLOADS["s_1k_128_c64"].at_concurrency(c) for c in (1, 8, 64)]
    speed = {"TILEWISE": 1.05, "FLASH_ATTN": 1.0, "STRANGER": 0.5}
    rows = []
    for turn in serve_plan.turns_of(list(speed), chosen, 3):
        jitter = 1 + 0.01 * (zlib.crc32(repr(turn.key).encode()) % 7 - 3)
        rate = speed[turn.backend] * jitter * turn.workload.concurrency**0.7
        row = {
            "workload": turn.workload.name, "backend": turn.backend, "run": turn.run,
            "group": "d#0", "request_throughput": rate, "output_throughput": 128 * rate,
            "completed": turn.workload.num_prompts, "failed": 0,
            "shape": {"input_len": 1024, "output_len": 128, "range_ratio": 0.0,
                      "concurrency": turn.workload.concurrency,
                      "num_prompts": turn.workload.num_prompts},
        }  # fmt: skip
        for base, names in ((300.0, "ttft"), (12.0, "tpot")):
            row |= {f"p{p}_{names}_ms": base * (1 + p / 99) / speed[turn.backend] * jitter
                    for p in (50, 90, 99)}  # fmt: skip
        rows.append(row)
    rows[4]["error"] = "12 of 16 completed"
    rows[5]["error"] = "not done after 300 s\nserver log:\n<script>alert('a & b')</script>"
    return {"env": {**load("serve")["env"]}, "rows": rows}


class Reader(html.parser.HTMLParser):
    """Collects text and attributes; fails on tags that do not close."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [v for k, v in attrs if k in ("href", "src", "xlink:href") and v]
        if tag not in VOID_TAGS:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID_TAGS:
            self.stack.pop()

    def handle_endtag(self, tag):
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.stack == []
    return reader


RESULT_FILES = {"kernels": load("kernels"), "serve": load("serve"), "several": several_runs()}


@pytest.fixture(scope="module", params=list(RESULT_FILES))
def page(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    result = folder / "result.json"
    result.write_text(json.dumps(RESULT_FILES[request.param]))
    assert report_html.main([str(result)]) == 0
    return folder / "result.html"


def test_a_page_is_whole_and_loads_nothing(page):
    text = page.read_text()
    reader = read(text)
    assert len(reader.ids) == len(set(reader.ids)), "an id occurs twice"
    assert all(link.startswith("#") for link in reader.links)
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    assert not re.search(r"@import|url\((?!#)", text)
    assert plots.INK not in text
    assert "<script" not in text
    assert text.count("<svg ") >= 2


def test_the_same_result_gives_the_same_page(tmp_path):
    result = load("kernels")
    pages = [report_html.render(report_html.build_page(result)) for _ in range(2)]
    assert pages[0] == pages[1]


@pytest.mark.parametrize("name", sorted(p.stem for p in RESULTS.glob("kernels*.json")))
def test_the_kernels_page_has_every_time_and_ratio(name):
    result = load(name)
    found = summary.kernel_summary(result)
    rows = {(r["case"], r["provider"]): r for r in result["rows"]}
    assert len(found["lines"]) == len({r["case"] for r in result["rows"]})
    for line in found["lines"]:
        times = {p: rows[line["case"], p]["median_us"] for p in found["providers"]
                 if (line["case"], p) in rows}  # fmt: skip
        times = {p: t for p, t in times.items() if t}
        if not times:  # a case that was cut
            assert line["to_base"] is line["to_best"] is None
            continue
        assert line["to_base"] == pytest.approx(times["fa3"] / times["tilewise"])
        rivals = {p: t for p, t in times.items() if not p.startswith("tilewise")}
        assert line["to_best"] == pytest.approx(min(rivals.values()) / times["tilewise"])
        assert rivals[line["best_peer"]] == min(rivals.values())
    assert [g["kind"] for g in found["groups"]] == list(
        dict.fromkeys(line["kind"] for line in found["lines"])
    )
    for group in found["groups"]:
        ratios = [line["to_base"] for line in found["lines"] if line["kind"] == group["kind"]]
        ratios = [ratio for ratio in ratios if ratio is not None]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        assert group["to_base"] == pytest.approx(mean)
    text = " ".join(read(report_html.render(report_html.build_page(result))).text)
    for row in result["rows"]:
        if row["median_us"]:
            assert html_parts.number(row["median_us"]) in text
        else:
            assert row["error"].split(":")[0] in text
    env = result["env"]
    ceilings: tuple[str, ...] = ()
    if "--no-ceilings" not in env["command"]:
        ceilings = (f"{env['matmul_tflops']} TFLOP/s", f"{env['copy_tbps']} TB/s")
    burst = re.search(r"--burst-ms \d+", env["command"])[0]
    for what in (*ceilings, "1,980", env["driver"], burst):
        assert what in text, what


def test_missing_peers_and_wrong_results_are_said_first():
    result = load("kernels")
    result["env"]["missing"] = {"fa3_best": "no module named flash_attn"}
    result["env"]["smoke"] = "cases were shrunk"
    result["rows"] += [
        {**dict.fromkeys(report.KERNEL_FIELDS), "case": "pf_1x16k", "provider": "odd",
         "error": "plain: gate: off by 3", "gate": "failed"},
        {**dict.fromkeys(report.KERNEL_FIELDS), "case": "pf_1x16k", "provider": "fa3_best",
         "error": "no module named flash_attn"},
    ]  # fmt: skip
    page = report_html.build_page(result)
    assert any("odd at pf_1x16k" in text for text in page.warnings)
    assert any("cases were shrunk" in text for text in page.warnings)
    text = page.markdown()
    assert "| FA3 at its best | no module named flash_attn | all |" in text
    assert text.count("no module named flash_attn") == 1


def test_a_run_that_only_checked_results_says_so():
    """What ``--smoke`` leaves without a GPU: gates, no times, no peers."""
    rows = [
        {**dict.fromkeys(report.KERNEL_FIELDS), "case": case, "provider": provider,
         "error": "not timed", "gate": "passed", "rel_error": 1e-3, "path": "p"}
        for case in ("pf_32x512", "dec_b8_4k") for provider in ("tilewise", "tilewise_p16")
    ]  # fmt: skip
    env = {"date": "d", "gpu": None, "smoke": "the times mean nothing"}
    page = report_html.build_page({"env": env, "rows": rows})
    text = page.markdown()
    assert "| case | tilewise | pages of 16 |" in text
    assert "| dec_b8_4k | right | right |" in text
    assert "not timed" not in text
    assert list(page.figures()) == []
    assert "<svg" not in report_html.render(page)


def test_runs_that_all_failed_make_a_page():
    result = several_runs()
    for row in result["rows"]:
        row["error"] = "exited with 1\nserver log:\nout of memory"
    page = report_html.build_page(result)
    assert list(page.figures()) == []
    text = page.markdown()
    assert "27 runs failed" in text
    assert "| s_1k_128_c8 | FLASH_ATTN | 0 of 3 |" in text
    assert "None: it takes a completed run" in text
    assert "out of memory" in report_html.render(page)


def test_failed_runs_count_nowhere():
    result = several_runs()
    found = summary.serve_summary(result)
    assert [f["what"] for f in found["failures"]] == ["12 of 16 completed", "not done after 300 s"]
    bad = result["rows"][4]
    cell = next(c for c in found["cells"]
                if (c["workload"], c["backend"]) == (bad["workload"], bad["backend"]))  # fmt: skip
    assert (cell["runs"], cell["asked"]) == (2, 3)
    good = [r["p50_ttft_ms"] for r in result["rows"] if not r.get("error")
            and (r["workload"], r["backend"]) == (bad["workload"], bad["backend"])]  # fmt: skip
    assert cell["metrics"]["p50_ttft_ms"] == [min(good), statistics.median(good), max(good)]
    (ratio,) = (
        r
        for r in found["ratios"]
        if (r["workload"], r["peer"]) == (bad["workload"], bad["backend"])
        and r["metric"] == "output_throughput"
    )
    assert ratio["pairs"] == 2
    assert ratio["low"] is None
    text = report_html.render(report_html.build_page(result))
    assert "2 runs failed and count in no median" in text
    assert "&lt;script&gt;alert" in text


def test_ratios_above_one_speak_for_ours_and_have_intervals():
    found = summary.serve_summary(several_runs())
    ratios = [r for r in found["ratios"] if r["peer"] == "STRANGER" and r["pairs"] == 3]
    assert {r["metric"] for r in ratios} == set(summary.RATIO_METRICS)
    for r in ratios:
        assert 1.9 < r["low"] <= r["ratio"] <= r["high"] < 2.3
        assert r["interleaved"]


def test_servers_that_did_not_stand_together_are_not_called_interleaved():
    result = several_runs()
    for row in result["rows"]:
        if row["backend"] == "STRANGER":
            row["group"] = "d#1"
    found = summary.serve_summary(result)
    assert {(r["peer"], r["interleaved"]) for r in found["ratios"]} == {
        ("FLASH_ATTN", True), ("STRANGER", False)
    }  # fmt: skip
    # A file from before rows said so.
    old = load("serve")
    for row in old["rows"]:
        del row["group"]
    assert {r["interleaved"] for r in summary.serve_summary(old)["ratios"]} == {None}
    assert "| not recorded |" in report_html.build_page(old).markdown()


def test_few_pairs_give_no_verdict():
    entry = {"ratio": 0.8, "low": 0.7, "high": 0.9, "pairs": 3}
    verdicts = {
        n: html_serve._verdict({**entry, "pairs": n}) for n in (3, summary.RUNS_FOR_A_VERDICT)
    }
    assert verdicts == {3: "", 6: "bad"}
    assert html_serve._verdict({**entry, "high": 1.1, "pairs": 9}) == ""
    assert html_serve._verdict({**entry, "low": 1.1, "high": 1.3, "pairs": 9}) == "good"
    assert html_serve._verdict({**entry, "low": None, "high": None, "pairs": 1}) == ""


def test_paired_ratio_by_hand():
    one = summary.paired_ratio([2.0], [4.0])
    assert (one.ratio, one.low, one.high, one.pairs) == (pytest.approx(0.5), None, None, 1)
    same = summary.paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (same.ratio, same.low, same.high) == (
        pytest.approx(2),
        pytest.approx(2),
        pytest.approx(2),
    )
    many = summary.paired_ratio([1.0, 2.0, 4.0, 8.0], [1.0] * 4)
    assert many.ratio == pytest.approx(8**0.5)
    assert 1.0 <= many.low < many.ratio < many.high <= 8.0
    assert summary.paired_ratio([1.0, 2.0, 4.0, 8.0], [1.0] * 4) == many
    for ours, peer in (([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([math.nan], [1.0])):
        with pytest.raises(ValueError, match="accepted"):
            summary.paired_ratio(ours, peer)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    import numpy as np

    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(40):
        ratios = np.exp(rng.normal(math.log(1.2), 0.1, size=12))
        found = summary.paired_ratio(list(ratios), [1.0] * 12)
        hits += found.low <= 1.2 <= found.high
    assert hits >= 32


def test_throughput_is_drawn_against_concurrency():
    curves = summary.serve_summary(several_runs())["curves"]
    (curve,) = curves
    assert [point[0] for point in curve["lines"]["FLASH_ATTN"]] == [1, 8, 64]
    assert summary.serve_summary(load("serve_34d93b1"))["curves"] == []


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "Expecting"),
        ("[]", "keys 'env' and 'rows'"),
        ('{"env": {}, "rows": []}', "no rows"),
        ('{"env": {}, "rows": [{"x": 1}]}', "rows with the keys x"),
    ],
)
def test_what_is_no_result_is_refused(content, what, tmp_path, capsys):
    path = tmp_path / "r.json"
    path.write_text(content)
    assert report_html.main([str(path)]) == report_html.EXIT_USAGE
    error = capsys.readouterr().err
    assert what in error
    assert str(path) in error
    assert not (tmp_path / "r.html").exists()
    assert report_html.main([str(tmp_path / "absent.json")]) == report_html.EXIT_USAGE


def test_the_command_writes_pages_plots_markdown_and_json(tmp_path):
    call = [sys.executable, "-m", "tilewise.cli", "bench", "report", str(RESULTS / "serve.json")]
    out = tmp_path / "new" / "page.html"
    options = ["-o", str(out), "--plots", str(tmp_path / "plots"), "--json"]
    done = subprocess.run([*call, *options], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["ours"] == "TILEWISE"
    assert out.read_text().startswith("<!doctype html>")
    images = sorted((tmp_path / "plots").iterdir())
    assert [image.stem for image in images] == ["ratios", "throughput", "tpot", "ttft"]
    assert all(browser.png_size(image)[0] > 1000 for image in images)
    done = subprocess.run(
        [*call, "-o", str(out), "--markdown"], capture_output=True, text=True, check=True
    )
    rates = [
        row["request_throughput"] for row in load("serve")["rows"]
        if (row["workload"], row["backend"]) == ("s_1k_128_c64", "TILEWISE")
    ]  # fmt: skip
    count, rate = f"{len(rates)} of {len(rates)}", f"{statistics.median(rates):.1f}"
    assert f"| s_1k_128_c64 | TILEWISE | {count} | {rate} " in done.stdout


def test_a_missing_library_costs_the_page_only(tmp_path, monkeypatch, capsys):
    result = tmp_path / "serve.json"
    result.write_text(json.dumps(load("serve")))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    write_pages(result)
    assert "it needs jinja2" in capsys.readouterr().err
    assert not (tmp_path / "serve.html").exists()


def test_publishing_several_runs_gives_medians_without_void_runs():
    result = several_runs()
    assert publish.runs_text(result) == "medians of 3 runs, void ones left out"
    lines = publish.serve_section(result).splitlines()
    assert len(lines) == 2 + 9
    assert sum("(2 of 3 runs)" in line for line in lines) == 2
    every = copy.deepcopy(result)
    for row in every["rows"]:
        row["error"] = "x\ny"
    assert publish.serve_section(every).count("void: x |") == 9


def test_the_line_at_1_runs_through_no_figure():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    result = load("kernels")
    figure = plots.ratio_bars(summary.kernel_summary(result))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    line = axes.transData.transform((1.0, 0.0))[0]
    boxes = {text.get_text(): text.get_window_extent(canvas.get_renderer()) for text in axes.texts}
    assert len(boxes) > 10
    assert any(float(text) < 1 for text in boxes)
    assert [text for text, box in boxes.items() if box.x0 <= line <= box.x1] == []
    # Nor does a mark of somebody else lie on ours.
    rates = plots.rate_dots(summary.kernel_summary(result), result["env"], {"fa3": "theirs"})
    order = {mark.get_label(): mark.get_zorder() for mark in rates.axes[0].lines}
    assert order["tilewise"] > order["theirs"]


@pytest.mark.parametrize(("name", "scale", "bars"), [("serve", "linear", True),
                                                     ("serve_prefix", "log", False)])  # fmt: skip
def test_figures_of_servers(name, scale, bars):
    """An outlier does not press the others together; every row of panels has its unit."""
    result = load(name)
    found = summary.serve_summary(result)
    (axes,) = plots.ratio_intervals(found, html_serve.METRIC_TEXT).axes
    assert axes.get_xscale() == scale
    for which in ("ttft", "tpot"):
        panels = [a for a in plots.latency_bars(found, which).axes if a.get_visible()]
        assert len(panels) == len(found["workloads"])
        assert {a.get_ylabel() for a in panels[::2]} == {f"{which.upper()}, ms"}
    text = report_html.render(report_html.build_page(result))
    assert ("bars: 95% intervals" in text) == bars
    assert ("too few pairs for intervals" in text) == (not bars)
    assert ("3 pairs of runs, 95% interval" in text) == bars
    assert re.search(r"SM clock [\d,]+ MHz \(least [\d,]+, most [\d,]+\)", text)
    # A long name may break, in its table, where a setting begins.
    assert ("TILEWISE@<wbr>TILEWISE_SHARED_PREFIXES=1" in text) == (name == "serve_prefix")


# JavaScript, without double quotes.
PROBES = {
    "over": "document.documentElement.scrollWidth - document.documentElement.clientWidth",
    "all": "document.querySelectorAll('svg').length",
    "figures": """[...document.querySelectorAll('svg')]
        .filter(s => s.clientWidth > 300 && s.clientHeight > 60).length""",
    "out": """[...document.querySelectorAll('h1,p,dd,dt,pre,.card,figcaption,.wide')]
        .filter(e => e.getBoundingClientRect().right > innerWidth).length""",
    "clipped": """[...document.querySelectorAll('svg')].filter(s => {
        const b = s.getBBox(), v = s.viewBox.baseVal;
        return b.x < v.x - 1 || b.x + b.width > v.x + v.width + 1
            || b.y < v.y - 1 || b.y + b.height > v.y + v.height + 1 }).length""",
}

needs_browser = pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING)


@needs_browser
@pytest.mark.parametrize("width", [1280, 520])
def test_nothing_sticks_out_in_a_browser(page, tmp_path, width):
    """The page never scrolls sideways (wide tables do, in their own box), and figures are drawn."""
    found = browser.measure(page, tmp_path, width, PROBES)
    assert (found["over"], found["out"], found["clipped"]) == ("0", "0", "0"), found
    assert found["figures"] == found["all"] != "0"


@needs_browser
def test_light_and_dark_pages_differ_as_they_should(page, tmp_path):
    light = browser.screenshot(page, tmp_path / "light.png", 900, 700)
    dark = browser.screenshot(page, tmp_path / "dark.png", 900, 700, dark=True)
    assert browser.png_size(light) == browser.png_size(dark) == (900, 700)
    assert brightness(light) > 200 > 100 > brightness(dark)


def brightness(path: Path) -> float:
    from matplotlib.image import imread

    return float(imread(path)[..., :3].mean() * 255)
