"""Where the kernels run: a CUDA device, or CPU tensors in Triton's interpreter."""

import torch
from triton.runtime.interpreter import InterpretedFunction

from tilewise import policy
from tilewise.errors import UnsupportedConfig
from tilewise.kernels import interpreter, plan


def resolve(device: str | torch.device) -> torch.device:
    """Return the device with its index, ready to run kernels.

    Raises
    ------
    UnsupportedConfig
        For a device that is not there or cannot run kernels, naming what is missing.
    """
    device = torch.device(device)
    if device.type == "cpu":
        _prepare_interpreter()
        return device
    if device.type != "cuda":
        raise UnsupportedConfig(f"device={device}; accepted: cuda, or cpu in the interpreter")
    if not torch.cuda.is_available():
        raise UnsupportedConfig(f"device={device}, but torch sees no CUDA device")
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def describe(device: torch.device) -> policy.Device:
    """Read what the policy needs off a device; the CPU stands for Triton's interpreter."""
    if device.type == "cpu":
        return policy.INTERPRETER
    props = torch.cuda.get_device_properties(device)
    return policy.Device(
        arch=props.major * 10 + props.minor,
        num_sms=props.multi_processor_count,
        shared_memory=props.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


def _prepare_interpreter() -> None:
    """See that kernels can run on CPU tensors, and compute bfloat16 there as a GPU does."""
    if not isinstance(plan._plan_kernel, InterpretedFunction):
        raise UnsupportedConfig(
            "device='cpu' needs TRITON_INTERPRET=1 in the environment before Triton is imported"
        )
    interpreter.install()
