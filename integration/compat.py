"""Which vLLM we register with, and how: every dependence on its version stands here.

vLLM lets the user name an attention backend by a member of its enum ``AttentionBackendEnum``.
``CUSTOM`` is a member kept free for plug-ins; ``TILEWISE`` is one that we add. Members pickle by
value, and a spawned engine core unpickles its configuration before it loads any plug-in, so the
added member must bring the call along that creates it in the new process.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
from typing import Any

from tilewise import exporter
from tilewise.errors import IncompatibleVllm, UnsupportedConfig
from tilewise.integration import compile_cache, fallback
from tilewise.settings import load_settings

BACKEND_PATH = "tilewise.integration.backend.TilewiseBackend"
OWN_NAME = "TILEWISE"
SHARED_NAME = "CUSTOM"

# First supported release, and the first one that is not.
MIN_VLLM = (0, 32)
END_VLLM = (0, 34)
SUPPORTED_TEXT = "0.32 and 0.33"

_REGISTRY = "vllm.v1.attention.backends.registry"

# What we build on, as module and dotted attributes. A vLLM that lacks one is not supported,
# whatever it calls itself.
_REQUIRED = (
    (_REGISTRY, "register_backend"),
    (_REGISTRY, "AttentionBackendEnum.CUSTOM"),
    (_REGISTRY, "AttentionBackendEnum.register"),
    ("vllm.v1.attention.backend", "AttentionBackend.validate_configuration"),
    ("vllm.v1.attention.backend", "AttentionBackend.supported_kv_cache_layouts"),
    ("vllm.v1.attention.backend", "AttentionCGSupport.ALWAYS"),
    ("vllm.v1.attention.backend", "AttentionImpl.forward"),
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder.build"),
    ("vllm.v1.attention.backend", "CommonAttentionMetadata"),
)

# What an import or an attribute of an unknown vLLM can raise. An error that left `register`
# would end every vLLM process, also for models that never ask for this backend.
_FOREIGN_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)

# Below the logger that vLLM configures, so that our lines look like its own.
logger = logging.getLogger("vllm.tilewise")

_said: set[str] = set()


def _say_once(message: str) -> None:
    """Log a warning the first time this process has it to say."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)


def vllm_version() -> str:
    """Return the version that vLLM reports of itself; raises ImportError without vLLM."""
    return str(importlib.import_module("vllm").__version__)


def version_supported(version: str) -> bool:
    """Whether a version is in the supported range; builds from source are judged by features.

    Parameters
    ----------
    version : str
        As vLLM reports it, for example ``0.33.0`` or ``0.34.0.dev12+g1234567``.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or "dev" in version:
        return True
    return MIN_VLLM <= (int(numbers[1]), int(numbers[2])) < END_VLLM


def missing_features() -> tuple[str, ...]:
    """Return what the installed vLLM lacks of the interfaces we build on; empty if nothing."""
    missing = []
    for module, dotted in _REQUIRED:
        target: Any = importlib.import_module(module)
        for attribute in dotted.split("."):
            target = getattr(target, attribute, None)
        if target is None:
            missing.append(f"{module}.{dotted}")
    return tuple(missing)


def shards_caches() -> bool:
    """Whether the installed vLLM says of a KV cache if ranks share its sequences, as 0.33 does."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    return hasattr(interface.AttentionSpec, "dcp_sharded")


def require_supported() -> None:
    """Check the installed vLLM.

    Raises
    ------
    IncompatibleVllm
        If its version is outside the supported range or an interface is missing.
    UnsupportedConfig
        If a ``TILEWISE_*`` variable cannot be read.
    """
    # Read in any case: this is where a misspelt or unreadable setting is first noticed.
    settings = load_settings(os.environ)
    found = vllm_version()
    if not version_supported(found) and not settings.any_vllm:
        raise IncompatibleVllm(
            f"tilewise supports vLLM {SUPPORTED_TEXT}, found {found} "
            "(TILEWISE_ANY_VLLM=1 tries it all the same)"
        )
    missing = missing_features()
    if missing:
        raise IncompatibleVllm(
            f"tilewise supports vLLM {SUPPORTED_TEXT}, found {found}, which lacks "
            + ", ".join(missing)
        )


def ensure_backend(name: str, path: str) -> Any:
    """Return the enum member ``name`` of vLLM, created if needed, whose backend class is ``path``.

    Repeating the call is harmless. The member pickles as this very call, so that it can be
    unpickled in a process that has not loaded its plug-ins yet.

    Parameters
    ----------
    name : str
        Name of the member, in capitals.
    path : str
        Dotted path of the backend class, which is not imported here.

    Returns
    -------
    AttentionBackendEnum
        The member.
    """
    registry = importlib.import_module(_REGISTRY)
    backends = registry.AttentionBackendEnum
    member = backends.__members__.get(name) or backends.register(name, path)
    # pickle looks this method up on the instance, unlike Python's own special methods.
    member.__reduce_ex__ = functools.partial(_reduce, name, path)
    registry.register_backend(member, path)
    return member


def _reduce(name: str, path: str, _protocol: int) -> tuple[Any, tuple[str, str]]:
    return ensure_backend, (name, path)


def _claim(name: str) -> bool:
    """Point an enum member at our backend unless another plug-in uses it already."""
    registry = importlib.import_module(_REGISTRY)
    members = registry.AttentionBackendEnum.__members__
    taken_by = _current_path(members[name]) if name in members else None
    if taken_by not in (None, BACKEND_PATH):
        _say_once(
            f"tilewise leaves the attention backend name {name} to {taken_by}, which has it already"
        )
        return False
    if name == SHARED_NAME:
        # A member of vLLM's own: it exists in every process and pickles by its value.
        registry.register_backend(members[name], BACKEND_PATH)
    else:
        ensure_backend(name, BACKEND_PATH)
    return True


def is_ours(member: Any) -> bool:
    """Whether a member of vLLM's enum, or None, leads to our backend in this process."""
    return member is not None and _current_path(member) == BACKEND_PATH


def _current_path(member: Any) -> str | None:
    """The class path behind a member, or None where vLLM keeps the name free."""
    try:
        return str(member.get_path())
    except ValueError:
        return None


def register_all() -> tuple[str, ...]:
    """Register the backend under both names, and the fallback with it; never raises.

    Returns
    -------
    tuple of str
        The names that select the backend in this process; empty on a vLLM that is not supported.
    """
    try:
        require_supported()
        names = tuple(name for name in (OWN_NAME, SHARED_NAME) if _claim(name))
        if names:
            fallback.install()
            compile_cache.install(is_ours)
            exporter.prepare()
        return names
    except (IncompatibleVllm, UnsupportedConfig) as error:
        _say_once(f"{error}; no attention backend registered")
    except _FOREIGN_ERRORS as error:
        _say_once(
            f"tilewise supports vLLM {SUPPORTED_TEXT}; the installed one cannot be used "
            f"({type(error).__name__}: {error}); no attention backend registered"
        )
    return ()
