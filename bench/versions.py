"""Kernels of several checkouts in one process, so that they can be timed in turn.

A checkout's ``plugin/`` and ``kernels/`` are copied below a package name of their own, with imports
of ``tilewise`` renamed.  Everything else (cases, inputs, the gate) is the running benchmark's own.
"""

from __future__ import annotations

import atexit
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise.bench.providers import Provider

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def copy_package(name: str, checkout: Path, folder: Path) -> str:
    """Write ``checkout``'s package into ``folder`` as ``tilewise_at_<name>``; return that name.

    Raises
    ------
    ValueError
        If ``checkout`` has no ``plugin/`` and ``kernels/``.
    """
    sources = {"": checkout / "plugin", "kernels": checkout / "kernels"}
    for part in sources.values():
        if not (part / "__init__.py").is_file():
            raise ValueError(f"{checkout} is no checkout of tilewise: it has no {part.name}/")
    package = f"tilewise_at_{name}"
    for place, source in sources.items():
        target = folder / package / place
        target.mkdir(parents=True)
        for path in source.iterdir():
            if path.suffix == ".py":
                text = re.sub(r"\btilewise\b", package, path.read_text(encoding="utf-8"))
                (target / path.name).write_text(text, encoding="utf-8")
            elif path.is_file():
                shutil.copy(path, target)
    return package


def parse(texts: Iterable[str]) -> dict[str, Path]:
    """Folders by name from ``NAME=FOLDER``.

    Raises
    ------
    ValueError
        If one has no name or folder, or a name comes twice.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if not _NAME.fullmatch(name) or not folder:
            raise ValueError(f"{text!r} is not NAME=FOLDER, NAME of lower-case letters and digits")
        if name in found:
            raise ValueError(f"version {name} is there twice")
        found[name] = Path(folder).resolve()
    return found


def providers(versions: dict[str, Path]) -> dict[str, Provider]:
    """Return a provider for each version, and ``<name>_fp8`` with products of fp8."""
    from tilewise.bench.providers import Tilewise

    folder = Path(tempfile.mkdtemp(prefix="tilewise-versions-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # Triton reads sources until then
    sys.path.append(str(folder))
    found: dict[str, Provider] = {}
    for name, checkout in versions.items():
        package = copy_package(name, checkout, folder)
        for label, fp8 in ((name, False), (f"{name}_fp8", True)):
            found[label] = Tilewise(label, fp8_matmul=fp8, package=package)
    return found
