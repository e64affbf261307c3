"""A CPU platform of vLLM on which tilewise's backend can be selected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability

from tilewise_cpu_platform import op_shims

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

OUR_NAMES = frozenset({"TILEWISE", "CUSTOM"})

# There is no GPU to ask: the interpreter stands in for the oldest one the kernels support.
INTERPRETED_CAPABILITY = DeviceCapability(8, 0)


class TilewiseCpuPlatform(CpuPlatform):
    """vLLM's CPU platform, which by itself accepts no attention backend but its own."""

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """Return the class path of the selected backend.

        Raises
        ------
        ValueError
            If our backend is selected and does not support the layer; lists every reason, as
            vLLM's CUDA platform does.
        """
        if selected_backend is None or selected_backend.name not in OUR_NAMES:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=INTERPRETED_CAPABILITY, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(
                f"Selected backend {selected_backend} is not valid for this configuration. "
                f"Reason: {reasons}"
            )
        return selected_backend.get_path()

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Finish the configuration for a CPU engine without compiled operators."""
        super().check_and_update_config(vllm_config)
        op_shims.install()
        # RMSNorm, RoPE, SiLU and the like in their torch forms: the wheel has no C++ ones for CPUs.
        vllm_config.compilation_config.custom_ops[:] = ["none"]

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Ask the backend which page size it prefers, as vLLM does on a GPU."""
        # Past CpuPlatform: in vLLM 0.32 it takes 128 whatever the backend prefers.
        super(CpuPlatform, cls).update_block_size_for_backend(vllm_config)
