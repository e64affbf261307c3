"""Where the kernels run: a CUDA device, or CPU tensors in Triton's interpreter."""

import functools

import torch
from triton.runtime.interpreter import InterpretedFunction

from tilewise import policy
from tilewise.errors import PlanMismatch, UnsupportedConfig
from tilewise.kernels import interpreter, plan

# Dtypes of an fp8 cache and the names of their formats.
FP8_DTYPES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def resolve(device: str | torch.device) -> torch.device:
    """Return the device with its index, ready to run kernels.

    Raises
    ------
    UnsupportedConfig
        For a device that is not there or cannot run kernels, naming what is missing.
    """
    try:
        device = torch.device(device)
    except RuntimeError as error:
        accepted = "cuda, cuda:0 and so on, or cpu in the interpreter"
        raise UnsupportedConfig(f"device={device!r}; accepted: {accepted}") from error
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


def check_current(device: torch.device) -> None:
    """See that kernels will start on a device: they do on the current one, wherever tensors are.

    Raises
    ------
    PlanMismatch
        When another device is the current one, naming both.
    """
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        raise PlanMismatch(
            f"the current device is cuda:{torch.cuda.current_device()}; built for {device} "
            "(torch.cuda.set_device makes another one current)"
        )


@functools.cache
def fp8_format(dtype: torch.dtype, device: torch.device, *, write: bool = False) -> str:
    """Return how the kernels read or write an fp8 cache there: see ``tilewise.kernels.fp8``.

    Raises
    ------
    UnsupportedConfig
        For a dtype that is not one of ``FP8_DTYPES``.
    """
    if dtype not in FP8_DTYPES:
        raise UnsupportedConfig(f"kv_dtype={dtype}; accepted: {', '.join(map(str, FP8_DTYPES))}")
    # 8.9 has the instructions, but there Triton narrows fp32 to fp16 first and so rounds twice.
    first = 90 if write else 89
    converts = device.type == "cuda" and describe(device).arch >= first
    return FP8_DTYPES[dtype] if converts else f"{FP8_DTYPES[dtype]}_bits"


def _prepare_interpreter() -> None:
    """See that kernels can run on CPU tensors, and compute bfloat16 there as a GPU does."""
    if not isinstance(plan._plan_kernel, InterpretedFunction):
        raise UnsupportedConfig(
            "device='cpu' needs TRITON_INTERPRET=1 in the environment before Triton is imported"
        )
    interpreter.install()
