"""A worker with layers that fall back, beside a server's own: ``fallback_worker.py MODEL``.

It builds real attention layers on vLLM's faked GPU platform, where nothing is computed, and then
waits for a line on stdin: the variables, as JSON, that the server's processes inherit. With these
it leaves its counters where the server's ``/metrics`` reads them, as engine 1, until stdin ends.
"""

import json
import os
import sys
from pathlib import Path

# PYTHONSAFEPATH keeps a script's own folder off the path.
sys.path.insert(0, str(Path(__file__).parent))

from fallback_probe import Scenario
from selection_probe import load_cuda_platform


def main(model: str) -> None:
    load_cuda_platform()
    from vllm.model_executor.layers.attention import RSWAAttention

    from tilewise import exporter

    with Scenario(model) as layers:
        layers.add()
        layers.add(chunk_lookback=1)
        layers.add(chunk_lookback=1)
        layers.add(RSWAAttention, rswa_window=16)
        os.environ.update(json.loads(sys.stdin.readline()))
        exporter.start({"engine": "1", "rank": "0"})
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
