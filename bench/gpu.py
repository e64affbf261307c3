"""What the GPU is and does: ceilings of this run, clocks under load, driver."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any


def matmul_tflops(size: int = 8192) -> float:
    """Return the rate of a square bf16 matmul on random data, in TFLOP/s."""
    import torch
    from triton.testing import do_bench

    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    ms = do_bench(lambda: torch.matmul(a, b, out=out), warmup=100, rep=300, return_mode="median")
    return 2 * size**3 / ms / 1e9


def copy_tbps(num_bytes: int = 2 << 30) -> float:
    """Return the rate of a device-to-device copy in TB/s, reads and writes both counted."""
    import torch
    from triton.testing import do_bench

    source = torch.zeros(num_bytes, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    ms = do_bench(lambda: target.copy_(source), warmup=50, rep=200, return_mode="median")
    return 2 * num_bytes / ms / 1e9


def ceilings() -> dict[str, float]:
    """Return the matmul and copy rates of the current GPU."""
    return {"matmul_tflops": round(matmul_tflops(), 1), "copy_tbps": round(copy_tbps(), 3)}


def ceilings_of_own_process(timeout: float = 120.0) -> dict[str, float]:
    """Return the ceilings, measured in a process that has left the GPU afterwards."""
    command = [sys.executable, "-m", "tilewise.bench.gpu"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (subprocess.SubprocessError, OSError):
        return {}
    return dict(json.loads(done.stdout.splitlines()[-1]))


@dataclass
class GpuMonitor:
    """Clock and power samples of one GPU, through NVML."""

    samples: list[dict[str, float]] = field(default_factory=list)
    _nvml: Any = None
    _handle: Any = None

    @classmethod
    def start(cls) -> GpuMonitor:
        """Return a monitor of the first visible GPU; without NVML it takes no samples."""
        monitor = cls()
        try:
            import pynvml
        except ImportError:
            return monitor
        try:
            pynvml.nvmlInit()
            monitor._handle = _visible_device(pynvml)
        except (pynvml.NVMLError, ValueError):
            return monitor
        monitor._nvml = pynvml
        return monitor

    def sample(self) -> None:
        """Record clocks (MHz) and power (W), if the driver tells them."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return
        try:
            self.samples.append(
                {
                    "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                    "mem_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
                    "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                }
            )
        except nvml.NVMLError:
            self._nvml = None

    def summary(self) -> dict[str, list[float]]:
        """Return minimum, median and maximum of every quantity over all samples."""
        if not self.samples:
            return {}
        result = {}
        for key in self.samples[0]:
            values = [sample[key] for sample in self.samples]
            result[key] = [min(values), statistics.median(values), max(values)]
        return result


def _visible_device(nvml: Any) -> Any:
    """Return NVML's handle of the device that CUDA numbers 0 in this environment."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first))


def query_smi(fields: str) -> str | None:
    """Return one line of `nvidia-smi --query-gpu`, or None where it does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    print(json.dumps(ceilings()))
