"""Registration: both names, any number of times, in spawned processes, and on a foreign vLLM.

A vLLM that is not installed is played by a module with an enum of the same make.
"""

import json
import logging
import os
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import tilewise
from tilewise.integration import compat

REGISTRY = "vllm.v1.attention.backends.registry"
BACKEND = "vllm.v1.attention.backend"
ELSEWHERE = "somebody.else.Backend"


def make_registry() -> ModuleType:
    """A registry module as vLLM 0.32 and 0.33 have it, of our own making."""
    module = ModuleType(REGISTRY)
    overrides = {}

    class AttentionBackendEnum(Enum):
        FLASH_ATTN = "vllm.FlashAttentionBackend"
        CUSTOM = None

        @classmethod
        def register(cls, name, value):
            if name in cls._member_map_:
                raise ValueError(f"{name} is there")
            member = object.__new__(cls)
            member._name_, member._value_ = name, value
            type.__setattr__(cls, name, member)
            cls._member_map_[name] = member
            cls._value2member_map_[value] = member
            cls._member_names_.append(name)
            return member

        def get_path(self):
            path = overrides.get(self, self.value)
            if not path:
                raise ValueError("must be registered first")
            return path

    module.AttentionBackendEnum = AttentionBackendEnum
    module.register_backend = overrides.__setitem__
    module.overrides = overrides
    return module


