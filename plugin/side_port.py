"""The metrics on a port of their own, when ``TILEWISE_METRICS_PORT`` asks for one.

One port for a whole server: the first process that loads the plug-in listens, its children do not.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from tilewise.errors import UnsupportedConfig

OFF = "off"
DEFAULT_HOST = "127.0.0.1"
# Names the process that listens to those that it starts. Not a setting, hence another prefix.
LISTENER_VARIABLE = "_TILEWISE_METRICS_LISTENER"
ACCEPTED = "off, a port from 1 to 65535 (on 127.0.0.1), or HOST:PORT"

logger = logging.getLogger("vllm.tilewise")


def parse(name: str, text: str) -> str:
    """Return a setting in the form ``off`` or ``HOST:PORT``.

    Raises
    ------
    UnsupportedConfig
        If it is neither.
    """
    value = text.strip()
    if value.lower() in (OFF, ""):
        return OFF
    host, _, port = value.rpartition(":")
    # int() alone would take "1_0" and other digits than ours.
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise UnsupportedConfig(f"{name}={text!r} is not a port to listen on: use {ACCEPTED}")
    return f"{host or DEFAULT_HOST}:{port}"


def listen(where: str, collect: Callable[[], Iterator[Any]]) -> None:
    """Serve what ``collect`` yields, unless another process of this server already does.

    A port that cannot be had is logged and costs nothing else.

    Parameters
    ----------
    where : str
        ``off`` or ``HOST:PORT``.
    collect : callable
        Yields metric families of prometheus_client; called for every request.
    """
    if where == OFF or os.environ.get(LISTENER_VARIABLE):
        return
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(collect))
    host, _, port = where.rpartition(":")
    try:
        start_http_server(int(port), addr=host, registry=registry)
    except OSError as error:
        logger.warning("tilewise: no metrics on %s (%s)", where, error)
        return
    os.environ[LISTENER_VARIABLE] = str(os.getpid())
    logger.info("tilewise: metrics on http://%s/metrics", where)


class _Collector:
    """What prometheus_client asks of a collector."""

    def __init__(self, collect: Callable[[], Iterator[Any]]) -> None:
        self.collect = collect
