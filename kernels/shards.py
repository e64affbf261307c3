"""How many keys of each sequence a rank holds, when ranks share every sequence's cache.

Decode context parallelism deals keys out in turns: ``interleave`` consecutive keys to the first
rank, as many to the next one, and so on round and round.
"""

import torch
import triton
import triton.language as tl

from tilewise.kernels.launch import Launcher

BLOCK_R = 128

# One kernel for all ranks and batches: the start of a server compiles it for a rank of its own.
_SCALARS = ["num_reqs", "count", "rank", "interleave"]
_VARYING = ["lengths_ptr", "query_start_loc_ptr", "seq_lens_ptr"]


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_VARYING)
def _shard_lengths_kernel(
    lengths_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_reqs,
    count,
    rank,
    interleave,
    WITH_NEW: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``lengths[r]`` = keys of request ``r`` on this rank; grid = (requests / BLOCK_R,)."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    ok = r < num_reqs
    keys = tl.load(seq_lens_ptr + r, mask=ok, other=0)
    if not WITH_NEW:
        begin = tl.load(query_start_loc_ptr + r, mask=ok, other=0)
        keys -= tl.load(query_start_loc_ptr + r + 1, mask=ok, other=0) - begin
    # Padding may have more rows than keys.
    keys = tl.maximum(keys, 0)
    rounds = keys // (count * interleave)
    rest = keys - rounds * (count * interleave) - rank * interleave
    lengths = rounds * interleave + tl.minimum(tl.maximum(rest, 0), interleave)
    tl.store(lengths_ptr + r, lengths, mask=ok)


_launch_shard_lengths = Launcher(_shard_lengths_kernel)


def shard_lengths(
    lengths: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    count: int,
    rank: int,
    interleave: int,
    with_new: bool,
) -> None:
    """Count the keys that one rank holds of each request; no host sync.

    Parameters
    ----------
    lengths : Tensor[num_reqs], int32, contiguous
        Written.
    query_start_loc : Tensor[num_reqs + 1], int32
    seq_lens : Tensor[num_reqs], int32
        Keys of each request on all ranks, the new ones among them.
    count, rank : int
        Ranks that share a sequence, and which of them this is.
    interleave : int
        Consecutive keys that a rank is dealt at a time.
    with_new : bool
        Whether keys of the queries' own tokens count.
    """
    num_reqs = lengths.shape[0]
    args = (lengths, query_start_loc, seq_lens, num_reqs, count, rank, interleave)
    constants = dict(WITH_NEW=with_new, BLOCK_R=BLOCK_R)
    _launch_shard_lengths((triton.cdiv(num_reqs, BLOCK_R), 1, 1), args, constants, num_warps=4)
