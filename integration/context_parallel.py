"""Decode context parallelism: ranks share every sequence's keys, and queries go round.

vLLM gives each rank of a group the same KV head and a part of every sequence's keys, dealt out in
turns of ``interleave`` keys. For a layer, each rank

1. gathers the queries of all ranks, and attends with them to the keys that it holds,
2. combines the parts of all ranks by their log-sum-exp, and keeps its own heads,
3. attends causally with its own queries to the batch's new keys, which it has whole,
4. merges the two.

The first part leaves the new keys out, so every query sees all keys of it and their order does not
matter. Where every request has one query, its own key is the last one anyway: then the first part
includes it, and the last two steps fall away. Where no request has a context, only they are left.

Collectives are vLLM's own. Every rank takes the same way through here: what decides is on the host
and the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tilewise import counters
from tilewise.attention import PagedAttention, Plan
from tilewise.errors import UnsupportedConfig
from tilewise.kernels.shards import shard_lengths
from tilewise.support import PAGE_SIZE_MULTIPLE

if TYPE_CHECKING:
    from tilewise.integration.impl import TilewiseImpl

# In place of the sinks of other ranks' heads: no weight beside any logit, and finite.
NO_SINK = -1e30


@dataclass(frozen=True)
class Shards:
    """How keys are dealt out.

    Parameters
    ----------
    count, rank : int
        Ranks that share a sequence, and which of them this is.
    interleave : int
        Consecutive keys that a rank is dealt at a time.
    """

    count: int
    rank: int
    interleave: int = 1


class Ranks(Protocol):
    """What the ranks of a group exchange."""

    def gather(self, query: torch.Tensor) -> torch.Tensor:
        """Join ``[tokens, heads, head_dim]`` of all ranks along the heads."""

    def combine(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Combine all ranks' ``[tokens, all heads, head_dim]`` and ``[tokens, all heads]``.

        Returns this rank's heads of both.
        """


