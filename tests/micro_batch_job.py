"""As ``engine_job.py``, with every step of two tokens or more in two micro-batches.

vLLM 0.33 splits a step (dual batch overlap, DBO) where several ranks of expert parallelism agree
to, over kernels that are not part of it. Here one rank decides for itself, and the micro-batches
hand over to each other after every attention layer, as they would around an exchange of experts.
Slices, metadata, threads and CUDA graphs are vLLM's, of either model runner. On a CPU streams and
events are stood in for, and the V1 runner's model is wrapped as it is on a GPU.

The result also has ``split_steps``, how many steps were split; ``replays``, how many of them were
one replayed graph; and ``handovers``, how often a micro-batch left off after a layer of ours.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_job

SEEN = {"split_steps": 0, "replays": 0, "handovers": 0}


def decide_alone() -> None:
    """Split by the thresholds, without other ranks, in the V1 runner."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker import gpu_model_runner, gpu_ubatch_wrapper
    from vllm.v1.worker.ubatch_utils import check_ubatch_thresholds, is_last_ubatch_empty

    runner, wrapper = gpu_model_runner.GPUModelRunner, gpu_ubatch_wrapper.UBatchWrapper
    decide, call = runner._determine_batch_execution_and_padding, wrapper.__call__

    def decide_and_split(self, *, num_tokens, allow_microbatching=True, **named):
        mode, batch, _, across, stats = decide(
            self, num_tokens=num_tokens, allow_microbatching=allow_microbatching, **named
        )
        parallel = self.parallel_config
        # One threshold for prefills and decodes (the test's settings).
        split = (
            allow_microbatching
            and check_ubatch_thresholds(parallel, num_tokens, uniform_decode=False)
            and not is_last_ubatch_empty(num_tokens, batch.num_tokens, parallel.num_ubatches)
        )
        return mode, batch, split, across, stats

    def call_alone(self, *args, **kwargs):
        context = gpu_ubatch_wrapper.get_forward_context()
        if context.ubatch_slices is not None:
            SEEN["split_steps"] += 1
            num_tokens = sum(half.num_tokens for half in context.ubatch_slices)
            whole = context.cudagraph_runtime_mode == CUDAGraphMode.FULL
            SEEN["replays"] += whole and num_tokens in self.cudagraphs
            context.dp_metadata = SimpleNamespace()  # that of ranks, which no dense layer reads
        return call(self, *args, **kwargs)

    runner._determine_batch_execution_and_padding = decide_and_split
    wrapper.__call__ = call_alone
    gpu_ubatch_wrapper.DPMetadata = SimpleNamespace(make=lambda *_: None)


def decide_alone_v2() -> None:
    """The same in the V2 runner, where a graph holds both halves or none."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu import model_runner, ubatch_utils
    from vllm.v1.worker.ubatch_utils import check_ubatch_thresholds

    dispatch = model_runner.dispatch_cg_and_sync_dp

    def dispatch_and_split(
        manager, num_reqs, num_tokens, uniform, *ranks, parallel_config, allow_ubatching, **named
    ):
        batch, sync = dispatch(manager, num_reqs, num_tokens, uniform, *ranks, **named)
        wanted = check_ubatch_thresholds(parallel_config, num_tokens, uniform_decode=False)
        if not (allow_ubatching and wanted):
            return batch, sync
        count, split = parallel_config.num_ubatches, None
        if manager is not None and not named.get("need_eager"):
            split = manager.dispatch(num_reqs, num_tokens, uniform, 0, num_ubatches=count)
        if split is None or 2 * num_tokens < split.num_tokens:
            split = type(batch)(CUDAGraphMode.NONE, num_tokens, num_reqs, num_ubatches=count)
        SEEN["split_steps"] += 1
        SEEN["replays"] += split.cg_mode == CUDAGraphMode.FULL
        return split, sync

    model_runner.dispatch_cg_and_sync_dp = dispatch_and_split
    model_runner.maybe_build_ubatch_runner = ubatch_utils.UBatchRunner
    ubatch_utils.DPMetadata = SimpleNamespace(make=lambda *_: None)


def hand_over_after_layers() -> None:
    """Alternate between micro-batches after each attention layer."""
    from vllm.v1.worker import ubatching

    from tilewise.integration.impl import TilewiseImpl

    forward = TilewiseImpl.forward

    def forward_and_yield(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if ubatching.dbo_enabled():
            SEEN["handovers"] += 1
            ubatching.dbo_yield()
        return output

    TilewiseImpl.forward = forward_and_yield


def do_without_cuda() -> None:
    """Let vLLM's micro-batches run on the CPU, one at a time as ever."""
    from vllm.config import CUDAGraphMode
    from vllm.utils import torch_utils
    from vllm.v1.worker import cpu_model_runner, gpu_ubatch_wrapper, ubatching
    from vllm.v1.worker.gpu import ubatch_utils

    class Event:
        """Nothing is recorded where nothing runs at the same time."""

        def record(self, stream=None) -> None: ...

    def set_stream(stream) -> None:
        torch_utils._current_stream_tls.value = stream

    cuda = SimpleNamespace(
        Stream=lambda device=None: torch_utils._StreamPlaceholder(), set_stream=set_stream,
        current_stream=torch_utils.current_stream, CUDAGraph=None, stream=contextlib.nullcontext,
    )  # fmt: skip
    accelerator = SimpleNamespace(set_device_index=lambda device: None)
    for module in (gpu_ubatch_wrapper, ubatch_utils, ubatching):
        module.torch = Torch(cuda=cuda, accelerator=accelerator, Event=Event)
    for module in (gpu_ubatch_wrapper, ubatch_utils):
        module.create_sm_control_context = lambda config: contextlib.nullcontext()

    load = cpu_model_runner.CPUModelRunner.load_model

    def load_and_wrap(self, *args, **kwargs):
        load(self, *args, **kwargs)
        self.model = gpu_ubatch_wrapper.UBatchWrapper(
            self.model, self.vllm_config, CUDAGraphMode.NONE, self.device
        )

    cpu_model_runner.CPUModelRunner.load_model = load_and_wrap


class Torch:
    """torch, but for some of its names."""

    def __init__(self, **others) -> None:
        vars(self).update(others)

    def __getattr__(self, name):
        return getattr(torch, name)


def main(job_path: str, result_path: str) -> None:
    decide_alone()
    decide_alone_v2()
    hand_over_after_layers()
    if not torch.cuda.is_available():
        do_without_cuda()
    engine_job.main(job_path, result_path)
    result = Path(result_path)
    result.write_text(json.dumps(json.loads(result.read_text()) | SEEN))


if __name__ == "__main__":
    main(*sys.argv[1:])
