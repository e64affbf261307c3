"""Where Triton keeps our kernels between starts.

vLLM gives every compiled model a Triton cache of its own, and another one when it loads that model
from disk at the next start: kernels compiled at the first start would be compiled again at the
second. Ours depend on no model, so they have one folder for all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "TRITON_CACHE_DIR"


@contextlib.contextmanager
def kept_for_all_models() -> Iterator[None]:
    """Let Triton look for what is compiled inside in one folder below vLLM's cache.

    A folder that the user chose stays, and so does vLLM's where ours cannot be written.
    """
    import vllm.envs

    root, given = Path(vllm.envs.VLLM_CACHE_ROOT), os.environ.get(VARIABLE)
    if given is None or not Path(given).is_relative_to(root):
        yield
        return
    folder = root / "tilewise" / "triton_cache"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        yield
        return
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        os.environ[VARIABLE] = given
