"""``engine_job.py`` under another version of tilewise: ``former_job.py VERSION WRITES JOB RESULT``.

``VERSION`` stands in for the fingerprint of our sources. With ``WRITES`` 1 attention writes the KV
cache itself, as a backend may, so that vLLM traces no operator for it; with 0 this version runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_job


def write_inside_attention() -> None:
    """Move the cache write from an operator of its own into attention's."""
    from tilewise.integration.backend import TilewiseBackend
    from tilewise.integration.impl import TilewiseImpl

    forward, update = TilewiseImpl.forward, TilewiseImpl.do_kv_cache_update

    def forward_and_write(
        self, layer, query, key, value, kv_cache, metadata, output, *rest, **named
    ):
        if metadata is not None and key is not None:  # the self-check writes for itself
            update(self, layer, key, value, kv_cache, metadata.slot_mapping)
        return forward(self, layer, query, key, value, kv_cache, metadata, output, *rest, **named)

    TilewiseBackend.forward_includes_kv_cache_update = True
    TilewiseImpl.forward = forward_and_write


def main(version: str, writes: str, job_path: str, result_path: str) -> None:
    import tilewise
    from tilewise.integration import compile_cache

    compile_cache.fingerprint = lambda: version
    tilewise.register()
    if writes == "1":
        write_inside_attention()
    engine_job.main(job_path, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
