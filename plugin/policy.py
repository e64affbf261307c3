"""Every decision about tiles and grids, as plain Python: ints in, frozen dataclasses out.

No torch and no GPU here, so the whole policy can be tested on a laptop.  The rule by which lengths
become tiles and splits is ``tilewise.plan_rule``.
"""

from dataclasses import dataclass, replace

from tilewise.errors import UnsupportedConfig
from tilewise.pieces import Pieces, choose_pieces
from tilewise.prefix_tiles import PrefixTiles

# Requests with at most this many query tokens are decoded with split KV (it covers speculative
# verification and the short tails of chunked prefill); longer ones take the prefill kernel.
DECODE_MAX_QUERY_LEN = 16

HEAD_DIM_MIN, HEAD_DIM_MAX, HEAD_DIM_STEP = 16, 256, 8
HEAD_DIM_WIDE = 512  # beside these
PAGE_SIZE_STEP = 16
PREFERRED_PAGE_SIZE = 64  # what vLLM is asked for: a key tile a page
HOPPER_ROWS = 128  # of a tile of the Gluon prefill
LAZY_ACCUMULATORS = (64, 128)  # a thread's, for which tilewise.kernels.lazy_rescale has assembly
MAX_GROUP_SIZE = 128
FP8_DOTS = ("", "promoted", "plain")
MAX_WIDE_GROUP_SIZE = 32  # of wide heads: a tile has no more rows, or it would spill


@dataclass(frozen=True)
class Device:
    """What the policy needs to know of a device.

    Parameters
    ----------
    arch : int
        Compute capability as one number: 80, 89, 90, 100.
    num_sms : int
        Streaming multiprocessors.
    shared_memory : int
        Bytes of shared memory one program may use.
    interpreted : bool
        Whether Triton's interpreter stands for the device: no Gluon, no assembly.
    """

    arch: int
    num_sms: int
    shared_memory: int
    interpreted: bool = False


# Triton's interpreter runs programs one after another, so a few workers are enough to exercise
# every way of cutting the work.
INTERPRETER = Device(arch=90, num_sms=2, shared_memory=227 * 1024, interpreted=True)


@dataclass(frozen=True)
class Geometry:
    """The attention layer: heads, head size, page size and bytes per element.

    ``kv_element_size`` is that of the cache, 1 for fp8; by default as ``element_size``.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    element_size: int
    kv_element_size: int = 0

    def __post_init__(self) -> None:
        if self.kv_element_size == 0:
            object.__setattr__(self, "kv_element_size", self.element_size)
        hq, hkv = self.num_q_heads, self.num_kv_heads
        if hkv < 1 or hq < 1 or hq % hkv:
            raise UnsupportedConfig(
                f"num_q_heads={hq} must be a positive multiple of num_kv_heads={hkv}"
            )
        d = self.head_dim
        most = MAX_WIDE_GROUP_SIZE if d == HEAD_DIM_WIDE else MAX_GROUP_SIZE
        if self.group_size > most:
            raise UnsupportedConfig(
                f"num_q_heads / num_kv_heads = {self.group_size}; accepted: 1 to {most} with "
                f"head_dim={d}"
            )
        in_range = HEAD_DIM_MIN <= d <= HEAD_DIM_MAX and d % HEAD_DIM_STEP == 0
        if not in_range and d != HEAD_DIM_WIDE:
            raise UnsupportedConfig(
                f"head_dim={d}; accepted: multiples of {HEAD_DIM_STEP} "
                f"from {HEAD_DIM_MIN} to {HEAD_DIM_MAX}, and {HEAD_DIM_WIDE}"
            )
        if self.page_size < PAGE_SIZE_STEP or self.page_size % PAGE_SIZE_STEP:
            raise UnsupportedConfig(
                f"page_size={self.page_size}; accepted: multiples of {PAGE_SIZE_STEP}"
            )
        if self.element_size not in (2, 4):
            raise UnsupportedConfig(
                f"element_size={self.element_size} bytes; accepted: 2 (fp16, bf16) and 4 (fp32)"
            )
        if self.kv_element_size not in (1, self.element_size):
            raise UnsupportedConfig(
                f"kv_element_size={self.kv_element_size} bytes; accepted: 1 (fp8) and "
                f"{self.element_size}, the queries'"
            )

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def block_d(self) -> int:
        """Head size padded to the next power of two."""
        return next_power_of_2(self.head_dim)


@dataclass(frozen=True)
class Tiles:
    """Launch configuration of one attention kernel.

    ``block_m`` query rows (tokens times the heads of a group), ``block_n`` keys a step,
    ``block_d`` padded head size; ``use_tma`` reads whole-page tiles with the copy engine;
    ``num_stages`` pipelines the loop without masks, ``tail_stages`` the one with them.
    ``lazy_rescale`` leaves accumulators alone while no maximum rises much.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    use_tma: bool
    tail_stages: int = 1
    lazy_rescale: bool = False


