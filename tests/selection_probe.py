"""Run by test_selection in a process of its own: vLLM's GPU platform on a machine without a GPU.

Usage: ``selection_probe.py MODEL CASES RESULT``. The released wheel's CUDA platform is imported
with its compiled parts stubbed and says that it is an H100 (compute capability 9.0, or the case's
``capability``). What it answers is vLLM's own code.
"""

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from unittest.mock import patch

import torch

COMPILED = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch")
FLASH_ATTN = ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")
FLASHINFER = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")


class Stub(types.ModuleType):
    """A module that has whatever is imported from it; none of it is ever called."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stub_peers():
    """FLASH_ATTN with its version 3 only, as a Hopper build has it, and FLASHINFER."""
    for name in (*FLASH_ATTN, *FLASHINFER):
        sys.modules[name] = Stub(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    interface = sys.modules[FLASH_ATTN[1]]
    interface.is_fa_version_supported = lambda version: version == 3
    interface.fa_version_unsupported_reason = lambda version: "not built"
    # They look at the platform when they are imported, and it was another one.
    for name in ("fa_utils", "flash_attn", "flashinfer"):
        sys.modules.pop(f"vllm.v1.attention.backends.{name}", None)


def load_cuda_platform():
    """Import the CUDA platform without libcuda and make it the current one."""
    for name in COMPILED:
        sys.modules.setdefault(name, types.ModuleType(name))
    # The worker's modules have to be imported before the platform is a CUDA one.
    import vllm.model_executor.layers.attention
    import vllm.v1.worker.gpu.attn_utils
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.plugins import load_general_plugins

    class FakeHopper(CudaPlatformBase):
        capability = (9, 0)

        @classmethod
        def get_device_capability(cls, device_id=0):
            from vllm.platforms.interface import DeviceCapability

            return DeviceCapability(*cls.capability)

        @classmethod
        def get_device_name(cls, device_id=0):
            return "NVIDIA H100"

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return 80 << 30

        @classmethod
        def is_fully_connected(cls, physical_device_ids):
            return True

    load_general_plugins()
    platforms._current_platform = FakeHopper()
    stub_peers()
    import vllm.utils.flashinfer

    vllm.utils.flashinfer.current_platform = platforms._current_platform
    return FakeHopper


def select(platform, case: dict) -> dict:
    """Ask vLLM's selector for the backend of one layer."""
    from vllm.utils import flashinfer
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from tilewise.integration.backend import TilewiseBackend

    case = dict(case)
    backend = case.pop("backend", "TILEWISE")
    backend = backend and AttentionBackendEnum[backend]
    platform.capability = tuple(case.pop("capability", (9, 0)))
    xqa = case.pop("xqa", False)
    layer = {"head_size": 128, "dtype": "bfloat16", "kv_cache_dtype": "auto", "block_size": None}
    layer |= case
    layer["dtype"] = getattr(torch, layer["dtype"])
    config = selector.AttentionSelectorConfig(**layer)
    selector._cached_get_attn_backend.cache_clear()
    flashinfer.supports_trtllm_attention.cache_clear()
    try:
        with patch.object(flashinfer, "has_nvidia_artifactory", lambda: xqa):
            found = selector._cached_get_attn_backend(backend, config, num_heads=32)
            reasons = TilewiseBackend.validate_configuration(
                device_capability=platform.get_device_capability(), **config._asdict()
            )
        path = ".".join(found.full_cls_name())
        return {"path": path, "name": found.get_name(), "reasons": reasons}
    except ValueError as refusal:
        return {"refused": str(refusal)}
    finally:
        platform.capability = (9, 0)


def page_size(model: str, **user) -> dict:
    """Build a layer as a model does, and let the platform settle the page size."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.platforms import current_platform
    from vllm.v1.worker.utils import select_common_block_size

    args = EngineArgs(model=model, dtype="bfloat16", attention_backend="tilewise", **user)
    config = args.create_engine_config()
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(config):
        layer = Attention(4, 64, 0.125, 2, cache_config=config.cache_config, prefix="layer")
    torch.set_default_dtype(torch.float32)
    before = config.cache_config.block_size
    current_platform.update_block_size_for_backend(config)
    chosen = config.cache_config.block_size
    spec = layer.get_kv_cache_spec(config)
    return {
        "backend": layer.attn_backend.__name__,
        "impl": type(layer.impl).__name__,
        "before": before,
        "chosen": chosen,
        "spec": spec.block_size,
        "kernel": select_common_block_size(chosen, [layer.attn_backend], [spec]),
    }


def main(model: str, cases_path: str, result_path: str) -> None:
    platform = load_cuda_platform()
    from vllm.config import VllmConfig, set_current_vllm_config

    cases = json.loads(Path(cases_path).read_text())
    with set_current_vllm_config(VllmConfig()):
        result = {name: select(platform, case) for name, case in cases.items()}
    with patch.object(torch.accelerator, "device_count", lambda: 1):
        result["pages"] = page_size(model)
        result["pages_of_16_engine"] = page_size(model, block_size=16)
        result["pages_of_48_engine"] = page_size(model, block_size=48)
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
