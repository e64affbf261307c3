"""A pytest plugin that prints what it collects: ``pytest -p collected --collect-only``.

One line of JSON a case: its ``id``, and whether it runs on a GPU where there is one.
"""

import json


def pytest_collection_finish(session):
    for item in session.items:
        on_gpu = "device" in item.fixturenames or item.get_closest_marker("gpu") is not None
        print("\n" + json.dumps({"id": item.nodeid, "gpu": on_gpu}), end="")
