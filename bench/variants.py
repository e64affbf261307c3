"""Which variants of the kernels there are, for ``tilewise bench resources``; neither torch nor GPU.

A variant is a kernel, an architecture, the sizes that it knows and the features that specialise
it. Other features of a layer leave the kernel as it is; or they lead elsewhere, and then
``why_not`` says why.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from tilewise import policy, prefix_rule
from tilewise.arch import ARCHITECTURES
from tilewise.errors import UnsupportedConfig
from tilewise.geometry import PAGE_SCALES_STEP

# Names as in `vllm serve --kv-cache-dtype`, and their formats.
FP8_CACHES = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
MASKS = ("bytes", "bits", "blocks", "tree")
_LOGITS = ("sinks", "softcap", "alibi", "sqrt")
_OF_FP8 = ("rotated", "head_scales", "page_scales")
# What the command line knows, with what it says of it.
FEATURES = {
    "sinks": "attention sinks",
    "softcap": "a soft cap on logits",
    "alibi": "ALiBi",
    "sqrt": "ALiBi of square roots",
    "lse": "log-sum-exps beside the output",
    "flags": "a flag for each request, whether it is causal",
    "bidirectional": "no request is causal",
    "spans": "bidirectional spans, as of images",
    "windowed": "spans that a window cuts, with --window",
    "bytes": "a mask of bytes",
    "bits": "a mask of bits",
    "blocks": "masks of a block-sparse matrix",
    "tree": "trees of drafts",
    "rows": "keys in rows instead of pages, as of encoders",
    "starts": "page ids or rows of keys that start anywhere",
    "fp8_out": "outputs of fp8",
    "fp8_dot": "products of fp8, of an e4m3 cache",
    "rotated": "rotated keys, of an fp8 cache",
    "head_scales": "scales for each head, of an fp8 cache",
    "page_scales": "scales for each page and head, of an fp8 cache",
    "invariant": "batch-invariant mode",
    "beside": "a prefill beside its batch's decodes",
}
EACH = "each"
# Features that come with others.
_WITH = {"sqrt": ("alibi",), "blocks": ("starts",), "windowed": ("spans",)}
# Each says which keys a query sees; no batch has two.
_ALONE = ("alibi", "flags", "bidirectional", "spans", *MASKS)

# Kernels by the name that launches are counted under, but for "prefix_plan", the plan of batches
# that may share pages; with the features, beside an fp8 cache, that each is compiled for.
# "window" is one of them, though an option of its own.
SPECIALISED = {
    "prefill": {*_LOGITS, "lse", "window", "flags", "bidirectional", "spans", "windowed", "bytes",
                "bits", "blocks", "rows", "starts", "fp8_out", "fp8_dot", *_OF_FP8},
    "hopper_prefill": {"sinks", "softcap", "lse", "window", "beside"},
    "hopper_prefill_kv8": {"sinks", "softcap", "lse", "window", "head_scales"},
    "hopper_prefill_fp8": {"sinks", "lse", "rotated", "head_scales"},
    "decode": {*_LOGITS, "lse", "window", "flags", "bidirectional", *MASKS, "rows", "starts",
               "fp8_out", *_OF_FP8, "invariant"},
    "hopper_decode": {"sinks", "softcap", "lse", "window"},
    "prefix_decode": {*_LOGITS, "lse", "fp8_out", "head_scales"},
    "prefix_keys": set(),
    "prefix_groups": set(),
    "plan": {"window", "spans", "invariant"},
    "prefix_plan": set(),
    "cache_write": set(_OF_FP8),
    "mask_starts": set(),
    "tree_words": set(),
    "shard_lengths": set(),
}  # fmt: skip
KERNELS = tuple(SPECIALISED)
# Kernels that know no sizes of a layer, and what they are compiled for instead.
FORMS = {
    "mask_starts": ("bytes", "bits", "blocks"),
    "tree_words": ("parents", "visible"),
    "shard_lengths": ("context", "new"),
}


@dataclass(frozen=True)
class Variant:
    """One kernel to compile; sizes and dtype are None where it knows none."""

    kernel: str
    arch: int
    dtype: str | None
    head_size: int | None
    page_size: int | None
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """What was asked for and is not compiled; ``variant.features`` are those asked for."""

    variant: Variant
    why: str


def geometry_of(variant: Variant, args: argparse.Namespace) -> policy.Geometry:
    """Heads and sizes of a variant's layers; raises ``UnsupportedConfig``."""
    assert variant.head_size is not None
    assert variant.page_size is not None
    size = 4 if variant.dtype == "fp32" else 2
    kv_size = 1 if args.kv_cache_dtype in FP8_CACHES else 0
    q, kv = args.heads
    return policy.Geometry(q, kv, variant.head_size, variant.page_size, size, kv_size)


