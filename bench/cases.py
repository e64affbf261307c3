"""Named benchmark cases as data, with the work that each of them asks for.

A case is one attention layer of one scheduler step: causal, bottom-right aligned, bf16 queries.
Names and shapes stay fixed so that result files of different versions can be compared.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

GROUPS = ("prefill", "mixed", "decode", "spec", "fp8", "sink", "prefix", "all")


@dataclass(frozen=True, slots=True)
class Case:
    """One batch shape.

    Parameters
    ----------
    name : str
        Stable name used in result files.
    kind : str
        ``prefill``, ``mixed`` or ``decode``.
    q_lens, kv_lens : tuple[int, ...]
        New tokens and total keys (new ones included) of each request.
    num_q_heads, num_kv_heads, head_dim : int
        Head geometry of the layer.
    window : int or None
        Keys a query may see, itself included; None is full causal attention.
    sinks : bool
        Whether every head has a learned sink logit in its softmax denominator.
    softcap : float
        Bound of the logits, by ``tanh``; 0 for none.
    kv_dtype : str
        ``bf16`` or ``fp8_e4m3``.
    prefix : int
        Keys, whole pages of any size, with which every request of a group begins; the group holds
        them once.
    prefix_groups : int
        Groups of equally many requests, one after another.
    """

    name: str
    kind: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    window: int | None = None
    sinks: bool = False
    softcap: float = 0.0
    kv_dtype: str = "bf16"
    prefix: int = 0
    prefix_groups: int = 1

    def __post_init__(self) -> None:
        """Reject shapes that no scheduler step can have."""
        if len(self.q_lens) != len(self.kv_lens):
            raise ValueError(f"{self.name}: {len(self.q_lens)} q_lens, {len(self.kv_lens)} kv_lens")
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            if not 1 <= q_len <= kv_len:
                raise ValueError(f"{self.name}: q_len {q_len} does not fit in kv_len {kv_len}")
            if kv_len - q_len < self.prefix:
                raise ValueError(f"{self.name}: prefix {self.prefix}, {kv_len - q_len} keys before")
        if self.prefix < 0 or self.prefix % 128 or self.num_reqs % self.prefix_groups:
            raise ValueError(
                f"{self.name}: prefix {self.prefix} and {self.prefix_groups} groups of "
                f"{self.num_reqs} requests; accepted: multiples of 128 keys, and equal groups"
            )

    @property
    def num_reqs(self) -> int:
        """Number of requests in the batch."""
        return len(self.q_lens)

    @property
    def num_tokens(self) -> int:
        """Number of query tokens in the batch."""
        return sum(self.q_lens)

    @property
    def max_q_len(self) -> int:
        """Longest query of the batch."""
        return max(self.q_lens)

    @property
    def max_kv_len(self) -> int:
        """Longest key sequence of the batch."""
        return max(self.kv_lens)

    @property
    def num_decodes(self) -> int:
        """Requests with one query token; in mixed batches they come first."""
        return sum(1 for q_len in self.q_lens if q_len == 1)

    @property
    def kv_itemsize(self) -> int:
        """Bytes of one cache element."""
        return 1 if self.kv_dtype.startswith("fp8") else 2

    @property
    def unmasked_pairs(self) -> int:
        """(query, key) pairs of one head that the mask lets through."""
        pairs = zip(self.q_lens, self.kv_lens, strict=True)
        return sum(_unmasked_pairs(q_len, kv_len, self.window) for q_len, kv_len in pairs)

    @property
    def keys_read(self) -> int:
        """Keys of one KV head that at least one query of their request sees."""
        total = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            first = 0 if self.window is None else max(0, kv_len - q_len - self.window + 1)
            total += kv_len - first
        return total - self.keys_twice

    @property
    def keys_twice(self) -> int:
        """Keys of one KV head that are not the first request's of a group with a prefix."""
        return (self.num_reqs - self.prefix_groups) * self.prefix

    def leader(self, request: int) -> int:
        """The first request of the group that ``request`` is in."""
        members = self.num_reqs // self.prefix_groups
        return request // members * members

    @property
    def flops(self) -> int:
        """Multiply-adds of QK and PV, counted as two each, over unmasked pairs only."""
        return 4 * self.head_dim * self.num_q_heads * self.unmasked_pairs

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that have to be read once."""
        return 2 * self.num_kv_heads * self.head_dim * self.keys_read * self.kv_itemsize

    @property
    def bytes_moved(self) -> int:
        """Least memory traffic of the layer: K and V once, Q in and O out in bf16."""
        return self.kv_bytes + 2 * 2 * self.num_tokens * self.num_q_heads * self.head_dim

    @property
    def cache_bytes(self) -> int:
        """Bytes that the cache occupies, window or not, without page padding."""
        keys = sum(self.kv_lens) - self.keys_twice
        return 2 * self.num_kv_heads * self.head_dim * keys * self.kv_itemsize


def _unmasked_pairs(q_len: int, kv_len: int, window: int | None) -> int:
    first, last = kv_len - q_len + 1, kv_len  # keys seen by the first and by the last query
    if window is None or last <= window:
        return (first + last) * q_len // 2
    growing = max(0, min(q_len, window - first + 1))  # queries that see fewer keys than a window
    return (first + first + growing - 1) * growing // 2 + (q_len - growing) * window


def zipf_lengths(count: int, seed: int = 0) -> tuple[int, ...]:
    """Return `count` lengths 256*k with P(k) proportional to k**-1.2 for k = 1...256."""
    ranks = np.arange(1, 257)
    weights = ranks**-1.2
    drawn = np.random.default_rng(seed).choice(ranks, size=count, p=weights / weights.sum())
    return tuple(int(rank) * 256 for rank in drawn)


def _prefill(name: str, *lens: int, **options: object) -> Case:
    return Case(name, "prefill", lens, lens, **options)  # type: ignore[arg-type]


def _decode(name: str, count: int, kv_len: int, **options: object) -> Case:
    return _spec(name, 1, count, kv_len, **options)


def _spec(name: str, q_len: int, count: int, kv_len: int, **options: object) -> Case:
    q_lens, kv_lens = (q_len,) * count, (kv_len,) * count
    return Case(name, "decode", q_lens, kv_lens, **options)  # type: ignore[arg-type]


def _ragged(name: str, kv_lens: Sequence[int]) -> Case:
    return Case(name, "decode", (1,) * len(kv_lens), tuple(kv_lens))


def _mixed(name: str, decodes: int, decode_kv: int, prefills: int, q_len: int, kv_len: int) -> Case:
    q_lens = (1,) * decodes + (q_len,) * prefills
    return Case(name, "mixed", q_lens, (decode_kv,) * decodes + (kv_len,) * prefills)


_D64 = {"num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64}
_D256 = {"num_q_heads": 16, "num_kv_heads": 4, "head_dim": 256}
_SINK = {**_D64, "window": 128, "sinks": True}
_FP8 = {"kv_dtype": "fp8_e4m3"}

CASES: tuple[Case, ...] = (
    _prefill("pf_1x16k", 16384),
    _prefill("pf_8x2k", *(2048,) * 8),
    _prefill("pf_32x512", *(512,) * 32),
    Case("pf_chunk2k_64k", "prefill", (2048,), (65536,)),
    _prefill("pf_ragged", 13, 700, 4096, 257, 1999, 1, 3000, 64),
    _prefill("pf_d64_1x16k", 16384, **_D64),
    _prefill("pf_d256_1x8k", 8192, **_D256),
    _prefill("pf_d96_1x16k", 16384, head_dim=96),
    _prefill("pf_cap50_1x16k", 16384, softcap=50.0),
    _prefill("pf_sink_w128_1x8k", 8192, **_SINK),
    _prefill("pf_fp8_1x16k", 16384, **_FP8),
    _prefill("pf_fp8_8x2k", *(2048,) * 8, **_FP8),
    _mixed("mix_63x4k_2k_8k", 63, 4096, 1, 1985, 8192),
    _mixed("mix_128x2k_2x2k", 128, 2048, 2, 2048, 2048),
    _decode("dec_b1_1k", 1, 1024),
    _decode("dec_b1_8k", 1, 8192),
    _decode("dec_b1_128k", 1, 131072),
    _decode("dec_b8_4k", 8, 4096),
    _decode("dec_b32_4k", 32, 4096),
    _decode("dec_b64_8k", 64, 8192),
    _decode("dec_b128_2k", 128, 2048),
    _decode("dec_b256_1k", 256, 1024),
    _decode("dec_b256_4k", 256, 4096),
    _ragged("dec_ragged64", [i * i * 37 % 16000 + 1 for i in range(64)]),
    _ragged("dec_zipf_b32", zipf_lengths(32)),
    _ragged("dec_zipf_b128", zipf_lengths(128)),
    _ragged("dec_zipf_b256", zipf_lengths(256)),
    _decode("dec_d64_b64_4k", 64, 4096, **_D64),
    _decode("dec_mqa_b32_8k", 32, 8192, num_kv_heads=1),
    _decode("dec_mha_b32_4k", 32, 4096, num_kv_heads=32),
    _decode("dec_sink_w128_b64_32k", 64, 32768, **_SINK),
    _decode("dec_fp8_b8_4k", 8, 4096, **_FP8),
    _decode("dec_fp8_b64_8k", 64, 8192, **_FP8),
    _decode("dec_fp8_b256_4k", 256, 4096, **_FP8),
    _decode("dec_b8_32k", 8, 32768),
    _decode("dec_b32_32k", 32, 32768),
    _spec("spec4_b8_32k", 4, 8, 32768),
    _spec("spec8_b8_32k", 8, 8, 32768),
    _spec("spec4_b32_32k", 4, 32, 32768),
    _spec("spec8_b32_32k", 8, 32, 32768),
    _decode("dec_prefix_b64_32k", 64, 32768 + 512, prefix=32768),
    _decode("dec_prefix_4x16_32k", 64, 32768 + 512, prefix=32768, prefix_groups=4),
)


def _in_group(case: Case, group: str) -> bool:
    if group == "spec":
        return case.kind == "decode" and case.max_q_len > 1
    if group == "fp8":
        return case.kv_itemsize == 1
    if group == "sink":
        return case.sinks
    if group == "prefix":
        return case.prefix > 0
    return group in ("all", case.kind)


def select_cases(patterns: Iterable[str], cases: Sequence[Case] = CASES) -> list[Case]:
    """Return the cases that names, globs or group names pick, in the suite's order.

    Parameters
    ----------
    patterns : iterable of str
        Names, globs (``dec_*``) or groups (see `GROUPS`), each possibly a comma-separated list.
        A leading ``-`` (``-dec_fp8*``) takes cases out again.

    Raises
    ------
    ValueError
        If a pattern picks nothing; the message offers near names.
    """
    wanted: set[str] = set()
    unwanted: set[str] = set()
    flat = [part for pattern in patterns for part in pattern.split(",") if part]
    if flat and all(part.startswith("-") for part in flat):
        flat.insert(0, "all")
    for part in flat:
        body = part.removeprefix("-")
        if body in GROUPS:
            names = {case.name for case in cases if _in_group(case, body)}
        else:
            names = {case.name for case in cases if fnmatch.fnmatchcase(case.name, body)}
        if not names:
            known = [case.name for case in cases]
            near = difflib.get_close_matches(body, [*known, *GROUPS], n=3) or known
            raise ValueError(
                f"no case matches {body!r}; did you mean {', '.join(near)}? Accepted: names, globs "
                f"like pf_*, and the groups {', '.join(GROUPS)}"
            )
        (unwanted if part.startswith("-") else wanted).update(names)
    return [case for case in cases if case.name in wanted - unwanted]


def shrink(case: Case, max_len: int, max_reqs: int) -> Case:
    """Return a small relative of `case` for dry runs, with the same heads, mask and dtypes."""
    picked = case.num_reqs if case.num_reqs <= max_reqs else max_reqs
    step = case.num_reqs / picked
    index = [int(i * step) for i in range(picked - 1)] + [case.num_reqs - 1]
    kv_lens = tuple(min(case.kv_lens[i], max_len - i % 7) for i in index)
    q_lens = tuple(min(case.q_lens[i], kv) for i, kv in zip(index, kv_lens, strict=True))
    window = None if case.window is None else min(case.window, max(1, max_len // 3))
    # As many of each group, or all in one.
    groups = case.prefix_groups if picked % case.prefix_groups == 0 else 1
    before = min(kv - q for q, kv in zip(q_lens, kv_lens, strict=True))
    prefix = min(case.prefix, before // 128 * 128)
    return replace(
        case, q_lens=q_lens, kv_lens=kv_lens, window=window, prefix=prefix, prefix_groups=groups
    )
