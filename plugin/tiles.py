"""Which tiles the plain kernels have, by architecture, head size, dtypes, pages and window.

The Gluon kernels' are in ``tilewise.policy``; those of their plain twins here.
"""

from dataclasses import replace

from tilewise.errors import UnsupportedConfig
from tilewise.geometry import (
    HEAD_DIM_MAX,
    HOPPER_ROWS,
    MAX_WIDE_GROUP_SIZE,
    Device,
    Geometry,
    Tiles,
    accumulators,
    next_power_of_2,
    shared_memory,
)

LAZY_ACCUMULATORS = (64, 128)  # a thread's, for which tilewise.kernels.lazy_rescale has assembly

# Padded head size to the narrowest window that the Gluon prefill takes. Below it every block
# touches an edge and a tile is mostly its start and end: the plain kernel, which keeps more tiles
# in flight, measured faster (bench/NOTES.md).
HOPPER_WINDOWS = {64: 1024, 128: 512, 256: 256}

# Tensor cores multiply fp8 in steps of as many elements: of a head for logits, of keys for outputs.
FP8_DEPTH = 32


def hopper_twin(geometry: Geometry) -> Tiles:
    """Plain tiles over the rows of the Gluon prefill's."""
    d = geometry.block_d
    # Tiles that are converted on the way lie in registers once.
    block_n = 32 if d > 128 and geometry.kv_element_size == 1 else 64
    return Tiles(
        HOPPER_ROWS, block_n, d, num_warps=8, num_stages=2 if d > 128 else 3, use_tma=True,
        lazy_rescale=d >= 128,
    )  # fmt: skip


def prefill_tiles(geometry: Geometry, device: Device, window: int) -> Tiles:
    """Tiles of a prefill whose queries see ``window`` keys at most; 0 for all."""
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
        if not tma_fits(tiles, geometry, device):
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
    tiles = replace(tiles, use_tma=tiles.use_tma and tma_fits(tiles, geometry, device))
    tiles = _fit(tiles, geometry, device)
    lazily = can_rescale_lazily(tiles, geometry, device) and not _is_narrow(window, geometry)
    return replace(tiles, lazy_rescale=lazily)


def _is_narrow(window: int, geometry: Geometry) -> bool:
    """Whether rows see so few keys that small tiles, copied whole, are best."""
    narrowest = HOPPER_WINDOWS[64 if geometry.block_d <= 64 else 128]
    whole = geometry.page_size % 32 == 0 and geometry.kv_element_size == 2
    return 0 < window < narrowest and whole


def fp8_tiles(geometry: Geometry, device: Device) -> Tiles:
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
    if not FP8_DEPTH <= d <= HEAD_DIM_MAX:
        raise UnsupportedConfig(
            f"fp8_matmul with head_dim={geometry.head_dim}; accepted: {FP8_DEPTH // 2 + 1} to "
            f"{HEAD_DIM_MAX}"
        )
    if device.arch < 90 or geometry.group_size > HOPPER_ROWS:
        tiles = prefill_tiles(geometry, device, window=0)
        if tiles.block_n < FP8_DEPTH:
            raise UnsupportedConfig(
                f"fp8_matmul with head_dim={geometry.head_dim}, {geometry.group_size} heads a KV "
                f"head and {device.shared_memory} bytes of shared memory; accepted: what leaves "
                f"room for {FP8_DEPTH} keys a step"
            )
        return tiles
    # Products are added to the accumulators by themselves, which takes as many registers again.
    rows = HOPPER_ROWS if d <= 128 else max(64, next_power_of_2(geometry.group_size))
    tiles = Tiles(rows, 64, d, num_warps=8, num_stages=3 if d <= 128 else 2, use_tma=True)
    tiles = replace(tiles, use_tma=tma_fits(tiles, geometry, device))
    tiles = _fit(tiles, geometry, device)
    return replace(tiles, lazy_rescale=can_rescale_lazily(tiles, geometry, device))


def _wide_prefill_tiles(geometry: Geometry, device: Device) -> Tiles:
    """Tiles of 32 rows: with more, accumulators leave no registers for what reads a tile.

    Where products add up in tensor memory there is room for 64, if no address is computed.
    """
    d = geometry.block_d
    if geometry.element_size == 4:
        return Tiles(MAX_WIDE_GROUP_SIZE, 16, d, num_warps=8, num_stages=1, use_tma=False)
    tiles = Tiles(32, 32, d, num_warps=8, num_stages=2, use_tma=True, tail_stages=2)
    if not tma_fits(tiles, geometry, device):
        return replace(tiles, use_tma=False, tail_stages=1)
    if device.arch >= 100 and geometry.kv_element_size == 2:
        tiles = replace(tiles, block_m=64)
    return tiles


def can_rescale_lazily(tiles: Tiles, geometry: Geometry, device: Device) -> bool:
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


def decode_tiles(
    geometry: Geometry, device: Device, decode_query_len: int, window: int = 0
) -> Tiles:
    """Tiles of a decode whose requests have ``decode_query_len`` query tokens, typically.

    Queries see ``window`` keys at most; 0 for all.
    """
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
    is_small = row_bytes <= 128 and not fp8
    if is_small:
        tiles = replace(tiles, tail_stages=3)
    if tma_fits(tiles, geometry, device):
        if is_small and 0 < window < 4 * block_n:
            # A few tiles, all in one loop: less memory, so that more programs of the launch that
            # follows find room beside those that end (bench/NOTES.md).
            tiles = replace(tiles, num_stages=2, tail_stages=2)
    else:
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
    if not tma_fits(tiles, geometry, device):
        tiles = replace(tiles, use_tma=False)
    return _fit(tiles, geometry, device)


def workers_per_sm(tiles: Tiles, geometry: Geometry, device: Device) -> int:
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


def tma_fits(tiles: Tiles, geometry: Geometry, device: Device) -> bool:
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
            tiles = replace(tiles, use_tma=tiles.use_tma and tma_fits(tiles, geometry, device))
        elif tiles.block_m > fewest_rows:
            tiles = replace(tiles, block_m=tiles.block_m // 2)
        else:
            raise UnsupportedConfig(
                f"head_dim={geometry.head_dim} needs {shared_memory(tiles, geometry)} bytes of "
                f"shared memory; the device has {device.shared_memory}"
            )
    return tiles
