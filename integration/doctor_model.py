"""What ``tilewise doctor`` says about a model: who computes each layer, with which tiles."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tilewise import policy, prefix_rule, support
from tilewise.errors import UnsupportedConfig
from tilewise.integration.doctor_checks import Problem
from tilewise.kernels.soft_cap import LARGEST_CAP
from tilewise.model_config import Layer, Options, read_model
from tilewise.workspace import workspace_bytes

ELEMENT_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
OURS = "TILEWISE"
# Pages that two backends of one model agree on when nobody names a size.
COMMON_PAGE_SIZE = 16

# What a foreign configuration class may raise over a file that it does not understand.
_CONFIG_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Server:
    """Bounds that size the workspace, and draft tokens; names as in ``vllm serve``.

    ``shared_prefixes`` and ``fp8_attention`` are tilewise's own (``tilewise.settings``).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int = 0
    shared_prefixes: str = "off"
    fp8_attention: str = "off"


@dataclass(frozen=True)
class LayerKind:
    """Layers of one model that are alike, and what becomes of them.

    ``backend`` is ``TILEWISE``, the first of ``candidates``, or None where nobody computes the
    layer. ``kernels`` are named as in the counters of launches. ``prefill``, ``decode``,
    ``num_workers`` and ``workspace_bytes`` are the policy's choice for a layer of ours, else None;
    the workspace is that of one KV-cache group of such layers. ``hopper_prefill`` is the Gluon
    kernel's where that serves the layer, and ``prefill`` then its stand-in; ``why_not_hopper`` says
    why it does not.  With products of fp8 both are of ``hopper_prefill_fp8``.  ``hopper_decode`` is
    the Gluon kernel's for batches of at most ``few_requests``; larger ones are the plain kernel's.
    ``prefix_decode`` is for batches whose requests may share pages, ``why_not_share`` says why a
    layer does not where that is asked for.
    """

    layers: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    features: tuple[str, ...]
    backend: str | None
    candidates: tuple[str, ...]
    reasons: tuple[support.Reason, ...]
    kernels: tuple[str, ...] = ()
    prefill: Mapping[str, Any] | None = None
    hopper_prefill: Mapping[str, Any] | None = None
    why_not_hopper: str | None = None
    decode: Mapping[str, Any] | None = None
    hopper_decode: Mapping[str, Any] | None = None
    few_requests: int | None = None
    prefix_decode: Mapping[str, Any] | None = None
    why_not_share: str | None = None
    num_workers: int | None = None
    workspace_bytes: int | None = None


@dataclass(frozen=True)
class ModelReport:
    """Everything that is said of a model."""

    source: str
    model_type: str
    dtype: str
    kv_cache_dtype: str
    tensor_parallel_size: int
    page_size: int
    arch: str
    kinds: tuple[LayerKind, ...]
    other_layers: int
    cuda_graphs: str
    cuda_graphs_why: str


def load_config(model: str) -> dict[str, Any]:
    """Return a model's configuration, with the defaults that transformers knows for it.

    Parameters
    ----------
    model : str
        A folder with a ``config.json``, that file, or a name on the Hugging Face hub.

    Raises
    ------
    UnsupportedConfig
        If there is none, or it is not a JSON object.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    elif not path.exists():
        if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model):
            raise UnsupportedConfig(f"model {model!r}: there is no such folder or file")
        path = _from_hub(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedConfig(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedConfig(f"{path} holds no JSON object; accepted: a model's config.json")
    return _with_defaults(config)


def _from_hub(name: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
        return Path(hub.hf_hub_download(name, "config.json"))
    except (ImportError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UnsupportedConfig(
            f"model {name!r} is no folder or file here, and the hub does not give its config.json "
            f"({type(error).__name__}: {reason})"
        ) from error


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Fill in what the model's class would: many files leave most entries out."""
    try:
        classes = importlib.import_module("transformers").CONFIG_MAPPING
    except ImportError:
        return config
    kind = config.get("model_type")
    if kind not in classes:
        return config
    try:
        return {**config, **classes[kind].from_dict(config).to_dict()}
    except _CONFIG_ERRORS as error:
        raise UnsupportedConfig(f"transformers cannot read this {kind!r}: {error}") from error


