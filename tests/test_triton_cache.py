"""Where our kernels are kept between starts."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm")

from tilewise.integration.triton_cache import VARIABLE, kept_for_all_models

pytestmark = pytest.mark.vllm


@pytest.fixture
def root(tmp_path, monkeypatch):
    """vLLM's cache, in which it gave the model a folder."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    return tmp_path / "vllm"


def inside() -> str | None:
    with kept_for_all_models():
        return os.environ.get(VARIABLE)


@pytest.mark.parametrize("of_model", ["torch_compile_cache/1a/rank_0_0", "dummy_cache/rank_0_0"])
def test_every_start_looks_in_the_same_folder(root, monkeypatch, of_model):
    given = str(root / of_model / "triton_cache")
    monkeypatch.setenv(VARIABLE, given)
    assert inside() == str(root / "tilewise" / "triton_cache")
    assert os.environ[VARIABLE] == given


def test_a_failure_gives_the_folder_back(root, monkeypatch):
    given = str(root / "dummy_cache" / "triton_cache")
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ValueError, match="mine"), kept_for_all_models():
        raise ValueError("mine")
    assert os.environ[VARIABLE] == given


@pytest.mark.parametrize("chosen", ["/elsewhere/triton", None])
def test_the_users_choice_stays(root, monkeypatch, chosen):
    monkeypatch.delenv(VARIABLE, raising=False)
    if chosen:
        monkeypatch.setenv(VARIABLE, chosen)
    assert inside() == chosen
    assert not root.exists()


def test_where_nothing_can_be_written_vllms_stays(root, monkeypatch):
    given = str(root / "dummy_cache" / "triton_cache")
    monkeypatch.setenv(VARIABLE, given)
    root.mkdir()
    (root / "tilewise").write_text("a file where the folder would be")
    assert inside() == given


def test_triton_follows(root, monkeypatch):
    from triton import knobs

    monkeypatch.setenv(VARIABLE, str(root / "dummy_cache" / "triton_cache"))
    with kept_for_all_models():
        assert knobs.cache.dir == str(root / "tilewise" / "triton_cache")
    assert knobs.cache.dir == str(root / "dummy_cache" / "triton_cache")
