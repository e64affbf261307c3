"""How decode over shared prefixes is tiled; see ``tilewise.prefix_rule``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixTiles:
    """Tiles of the part of the keys that a group of requests reads once.

    Parameters
    ----------
    block_m : int
        Query rows of a tile: the members' tokens times the heads that share a KV head.
    num_stages : int
        Tiles of keys and values in flight.
    max_query_len : int
        Longest request, in query tokens, that joins a group.
    min_pages : int
        Fewest pages that are looked at for a group.
    max_registers : int
        What a thread may take, so that as many programs share an SM as of the plain decode; 0 where
        the hardware's own limit suffices.
    """

    block_m: int
    num_stages: int
    max_query_len: int
    min_pages: int
    max_registers: int = 0