def examine(
    config: Mapping[str, Any],
    options: Options,
    server: Server,
    device: policy.Device,
    source: str = "",
) -> ModelReport:
    """Say for every layer of a model who computes it.

    Parameters
    ----------
    config : Mapping[str, Any]
        The model's configuration.
    options : Options
        What the command line of the server adds to it.
    server : Server
        Its bounds.
    device : policy.Device
        The GPU that tiles are chosen for.
    source : str
        Where the configuration came from.

    Raises
    ------
    UnsupportedConfig
        If the configuration describes no layers that can be judged.
    """
    model = read_model(config, options)
    alone = all(not support.check(layer.request) for layer in model.layers)
    page = options.block_size or (policy.PREFERRED_PAGE_SIZE if alone else COMMON_PAGE_SIZE)
    if model.layers and all(_is_encoder(layer.request) for layer in model.layers):
        page = policy.PAGE_SIZE_STEP  # nothing lies in pages
    grouped: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in model.layers:
        key = (layer.num_q_heads, layer.num_kv_heads, layer.window, layer.request)
        grouped.setdefault(key, []).append(layer)
    kinds = tuple(_judge(layers, server, device, page) for layers in grouped.values())
    level, why = cuda_graphs([kind.backend for kind in kinds])
    return ModelReport(
        source, model.model_type, model.dtype, options.kv_cache_dtype,
        options.tensor_parallel_size, page, f"sm_{device.arch}", kinds, model.other_layers,
        level, why,
    )  # fmt: skip


def _judge(layers: list[Layer], server: Server, device: policy.Device, page: int) -> LayerKind:
    layer = layers[0]
    request = layer.request
    reasons = support.check(request)
    kind = LayerKind(
        layers=tuple(one.index for one in layers),
        num_q_heads=layer.num_q_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=request.head_size,
        window=layer.window,
        features=tuple(_features(layer)),
        backend=OURS,
        candidates=(),
        reasons=reasons,
    )
    if reasons:
        able = support.targets(request)
        return replace(kind, backend=able[0] if able else None, candidates=able)
    return _planned(kind, request, server, device, page)


def _is_encoder(request: support.Request) -> bool:
    """Whether a layer's keys are its batch's own rows, in no pages."""
    return request.attn_type in ("encoder", "encoder_only")


def _planned(
    kind: LayerKind, request: support.Request, server: Server, device: policy.Device, page: int
) -> LayerKind:
    """Add the policy's choice for a layer of ours."""
    drafts = min(1 + server.num_speculative_tokens, policy.DECODE_MAX_QUERY_LEN)
    encoder = _is_encoder(request)
    kv_cache_dtype = "auto" if encoder else request.kv_cache_dtype or "auto"
    page = policy.PAGE_SIZE_STEP if encoder else page
    try:
        geometry = policy.Geometry(
            kind.num_q_heads, kind.num_kv_heads, kind.head_size, page, ELEMENT_SIZE[request.dtype],
            1 if kv_cache_dtype.startswith("fp8") else 0,
        )  # fmt: skip
        alibi = bool(request.alibi or request.alibi_sqrt)
        e4m3 = kv_cache_dtype in ("fp8", "fp8_e4m3")
        fp8 = e4m3 and server.fp8_attention != "off"
        config = policy.choose(
            geometry, device, drafts, kind.window or 0, plain=alibi, fp8_matmul=fp8
        )
        config = replace(config, window=kind.window or 0)
    except UnsupportedConfig as error:
        return replace(kind, backend=None, reasons=(support.Reason("policy", str(error)),))
    why_not = (policy.why_not_hopper_fp8 if fp8 else policy.why_not_hopper)(
        geometry, device, config.window
    )
    if encoder:
        why_not = policy.why_plain_batch(causal=False, pages=False)
    if why_not is None and alibi:
        why_not = "ALiBi (accepted: none)"
    if why_not is None and (request.soft_cap or 0) > LARGEST_CAP:
        why_not = f"a logits soft cap of {request.soft_cap:g} (accepted: to {LARGEST_CAP:g})"
    if why_not is None and fp8 and request.soft_cap:
        why_not = f"a logits soft cap of {request.soft_cap:g} (accepted: none)"
    hopper = config.hopper_prefill_fp8 if fp8 else config.hopper_prefill
    hopper = hopper if why_not is None else None
    # What its prefill leaves for its logits or its batches, its decode leaves as well.
    plain = encoder or (request.soft_cap or 0) > LARGEST_CAP
    few = None if plain else config.hopper_decode
    why_not_share = None
    if server.shared_prefixes != "off":
        why_not_share = prefix_rule.why_not_share(config, device)
        if fp8 and server.fp8_attention == "rotated":
            why_not_share = "rotated keys (TILEWISE_FP8_ATTENTION)"
        if encoder:
            why_not_share = "keys that lie in no cache"
        if why_not_share is None:
            config = prefix_rule.share_prefixes(config, device, drafts)
    shared = config.prefixes
    kernels = ["plan"] if encoder else ["plan", "cache_write"]
    gluon = "hopper_prefill_kv8" if geometry.kv_element_size == 1 else "hopper_prefill"
    gluon = "hopper_prefill_fp8" if fp8 else gluon
    kernels.append(gluon if hopper else "prefill")
    kernels += ["prefix_keys", "prefix_groups", "prefix_decode"] if shared else []
    kernels += ["decode"] if few is None else ["hopper_decode", "decode"]
    most = config.num_sms // geometry.num_kv_heads
    if shared and server.shared_prefixes == "always":
        most = 1  # larger batches are looked through for pages that they share
    return replace(
        kind,
        kernels=tuple(kernels),
        prefill=asdict(config.prefill),
        hopper_prefill=asdict(hopper) if hopper else None,
        why_not_hopper=why_not,
        decode=asdict(config.decode),
        hopper_decode=asdict(few) if few else None,
        few_requests=most if few else None,
        prefix_decode=asdict(shared) if shared else None,
        why_not_share=why_not_share,
        num_workers=config.num_workers,
        workspace_bytes=workspace_bytes(config, server.max_num_seqs, server.max_num_batched_tokens),
    )


