"""Every decision about tiles and grids, as plain Python: ints in, frozen dataclasses out.

No torch and no GPU here, so the whole policy can be tested on a laptop.  Tiles of the plain kernels
are chosen in ``tilewise.tiles``; the rule by which lengths become tiles and splits is
``tilewise.plan_rule``.
"""

from dataclasses import dataclass, replace

from tilewise import tuned
from tilewise.errors import UnsupportedConfig
from tilewise.geometry import (
    DECODE_MAX_QUERY_LEN,
    HEAD_DIM_MAX,
    HEAD_DIM_MIN,
    HEAD_DIM_STEP,
    HEAD_DIM_WIDE,
    HOPPER_ROWS,
    INTERPRETER,
    MAX_GROUP_SIZE,
    MAX_WIDE_GROUP_SIZE,
    PAGE_SIZE_STEP,
    PREFERRED_PAGE_SIZE,
    Device,
    Geometry,
    Tiles,
    accumulators,
    cdiv,
    next_power_of_2,
    shared_memory,
)
from tilewise.pieces import Pieces, choose_pieces
from tilewise.prefix_tiles import PrefixTiles
from tilewise.tiles import (
    HOPPER_WINDOWS,
    LAZY_ACCUMULATORS,
    decode_tiles,
    fp8_tiles,
    hopper_twin,
    prefill_tiles,
    workers_per_sm,
)

__all__ = [
    "DECODE_MAX_QUERY_LEN",
    "FP8_DOTS",
    "HEAD_DIM_MAX",
    "HEAD_DIM_MIN",
    "HEAD_DIM_STEP",
    "HEAD_DIM_WIDE",
    "HOPPER_ROWS",
    "INTERPRETER",
    "LAZY_ACCUMULATORS",
    "MAX_GROUP_SIZE",
    "MAX_WIDE_GROUP_SIZE",
    "PAGE_SIZE_STEP",
    "PREFERRED_PAGE_SIZE",
    "Config",
    "Device",
    "Geometry",
    "HopperTiles",
    "Tiles",
    "accumulators",
    "batch_invariant",
    "cdiv",
    "choose",
    "next_power_of_2",
    "shared_memory",
    "why_not_hopper",
    "why_not_hopper_decode",
    "why_not_hopper_fp8",
    "why_plain_batch",
]

FP8_DOTS = ("", "promoted", "plain")


@dataclass(frozen=True)
class HopperTiles:
    """Launch configuration of a Gluon kernel for Hopper; the prefill's tiles have 128 rows.

    ``block_n`` keys a block, ``num_stages`` blocks of K and of V in flight; of the Gluon decode,
    whose items have the rows that the plain kernel's have, keys a tile and tiles in flight.  Over
    an fp8 cache the prefill keeps ``narrow_stages`` more blocks as they come from memory.
    """

    block_n: int
    num_stages: int
    narrow_stages: int = 0