@pytest.fixture
def vllm(monkeypatch, caplog):
    """A vLLM 0.33.0 made of stand-ins; the log of what tilewise says."""
    package = ModuleType("vllm")
    package.__version__ = "0.33.0"
    registry, backend = make_registry(), ModuleType(BACKEND)
    for module, dotted in compat._REQUIRED:
        if module == BACKEND:
            head, _, attribute = dotted.partition(".")
            holder = getattr(backend, head, SimpleNamespace())
            if attribute:
                setattr(holder, attribute, object())
            setattr(backend, head, holder)
    for module in (package, registry, backend):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(compat, "_said", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.tilewise")
    return SimpleNamespace(package=package, registry=registry, backend=backend, log=caplog)


def names(vllm) -> dict:
    """Name and class path of every member that has one."""
    found = {}
    for name, member in vllm.registry.AttentionBackendEnum.__members__.items():
        try:
            found[name] = member.get_path()
        except ValueError:
            continue
    return found


FLASH = {"FLASH_ATTN": "vllm.FlashAttentionBackend"}
OURS = {"TILEWISE": compat.BACKEND_PATH, "CUSTOM": compat.BACKEND_PATH}


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33.0+cu130", "0.33.1rc1"])
def test_both_names_any_number_of_times(vllm, version):
    vllm.package.__version__ = version
    assert compat.register_all() == ("TILEWISE", "CUSTOM")
    member = vllm.registry.AttentionBackendEnum["TILEWISE"]
    assert tilewise.register() is None
    assert compat.register_all() == ("TILEWISE", "CUSTOM")
    assert vllm.registry.AttentionBackendEnum["TILEWISE"] is member
    assert names(vllm) == {**FLASH, **OURS}
    assert vllm.log.messages == []


def test_custom_of_another_plugin_is_left_alone(vllm):
    vllm.registry.register_backend(vllm.registry.AttentionBackendEnum.CUSTOM, ELSEWHERE)
    assert compat.register_all() == ("TILEWISE",)
    compat.register_all()
    assert names(vllm) == {**FLASH, "TILEWISE": compat.BACKEND_PATH, "CUSTOM": ELSEWHERE}
    (line,) = vllm.log.messages
    assert "CUSTOM" in line
    assert ELSEWHERE in line


def test_our_name_of_another_plugin_is_left_alone(vllm):
    vllm.registry.AttentionBackendEnum.register("TILEWISE", ELSEWHERE)
    assert compat.register_all() == ("CUSTOM",)
    assert names(vllm) == {**FLASH, "TILEWISE": ELSEWHERE, "CUSTOM": compat.BACKEND_PATH}
    assert len(vllm.log.messages) == 1


@pytest.mark.parametrize("version", ["0.26.0", "0.31.2", "0.34.0", "0.34.0rc1", "1.0.0"])
def test_unsupported_version_is_one_line_and_nothing_registered(vllm, version):
    vllm.package.__version__ = version
    for _ in range(3):
        assert tilewise.register() is None
    assert names(vllm) == FLASH
    (line,) = vllm.log.messages
    assert version in line
    assert "0.32 and 0.33" in line
    assert "\n" not in line


def test_unsupported_version_on_request(vllm, monkeypatch):
    vllm.package.__version__ = "0.35.0"
    monkeypatch.setenv("TILEWISE_ANY_VLLM", "1")
    assert compat.register_all() == ("TILEWISE", "CUSTOM")


def test_source_builds_are_judged_by_what_they_have(vllm):
    vllm.package.__version__ = "0.34.0.dev12+g1234567"
    assert compat.register_all() == ("TILEWISE", "CUSTOM")


@pytest.mark.parametrize(("module", "dotted"), compat._REQUIRED)
def test_a_missing_interface_is_named(vllm, module, dotted):
    head, _, attribute = dotted.partition(".")
    holder = getattr(sys.modules[module], head)
    if module == REGISTRY and attribute == "CUSTOM":
        sys.modules[module].AttentionBackendEnum = Enum("E", {"A": "a"})
    elif attribute:
        delattr(holder, attribute)
    else:
        delattr(sys.modules[module], head)
    assert compat.register_all() == ()
    (line,) = vllm.log.messages
    assert f"{module}.{dotted}" in line
    assert "0.33.0" in line


@pytest.mark.parametrize(
    "error", [ImportError, ModuleNotFoundError, OSError, RuntimeError, KeyError, TypeError]
)
def test_a_vllm_that_cannot_be_imported_raises_nothing(vllm, monkeypatch, error):
    def broken():
        raise error("libcuda.so.1: no such file")

    monkeypatch.setattr(compat, "vllm_version", broken)
    assert tilewise.register() is None
    assert names(vllm) == FLASH
    (line,) = vllm.log.messages
    assert "libcuda.so.1" in line


def test_an_unreadable_setting_is_one_line(vllm, monkeypatch):
    monkeypatch.setenv("TILEWISE_ANY_VLLM", "perhaps")
    tilewise.register()
    tilewise.register()
    assert names(vllm) == FLASH
    (line,) = vllm.log.messages
    assert "TILEWISE_ANY_VLLM='perhaps'" in line


@pytest.mark.vllm
def test_spawned_processes_get_the_member_before_plugins_load():
    probe = Path(__file__).with_name("spawn_probe.py")
    done = subprocess.run(
        [sys.executable, str(probe)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "VLLM_PLUGINS": "tilewise,tilewise_cpu_platform"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("SEEN ")]
    seen = json.loads(line.removeprefix("SEEN "))
    assert seen == {
        word: [word.upper(), compat.BACKEND_PATH, "TilewiseBackend"]
        for word in ("tilewise", "CUSTOM")
    }


UNSUPPORTED = """
from tilewise.integration import compat
compat.vllm_version = lambda: "0.99.0"
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import AttentionConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
assert "TILEWISE" not in AttentionBackendEnum.__members__
assert not AttentionBackendEnum.CUSTOM.is_overridden()
print(AttentionConfig(backend="FLASH_ATTN").backend.name)
"""


@pytest.mark.vllm
def test_unsupported_vllm_leaves_other_backends_usable():
    done = subprocess.run(
        [sys.executable, "-c", UNSUPPORTED],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FLASH_ATTN" in done.stdout
    said = [line for line in (done.stdout + done.stderr).splitlines() if "0.99.0" in line]
    assert len(said) == 1


SELECT = """
import torch
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

config = AttentionSelectorConfig(128, torch.bfloat16, "auto", None)
for name in ("TILEWISE", "CUSTOM", "CPU_ATTN"):
    print(name, current_platform.get_attn_backend_cls(AttentionBackendEnum[name], config, 32))
for bad in (config._replace(head_size=60), config._replace(use_mla=True)):
    try:
        current_platform.get_attn_backend_cls(AttentionBackendEnum.TILEWISE, bad, 32)
    except ValueError as error:
        print("refused", error)
"""


@pytest.mark.vllm
def test_cpu_platform_selects_by_either_name_and_says_why_not():
    pytest.importorskip("tilewise_cpu_platform")
    done = subprocess.run(
        [sys.executable, "-c", SELECT],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "TILEWISE_CPU_PLATFORM": "1",
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert f"TILEWISE {compat.BACKEND_PATH}" in lines
    assert f"CUSTOM {compat.BACKEND_PATH}" in lines
    assert any(line.startswith("CPU_ATTN vllm.") for line in lines)
    refusals = [line for line in lines if line.startswith("refused")]
    assert len(refusals) == 2
    assert "head_size" in refusals[0]
