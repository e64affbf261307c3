"""vLLM's cache of compiled models: an upgraded tilewise changes its key, other backends' stay."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.vllm


@pytest.fixture
def config_class():
    import tilewise

    tilewise.register()
    from vllm.config.attention import AttentionConfig

    return AttentionConfig


@pytest.fixture
def upgrade(monkeypatch):
    """Play another version of tilewise from now on."""
    from tilewise.integration import compile_cache

    return lambda text: monkeypatch.setattr(compile_cache, "fingerprint", lambda: text)


OURS = [
    {"backend": "TILEWISE"},
    {"backend": "CUSTOM"},
    {"backend_per_kind": {"sliding_window": "TILEWISE"}},
    {"backend": "FLASH_ATTN", "backend_per_kind": {"full_attention": "CUSTOM"}},
]
OTHERS = [{}, {"backend": "FLASH_ATTN"}, {"backend_per_kind": {"sliding_window": "TRITON_ATTN"}}]


@pytest.mark.parametrize("settings", OURS, ids=str)
def test_an_upgrade_changes_the_key(settings, config_class, upgrade):
    config = config_class(**settings)
    installed = config.compute_hash()
    assert config.compute_hash() == installed
    upgrade("one")
    one = config.compute_hash()
    upgrade("two")
    assert len({installed, one, config.compute_hash()}) == 3


@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_other_backends_keep_their_cache(settings, config_class, upgrade):
    config = config_class(**settings)
    installed = config.compute_hash()
    upgrade("one")
    assert config.compute_hash() == installed == config_class.compute_hash.tilewise_original(config)


def test_what_else_is_configured_still_counts(config_class):
    flags = [{}, {"flash_attn_version": 3}, {"use_trtllm_attention": False}]
    hashes = {config_class(backend="TILEWISE", **flag).compute_hash() for flag in flags}
    assert len(hashes) == len(flags)


def test_both_caches_of_vllm_take_it_in(config_class, upgrade):
    """The key of its graphs, and that of whole models compiled ahead of time."""
    from vllm.compilation.caching import aot_compile_hash_factors
    from vllm.config import VllmConfig

    config = VllmConfig(attention_config=config_class(backend="TILEWISE"))
    before = config.compute_hash(), aot_compile_hash_factors(config)
    assert (config.compute_hash(), aot_compile_hash_factors(config)) == before
    upgrade("one")
    after = config.compute_hash(), aot_compile_hash_factors(config)
    assert after[0] != before[0]
    assert after[1] != before[1]


def test_every_source_counts_and_its_place_does_not(tmp_path):
    from tilewise.integration import compile_cache

    names = {path.name for path in compile_cache.sources()}
    assert {"backend.py", "impl.py", "builder.py", "fallback.py", "support.py"} <= names
    copies = []
    for path in compile_cache.sources():
        folder = tmp_path / path.parent.name
        folder.mkdir(exist_ok=True)
        copies.append(folder / path.name)
        shutil.copy(path, copies[-1])
    same = compile_cache.fingerprint_of("1", compile_cache.sources())
    assert compile_cache.fingerprint_of("1", copies) == same
    assert compile_cache.fingerprint_of("2", copies) != same
    copies[-1].write_bytes(copies[-1].read_bytes() + b"\n")
    assert compile_cache.fingerprint_of("1", copies) != same


def test_every_process_finds_the_same_key(config_class):
    """Workers and API servers of one installation share the cache."""
    program = (
        "import tilewise; tilewise.register();"
        "from vllm.config.attention import AttentionConfig as C;"
        "print(C(backend='TILEWISE').compute_hash())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split()[-1] == config_class(backend="TILEWISE").compute_hash()


def test_registering_again_wraps_once(config_class):
    import tilewise

    wrapped = config_class.compute_hash
    tilewise.register()
    assert config_class.compute_hash is wrapped
    assert not hasattr(wrapped.tilewise_original, "tilewise_original")