def config_of(variant: Variant, args: argparse.Namespace) -> policy.Config:
    """What layers of all that was asked for are launched with; raises ``UnsupportedConfig``."""
    config = policy.choose(
        geometry_of(variant, args), ARCHITECTURES[variant.arch], window=args.window or 0,
        plain="alibi" in variant.features, fp8_matmul="fp8_dot" in variant.features,
    )  # fmt: skip
    return policy.batch_invariant(config) if "invariant" in variant.features else config


def variants(args: argparse.Namespace) -> Iterator[Variant | LeftOut]:
    """Yield what the command line asks for: everything once, what is left out as well."""
    asked: list[tuple[str, ...]] = [tuple(args.features)]
    if EACH in args.features:
        asked = [(), *((name,) for name in FEATURES)]
    seen = set()
    for arch, kernel, dtype, head_size, page_size, names in product(
        args.arch, args.kernel, args.dtype, args.head_size, args.page_size, asked
    ):
        wanted = {*names, *(other for name in names for other in _WITH.get(name, ()))}
        features = tuple(name for name in FEATURES if name in wanted)
        for found in _of_kernel(Variant(kernel, arch, dtype, head_size, page_size, features), args):
            if found not in seen:
                seen.add(found)
                yield found


def _of_kernel(whole: Variant, args: argparse.Namespace) -> Iterator[Variant | LeftOut]:
    """What becomes of one kernel with everything that was asked for."""
    if whole.kernel in FORMS:
        for form in FORMS[whole.kernel]:
            yield Variant(whole.kernel, whole.arch, None, None, None, (form,))
    elif why := why_not(bare := replace(whole, features=()), args):
        yield LeftOut(bare, why)
    elif why := why_not(whole, args):
        yield LeftOut(whole, why)
    else:
        own = SPECIALISED[whole.kernel]
        yield replace(whole, features=tuple(f for f in whole.features if f in own))


def why_not(variant: Variant, args: argparse.Namespace) -> str | None:
    """Why layers or batches of these features never come to a kernel; None where they do.

    Sizes that no kernel takes are no such reason: compiling says so.
    """
    features = set(variant.features)
    try:
        geometry = geometry_of(variant, args)
    except UnsupportedConfig as error:
        plain = variant.kernel in ("prefill", "decode", "plan", "cache_write")
        return None if plain else str(error)
    if (why := _why_nobody(features, geometry, args)) is not None:
        return why
    try:
        config = config_of(variant, args)
    except UnsupportedConfig as error:
        return str(error)
    if variant.kernel.startswith("prefix_"):
        return _why_not_shared(features, config, ARCHITECTURES[variant.arch])
    if variant.kernel.startswith("hopper_"):
        return _why_not_gluon(variant, config, args)
    return None


