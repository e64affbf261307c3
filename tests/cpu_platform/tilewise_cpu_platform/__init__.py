"""Test only: a vLLM engine on a machine without a GPU, with tilewise's kernels interpreted.

The released CUDA wheel of vLLM finds no platform on such a machine and lacks the C++ operators
of its CPU build. This package supplies both, for tests:

* ``platform``: a CPU platform that lets ``TILEWISE`` and ``CUSTOM`` be selected,
* ``op_shims``: the few C++ operators the engine calls, written with torch,
* ``image_shims``: image processors that do without torchvision, where it is missing,
* ``triton_shims``: an attribute of compiled kernels that vLLM reads off interpreted ones,
* ``tilewise.kernels.interpreter`` is installed here: it corrects bfloat16 arithmetic.

Environment
-----------
TILEWISE_CPU_PLATFORM
    ``1`` switches the platform and the operator shims on; anything else leaves vLLM alone.
TRITON_INTERPRET
    ``1`` (Triton's own switch) installs the interpreter fix in every vLLM process.
"""

from __future__ import annotations

import os


def is_enabled() -> bool:
    """Whether this process was asked to run vLLM on the CPU test platform."""
    return os.environ.get("TILEWISE_CPU_PLATFORM") == "1"


def platform() -> str | None:
    """Entry point ``vllm.platform_plugins``: the platform's class path, or None when off."""
    if not is_enabled():
        return None
    # vLLM replaces Triton by a placeholder when it sees no GPU driver, unless the list of visible
    # GPUs is set and empty. It asks for the platform before it looks, so this is early enough.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    # Every process that imports model code asks, those that look at it only among them.
    from tilewise_cpu_platform import image_shims

    image_shims.install()
    return "tilewise_cpu_platform.platform.TilewiseCpuPlatform"


def prepare_process() -> None:
    """Entry point ``vllm.general_plugins``: runs in the API server, engine core and workers."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tilewise.kernels import interpreter

        interpreter.install()
        from tilewise_cpu_platform import triton_shims

        triton_shims.install()
    if is_enabled():
        from tilewise_cpu_platform import op_shims

        op_shims.install()
