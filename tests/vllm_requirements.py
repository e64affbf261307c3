"""Print what the installed vLLM requires, less what only a GPU can use.

For a CPU test environment: vLLM is installed without its requirements, and these are installed
after it. The list comes from the metadata of the very wheel, so that it follows vLLM's version.
"""

import re
from importlib.metadata import requires

# torch is chosen by the setup itself; the rest are CUDA libraries, kernels for GPUs and loaders
# that read files straight into GPU memory. vLLM imports none of them on a CPU.
SKIPPED = frozenset(
    {
        "fastsafetensors",
        "flashinfer-cubin",
        "flashinfer-python",
        "humming-kernels",
        "instanttensor",
        "nvidia-cudnn-frontend",
        "nvidia-cutlass-dsl",
        "nvtx",
        "pynvvideocodec",
        "quack-kernels",
        "tilelang",
        "tokenspeed-mla",
        "torch",
        "torchaudio",
        "torchcodec",
        "torchvision",
    }
)

# From 2.4 on, numpy refuses an array where Triton's interpreter passes one as a loop bound.
REPLACED = {"numpy": "numpy<2.4"}


def main() -> None:
    for line in requires("vllm") or []:
        if "extra ==" in line:
            continue
        name = re.match(r"[A-Za-z0-9_.-]+", line)[0].lower().replace("_", "-")
        if name not in SKIPPED:
            print(REPLACED.get(name, line))


if __name__ == "__main__":
    main()
