"""What every test module relies on: the environment, the markers' meaning, the device.

Without a GPU the kernels run in Triton's interpreter and vLLM on the CPU test platform. Both are
switched on by variables that have to be set before Triton and vLLM are imported, hence here.
"""

import importlib.util
import os
import sys
from pathlib import Path

import aot_cache
import aot_quick
import pytest
import torch

# `python -m pytest` puts the checkout first on the path, where the folder `kernels` would hide
# another project's package; so would the processes that tests start.
ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
os.environ.setdefault("PYTHONSAFEPATH", "1")

HAS_GPU = torch.cuda.is_available()
HAS_VLLM = importlib.util.find_spec("vllm") is not None

# Tests and the engines they start reach no network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TILEWISE_CPU_PLATFORM", "1")
    # Set and empty: otherwise vLLM takes Triton for absent where there is no driver.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from tilewise.kernels import interpreter

    interpreter.install()


# Files that take minutes come first: a worker has a file whole, and who gets one of these last
# keeps everybody waiting.
LONGEST = (
    "test_aot", "test_several_ranks", "test_abuse", "test_vllm_features_engine", "test_engine",
    "test_shared_prefixes", "test_compile_stalls", "test_masks", "test_model_zoo", "test_features",
    "test_micro_batches", "test_serve", "test_start_up_engine", "test_attention_types",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, torch sees none")
    no_vllm = pytest.mark.skip(reason="needs vLLM, which is not installed")
    not_alone = pytest.mark.skip(reason="measures the GPU: runs without other workers (-m alone)")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for item in items:
        if HAS_GPU and not INTERPRETED and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)  # it runs on the GPU: `-m gpu` means to run it
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(no_gpu)
        if item.get_closest_marker("alone") and workers > 1:
            item.add_marker(not_alone)
        if item.get_closest_marker("vllm") and not HAS_VLLM:
            item.add_marker(no_vllm)


def pytest_configure() -> None:
    # Each of several workers would take all cores for its references.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add failures to the file that TILEWISE_TEST_FAILURES names as they come.

    pytest shows them at its end, which a run that is cut on a lent GPU does not reach.
    """
    _note_failure(report, report.when)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Add files that cannot be imported as well."""
    _note_failure(report, "collect")


def _note_failure(report: pytest.TestReport | pytest.CollectReport, when: str) -> None:
    path = os.environ.get("TILEWISE_TEST_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"== {report.nodeid} ({when})\n{report.longreprtext}\n")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or CPU tensors for the interpreter."""
    return torch.device("cuda" if HAS_GPU and not INTERPRETED else "cpu")


@pytest.fixture
def compiled(request, pytestconfig, tmp_path):
    """``compiled(kind, variants, old_triton=False)``: what kernels take, compiled for no GPU.

    A test that is not slow asks for variants of ``aot_quick.py`` only, which are counted.
    """
    slow = request.node.get_closest_marker("slow") is not None
    folder = pytestconfig.cache.mkdir("tilewise-aot")  # git ignores it

    def rows(kind: str, variants: list, old_triton: bool = False) -> list[dict]:
        if old_triton and not aot_cache.OLD_TRITON.is_dir():
            pytest.skip("Triton 3.6 is not set up: the environment has no triton36")
        counted = aot_quick.VARIANTS.get((kind, old_triton), [])
        extra = [] if slow else [variant for variant in variants if variant not in counted]
        assert not extra, f"count them in aot_quick.py or mark the test slow: {extra}"
        return aot_cache.rows(kind, variants, old_triton, folder, tmp_path)

    return rows


@pytest.fixture(autouse=True)
def _give_memory_back(request):
    """Processes that test side by side share the GPU: what a test took is free for the others."""
    yield
    if HAS_GPU and torch.cuda.is_initialized() and request.node.get_closest_marker("gpu"):
        torch.cuda.empty_cache()
