"""What a worker of an abused server tells of itself (``--worker-extension-cls``)."""

from __future__ import annotations


class Memory:
    """Mixed into vLLM's worker; asked for through ``/collective_rpc``."""

    def held_by_torch(self) -> dict[str, float]:
        """MiB of the GPU that PyTorch has reserved, and has given out."""
        import torch

        if not torch.cuda.is_available():
            return {}
        return {
            "gpu_reserved_mib": torch.cuda.memory_reserved() / 2**20,
            "gpu_allocated_mib": torch.cuda.memory_allocated() / 2**20,
        }
