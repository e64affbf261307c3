"""What ``tilewise doctor`` finds out about the machine: versions, GPUs, registration, settings."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import tilewise
from tilewise import settings, support
from tilewise.errors import IncompatibleVllm, UnsupportedConfig
from tilewise.integration import compat

GROUP, NAME = "vllm.general_plugins", "tilewise"


@dataclass(frozen=True)
class Problem:
    """Something wrong: ``fatal`` when tilewise would not serve, else ``warning``."""

    severity: str
    about: str
    text: str


@dataclass(frozen=True)
class Gpu:
    """One CUDA device that torch sees; memory in bytes."""

    name: str
    capability: tuple[int, int]
    sms: int
    shared_memory: int
    memory: int


@dataclass(frozen=True)
class Registration:
    """Under which names vLLM knows the backend, or why it does not."""

    names: tuple[str, ...]
    entry_point: bool
    why_not: str | None


@dataclass(frozen=True)
class Setting:
    """One ``TILEWISE_*`` variable: its value, and what is wrong with it."""

    name: str
    value: str | None
    default: str | None
    problem: str | None


def versions() -> dict[str, str | None]:
    """Return the versions of everything involved; None for what is not there."""
    found: dict[str, str | None] = {"tilewise": tilewise.__version__}
    for package in ("vllm", "torch", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["cuda_driver"] = cuda_driver()
    found["python"] = platform.python_version()
    return found


def version_problems(found: Mapping[str, str | None]) -> Iterator[Problem]:
    """Yield a problem for each package older than what tilewise declares that it needs."""
    try:
        declared = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:  # a checkout on the path
        return
    for line in declared:
        bound = re.fullmatch(r"(\w+)>=([\d.]+)", line)
        version = found.get(bound[1]) if bound else None
        if bound and version and _numbers(version) < _numbers(bound[2]):
            text = f"{bound[1]} {version}; accepted: {bound[2]} and later"
            yield Problem("fatal", "versions", text)


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: (2, 13) of ``2.13.0+cpu``."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def cuda_driver(load: Callable[[str], Any] = ctypes.CDLL) -> str | None:
    """Return the CUDA version that the installed driver supports, such as ``13.0``."""
    try:
        library = load("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def gpus() -> tuple[Gpu, ...]:
    """Describe the CUDA devices that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        props: Any = torch.cuda.get_device_properties(index)
        capability = (props.major, props.minor)
        shared = props.shared_memory_per_block_optin
        sms = props.multi_processor_count
        found.append(Gpu(props.name, capability, sms, shared, props.total_memory))
    return tuple(found)


def gpu_problems(found: tuple[Gpu, ...]) -> Iterator[Problem]:
    """Yield a problem for each device that is too old."""
    oldest = ".".join(map(str, support.MIN_COMPUTE_CAPABILITY))
    for gpu in found:
        if gpu.capability < support.MIN_COMPUTE_CAPABILITY:
            capability = ".".join(map(str, gpu.capability))
            text = f"{gpu.name} has compute capability {capability}; accepted: {oldest} and later"
            yield Problem("fatal", "gpu", text)


def registration(environ: Mapping[str, str] | None = None) -> Registration:
    """Register as vLLM would, and say under which names or why not.

    Parameters
    ----------
    environ : Mapping[str, str], optional
        Where ``VLLM_PLUGINS`` is looked for; this process's environment by default.
    """
    environ = os.environ if environ is None else environ
    declared = bool(metadata.entry_points(group=GROUP, name=NAME))
    names, why_not = _register()
    if why_not is None:
        why_not = _not_loaded(declared, environ.get("VLLM_PLUGINS"))
    return Registration(() if why_not else names, declared, why_not)


def _not_loaded(declared: bool, allowed: str | None) -> str | None:
    """Why vLLM would not load a plug-in that works."""
    if not declared:
        return (
            f"no installed package declares the entry point {NAME!r} in {GROUP}: install tilewise "
            "with pip into vLLM's environment (a checkout on the path is not enough)"
        )
    if allowed is not None and NAME not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed!r} leaves tilewise out; add tilewise to it, or unset it"
    return None


def _register() -> tuple[tuple[str, ...], str | None]:
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        return (), f"vLLM cannot be imported ({error})"
    try:
        compat.require_supported()
    except (IncompatibleVllm, UnsupportedConfig) as error:
        return (), str(error)
    with _logged() as lines:
        names = compat.register_all()
    return names, None if names else "; ".join(lines) or "both names are taken"


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what tilewise logs meanwhile."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    collector = Collector()
    compat.logger.addHandler(collector)
    try:
        yield lines
    finally:
        compat.logger.removeHandler(collector)


def settings_found(environ: Mapping[str, str] | None = None) -> tuple[Setting, ...]:
    """List every variable that exists, and those of ours that do not."""
    environ = os.environ if environ is None else environ
    problems = settings.problems(environ)
    known = settings.defaults()
    names = [*known, *sorted(set(problems) - set(known))]
    return tuple(Setting(n, environ.get(n), known.get(n), problems.get(n)) for n in names)


def setting_problems(found: tuple[Setting, ...]) -> Iterator[Problem]:
    """Yield a problem for each variable that is misspelt (a warning) or unreadable (fatal)."""
    for setting in found:
        if setting.problem:
            severity = "warning" if setting.default is None else "fatal"
            yield Problem(severity, "settings", setting.problem)
