"""What ``tilewise tune`` measures: kinds of layers, their batches, tiles to try, and the verdict.

No torch, no GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tilewise import policy
from tilewise.bench.cases import Case
from tilewise.geometry import Device, Geometry, Tiles, accumulators, shared_memory
from tilewise.tiles import tma_fits
from tilewise.tuned import KERNELS, NONE, Kind, Table

HEADS = {64: (32, 8), 128: (32, 8), 256: (16, 4)}
# Fewer registers hold a thread's accumulators, products and addresses without spilling.
MOST_ACCUMULATORS = 128
KEYS = (16, 32, 64, 128)  # a step
# A tile replaces the rule's if it gains so much over all batches and loses nowhere more than noise.
LEAST_GAIN, MOST_LOSS = 1.03, 0.99


@dataclass(frozen=True)
class Subject:
    """A kind of layer to tune.

    Parameters
    ----------
    kernel : str
        ``prefill`` or ``decode``.
    head_dim, page_size : int
    kv_dtype : str
        ``bf16`` or ``fp8_e4m3``.
    """

    kernel: str
    head_dim: int
    page_size: int
    kv_dtype: str = "bf16"

    @property
    def name(self) -> str:
        """For people: ``decode, D 128, pages of 64, bf16``."""
        return f"{self.kernel}, D {self.head_dim}, pages of {self.page_size}, {self.kv_dtype}"

    @property
    def geometry(self) -> Geometry:
        """The layer that stands for the kind: four query heads share a KV head."""
        size = 1 if self.kv_dtype.startswith("fp8") else 2
        return Geometry(*HEADS[self.head_dim], self.head_dim, self.page_size, 2, size)

    def config(self, device: Device, table: Table) -> policy.Config:
        """What the plain kernels would launch with a table."""
        return policy.choose(self.geometry, device, plain=True, table=table)

    def tiles(self, config: policy.Config) -> Tiles:
        """Of the kernel in question."""
        return config.prefill if self.kernel == "prefill" else config.decode

    def kind(self, device: Device) -> Kind:
        """Where the table keeps it."""
        rule = self.tiles(self.config(device, NONE))
        return Kind.of(self.kernel, self.geometry, rule)

    def cases(self) -> list[Case]:
        """Batches that a choice must serve: few and many, short and long, uneven."""
        heads = dict(zip(("num_q_heads", "num_kv_heads"), HEADS[self.head_dim], strict=True))
        options = {**heads, "head_dim": self.head_dim, "kv_dtype": self.kv_dtype}
        if self.kernel == "prefill":
            lens = {"1x8k": (8192,), "8x1k": (1024,) * 8, "uneven": (13, 700, 4096, 257, 1999)}
            return [Case(f"tune_{n}", "prefill", x, x, **options) for n, x in lens.items()]  # type: ignore[arg-type]
        keys = {"b8_4k": (4096,) * 8, "b64_2k": (2048,) * 64, "uneven": (300, 16384, 900, 5000) * 8}
        return [
            Case(f"tune_{n}", "decode", (1,) * len(x), x, **options)  # type: ignore[arg-type]
            for n, x in keys.items()
        ]


def subjects(
    kernels: Sequence[str], head_dims: Sequence[int], pages: Sequence[int], kv_dtypes: Sequence[str]
) -> list[Subject]:
    """All combinations.

    Raises
    ------
    ValueError
        Naming a value and what is accepted.
    """
    accepted: dict[str, tuple[Sequence[object], Sequence[object]]] = {
        "--kernels": (kernels, KERNELS),
        "--head-dims": (head_dims, tuple(HEADS)),
        "--kv-dtypes": (kv_dtypes, ("bf16", "fp8_e4m3")),
    }
    for option, (given, known) in accepted.items():
        for value in given:
            if value not in known:
                raise ValueError(f"{option} {value}; accepted: {', '.join(map(str, known))}")
    for page in pages:
        if page < 16 or page % 16:
            raise ValueError(f"--page-sizes {page}; accepted: multiples of 16")
    return [Subject(*x) for x in itertools.product(kernels, head_dims, pages, kv_dtypes)]


def candidates(subject: Subject, device: Device) -> list[Tiles]:
    """Tiles to try, the rule's first."""
    rule = subject.tiles(subject.config(device, NONE))
    found = [rule]
    found += [t for t in _around(subject.kernel, rule) if t != rule and _fits(t, subject, device)]
    return list(dict.fromkeys(found))


def _around(kernel: str, rule: Tiles) -> Iterator[Tiles]:
    rows = (64, 128) if kernel == "prefill" else (rule.block_m,)
    shapes = itertools.product(rows, KEYS, (4, 8), (1, 2, 3, 4), (1, 2))
    for m, n, warps, stages, tail in shapes:
        if tail > stages:
            continue
        tiles = replace(rule, block_m=m, block_n=n, num_warps=warps, num_stages=stages)
        yield replace(tiles, tail_stages=tail, lazy_rescale=False)


def _fits(tiles: Tiles, subject: Subject, device: Device) -> bool:
    geometry = subject.geometry
    if tiles.use_tma and not tma_fits(tiles, geometry, device):
        return False
    if tiles.block_m < geometry.group_size or accumulators(tiles) > MOST_ACCUMULATORS:
        return False
    return shared_memory(tiles, geometry) <= device.shared_memory


def gain(rule: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Geometric mean of how much faster ``other`` is, over the batches; times by name."""
    logs = [math.log(rule[name] / other[name]) for name in rule]
    return math.exp(sum(logs) / len(logs))


def is_better(rule: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether measured times say that a tile should replace the rule's."""
    least = min(rule[name] / other[name] for name in rule)
    return gain(rule, other) >= LEAST_GAIN and least >= MOST_LOSS
