"""Where Triton keeps our kernels: in one folder for all models, options and starts.

While vLLM compiles a model it points Triton to a folder inside that model's cache. A start that
finds the model compiled does not: Triton would look in its default folder, and the second start
would compile every kernel again. So our kernels have a folder of their own in vLLM's cache, which
users keep between containers anyway, unless the user has named one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

VARIABLE = "TRITON_CACHE_DIR"
HOME_VARIABLE = "TRITON_HOME"


def choose(environ: Mapping[str, str], vllm_root: Path, assigned: str | None) -> Path | None:
    """Return the folder for our kernels, made if needed; None leaves Triton as it is.

    Parameters
    ----------
    environ : Mapping[str, str]
        ``os.environ``, or a dictionary in tests.
    vllm_root : Path
        vLLM's cache, ``VLLM_CACHE_ROOT``.
    assigned : str, optional
        What vLLM has last set ``TRITON_CACHE_DIR`` to by itself.
    """
    given = environ.get(VARIABLE)
    models = vllm_root / "torch_compile_cache"
    if given and given != assigned and models not in Path(given).parents:
        return None  # the user's own
    home = environ.get(HOME_VARIABLE)
    folder = Path(home) / ".triton" / "cache" if home else vllm_root / "tilewise" / "triton_cache"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Let Triton keep what it compiles in the block where the next start will look for it."""
    from vllm import envs
    from vllm.compilation import compiler_interface

    # vLLM 0.32 does not remember it; its folders are known by where they lie.
    assigned = getattr(compiler_interface, "_last_inductor_triton_cache_dir", None)
    folder = choose(os.environ, Path(envs.VLLM_CACHE_ROOT), assigned)
    if folder is None:
        yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
