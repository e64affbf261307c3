"""Batch-invariant decode: where an item is cut depends on the item alone.

An item, one (request, KV head, query tile), is cut at multiples of so many key tiles, counted from
the first tile that it reads.  Workers take whole pieces, and pieces are merged one after another
from the first, whoever computed them: a request gets the same bits whatever else is in the batch.
Python's side of ``tilewise.kernels.pieces``.
"""

from dataclasses import dataclass

from tilewise.errors import UnsupportedConfig

# Enough keys that writing and merging a piece costs little beside reading them.
PIECE_KEYS = 512
# Pieces, times KV heads, into which one long request is cut at least, where memory allows: as many
# as a large GPU has places for.  Not the device's own number, so that GPUs agree on the cuts.
WANTED_PIECES = 256
# Scratch of one worker.
SCRATCH_BYTES = 512 * 1024
FEWEST_PIECES = 8


@dataclass(frozen=True)
class Pieces:
    """How items are cut.

    Parameters
    ----------
    min_tiles : int
        Key tiles of a piece, 1 or more.
    most : int
        Pieces of an item, 1 or more; those of items that are longer have more tiles.
    """

    min_tiles: int
    most: int

    def __post_init__(self) -> None:
        for name, value in (("min_tiles", self.min_tiles), ("most", self.most)):
            if value < 1:
                raise UnsupportedConfig(f"{name}={value} of pieces; accepted: 1 or more")

    def tiles(self, item_tiles: int) -> int:
        """Key tiles of each piece but the last of an item of ``item_tiles``."""
        return max(-(-item_tiles // self.most), self.min_tiles)

    def count(self, item_tiles: int) -> int:
        """Pieces of an item of ``item_tiles`` key tiles, 1 or more."""
        return -(-item_tiles // self.tiles(item_tiles))

    def next_cut(self, unit: int, item_tiles: int, overhead: int) -> int:
        """First unit from ``unit`` on, within an item, at which a piece or the item ends.

        The units of starting an item come last, behind its key tiles.
        """
        tiles = self.tiles(item_tiles)
        piece = -(-unit // tiles)
        return item_tiles + overhead if piece >= self.count(item_tiles) else piece * tiles


def choose_pieces(num_kv_heads: int, block_m: int, block_n: int, block_d: int) -> Pieces:
    """Cut long items finely enough that one request keeps a GPU busy, within bounded scratch.

    Parameters
    ----------
    num_kv_heads : int
    block_m, block_n, block_d : int
        The decode kernel's tiles.
    """
    slot = block_m * block_d * 4
    most = min(-(-WANTED_PIECES // num_kv_heads), SCRATCH_BYTES // slot)
    return Pieces(min_tiles=max(PIECE_KEYS // block_n, 1), most=max(most, FEWEST_PIECES))


def scratch_slots(pieces: Pieces | None, num_workers: int) -> int:
    """Partial results that decode must have room for.

    Without pieces two a worker: of the item that its stretch begins in, and of that it ends in.
    With them, every piece of the one shared item that may start in a worker's stretch, and what a
    worker has merged so far of an item that is its own.
    """
    return (2 if pieces is None else pieces.most + 1) * num_workers
