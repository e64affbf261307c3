"""Tiles of the plain kernels that a measurement chose, instead of the rule's (``tilewise.tiles``).

``tuned.json`` beside this module holds them by architecture; ``tilewise tune`` writes it on a GPU
of that architecture.  A tile is taken where the layer is of the kind that was measured and a
program still fits the device; the rule decides everywhere else, as it does for the Gluon kernels'
twins, for windows and for products of fp8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

from tilewise.errors import UnsupportedConfig
from tilewise.geometry import Device, Geometry, Tiles, next_power_of_2, shared_memory
from tilewise.tiles import can_rescale_lazily, tma_fits

PATH = Path(__file__).with_name("tuned.json")
KERNELS = ("prefill", "decode")
# What a measurement chooses; the rest of ``Tiles`` follows from the layer.
CHOSEN = ("block_m", "block_n", "num_warps", "num_stages", "tail_stages", "use_tma")


@dataclass(frozen=True, order=True)
class Kind:
    """The layers that a measured tile is for.

    Parameters
    ----------
    kernel : str
        ``prefill`` or ``decode``.
    block_d : int
        Head size, padded to a power of two.
    element_size, kv_element_size : int
        Bytes of a query's and of a cached element.
    page : int
        Largest power of two that divides the page size, 128 at most.
    rows : int
        Query rows of a decode tile, which follow from the heads; 0 for prefills.
    """

    kernel: str
    block_d: int
    element_size: int
    kv_element_size: int
    page: int
    rows: int = 0

    @classmethod
    def of(cls, kernel: str, geometry: Geometry, tiles: Tiles) -> Kind:
        """The kind of a layer whose ``kernel`` has ``tiles`` by the rule."""
        return cls(
            kernel, geometry.block_d, geometry.element_size, geometry.kv_element_size,
            gcd(geometry.page_size, 128), tiles.block_m if kernel == "decode" else 0,
        )  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Measured tiles by architecture and kind, and what is known of each measurement."""

    tiles: Mapping[int, Mapping[Kind, Tiles]] = field(default_factory=dict)
    measured: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def choose(self, kernel: str, tiles: Tiles, geometry: Geometry, device: Device) -> Tiles:
        """Measured tiles for a layer, or ``tiles``, the rule's, where none are known that fit."""
        found = self.tiles.get(device.arch, {}).get(Kind.of(kernel, geometry, tiles))
        if found is None:
            return tiles
        if found.use_tma and not tma_fits(found, geometry, device):
            return tiles
        if found.block_m < next_power_of_2(geometry.group_size):
            return tiles
        if shared_memory(found, geometry) > device.shared_memory:
            return tiles
        lazily = kernel == "prefill" and can_rescale_lazily(found, geometry, device)
        return replace(found, lazy_rescale=lazily)

    def with_tiles(self, arch: int, kind: Kind, tiles: Tiles | None) -> Table:
        """The same table with other tiles for a kind, or with none: the rule's."""
        of_arch = {k: t for k, t in self.tiles.get(arch, {}).items() if k != kind}
        if tiles is not None:
            of_arch[kind] = tiles
        return replace(self, tiles={**self.tiles, arch: of_arch})

    def with_measurement(self, arch: int, about: Mapping[str, Any]) -> Table:
        """The same table with what is said of an architecture's measurement."""
        return replace(self, measured={**self.measured, arch: dict(about)})

    def text(self) -> str:
        """The file that ``load`` reads."""
        made: dict[str, Any] = {}
        for arch in sorted({*self.tiles, *self.measured}):
            rows = [
                asdict(kind) | {name: getattr(tiles, name) for name in CHOSEN}
                for kind, tiles in sorted(self.tiles.get(arch, {}).items())
            ]
            if rows:
                made[str(arch)] = {"measured": dict(self.measured.get(arch, {})), "tiles": rows}
        return json.dumps({"architectures": made}, indent=2) + "\n"


NONE = Table()


def load(path: Path = PATH) -> Table:
    """Read a table.

    Raises
    ------
    UnsupportedConfig
        Naming the file and what in it is no table.
    """
    try:
        found = json.loads(path.read_text())["architectures"]
        made = NONE
        for arch, about in found.items():
            for row in about["tiles"]:
                kind, tiles = _parsed(row)
                made = made.with_tiles(int(arch), kind, tiles)
            made = made.with_measurement(int(arch), about["measured"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedConfig(
            f"{path} is no table of tiles ({type(error).__name__}: {error}); accepted: what "
            f"`tilewise tune` writes"
        ) from error
    return made


def _parsed(row: Mapping[str, Any]) -> tuple[Kind, Tiles]:
    known = {*Kind.__dataclass_fields__, *CHOSEN}
    if set(row) != known:
        raise ValueError(f"{sorted(set(row) ^ known)} missing or unknown in {dict(row)}")
    if row["kernel"] not in KERNELS:
        raise ValueError(f"kernel {row['kernel']!r}, not one of {', '.join(KERNELS)}")
    for name in ("block_m", "block_n", "num_warps"):
        if not isinstance(row[name], int) or row[name] < 1 or row[name] & (row[name] - 1):
            raise ValueError(f"{name} {row[name]!r}, no power of two")
    kind = Kind(**{name: row[name] for name in Kind.__dataclass_fields__})
    if kind.kernel == "decode" and row["block_m"] != kind.rows:
        raise ValueError(f"block_m {row['block_m']} of a decode with {kind.rows} rows")
    return kind, Tiles(block_d=kind.block_d, **{name: row[name] for name in CHOSEN})


@cache
def checked_in() -> Table:
    """The table that came with this version."""
    return load()
