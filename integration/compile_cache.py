"""vLLM's cache of compiled models: an upgraded tilewise must not be given its predecessor's.

vLLM keeps compiled graphs on disk under a key that hashes its own version, its configuration and
the files that were traced. Attention is one opaque operator there, but what stands around it
follows the backend's answers: whether the cache is written by an operator of its own, whether
queries come quantised, whether an output's quantisation is fused, which layers another backend
computes. Nothing of that is in the key, where our backend is a name. So the part of the key that
names it gets a fingerprint of our sources as well.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tilewise
from tilewise.integration.after_import import when_imported

CONFIG = "vllm.config.attention"


def sources() -> tuple[Path, ...]:
    """Every file of ours that could decide what vLLM traces; the kernels are behind an operator."""
    folders = (Path(tilewise.__file__).parent, Path(__file__).parent)
    return tuple(sorted(path for folder in folders for path in folder.glob("*.py")))


def fingerprint_of(version: str, files: Iterable[Path]) -> str:
    """Hash a version and the names and contents of files, wherever these lie."""
    digest = hashlib.sha256(version.encode())
    for path in files:
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def fingerprint() -> str:
    """Hash of this installation of tilewise; files are read once a process."""
    return fingerprint_of(tilewise.__version__, sources())


def install(is_ours: Any) -> None:
    """Wrap ``AttentionConfig.compute_hash``, now or when vLLM imports it; idempotent.

    Parameters
    ----------
    is_ours : callable
        Whether a member of vLLM's ``AttentionBackendEnum`` is our backend.
    """
    when_imported(CONFIG, functools.partial(_wrap, is_ours=is_ours))


def _wrap(module: Any, is_ours: Any) -> None:
    config = module.AttentionConfig
    original = config.compute_hash
    if hasattr(original, "tilewise_original"):
        return

    @functools.wraps(original)
    def compute_hash(self: Any) -> str:
        text = str(original(self))
        per_kind = getattr(self, "backend_per_kind", None) or {}
        if not any(is_ours(member) for member in (self.backend, *per_kind.values())):
            return text
        return hashlib.sha256(f"{text} {fingerprint()}".encode()).hexdigest()

    compute_hash.tilewise_original = original  # type: ignore[attr-defined]
    config.compute_hash = compute_hash
