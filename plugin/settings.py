"""Settings from the environment; the only place that reads ``TILEWISE_*`` variables.

Each field of ``Settings`` is one variable: ``TILEWISE_`` and the field's name in capitals. Only
``fp8_attention`` changes what the kernels compute.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tilewise import side_port
from tilewise.errors import UnsupportedConfig

PREFIX = "TILEWISE_"

# Below the logger that vLLM configures, so that our lines look like its own.
logger = logging.getLogger("vllm.tilewise")

_warned: set[str] = set()


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Parameters
    ----------
    any_vllm : bool
        Register with a vLLM outside the supported range as well.
    cpu_platform : bool
        Belongs to the CPU test platform, which reads it itself; listed so that it is known here.
    fallback : str
        ``auto``: layers that we do not compute go to a backend of vLLM that does. ``error``: vLLM
        does not start with such a layer.
    fp8_attention : str
        How layers with an e4m3 cache are computed. ``off``: with products of 16 bits. ``fp8``: the
        prefill multiplies fp8 operands. ``rotated``: so it does, and keys are rotated before they
        are stored, which outliers ask for.
    metrics_port : str
        ``off``, or ``HOST:PORT`` where the metrics are served besides vLLM's own ``/metrics``.
    metrics_dir : str
        Folder through which workers hand their counters to ``/metrics``; ``auto``: the first
        process makes a temporary one.
    self_check : bool
        Compare the kernels with a plain computation when a server has allocated its KV cache.
    shared_prefixes : str
        ``on``: decodes that begin with the same pages of the cache read these once
        (``tilewise.prefix_rule``), but for batches that the Gluon kernels serve faster; ``always``:
        those too; ``off``.
    """

    any_vllm: bool = False
    cpu_platform: bool = False
    fallback: str = "auto"
    fp8_attention: str = "off"
    metrics_port: str = side_port.OFF
    metrics_dir: str = "auto"
    self_check: bool = True
    shared_prefixes: str = "off"


_SWITCH = {"1": True, "true": True, "0": False, "false": False}


def _parse_switch(name: str, text: str) -> bool:
    value = _SWITCH.get(text.strip().lower())
    if value is None:
        raise UnsupportedConfig(f"{name}={text!r} is not a switch: use 1, true, 0 or false")
    return value


def _parse_fallback(name: str, text: str) -> str:
    value = text.strip().lower()
    if value not in ("auto", "error"):
        raise UnsupportedConfig(f"{name}={text!r} is not a way to fall back: use auto or error")
    return value


def _parse_fp8(name: str, text: str) -> str:
    value = text.strip().lower()
    if value not in ("off", "fp8", "rotated"):
        raise UnsupportedConfig(
            f"{name}={text!r} is not a way to compute fp8 attention: use off, fp8 or rotated"
        )
    return value


def _parse_sharing(name: str, text: str) -> str:
    value = text.strip().lower()
    value = {"1": "on", "true": "on", "0": "off", "false": "off"}.get(value, value)
    if value not in ("off", "on", "always"):
        raise UnsupportedConfig(
            f"{name}={text!r} is not a way to share prefixes: use off, on or always"
        )
    return value


def _parse_folder(name: str, text: str) -> str:
    return text


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "any_vllm": _parse_switch,
    "cpu_platform": _parse_switch,
    "metrics_port": side_port.parse,
    "metrics_dir": _parse_folder,
    "fallback": _parse_fallback,
    "fp8_attention": _parse_fp8,
    "self_check": _parse_switch,
    "shared_prefixes": _parse_sharing,
}


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Read ``Settings`` from an environment; a name we do not know is logged once.

    Parameters
    ----------
    environ : Mapping[str, str]
        ``os.environ``, or a dictionary in tests. Variables without our prefix are not looked at.

    Returns
    -------
    Settings
        Defaults where a variable is not set, or empty.

    Raises
    ------
    UnsupportedConfig
        If a value cannot be read; names the variable, the value and what is accepted.
    """
    known = _known()
    for name in _unknown(environ):
        if name not in _warned:
            _warned.add(name)
            logger.warning("%s", _unknown_text(name, sorted(known)))
    values = {
        field: _PARSERS[field](name, environ[name])
        for name, field in known.items()
        if environ.get(name)
    }
    return Settings(**values)


def defaults() -> dict[str, str]:
    """Return every variable with its default, as one would write it."""
    written = {True: "1", False: "0"}
    return {
        name: written.get(value, value)
        for name, field in _known().items()
        for value in [getattr(Settings(), field)]
    }


def problems(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what is wrong with each variable of ours that is wrong, by name."""
    found = {name: _unknown_text(name, sorted(_known())) for name in _unknown(environ)}
    for name, field in _known().items():
        if environ.get(name):
            try:
                _PARSERS[field](name, environ[name])
            except UnsupportedConfig as error:
                found[name] = str(error)
    return found


def _known() -> dict[str, str]:
    """Field of ``Settings`` by the name of its variable."""
    return {PREFIX + field.name.upper(): field.name for field in fields(Settings)}


def _unknown(environ: Mapping[str, str]) -> list[str]:
    return sorted(n for n in environ if n.startswith(PREFIX) and n not in _known())


def _unknown_text(name: str, known: list[str]) -> str:
    # The prefix they share would make every name look alike.
    suffixes = {k.removeprefix(PREFIX): k for k in known}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), suffixes, n=1, cutoff=0.5)
    hint = f"did you mean {suffixes[near[0]]}?" if near else f"known are {', '.join(known)}"
    return f"unknown setting {name}: {hint}"
