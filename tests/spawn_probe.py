"""Run by test_registration in a process of its own: a spawned child unpickles our enum members.

Usage: ``python spawn_probe.py``; prints what the child saw as JSON.
"""

import copy
import json
import multiprocessing
import pickle


def child(config, queue):
    """Unlike the parent, this process has loaded no plug-in when its argument arrives."""
    from vllm.plugins import load_general_plugins

    name, path = config.backend.name, None
    if name == "TILEWISE":
        path = config.backend.get_path()
    load_general_plugins()
    queue.put([name, path or config.backend.get_path(), config.backend.get_class().__name__])


def main():
    from vllm.config import AttentionConfig
    from vllm.plugins import load_general_plugins

    import tilewise

    load_general_plugins()
    tilewise.register()
    seen = {}
    context = multiprocessing.get_context("spawn")
    for name in ("tilewise", "CUSTOM"):
        config = AttentionConfig(backend=name)
        member = config.backend
        assert pickle.loads(pickle.dumps(member)) is member
        assert copy.deepcopy(config).backend is member
        assert isinstance(config.compute_hash(), str)
        queue = context.Queue()
        process = context.Process(target=child, args=(config, queue))
        process.start()
        seen[name] = queue.get(timeout=240)
        process.join()
    print("SEEN " + json.dumps(seen))


if __name__ == "__main__":
    main()