def _features(layer: Layer) -> Iterator[str]:
    """What tells this layer from a plain one, in words of the support table."""
    for row in support.present(layer.request):
        plain = row.key in {r.key for r in support.present(support.Request())}
        if not plain and row.key not in ("connector", "adaptive"):
            yield f"{row.label} ({layer.window})" if row.key == "sliding_window" else row.label


def cuda_graphs(
    backends: Sequence[str | None], level_of: Callable[[str], str | None] | None = None
) -> tuple[str, str]:
    """Return the CUDA-graph level that vLLM can use with these backends, and why.

    Parameters
    ----------
    backends : sequence of str or None
        Names of the layers' backends; ours is ``TILEWISE``, None where nobody computes a layer.
    level_of : Callable, optional
        The level of a backend by name, None if unknown; asks vLLM by default.

    Returns
    -------
    tuple of str
        A level of vLLM's ``AttentionCGSupport``, or ``UNKNOWN``; and who limits it.
    """
    order = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")
    if None in backends:
        return "UNKNOWN", "nobody computes some of the layers"
    lowest, why = "ALWAYS", "every layer is computed here: full graphs for any batch"
    for name in dict.fromkeys(filter(None, backends)):
        level = "ALWAYS" if name == OURS else (level_of or _level)(name)
        if level is None:
            return "UNKNOWN", f"depends on {name}, which cannot be asked here"
        if order.index(level) < order.index(lowest):
            lowest, why = level, f"{name} allows no more"
        elif name != OURS and lowest == "ALWAYS":
            why = f"{name} allows full graphs for any batch too"
    return lowest, why


def _level(name: str) -> str | None:
    """What vLLM's builder class of a backend declares."""
    try:
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        member = registry.AttentionBackendEnum.__members__.get(name)
        builder = member and member.get_class().get_builder_cls()
    except (ImportError, OSError):
        return None
    level = getattr(builder, "_cudagraph_support", None)
    return getattr(level, "name", None)


def model_problems(report: ModelReport, fallback: str) -> Iterator[Problem]:
    """Yield what keeps vLLM from starting with this model."""
    if not report.kinds:
        yield Problem("warning", "model", "the model has no attention layers")
    for kind in report.kinds:
        where = f"layers {ranges(kind.layers)}"
        said = "; ".join(reason.text for reason in kind.reasons)
        if kind.backend is None:
            yield Problem("fatal", "model", f"no backend computes {where}: {said}")
        elif kind.backend != OURS and fallback == "error":
            text = f"TILEWISE_FALLBACK=error, and tilewise does not compute {where}: {said}"
            yield Problem("fatal", "model", text)


def ranges(numbers: tuple[int, ...]) -> str:
    """Write numbers short; steps of two as well.

    >>> ranges((0, 1, 2, 5)), ranges((0, 2, 4, 6))
    ('0-2, 5', '0, 2 .. 6')
    """
    if len(numbers) > 3 and len({b - a for a, b in pairwise(numbers)}) == 1:
        step = numbers[1] - numbers[0]
        if step > 1:
            return f"{numbers[0]}, {numbers[1]} .. {numbers[-1]}"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
