"""What decisions are made of: a device, a layer's geometry, and tiles.

No torch and no GPU here.
"""

from dataclasses import dataclass

from tilewise.errors import UnsupportedConfig

# Requests with at most this many query tokens are decoded with split KV (it covers speculative
# verification and the short tails of chunked prefill); longer ones take the prefill kernel.
DECODE_MAX_QUERY_LEN = 16
HEAD_DIM_MIN, HEAD_DIM_MAX, HEAD_DIM_STEP = 16, 256, 8
HEAD_DIM_WIDE = 512  # beside these
PAGE_SIZE_STEP = 16
PAGE_SCALES_STEP = 64  # a page with scales of its own holds whole key tiles of every kernel
PREFERRED_PAGE_SIZE = 64  # what vLLM is asked for: a key tile a page
HOPPER_ROWS = 128  # of a tile of the Gluon prefill
MAX_GROUP_SIZE = 128
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


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n`` (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


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
