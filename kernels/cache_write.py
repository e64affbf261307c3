"""Write new keys and values into the paged cache by slot mapping."""

import torch
import triton
import triton.language as tl

from tilewise.geometry import cdiv, next_power_of_2
from tilewise.kernels.fp8 import FORMATS, encode_fp8
from tilewise.kernels.hadamard import rotate_rows
from tilewise.kernels.launch import KvCache, Launcher

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Micro-batches and cache groups slice the slot mapping anywhere.
_VARYING = ["num_tokens", "slot_mapping_ptr"]


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=_VARYING)
def _write_kv_kernel(
    k_cache_ptr,
    v_cache_ptr,
    key_ptr,
    value_ptr,
    slot_mapping_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_tokens,
    stride_kc_p,
    stride_kc_h,
    stride_kc_s,
    stride_vc_p,
    stride_vc_h,
    stride_vc_s,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    K_SCALE_STEP: tl.constexpr,
    V_SCALE_STEP: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """cache[slot // PAGE_SIZE, head, slot % PAGE_SIZE] = token; grid = (token tiles, heads).

    With a ``KV_FORMAT`` the cache holds ``fp8(token / scale)``; scales may be None for 1.  They
    lie ``…_SCALE_STEP`` apart from head to head; -1 says that every page has one of each head.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    # -1 marks tokens without a slot (padding, idle ranks): they touch nothing.
    mask = (slot >= 0)[:, None] & (offs_d < HEAD_DIM)[None, :]
    page = slot // PAGE_SIZE
    in_page = slot % PAGE_SIZE
    token = token.to(tl.int64)
    k = tl.load(
        key_ptr + token[:, None] * stride_k_t + head * stride_k_h + offs_d[None, :], mask=mask
    )
    v = tl.load(
        value_ptr + token[:, None] * stride_v_t + head * stride_v_h + offs_d[None, :], mask=mask
    )
    if KV_FORMAT != "":
        k = k.to(tl.float32)
        v = v.to(tl.float32)
        if ROTATED:
            k = rotate_rows(k, BLOCK_T, HEAD_DIM)
        # Divisions that round as IEEE's do, so that the bytes are those of any other writer.
        if K_SCALE_STEP < 0:
            at = page * tl.num_programs(1) + head
            if k_scale_ptr is not None:
                k_scale = tl.load(k_scale_ptr + at, mask=slot >= 0, other=1.0)
                k = tl.div_rn(k, tl.broadcast_to(k_scale[:, None], [BLOCK_T, BLOCK_D]))
            if v_scale_ptr is not None:
                v_scale = tl.load(v_scale_ptr + at, mask=slot >= 0, other=1.0)
                v = tl.div_rn(v, tl.broadcast_to(v_scale[:, None], [BLOCK_T, BLOCK_D]))
        else:
            if k_scale_ptr is not None:
                k = tl.div_rn(k, tl.load(k_scale_ptr + head * K_SCALE_STEP))
            if v_scale_ptr is not None:
                v = tl.div_rn(v, tl.load(v_scale_ptr + head * V_SCALE_STEP))
        k = encode_fp8(k, KV_FORMAT)
        v = encode_fp8(v, KV_FORMAT)
    k_rows = page * stride_kc_p + head * stride_kc_h + in_page * stride_kc_s
    v_rows = page * stride_vc_p + head * stride_vc_h + in_page * stride_vc_s
    tl.store(k_cache_ptr + k_rows[:, None] + offs_d[None, :], k, mask=mask)
    tl.store(v_cache_ptr + v_rows[:, None] + offs_d[None, :], v, mask=mask)


_launch_write = Launcher(_write_kv_kernel)


def _check_write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    fp8_format: str,
) -> None:
    if fp8_format not in FORMATS:
        raise ValueError(f"fp8_format={fp8_format!r}; accepted: {', '.join(map(repr, FORMATS))}")
    if (k_cache.dtype == torch.uint8) != bool(fp8_format):
        raise ValueError(
            f"k_cache is {k_cache.dtype} with fp8_format={fp8_format!r}; accepted: torch.uint8 "
            "with an fp8 format, any other dtype without"
        )
    if k_cache.dim() != 4 or k_cache.stride(3) != 1 or v_cache.stride(-1) != 1:
        raise ValueError(
            f"caches have strides {k_cache.stride()} and {v_cache.stride()}; accepted: "
            "[pages, heads, page, head_dim] with unit last stride"
        )
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"v_cache is {v_cache.dtype} {tuple(v_cache.shape)}; accepted: like k_cache, "
            f"{k_cache.dtype} {tuple(k_cache.shape)}"
        )
    if slot_mapping.dim() != 1 or slot_mapping.stride(0) != 1:
        raise ValueError(
            f"slot_mapping has shape {tuple(slot_mapping.shape)} and strides "
            f"{slot_mapping.stride()}; accepted: one contiguous axis"
        )
    heads_and_dim = (k_cache.shape[1], k_cache.shape[3])
    for name, x in (("key", key), ("value", value)):
        fits = x.dim() == 3 and x.shape[1:] == heads_and_dim and x.stride(2) == 1
        dtypes = _FLOATS if fp8_format else (k_cache.dtype,)
        if not fits or x.shape[0] < slot_mapping.shape[0] or x.dtype not in dtypes:
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; accepted: "
                f"{' or '.join(map(str, dtypes))} [>= {slot_mapping.shape[0]}, "
                f"{heads_and_dim[0]}, {heads_and_dim[1]}] with unit last stride"
            )


def _check_scale(
    name: str, scale: torch.Tensor | None, k_cache: torch.Tensor, fp8_format: str
) -> None:
    if scale is None:
        return
    if not fp8_format:
        raise ValueError(f"{name} is given for a cache that is not fp8; accepted: None")
    if not isinstance(scale, torch.Tensor):
        raise ValueError(f"{name}={scale!r}; accepted: a tensor or None")
    pages, heads = k_cache.shape[:2]
    # Two axes say that there is one for every page: no others may have them.
    fits = scale.shape in ((), (1,), (heads,), (pages, heads)) and scale.is_contiguous()
    if not fits or scale.dtype != torch.float32 or scale.device != k_cache.device:
        raise ValueError(
            f"{name} is {scale.dtype} {tuple(scale.shape)} on {scale.device}; accepted: "
            f"contiguous torch.float32 of shape (), (1,), ({heads},) or ({pages}, {heads}) on "
            f"{k_cache.device}"
        )


def _check_rotation(rotated: bool, fp8_format: str, head_dim: int) -> None:
    if rotated and (not fp8_format or head_dim & (head_dim - 1)):
        raise ValueError(
            f"rotated with fp8_format={fp8_format!r} and head_dim={head_dim}; accepted: an fp8 "
            "format and a power of two"
        )


def write_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    fp8_format: str = "",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rotated: bool = False,
) -> None:
    """Store the first ``len(slot_mapping)`` tokens' keys and values into their slots.

    Parameters
    ----------
    k_cache, v_cache : Tensor[num_pages, num_kv_heads, page_size, head_dim]
        Any strides, unit stride in the last axis; written in place.  uint8 with ``fp8_format``.
    key, value : Tensor[num_tokens, num_kv_heads, head_dim]
        Same dtype as the cache, or fp16, bf16 or fp32 with ``fp8_format``; may be padded beyond
        ``slot_mapping``.  Unit last stride.
    slot_mapping : Tensor[num_slots], int64 or int32
        ``page * page_size + slot`` of each token; negative slots are skipped.
    fp8_format : str
        Store fp8, in this format of ``tilewise.kernels.fp8``: the bytes nearest to the value over
        its scale, ties to even, with what is too large (infinities too) stored as the largest
        finite value.  NaN stays NaN.
    k_scale, v_scale : Tensor[], [1], [num_kv_heads] or [num_pages, num_kv_heads], fp32, optional
        Contiguous; divisors with ``fp8_format``; None for 1.
    rotated : bool
        Rotate keys before they are rounded to fp8 (``tilewise.kernels.hadamard``); head_dim must
        be a power of two.

    Raises
    ------
    ValueError
        Naming the tensor that does not fit.
    """
    _check_write(k_cache, v_cache, key, value, slot_mapping, fp8_format)
    _check_scale("k_scale", k_scale, k_cache, fp8_format)
    _check_scale("v_scale", v_scale, k_cache, fp8_format)
    _check_rotation(rotated, fp8_format, k_cache.shape[3])
    kv = KvCache(k_cache, v_cache, fp8_format, k_scale, v_scale, rotated=rotated)
    if len({x.dim() == 2 for x in (k_scale, v_scale) if x is not None}) > 1:
        raise ValueError("scales of pages with scales of heads; accepted: both of the same kind")
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    _, num_heads, page_size, head_dim = k_cache.shape
    block_t = 16
    args = (
        k_cache, v_cache, key, value, slot_mapping, k_scale, v_scale, num_tokens,
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
    )  # fmt: skip
    constants = dict(
        HEAD_DIM=head_dim, PAGE_SIZE=page_size, BLOCK_T=block_t,
        BLOCK_D=next_power_of_2(head_dim), **kv.constants,
    )  # fmt: skip
    grid = (cdiv(num_tokens, block_t), num_heads, 1)
    _launch_write(grid, args, constants, num_warps=4)