class Group:
    """The ranks of vLLM's group, by vLLM's collectives.

    Parameters
    ----------
    group : GroupCoordinator
        Of decode context parallelism.
    combine : callable
        ``cp_lse_ag_out_rs`` or ``dcp_a2a_lse_reduce``.
    """

    def __init__(self, group: Any, combine: Callable[..., Any]) -> None:
        self._group, self._combine = group, combine

    def gather(self, query: torch.Tensor) -> torch.Tensor:
        """See ``Ranks``."""
        return self._group.all_gather(query.contiguous(), dim=1)

    def combine(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Ranks``; ``out`` is overwritten."""
        return self._combine(out, lse, self._group, return_lse=True)


class Alone:
    """One rank that plays a group whose others hold no keys; it exchanges nothing.

    Parameters
    ----------
    shards : Shards
        The group's.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def gather(self, query: torch.Tensor) -> torch.Tensor:
        """See ``Ranks``."""
        return query.repeat(1, self._shards.count, 1)

    def combine(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Ranks``."""
        heads = out.shape[1] // self._shards.count
        own = slice(self._shards.rank * heads, (self._shards.rank + 1) * heads)
        return out[:, own].contiguous(), lse[:, own].contiguous()


@dataclass(frozen=True)
class ShardedStep:
    """One batch, planned.

    Parameters
    ----------
    attention : ShardedAttention
        Who planned it.
    plan : Plan
        Of all ranks' heads over this rank's keys.
    new : Plan, optional
        Of this rank's heads over the new keys; None where ``plan`` includes them.
    has_context : bool
        False promises that no request has keys besides its new ones.
    """

    attention: ShardedAttention
    plan: Plan
    new: Plan | None
    has_context: bool


class ShardedAttention:
    """Attention over the keys of one rank and the batch's own, and their exchange.

    Parameters
    ----------
    shards : Shards
        How keys are dealt out.
    ranks : Ranks
        The other ranks.
    attn : PagedAttention
        For the heads of all ranks.
    dealt : Shards, optional
        Otherwise than ``shards`` where this is not a real group: how the keys really lie.

    Raises
    ------
    UnsupportedConfig
        For several KV heads a rank, whose query heads would not lie together when gathered.
    """

    def __init__(
        self, shards: Shards, ranks: Ranks, attn: PagedAttention, dealt: Shards | None = None
    ) -> None:
        g = attn.geometry
        if g.num_kv_heads != 1:
            raise UnsupportedConfig(
                f"decode context parallelism with {g.num_kv_heads} KV heads a rank; accepted: 1"
            )
        self.shards, self.ranks, self.attn = shards, ranks, attn
        self._dealt = dealt or shards
        self.num_heads = g.num_q_heads // shards.count
        self.new = PagedAttention(
            self.num_heads, g.num_kv_heads, g.head_dim,
            # New keys are rows; they lie in no pages.
            page_size=PAGE_SIZE_MULTIPLE, dtype=attn.dtype, max_num_reqs=attn.max_num_reqs,
            max_num_tokens=attn.max_num_tokens, device=attn.device,
            batch_invariant=attn.batch_invariant,
        )  # fmt: skip
        self._lengths = torch.zeros(attn.max_num_reqs, dtype=torch.int32, device=attn.device)
        # vLLM's kernels take vectors of powers of two.
        self._width = 1 << (g.head_dim - 1).bit_length()

    def alone(self) -> ShardedAttention:
        """Return the same for a rank that holds all keys, and exchanges nothing (self-check)."""
        return ShardedAttention(self.shards, Alone(self.shards), self.attn, Shards(1, 0))

    @property
    def workspace_bytes(self) -> int:
        """Device memory held besides that of ``attn``."""
        return self.new.workspace_bytes + 4 * self._lengths.numel()

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        num_tokens: int,
        max_query_len: int,
        has_decode: bool = True,
        causal: bool | torch.Tensor = True,
        has_context: bool = True,
        single: bool | None = None,
    ) -> ShardedStep:
        """Plan a batch; no host sync.

        Parameters
        ----------
        query_start_loc, seq_lens, block_table, num_tokens, max_query_len, has_decode, causal
            As of ``PagedAttention.plan``. ``seq_lens`` counts the keys of all ranks,
            ``block_table`` names the pages of this one, whose keys lie in it without gaps.
        has_context : bool
            False promises that no request has keys besides its new ones: nothing is exchanged.
            The same on all ranks.
        single : bool, optional
            True promises that no request has more than one query token, so that the new keys can be
            counted in the shards. Default: what ``max_query_len`` says. A batch that replays a
            graph must be planned as the one that was captured, in this respect.
        """
        lengths = self._lengths[: seq_lens.shape[0]]
        single = max_query_len <= 1 if single is None else single
        if lengths.shape[0]:
            dealt = self._dealt
            shard_lengths(
                lengths, query_start_loc, seq_lens, count=dealt.count, rank=dealt.rank,
                interleave=dealt.interleave, with_new=single,
            )  # fmt: skip
            counters.add("launches", kernel="shard_lengths")
        bounds: dict[str, Any] = {
            "num_tokens": num_tokens, "max_query_len": max_query_len, "has_decode": has_decode,
        }  # fmt: skip
        plan = self.attn.plan(query_start_loc, lengths, block_table, causal=False, **bounds)
        new = None
        if not single:
            new = self.new.plan(query_start_loc, None, None, causal=causal, **bounds)
        return ShardedStep(self, plan, new, has_context or single)

    def run(
        self,
        step: ShardedStep,
        impl: TilewiseImpl,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        scales: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        """Attend with one layer's queries.

        Parameters
        ----------
        step : ShardedStep
            The newest one.
        impl : TilewiseImpl
            The layer's; its scale, soft cap and sinks are used.
        query, output : Tensor[num_tokens, num_heads, head_dim]
            Of this rank's heads; rows beyond the planned tokens are left alone.
        key, value : Tensor[num_tokens, 1, head_dim]
            Of the new tokens.
        kv_cache : Tensor[num_pages, 1, page_size, 2 * head_dim]
            This rank's part.
        scales : pair of Tensor or None
            Of keys and values in an fp8 cache.
        """
        tokens = step.plan.num_tokens
        if not tokens:
            return
        query, output = query[:tokens], output[:tokens]
        part = None
        if step.has_context:
            sinks = impl.sinks if step.new is None else None
            part = self._over_context(step.plan, impl, query, kv_cache, sinks, scales)
        if step.new is None:
            assert part is not None
            output.copy_(part[0])
            return
        if key is None or value is None:
            raise UnsupportedConfig("a layer was called without its new keys and values")
        new: dict[str, Any] = {
            "scale": impl.scale, "softcap": impl.soft_cap, "sinks": impl.sinks, "plan": step.new,
        }  # fmt: skip
        rows = key[:tokens], value[:tokens]
        if part is None:
            self.new.run(query, rows, out=output, **new)
            return
        shape = (tokens, self.num_heads, output.shape[2])
        out = torch.empty(shape, dtype=output.dtype, device=output.device)
        _, lse = self.new.run(query, rows, out=out, return_lse=True, **new)
        _merge(output, *part, out, lse)

    def _over_context(
        self,
        plan: Plan,
        impl: TilewiseImpl,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        sinks: torch.Tensor | None,
        scales: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with own heads to the keys of all ranks: output and log-sum-exp."""
        gathered = self.ranks.gather(query)
        size = gathered.shape[2]
        out = torch.empty(
            (*gathered.shape[:2], self._width), dtype=query.dtype, device=query.device
        )
        _, lse = self.attn.run(
            gathered, kv_cache, scale=impl.scale, out=out[..., :size], return_lse=True, plan=plan,
            softcap=impl.soft_cap, sinks=self._own_sinks(sinks), k_scale=scales[0],
            v_scale=scales[1],
        )  # fmt: skip
        out, lse = self.ranks.combine(out, lse)
        return out[..., :size], lse

    def _own_sinks(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """Sinks of all ranks' heads: a head's sink counts on the rank that owns the head."""
        if sinks is None:
            return None
        everyone = torch.full(
            (self.shards.count * self.num_heads,), NO_SINK, dtype=torch.float32, device=sinks.device
        )
        begin = self.shards.rank * self.num_heads
        everyone[begin : begin + self.num_heads] = sinks
        return everyone


def _merge(
    output: torch.Tensor,
    context: torch.Tensor,
    context_lse: torch.Tensor,
    new: torch.Tensor,
    new_lse: torch.Tensor,
) -> None:
    """Merge two parts ``[tokens, heads, head_dim]`` by their log-sum-exps into ``output``."""
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    # vLLM's kernels take dense rows, and log-sum-exps with the heads first.
    dense = output if output.is_contiguous() else torch.empty_like(new)
    merge_attn_states(
        dense, context.contiguous(), context_lse.t().contiguous(), new, new_lse.t().contiguous()
    )
    if dense is not output:
        output.copy_(dense)


def group_shards(kv_cache_spec: Any, parallel: Any) -> Shards | None:
    """Return how keys of a KV-cache group are dealt out; None where each rank holds them all.

    Parameters
    ----------
    kv_cache_spec : KVCacheSpec
        The group's.
    parallel : ParallelConfig
        vLLM's.
    """
    if not getattr(kv_cache_spec, "dcp_sharded", False):
        return None
    from vllm.distributed.parallel_state import get_dcp_world_size_and_rank

    count, rank = get_dcp_world_size_and_rank()
    return Shards(count, rank, parallel.cp_kv_cache_interleave_size) if count > 1 else None


def join_group(shards: Shards, parallel: Any) -> Group:
    """Return vLLM's group with the exchange that the user chose.

    Parameters
    ----------
    shards : Shards
        How keys are dealt out.
    parallel : ParallelConfig
        vLLM's.

    Raises
    ------
    UnsupportedConfig
        If vLLM's default exchange cannot take as many ranks, or would not happen.
    """
    from vllm.distributed import get_dcp_group
    from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce

    if parallel.dcp_comm_backend == "a2a":
        return Group(get_dcp_group(), dcp_a2a_lse_reduce)
    nccl = getattr(get_dcp_group().device_communicator, "pynccl_comm", None)
    if nccl is not None and nccl.disabled:
        # Its reduce-scatter then returns memory that nobody has written, and says nothing.
        raise UnsupportedConfig(
            "decode context parallelism where vLLM has not loaded NCCL (no libnccl.so.2, or "
            "VLLM_DISABLE_PYNCCL); accepted: with VLLM_NCCL_SO_PATH naming the library, or with "
            "--dcp-comm-backend a2a"
        )
    if shards.count & (shards.count - 1):
        raise UnsupportedConfig(
            f"--decode-context-parallel-size {shards.count}; accepted: a power of two, or any "
            "with --dcp-comm-backend a2a"
        )
    return Group(get_dcp_group(), cp_lse_ag_out_rs)
