"""Settings: defaults, what is accepted, and what is said of the rest."""

import dataclasses
import logging
import re
from pathlib import Path

import pytest

import tilewise.bench
import tilewise.integration
import tilewise.kernels
from tilewise import settings
from tilewise.errors import TilewiseError, UnsupportedConfig
from tilewise.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch):
    monkeypatch.setattr(settings, "_warned", set())


@pytest.fixture
def log(caplog, monkeypatch):
    # vLLM's logger keeps its records from the root logger, where pytest listens.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="vllm.tilewise")
    return caplog


def test_defaults_and_immutability():
    found = load_settings({"HOME": "/", "TILE_SIZE": "7"})
    assert found == Settings()
    assert not found.any_vllm
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.any_vllm = True


def test_every_field_has_a_parser():
    assert {field.name for field in dataclasses.fields(Settings)} == set(settings._PARSERS)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), (" TRUE ", True), ("0", False), ("false", False), ("", False)],
)
def test_switch(text, value):
    assert load_settings({"TILEWISE_ANY_VLLM": text}).any_vllm is value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", "on"),
        ("on", "on"),
        ("0", "off"),
        (" False ", "off"),
        ("ALWAYS", "always"),
        ("", "off"),
    ],
)
def test_shared_prefixes(text, value):
    assert load_settings({"TILEWISE_SHARED_PREFIXES": text}).shared_prefixes == value
    with pytest.raises(UnsupportedConfig, match=r"'never' is not a way .* use off, on or always"):
        load_settings({"TILEWISE_SHARED_PREFIXES": "never"})


@pytest.mark.parametrize("text", ["2", "yes please", "-1", "10", "True,", "\u0661"])
def test_garbage_is_refused_by_name_and_value(text):
    with pytest.raises(UnsupportedConfig, match="TILEWISE_ANY_VLLM") as caught:
        load_settings({"TILEWISE_ANY_VLLM": text})
    assert repr(text) in str(caught.value)
    assert "1, true, 0 or false" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TilewiseError)


def test_unknown_name_is_logged_once_with_the_nearest(log):
    environ = {"TILEWISE_ANY_VLM": "1"}
    assert load_settings(environ) == Settings()
    load_settings(environ)
    assert log.messages == [
        "unknown setting TILEWISE_ANY_VLM: did you mean TILEWISE_ANY_VLLM?",
    ]


def test_unknown_name_like_no_other_lists_what_is_known(log):
    load_settings({"TILEWISE_QQQQ": "1"})
    assert len(log.messages) == 1
    assert "known are TILEWISE_ANY_VLLM, TILEWISE_CPU_PLATFORM" in log.messages[0]


def test_other_peoples_variables_are_silent(log):
    load_settings({"VLLM_PLUGINS": "tilewise", "tilewise_any_vllm": "x", "TILEWISEX": "1"})
    assert log.messages == []


def test_nobody_else_reads_our_variables():
    readers = set()
    for package in (tilewise, tilewise.kernels, tilewise.integration, tilewise.bench):
        for path in Path(package.__file__).parent.glob("*.py"):
            if re.search(r"(environ|getenv)\W+(get\W+)?TILEWISE_", path.read_text()):
                readers.add(path.name)
    assert readers <= {"settings.py"}


# Text of the wrong kind, a number out of range, what is no UTF-8, two values, far too much.
GARBAGE = ["maybe", "-1", "99999999999999999999", "\udcff\udcfe", "1;0", "x" * 100_000]
ACCEPTED = {
    "TILEWISE_ANY_VLLM": "use 1, true, 0 or false",
    "TILEWISE_CPU_PLATFORM": "use 1, true, 0 or false",
    "TILEWISE_FALLBACK": "use auto or error",
    "TILEWISE_FP8_ATTENTION": "use off, fp8 or rotated",
    "TILEWISE_METRICS_PORT": "use off, a port from 1 to 65535 (on 127.0.0.1), or HOST:PORT",
    "TILEWISE_SELF_CHECK": "use 1, true, 0 or false",
    "TILEWISE_SHARED_PREFIXES": "use off, on or always",
}


@pytest.mark.parametrize("text", GARBAGE, ids=lambda text: ascii(text[:12]))
@pytest.mark.parametrize("name", sorted(settings.defaults()))
def test_garbage_in_every_variable_is_answered(name, text):
    if name == "TILEWISE_METRICS_DIR":  # any text names a folder; the exporter says what is wrong
        assert load_settings({name: text}).metrics_dir == text
        assert settings.problems({name: text}) == {}
        return
    with pytest.raises(UnsupportedConfig) as caught:
        load_settings({name: text})
    said = str(caught.value)
    assert said.startswith(f"{name}={text!r} is not a ")
    assert said.endswith(ACCEPTED[name])
    # What `tilewise doctor` shows instead of stopping.
    assert settings.problems({name: text, "TILEWISE_FALLBAK": "1"})[name] == said
