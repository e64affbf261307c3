"""Image processors of Hugging Face for machines without torchvision, which is not installed here.

vLLM's model code imports the torchvision one by its module, for a type; what is made of a
processor's configuration is the one for PIL, as Hugging Face itself falls back to.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

# Modules that need torchvision, and those that do without it.
_MODULES = {
    "transformers.models.gemma3.image_processing_gemma3": (
        "transformers.models.gemma3.image_processing_pil_gemma3"
    ),
}


class _StandIn(ModuleType):
    """A module whose classes are those of another one, imported when they are asked for."""

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(name)
        self._instead = instead

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._instead), f"{name}Pil")


def install() -> None:
    """Stand in for the modules that cannot be imported; harmless when repeated."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name, instead in _MODULES.items():
        sys.modules.setdefault(name, _StandIn(name, instead))