@dataclass(frozen=True)
class Config:
    """Everything the plan and the kernels are launched with.

    Where there is a ``hopper_prefill``, or with ``fp8_dot`` a ``hopper_prefill_fp8``, ``prefill``
    is its plain twin: the same query tiles, for layers whose logits or addresses the former does
    not take.  So is ``decode`` to a ``hopper_decode``, and the faster one where a batch has many
    items (``decodes_few``).

    ``num_workers`` decode programs on ``num_sms`` SMs share the batch's work, counted in key
    tiles; an item, one (request, KV head, query tile), costs ``item_overhead`` more than its
    tiles, or whoever gets many short requests would finish last.

    ``window`` is the number of keys a query may see, itself included; 0 for all.

    ``pieces`` says where items are cut in batch-invariant mode; None: where stretches of equal
    work end.

    ``fp8_dot`` says how the prefill multiplies an e4m3 cache: "" as 16 bits, "promoted" as fp8
    operands whose products are added in fp32 after every tile, "plain" without that (experiments).

    ``pdl`` lets decode start while the kernel before it ends (programmatic dependent launch).

    ``prefixes`` are the tiles of pages that requests share; None: everyone reads its own
    (``tilewise.prefix_rule``).  Batches that may share take the plain decode.
    """

    geometry: Geometry
    prefill: Tiles
    decode: Tiles
    num_workers: int
    num_sms: int
    item_overhead: int = 3
    window: int = 0
    hopper_prefill: HopperTiles | None = None
    hopper_prefill_fp8: HopperTiles | None = None
    hopper_decode: HopperTiles | None = None
    pieces: Pieces | None = None
    pdl: bool = False
    prefixes: PrefixTiles | None = None
    fp8_dot: str = ""

    def __post_init__(self) -> None:
        # Half of what int32 holds, so that the kernels' differences of positions cannot overflow.
        if not 0 <= self.window <= 2**30:
            raise UnsupportedConfig(f"window={self.window}; accepted: 0 (none) to 2**30")
        if self.hopper_decode and self.hopper_decode.block_n != self.decode.block_n:
            raise UnsupportedConfig(
                f"hopper_decode.block_n={self.hopper_decode.block_n}; accepted: the plan's, "
                f"{self.decode.block_n}"
            )
        if self.fp8_dot not in FP8_DOTS:
            raise UnsupportedConfig(
                f"fp8_dot={self.fp8_dot!r}; accepted: {', '.join(map(repr, FP8_DOTS))}"
            )
        t = self.prefill
        gluon = self.hopper_prefill
        if gluon and (self.geometry.kv_element_size == 1) != (gluon.narrow_stages > 0):
            raise UnsupportedConfig(
                f"hopper_prefill.narrow_stages={gluon.narrow_stages}; accepted: 1 and more for an "
                f"fp8 cache, else 0"
            )
        for name in ("hopper_prefill", "hopper_prefill_fp8"):
            if getattr(self, name) and t.block_m != HOPPER_ROWS:
                raise UnsupportedConfig(
                    f"prefill.block_m={t.block_m} beside {name}; accepted: {HOPPER_ROWS}"
                )
        if t.lazy_rescale and (
            t.block_m != 16 * t.num_warps or accumulators(t) not in LAZY_ACCUMULATORS
        ):
            raise UnsupportedConfig(
                f"lazy_rescale with block_m={t.block_m}, block_d={t.block_d} and {t.num_warps} "
                f"warps; accepted: 16 rows a warp, {LAZY_ACCUMULATORS} accumulators a thread"
            )

    @property
    def prefill_block_q(self) -> int:
        """Query tokens of one prefill tile."""
        group = self.geometry.group_size
        if self.hopper_prefill or self.hopper_prefill_fp8:
            group = next_power_of_2(group)  # its boxes are powers of two
        return self.prefill.block_m // group

    def decodes_few(self, num_reqs: int) -> bool:
        """Whether so many requests are decoded by the Gluon kernel: no more items than SMs.

        It starts and merges faster; many items are read faster by two plain programs an SM.
        """
        items = num_reqs * self.geometry.num_kv_heads
        return self.hopper_decode is not None and self.pieces is None and items <= self.num_sms

    @property
    def side_by_side(self) -> bool:
        """Whether the prefill and the decode of a batch run at the same time, both in Gluon."""
        return bool(self.hopper_prefill and self.hopper_decode and self.pdl) and not self.pieces

    @property
    def beside(self) -> tuple[int, int]:
        """Fewest and most decode workers beside a prefill; zeros where they do not run so.

        With less than half of the SMs decode would be the last to finish; a tenth left to a small
        prefill costs decode nothing, for memory is what it waits for (bench/NOTES.md).
        """
        sms = min(self.num_sms, self.num_workers)
        return (sms // 2, sms * 9 // 10) if self.side_by_side else (0, 0)

    @property
    def merge_tile(self) -> tuple[int, int]:
        """Rows of an item that are merged at a time, and pieces of them.

        So many that a thread has 64 values on their way, or 16 where more programs share an SM's
        registers: one memory latency for most batches.
        """
        t = self.decode
        rows = min(t.block_m, next_power_of_2(self.geometry.group_size), 8)
        values = (64 if t.block_d >= 128 else 16) * 32 * t.num_warps
        return rows, min(max(values // (rows * t.block_d), 1), 32)

    @property
    def piece_constants(self) -> dict[str, int]:
        """``piece_tiles`` and ``max_pieces`` of the kernels; 0 but in batch-invariant mode."""
        p = self.pieces
        return {"piece_tiles": p.min_tiles if p else 0, "max_pieces": p.most if p else 0}


def batch_invariant(config: Config) -> Config:
    """The same configuration in batch-invariant mode, with pieces chosen where it has none."""
    if config.pieces is not None:
        return config
    t = config.decode
    pieces = choose_pieces(config.geometry.num_kv_heads, t.block_m, t.block_n, t.block_d)
    if t.block_d > 128 and config.geometry.page_size % t.block_n:
        # Every row looks up its page, and pieces take registers too: a stage less leaves them.
        t = replace(t, num_stages=min(t.num_stages, 2))
    return replace(config, decode=t, pieces=pieces)


def choose(
    geometry: Geometry,
    device: Device,
    decode_query_len: int = 1,
    window: int = 0,
    plain: bool = False,
    fp8_matmul: bool = False,
    table: tuned.Table | None = None,
) -> Config:
    """Pick tiles and worker count.

    Parameters
    ----------
    geometry : Geometry
    device : Device
    decode_query_len : int
        Query tokens of a typical decode request: 1, or 1 + speculative tokens.
    window : int
        Keys a query may see, itself included; 0 for all.
    plain : bool
        Leave the Gluon kernels out (tests, comparisons).
    fp8_matmul : bool
        Multiply an e4m3 cache as fp8 operands in the prefill.
    table : tuned.Table, optional
        Measured tiles, which go before the rule's; by default those that came with this version,
        and none in the interpreter.

    Raises
    ------
    UnsupportedConfig
        Naming what the layer or the device has, and what is accepted.
    """
    if table is None:
        table = tuned.NONE if device.interpreted else tuned.checked_in()
    if not 1 <= decode_query_len <= DECODE_MAX_QUERY_LEN:
        raise UnsupportedConfig(
            f"decode_query_len={decode_query_len}; accepted: 1 to {DECODE_MAX_QUERY_LEN}"
        )
    if device.arch < 80:
        raise UnsupportedConfig(f"compute capability {device.arch / 10}; accepted: 8.0 and later")
    decode = decode_tiles(geometry, device, decode_query_len, window)
    few = None
    if not plain and why_not_hopper_decode(geometry, device, decode) is None:
        few = HopperTiles(decode.block_n, num_stages=3)
    else:
        decode = table.choose("decode", decode, geometry, device)
    hopper = None
    prefill = prefill_tiles(geometry, device, window)
    if not window:
        prefill = table.choose("prefill", prefill, geometry, device)
    hopper_fp8 = None
    if fp8_matmul:
        prefill = fp8_tiles(geometry, device)
        if not plain and why_not_hopper_fp8(geometry, device, window) is None:
            hopper_fp8 = _HOPPER_FP8_TILES
    elif not plain and why_not_hopper(geometry, device, window) is None:
        hopper = _hopper_tiles(geometry)
        prefill = hopper_twin(geometry)
    return Config(
        geometry=geometry,
        prefill=prefill,
        hopper_prefill=hopper,
        hopper_prefill_fp8=hopper_fp8,
        decode=decode,
        hopper_decode=few,
        num_workers=device.num_sms * workers_per_sm(decode, geometry, device),
        num_sms=device.num_sms,
        window=window,
        pdl=device.arch >= 90 and not device.interpreted,
        fp8_dot="promoted" if fp8_matmul else "",
    )


# Padded head size to blocks; shared memory holds the queries of a tile and the blocks in flight.
_HOPPER_TILES = {
    64: HopperTiles(block_n=128, num_stages=5),
    128: HopperTiles(block_n=128, num_stages=3),
    256: HopperTiles(block_n=64, num_stages=2),
}
# Of an fp8 cache, which comes in rings of its own.
_HOPPER_KV8_TILES = {
    64: HopperTiles(block_n=128, num_stages=4, narrow_stages=3),
    128: HopperTiles(block_n=128, num_stages=2, narrow_stages=2),
    256: HopperTiles(block_n=64, num_stages=2, narrow_stages=1),
}
_HOPPER_FP8_TILES = HopperTiles(block_n=128, num_stages=3)  # of head size 128


def _hopper_tiles(geometry: Geometry) -> HopperTiles:
    """The Gluon prefill's tiles for a head size that it takes."""
    tiles = _HOPPER_KV8_TILES if geometry.kv_element_size == 1 else _HOPPER_TILES
    return tiles[geometry.block_d]


def _why_no_gluon(
    geometry: Geometry, device: Device, kv_sizes: tuple[int, ...] = (2,)
) -> str | None:
    """What all Gluon kernels ask of a device and of dtypes; None where it is there."""
    if device.interpreted:
        return "kernels in Gluon do not run in Triton's interpreter"
    if device.arch != 90:
        return f"compute capability {device.arch / 10} (accepted: 9.0)"
    if geometry.element_size != 2:
        return f"{geometry.element_size} bytes an element (accepted: 2)"
    if geometry.kv_element_size not in kv_sizes:
        accepted = " and ".join(map(str, kv_sizes))
        return f"{geometry.kv_element_size} bytes an element of the cache (accepted: {accepted})"
    return None


def _why_no_boxes(geometry: Geometry, tiles: HopperTiles) -> str | None:
    """What the prefills' bulk copies ask of heads and pages; None where it is there."""
    group, page = geometry.group_size, geometry.page_size
    if group > HOPPER_ROWS // 2:
        return f"group size {group} (accepted: 1 to {HOPPER_ROWS // 2})"
    if page != 64 and page % tiles.block_n:
        return f"page_size {page} (accepted: 64 and multiples of {tiles.block_n})"
    return None


def why_not_hopper(geometry: Geometry, device: Device, window: int = 0) -> str | None:
    """Why the Gluon prefill does not serve a layer, or None where it does.

    Parameters
    ----------
    geometry : Geometry
    device : Device
    window : int
        Keys a query may see, itself included; 0 for all.

    Returns
    -------
    str or None
        What the layer or the device has, and what is accepted.
    """
    if (why := _why_no_gluon(geometry, device, kv_sizes=(1, 2))) is not None:
        return why
    d = geometry.block_d
    if d not in _HOPPER_TILES:
        smallest, *_, largest = _HOPPER_TILES
        return f"head_dim {geometry.head_dim} (accepted: {smallest // 2 + 8} to {largest})"
    if geometry.head_dim * geometry.kv_element_size % 16:
        # Values follow keys in a row of the cache: the copy engine cannot begin there.
        return f"head_dim {geometry.head_dim} of an fp8 cache (accepted: multiples of 16)"
    if (why := _why_no_boxes(geometry, _hopper_tiles(geometry))) is not None:
        return why
    narrowest = HOPPER_WINDOWS[d]
    if 0 < window < narrowest:
        return f"window {window} (accepted: none, or {narrowest} and more)"
    needed = _hopper_shared_memory(geometry)
    if needed > device.shared_memory:
        return f"{device.shared_memory} bytes of shared memory (needed: {needed})"
    return None


def why_not_hopper_fp8(geometry: Geometry, device: Device, window: int = 0) -> str | None:
    """Why the Gluon prefill with fp8 operands does not serve a layer, or None where it does.

    Parameters
    ----------
    geometry : Geometry
    device : Device
    window : int
        Keys a query may see, itself included; 0 for all.

    Returns
    -------
    str or None
        What the layer or the device has, and what is accepted.
    """
    tiles = _HOPPER_FP8_TILES
    if (why := _why_no_gluon(geometry, device, kv_sizes=(1,))) is not None:
        return why
    if geometry.head_dim != 128:
        return f"head_dim {geometry.head_dim} (accepted: 128)"
    if (why := _why_no_boxes(geometry, tiles)) is not None:
        return why
    if window:
        return f"window {window} (accepted: none)"
    # Queries as they come and rounded; blocks of keys, of values and of turned values.
    blocks = 3 * tiles.num_stages * tiles.block_n * geometry.head_dim
    needed = 3 * HOPPER_ROWS * geometry.head_dim + blocks + 1024
    if needed > device.shared_memory:
        return f"{device.shared_memory} bytes of shared memory (needed: {needed})"
    return None


def why_not_hopper_decode(geometry: Geometry, device: Device, decode: Tiles) -> str | None:
    """Why the Gluon decode serves no batch of a layer, or None where it may.

    Parameters
    ----------
    geometry : Geometry
    device : Device
    decode : Tiles
        Of the plain kernel.

    Returns
    -------
    str or None
        What the layer or the device has, and what is accepted.
    """
    group = geometry.group_size
    if (why := _why_no_gluon(geometry, device)) is not None:
        return why
    if geometry.head_dim != 128:
        # Four plain programs an SM read heads of 64 faster (bench/NOTES.md).
        return f"head_dim {geometry.head_dim} (accepted: 128)"
    if group != next_power_of_2(group) or group > decode.block_m:
        return f"group size {group} (accepted: powers of two to {decode.block_m})"
    if not decode.use_tma:
        return f"page_size {geometry.page_size} (accepted: multiples of {decode.block_n})"
    return None


def why_plain_batch(causal: bool, pages: bool, mask: str = "") -> str | None:
    """Why the Gluon kernels leave a batch to their plain twins, or None where they may take it.

    Parameters
    ----------
    causal : bool
        Whether all requests are causal.
    pages : bool
        Whether keys lie in pages and every request has a row of a block table.
    mask : str
        Kind of a mask by element or tree (``tilewise.kernels.masks``); "" for none.

    Returns
    -------
    str or None
        What the batch has, and what is accepted.
    """
    if mask:
        return f"a mask of {mask} (accepted: none)"
    if not causal:
        return "attention that is not causal (accepted: causal)"
    if not pages:
        return "keys without a block table of a row a request (accepted: with one)"
    return None


def _hopper_shared_memory(geometry: Geometry) -> int:
    """Bytes of the Gluon prefill's queries, blocks in flight and barriers."""
    tiles = _hopper_tiles(geometry)
    rows = 2 * (HOPPER_ROWS + 2 * tiles.num_stages * tiles.block_n)
    rows += 2 * tiles.narrow_stages * tiles.block_n  # of bytes
    return rows * geometry.block_d + 1024
