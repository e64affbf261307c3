"""Paged attention in Triton: a plan/run API and an attention backend of vLLM.

Importing this package imports neither vLLM nor Triton and does not touch CUDA, so that vLLM can
load the plug-in in every process it starts. ``PagedAttention``, ``BlockSparseAttention``, ``Plan``
and the masks are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ == "plugin":
    raise ImportError(
        "this folder is the package tilewise; set PYTHONSAFEPATH=1 or leave the checkout"
    )

from tilewise import counters
from tilewise.errors import (
    IncompatibleVllm,
    PlanMismatch,
    SelfCheckFailed,
    TilewiseError,
    UnsupportedConfig,
    UnsupportedFeature,
)

if TYPE_CHECKING:
    from tilewise.attention import PagedAttention, Plan
    from tilewise.masks import CustomMask, TreeMask
    from tilewise.sparse import BlockSparseAttention

__version__ = "0.1.0"

__all__ = [
    "BlockSparseAttention",
    "CustomMask",
    "IncompatibleVllm",
    "PagedAttention",
    "Plan",
    "PlanMismatch",
    "SelfCheckFailed",
    "TilewiseError",
    "TreeMask",
    "UnsupportedConfig",
    "UnsupportedFeature",
    "__version__",
    "counters",
    "register",
]

_LAZY = {
    "BlockSparseAttention": "sparse",
    "CustomMask": "masks",
    "PagedAttention": "attention",
    "Plan": "attention",
    "TreeMask": "masks",
}


def register() -> None:
    """Make vLLM know the backend names ``TILEWISE`` and ``CUSTOM``.

    vLLM calls this entry point in the API server, the engine core and every worker. It may run
    any number of times and never raises: on a vLLM it does not know, it logs one line and
    registers nothing, so that models which do not ask for this backend still start.
    """
    from tilewise.integration.compat import register_all

    register_all()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"tilewise.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