def _why_nobody(
    features: set[str], geometry: policy.Geometry, args: argparse.Namespace
) -> str | None:
    """What ``PagedAttention`` refuses, whatever the kernel."""
    alone = [f for f in _ALONE if f in features]
    if len(alone) > 1:
        return f"{' with '.join(alone)} (accepted: one of them)"
    if args.window and features.intersection(MASKS):
        return f"{alone[0]} with a window (accepted: one of them)"
    cache = FP8_CACHES.get(args.kv_cache_dtype, "16 bits or more")
    if "fp8_dot" in features and cache != "e4m3":
        return f"fp8_dot with a cache of {cache} (accepted: --kv-cache-dtype fp8)"
    of_fp8 = [f for f in _OF_FP8 if f in features]
    if of_fp8 and geometry.kv_element_size != 1:
        return f"{of_fp8[0]} with a cache of {cache} (accepted: --kv-cache-dtype fp8 or fp8_e5m2)"
    if "head_scales" in features and "page_scales" in features:
        return "head_scales with page_scales (accepted: one of them)"
    if "page_scales" in features and geometry.page_size % PAGE_SCALES_STEP:
        accepted = f"multiples of {PAGE_SCALES_STEP}"
        return f"page_scales with page size {geometry.page_size} (accepted: {accepted})"
    if "rows" in features and (geometry.kv_element_size == 1 or "blocks" in features):
        beside = "blocks" if "blocks" in features else f"a cache of {cache}"
        return f"rows with {beside} (accepted: without)"
    if "windowed" in features and not args.window:
        return "windowed without a window (accepted: --window)"
    if "rotated" in features and geometry.head_dim & (geometry.head_dim - 1):
        return f"rotated with head size {geometry.head_dim} (accepted: powers of two)"
    return None


def _why_plain(features: set[str]) -> str | None:
    """Why a batch takes plain kernels alone."""
    mask = next((f for f in MASKS if f in features), "")
    causal = not features.intersection(("flags", "bidirectional"))
    return policy.why_plain_batch(causal, not features.intersection(("rows", "starts")), mask)


def _why_not_shared(features: set[str], config: policy.Config, device: policy.Device) -> str | None:
    """Why requests share no pages."""
    for feature in ("rotated", "page_scales"):
        if feature in features:
            return f"{feature} (accepted: without)"
    if "spans" in features:
        return "spans (accepted: none)"
    return _why_plain(features) or prefix_rule.why_not_share(config, device)


def _why_not_gluon(variant: Variant, config: policy.Config, args: argparse.Namespace) -> str | None:
    """Why a Gluon kernel does not serve such layers."""
    kernel, features = variant.kernel, set(variant.features)
    geometry, device, window = config.geometry, ARCHITECTURES[variant.arch], args.window or 0
    if (why := _why_plain(features)) is not None:
        return why
    if "alibi" in features:
        return "ALiBi (accepted: none)"
    if "fp8_out" in features:
        return "outputs of fp8 (accepted: the model's dtype)"
    if kernel == "hopper_decode":
        if config.pieces is not None:
            return "batch-invariant mode (accepted: off)"
        return policy.why_not_hopper_decode(geometry, device, config.decode)
    if "spans" in features:
        return "spans (accepted: none)"
    cache = FP8_CACHES.get(args.kv_cache_dtype, "")
    if kernel == "hopper_prefill_fp8":
        if cache != "e4m3":
            return f"a cache of {cache or '16 bits or more'} (accepted: e4m3)"
        if "page_scales" in features:
            return "page_scales (accepted: without)"
        if "softcap" in features:
            return "a soft cap (accepted: none)"
        return policy.why_not_hopper_fp8(geometry, device, window)
    if (kernel == "hopper_prefill_kv8") != bool(cache):
        accepted = "16 bits" if cache else "fp8"
        return f"a cache of {cache or '16 bits or more'} (accepted: {accepted})"
    for feature in ("fp8_dot", "rotated", "page_scales"):
        if feature in features:
            return f"{feature} (accepted: without)"
    if (why := policy.why_not_hopper(geometry, device, window)) is not None:
        return why
    if kernel == "hopper_prefill" and "beside" in features and not config.side_by_side:
        return "no Gluon decode to run beside"
    return None
