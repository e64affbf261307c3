"""The dashboard and the metrics page agree with what the exporter has."""

import json
import re
from pathlib import Path

import pytest

from tilewise import exporter
from tilewise.counters import METRICS

DOCS = Path(__file__).resolve().parent.parent / "docs"
DASHBOARD = json.loads((DOCS / "monitoring" / "grafana.json").read_text())
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_that_exist():
    known = {m.name + suffix for m in METRICS.values() for suffix in SUFFIXES[m.kind]}
    asked = {name for text in expressions() for name in re.findall(r"tilewise_\w+", text)}
    assert asked <= known, asked - known


def test_every_metric_has_a_panel():
    asked = " ".join(expressions())
    missing = [
        m.name for m in METRICS.values() if not re.search(rf"{m.name}(_total|_bucket)?\{{", asked)
    ]
    assert missing == []


def test_labels_in_the_dashboard_are_those_of_the_metrics():
    by_name = {m.name: {*m.labels, "engine", "rank", "instance"} for m in METRICS.values()}
    for text in expressions():
        used = set(re.findall(r"(\w+)=~?\"", text))
        for grouped in re.findall(r"by \(([^)]*)\)", text):
            used |= {label.strip() for label in grouped.split(",")}
        for name in re.findall(r"(tilewise_\w+?)(?:_total|_bucket)?\{", text):
            if name in by_name:
                assert used <= by_name[name] | {"le"}, (name, used)


def test_panels_have_titles_descriptions_and_their_own_places():
    taken = set()
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        assert panel["description"].endswith(".")
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs))
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_the_metrics_page_is_generated_from_the_definitions():
    """``python -m tilewise.metrics_page docs/metrics.md`` rewrites it."""
    from tilewise import metrics_page

    assert metrics_page.main([str(DOCS / "metrics.md"), "--check"]) == 0


def test_a_stale_metrics_page_is_noticed_and_rewritten(tmp_path, capsys):
    from tilewise import metrics_page

    page = tmp_path / "metrics.md"
    page.write_text((DOCS / "metrics.md").read_text().replace("tilewise_steps_total", "steps"))
    assert metrics_page.main([str(page), "--check"]) == 1
    assert "does not match" in capsys.readouterr().out
    assert metrics_page.main([str(page)]) == 0
    assert page.read_text() == (DOCS / "metrics.md").read_text()
    page.write_text("no markers")
    with pytest.raises(ValueError, match="once each"):
        metrics_page.main([str(page)])


def test_the_page_names_every_sample(tmp_path, monkeypatch):
    from tilewise import metrics_page

    text = metrics_page.table()
    for metric in METRICS.values():
        suffix = {"counter": "_total"}.get(metric.kind, "")
        assert f"`{metric.name}{suffix}`" in text
        for label in metric.labels:
            assert f"`{label}`" in text
    assert f"{exporter.PERIOD_SECONDS:g} second" in (DOCS / "metrics.md").read_text()