def accumulators(tiles: Tiles) -> int:
    """Accumulators that one thread holds."""
    return tiles.block_m * tiles.block_d // (tiles.num_warps * 32)


@dataclass(frozen=True)
class HopperTiles:
    """Launch configuration of a Gluon kernel for Hopper; the prefill's tiles have 128 rows.

    ``block_n`` keys a block, ``num_stages`` blocks of K and of V in flight; of the Gluon decode,
    whose items have the rows that the plain kernel's have, keys a tile and tiles in flight.
    """

    block_n: int
    num_stages: int


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
    return replace(config, pieces=pieces)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n`` (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def choose(
    geometry: Geometry,
    device: Device,
    decode_query_len: int = 1,
    window: int = 0,
    plain: bool = False,
    fp8_matmul: bool = False,
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

    Raises
    ------
    UnsupportedConfig
        Naming what the layer or the device has, and what is accepted.
    """
    if not 1 <= decode_query_len <= DECODE_MAX_QUERY_LEN:
        raise UnsupportedConfig(
            f"decode_query_len={decode_query_len}; accepted: 1 to {DECODE_MAX_QUERY_LEN}"
        )
    if device.arch < 80:
        raise UnsupportedConfig(f"compute capability {device.arch / 10}; accepted: 8.0 and later")
    decode = _decode_tiles(geometry, device, decode_query_len)
    few = None
    if not plain and why_not_hopper_decode(geometry, device, decode) is None:
        few = HopperTiles(decode.block_n, num_stages=3)
    hopper = None
    prefill = _prefill_tiles(geometry, device, window)
    hopper_fp8 = None
    if fp8_matmul:
        prefill = _fp8_tiles(geometry, device)
        if not plain and why_not_hopper_fp8(geometry, device, window) is None:
            hopper_fp8 = _HOPPER_FP8_TILES
    if not plain and why_not_hopper(geometry, device, window) is None:
        hopper = _HOPPER_TILES[geometry.head_dim]
        prefill = _hopper_twin(geometry)
    return Config(
        geometry=geometry,
        prefill=prefill,
        hopper_prefill=hopper,
        hopper_prefill_fp8=hopper_fp8,
        decode=decode,
        hopper_decode=few,
        num_workers=device.num_sms * _workers_per_sm(decode, geometry, device),
        num_sms=device.num_sms,
        window=window,
        pdl=device.arch >= 90 and not device.interpreted,
        fp8_dot="promoted" if fp8_matmul else "",
    )


# Head size to blocks; shared memory holds the queries of a tile and the blocks in flight.
_HOPPER_TILES = {
    64: HopperTiles(block_n=128, num_stages=5),
    128: HopperTiles(block_n=128, num_stages=3),
    256: HopperTiles(block_n=64, num_stages=2),
}
# Head size to the narrowest window that the Gluon prefill takes. Below it every block touches an
# edge and a tile is mostly its start and end: the plain kernel, which keeps more tiles in flight,
# measured faster (bench/NOTES.md).
_HOPPER_WINDOWS = {64: 1024, 128: 512, 256: 256}


_HOPPER_FP8_TILES = HopperTiles(block_n=128, num_stages=3)  # of head size 128


def _why_no_gluon(geometry: Geometry, device: Device, kv_size: int = 2) -> str | None:
    """What all Gluon kernels ask of a device and of dtypes; None where it is there."""
    if device.interpreted:
        return "kernels in Gluon do not run in Triton's interpreter"
    if device.arch != 90:
        return f"compute capability {device.arch / 10} (accepted: 9.0)"
    if geometry.element_size != 2:
        return f"{geometry.element_size} bytes an element (accepted: 2)"
    if geometry.kv_element_size != kv_size:
        return f"{geometry.kv_element_size} bytes an element of the cache (accepted: {kv_size})"
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
    group, page = geometry.group_size, geometry.page_size
    if (why := _why_no_gluon(geometry, device)) is not None:
        return why
    if geometry.head_dim not in _HOPPER_TILES:
        return f"head_dim {geometry.head_dim} (accepted: {', '.join(map(str, _HOPPER_TILES))})"
    if group > HOPPER_ROWS // 2:
        return f"group size {group} (accepted: 1 to {HOPPER_ROWS // 2})"
    block_n = _HOPPER_TILES[geometry.head_dim].block_n
    if page != 64 and page % block_n:
        return f"page_size {page} (accepted: 64 and multiples of {block_n})"
    narrowest = _HOPPER_WINDOWS[geometry.head_dim]
    if 0 < window < narrowest:
        return f"window {window} (accepted: none, or {narrowest} and more)"
    needed = _hopper_shared_memory(geometry.head_dim)
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
    group, page, tiles = geometry.group_size, geometry.page_size, _HOPPER_FP8_TILES
    if (why := _why_no_gluon(geometry, device, kv_size=1)) is not None:
        return why
    if geometry.head_dim != 128:
        return f"head_dim {geometry.head_dim} (accepted: 128)"
    if group > HOPPER_ROWS // 2:
        return f"group size {group} (accepted: 1 to {HOPPER_ROWS // 2})"
    if page != 64 and page % tiles.block_n:
        return f"page_size {page} (accepted: 64 and multiples of {tiles.block_n})"
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


def _hopper_shared_memory(head_dim: int) -> int:
    """Bytes of the Gluon prefill's queries, blocks in flight and barriers."""
    tiles = _HOPPER_TILES[head_dim]
    rows = HOPPER_ROWS + 2 * tiles.num_stages * tiles.block_n
    return rows * head_dim * 2 + 1024


def _hopper_twin(geometry: Geometry) -> Tiles:
    """Plain tiles over the rows of the Gluon prefill's."""
    stages = 2 if geometry.head_dim > 128 else 3
    return Tiles(
        HOPPER_ROWS, 64, geometry.head_dim, num_warps=8, num_stages=stages, use_tma=True,
        lazy_rescale=geometry.head_dim >= 128,
    )  # fmt: skip


def _prefill_tiles(geometry: Geometry, device: Device, window: int) -> Tiles:
    d, group = geometry.block_d, next_power_of_2(geometry.group_size)
    fp8 = geometry.kv_element_size == 1
    if d > HEAD_DIM_MAX:
        tiles = _wide_prefill_tiles(geometry, device)
    elif geometry.element_size == 4:
        tiles = Tiles(max(64, group), 32, d, num_warps=4, num_stages=2, use_tma=False)
    elif device.arch >= 90 and d <= 128:
        # 64 rows of 4 warps leave room for two or three programs an SM; measured best at short
        # and level with 128 rows at long sequences (bench/NOTES.md).  Without whole pages the
        # addresses take registers, so twice the rows share them among eight warps.
        tiles = Tiles(max(64, group), 64, d, num_warps=4, num_stages=3, use_tma=True, tail_stages=2)
        if _is_narrow(window, geometry):
            # A few keys around each query: small tiles, many of them at a time.
            tiles = replace(tiles, block_n=32, num_stages=2)
        elif d <= 64:
            tiles = replace(tiles, block_m=128, num_warps=8)
        if not _tma_fits(tiles, geometry, device):
            tiles = Tiles(128, 64, d, num_warps=8, num_stages=3, use_tma=False)
    elif device.arch >= 90:
        # Tiles that are converted on the way lie in registers once.
        tiles = Tiles(128, 32 if fp8 else 64, d, num_warps=8, num_stages=2, use_tma=True)
        if _divides_per_row(tiles, geometry) and not fp8:
            tiles = replace(tiles, block_n=32, num_stages=3)
    elif fp8:
        # Every warp converts the whole tile for itself: few warps, and small tiles for them.
        warps = 4 if d <= 128 else 8
        tiles = Tiles(max(64, group), 32, d, num_warps=warps, num_stages=2, use_tma=False)
    elif d <= 128:
        tiles = Tiles(128, 64, d, num_warps=4 if d <= 64 else 8, num_stages=2, use_tma=False)
        if _divides_per_row(tiles, geometry):
            tiles = replace(tiles, num_warps=8)
    else:
        tiles = Tiles(128, 32, d, num_warps=8, num_stages=2, use_tma=False)
    tiles = replace(tiles, use_tma=tiles.use_tma and _tma_fits(tiles, geometry, device))
    tiles = _fit(tiles, geometry, device)
    lazily = _can_rescale_lazily(tiles, geometry, device) and not _is_narrow(window, geometry)
    return replace(tiles, lazy_rescale=lazily)


def _is_narrow(window: int, geometry: Geometry) -> bool:
    """Whether rows see so few keys that small tiles, copied whole, are best."""
    narrowest = _HOPPER_WINDOWS[64 if geometry.block_d <= 64 else 128]
    whole = geometry.page_size % 32 == 0 and geometry.kv_element_size == 2
    return 0 < window < narrowest and whole


def _fp8_tiles(geometry: Geometry, device: Device) -> Tiles:
    """Tiles of a prefill that multiplies fp8 operands, those of the Gluon kernel's twin."""
    d = geometry.block_d
    if geometry.kv_element_size != 1:
        raise UnsupportedConfig(
            f"fp8_matmul with {geometry.kv_element_size} bytes an element of the cache; accepted: 1"
        )
    if device.arch < 89:
        raise UnsupportedConfig(
            f"fp8_matmul with compute capability {device.arch / 10}; accepted: 8.9 and later"
        )
    if d > HEAD_DIM_MAX:
        raise UnsupportedConfig(
            f"fp8_matmul with head_dim={geometry.head_dim}; accepted: up to {HEAD_DIM_MAX}"
        )
    if device.arch < 90 or geometry.group_size > HOPPER_ROWS:
        return _prefill_tiles(geometry, device, window=0)
    # Products are added to the accumulators by themselves, which takes as many registers again.
    rows = HOPPER_ROWS if d <= 128 else max(64, next_power_of_2(geometry.group_size))
    tiles = Tiles(rows, 64, d, num_warps=8, num_stages=3 if d <= 128 else 2, use_tma=True)
    tiles = replace(tiles, use_tma=_tma_fits(tiles, geometry, device))
    tiles = _fit(tiles, geometry, device)
    return replace(tiles, lazy_rescale=_can_rescale_lazily(tiles, geometry, device))


def _wide_prefill_tiles(geometry: Geometry, device: Device) -> Tiles:
    """Tiles of 32 rows: with more, accumulators leave no registers for what reads a tile.

    Where products add up in tensor memory there is room for 64, if no address is computed.
    """
    d = geometry.block_d
    if geometry.element_size == 4:
        return Tiles(MAX_WIDE_GROUP_SIZE, 16, d, num_warps=8, num_stages=1, use_tma=False)
    tiles = Tiles(32, 32, d, num_warps=8, num_stages=2, use_tma=True, tail_stages=2)
    if not _tma_fits(tiles, geometry, device):
        return replace(tiles, use_tma=False, tail_stages=1)
    if device.arch >= 100 and geometry.kv_element_size == 2:
        tiles = replace(tiles, block_m=64)
    return tiles


def _can_rescale_lazily(tiles: Tiles, geometry: Geometry, device: Device) -> bool:
    """Whether accumulators lie as ``tilewise.kernels.lazy_rescale`` expects: 16 rows a warp.

    With fewer than 128 columns there is too little to save: it measured slower.
    """
    return (
        device.arch == 90
        and not device.interpreted
        and geometry.element_size == 2
        and tiles.num_warps % 4 == 0
        and tiles.block_m == 16 * tiles.num_warps
        and tiles.block_d >= 128
        and accumulators(tiles) in LAZY_ACCUMULATORS
    )


def _decode_tiles(geometry: Geometry, device: Device, decode_query_len: int) -> Tiles:
    d = geometry.block_d
    if d > HEAD_DIM_MAX:
        return _wide_decode_tiles(geometry, device)
    rows = geometry.group_size * decode_query_len
    block_m = min(max(next_power_of_2(rows), 16), 64)
    fp8 = geometry.kv_element_size == 1 and geometry.element_size == 2  # fp32 is not tuned
    row_bytes = (1 if fp8 else geometry.element_size) * d
    block_n = 64 if row_bytes <= 256 else 32
    stages = 3
    if fp8:
        # Half the bytes a key: twice the keys a step where a page holds them, else more steps
        # on the way.
        whole = device.arch >= 90 and geometry.page_size % 128 == 0
        if row_bytes <= 128 and whole and block_m == 16:
            block_n = 128
        else:
            stages = 4
    tiles = Tiles(block_m, block_n, d, num_warps=4, num_stages=stages, use_tma=True, tail_stages=2)
    if row_bytes <= 128 and not fp8:
        tiles = replace(tiles, tail_stages=3)
    if not _tma_fits(tiles, geometry, device):
        tiles = replace(tiles, use_tma=False)
        if geometry.page_size % block_n and block_m == 16 and not fp8:
            # Every row looks up its page: smaller tiles leave registers for a third program.
            tiles = replace(tiles, block_n=32, num_stages=4)
    # Two programs an SM where possible, or one waits for memory while nobody computes.
    half = replace(device, shared_memory=device.shared_memory // 2)
    smallest = replace(tiles, block_n=16, num_stages=1)
    fits_twice = shared_memory(smallest, geometry) <= half.shared_memory
    return _fit(tiles, geometry, half if fits_twice else device)


def _wide_decode_tiles(geometry: Geometry, device: Device) -> Tiles:
    """Tiles of a program that has an SM for itself: its stages hold what two would have."""
    d = geometry.block_d
    tiles = Tiles(16, 32, d, num_warps=8, num_stages=3, use_tma=True, tail_stages=2)
    if geometry.kv_element_size == 1 and device.arch >= 90 and geometry.page_size % 64 == 0:
        tiles = replace(tiles, block_n=64, num_stages=2)  # half the bytes a key
    if not _tma_fits(tiles, geometry, device):
        tiles = replace(tiles, use_tma=False)
    return _fit(tiles, geometry, device)


def _tma_fits(tiles: Tiles, geometry: Geometry, device: Device) -> bool:
    """Whether one key tile lies inside one page, on a device with the copy engine."""
    return device.arch >= 90 and geometry.page_size % tiles.block_n == 0


def _divides_per_row(tiles: Tiles, geometry: Geometry) -> bool:
    """Whether every key looks up its page by a real division; it costs registers, a shift none."""
    page = geometry.page_size
    return page % tiles.block_n != 0 and page != next_power_of_2(page)


def _fit(tiles: Tiles, geometry: Geometry, device: Device) -> Tiles:
    """Give up pipeline stages, then keys a step, then rows, until shared memory suffices."""
    fewest_rows = max(16, next_power_of_2(geometry.group_size))
    while shared_memory(tiles, geometry) > device.shared_memory:
        if tiles.num_stages > 1:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.block_n > 16:
            tiles = replace(tiles, block_n=tiles.block_n // 2)
            tiles = replace(tiles, use_tma=tiles.use_tma and _tma_fits(tiles, geometry, device))
        elif tiles.block_m > fewest_rows:
            tiles = replace(tiles, block_m=tiles.block_m // 2)
        else:
            raise UnsupportedConfig(
                f"head_dim={geometry.head_dim} needs {shared_memory(tiles, geometry)} bytes of "
                f"shared memory; the device has {device.shared_memory}"
            )
    return tiles


def shared_memory(tiles: Tiles, geometry: Geometry) -> int:
    """Upper estimate of a program's shared memory in bytes: Q, P, and staged K and V.

    A tile of an fp8 cache is staged as it is and may pass once more as operand of a product.
    """
    size, kv_size = geometry.element_size, geometry.kv_element_size
    q = tiles.block_m * tiles.block_d * size
    p = tiles.block_m * tiles.block_n * size
    kv = 2 * tiles.num_stages * tiles.block_n * tiles.block_d * kv_size
    converted = 2 * tiles.block_n * tiles.block_d * size if kv_size < size else 0
    return q + p + kv + converted


def _workers_per_sm(tiles: Tiles, geometry: Geometry, device: Device) -> int:
    """Decode programs that share an SM: enough loads in flight, without starving for memory."""
    if tiles.block_d > HEAD_DIM_MAX:
        return 1
    # In units of 16 bits; fp32 is not tuned.
    tile = tiles.block_n * tiles.block_d * min(geometry.kv_element_size, 2) // 2
    wanted = 2 if tile >= 64 * 128 else 3
    if tiles.use_tma and tile <= 64 * 64 and tiles.block_m == 16 and geometry.kv_element_size == 2:
        wanted = 4  # within 128 registers
    if geometry.kv_element_size == 1 and tiles.block_m > 16:
        wanted = 2  # converting takes registers, and so do rows
    return max(1, min(wanted, device.shared_memory // shared_memory(tiles, geometry)))
