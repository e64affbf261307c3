"""Layers that we do not compute go to a backend of vLLM that does, each with its reasons.

vLLM selects a backend for a layer without seeing all of it: ALiBi, a soft cap and the like reach
the layer's constructor only, and one answer is kept for all layers that look alike. So two places
are wrapped, and both do nothing unless our backend was named:

* the constructors of attention layers, which note what the layer is and, where our implementation
  refuses it all the same, build it once more without us;
* the selector, which asks the support table about that layer and, where it is not ours, takes the
  first backend that computes it right and that vLLM finds fit for it.

vLLM then makes groups, builders and metadata for each backend of a model. It intersects their KV
cache layouts (we read any), takes a page size that all of them read, and captures CUDA graphs at
the level of the least able, so nothing has to be agreed upon here.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from tilewise import counters, support
from tilewise.errors import UnsupportedConfig, UnsupportedFeature
from tilewise.integration.after_import import when_imported
from tilewise.settings import load_settings

SELECTOR = "vllm.v1.attention.selector"
LAYERS = {
    "vllm.model_executor.layers.attention.attention": "Attention",
    "vllm.model_executor.layers.attention.mla_attention": "MLAAttention",
}
OUR_MODULE = "tilewise.integration.backend"

# On a platform without CUDA devices: what Triton's interpreter can run.
_INTERPRETED = ("TRITON_ATTN",)

# Below the logger that vLLM configures, so that our lines look like its own.
logger = logging.getLogger("vllm.tilewise")


@dataclass(frozen=True)
class Choice:
    """Who computes a layer in our place, and why."""

    target: str
    reasons: tuple[support.Reason, ...]


@dataclass
class _Layer:
    """An attention layer that is being built."""

    owner: object
    name: str = "a layer of this model"
    # Fields of support.Request
    features: dict[str, Any] = field(default_factory=dict)
    # What vLLM asked the selector, once it has asked for us
    config: dict[str, Any] | None = None
    # What our implementation said
    refusal: str | None = None
    choice: Choice | None = None


_building: ContextVar[_Layer | None] = ContextVar("tilewise_building", default=None)

# Layers that fell back and have not been logged: vLLM builds one after another.
_pending: dict[Choice, list[str]] = {}

# What was logged of selections without a layer.
_said: set[Choice] = set()


# -- selection -------------------------------------------------------------------------------------


def select(
    original: Callable[..., Any],
    backend: Any,
    attn_selector_config: Any,
    num_heads: int | None = None,
    **options: Any,
) -> Any:
    """Select the backend class of a layer: ours, or the one that takes the layer over.

    Parameters
    ----------
    original : Callable
        vLLM's own selection.
    backend : AttentionBackendEnum, optional
        What the user named. Any backend but ours is left to ``original``.
    attn_selector_config : NamedTuple
        What vLLM tells a selector about the layer.
    num_heads, **options
        Passed on.

    Returns
    -------
    type[AttentionBackend]
        The class.

    Raises
    ------
    UnsupportedConfig
        If nobody computes the layer, or ``TILEWISE_FALLBACK=error`` and it is not ours.
    """
    if not _is_ours(backend):
        return original(backend, attn_selector_config, num_heads, **options)
    from vllm.platforms import current_platform

    layer = _building.get() or _Layer(owner=None)
    layer.config = {
        **attn_selector_config._asdict(),
        "device_capability": current_platform.get_device_capability(),
    }
    reasons = _reasons(layer)
    if not reasons:
        return original(backend, attn_selector_config, num_heads, **options)
    if load_settings(os.environ).fallback == "error":
        raise UnsupportedConfig(
            f"TILEWISE_FALLBACK=error, and tilewise does not compute {layer.name}: "
            + "; ".join(reason.text for reason in reasons)
        )
    if _request(layer).use_mla or _request(layer).use_sparse:
        chosen = original(None, attn_selector_config, num_heads, **options)
    else:
        chosen = _substitute(layer, reasons, current_platform.is_cuda())
    layer.choice = Choice(chosen.get_name(), reasons)
    if layer.owner is None and layer.choice not in _said:
        # From elsewhere (a model's own layer class, a KV connector): no names to wait for.
        _said.add(layer.choice)
        _log(layer.choice, [layer.name])
    return chosen


def _is_ours(backend: Any) -> bool:
    """Whether an enum member stands for our backend."""
    from tilewise.integration.compat import BACKEND_PATH, OWN_NAME, SHARED_NAME

    if getattr(backend, "name", None) not in (OWN_NAME, SHARED_NAME):
        return False
    try:
        return bool(backend.get_path() == BACKEND_PATH)
    except ValueError:  # the shared name, with nobody behind it
        return False


def _request(layer: _Layer) -> support.Request:
    from tilewise.integration.backend import request_of

    return request_of(layer.config or {}, layer.features)


def _reasons(layer: _Layer) -> tuple[support.Reason, ...]:
    """Why a layer is not ours: the table's reasons, else what our implementation said."""
    from tilewise.integration.backend import TilewiseBackend

    reasons = TilewiseBackend.reasons(layer.config or {}, layer.features)
    if not reasons and layer.refusal is not None:
        reasons = (support.Reason("layer", layer.refusal),)
    return reasons


def _substitute(layer: _Layer, reasons: tuple[support.Reason, ...], cuda: bool) -> Any:
    """Return the first backend class that computes the layer right and is fit for it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    request, refusals = _request(layer), {}
    right = support.targets(request)
    # The selector does not see these of every layer class; a substitute has to know.
    config = {**(layer.config or {}), "has_sink": request.has_sink}
    config["has_sliding_window"] = request.has_sliding_window
    for name in support.ORDER if cuda else _INTERPRETED:
        if name not in right:
            rows = (row.label for row in support.present(request) if name not in row.targets)
            refusals[name] = "not for " + ", ".join(rows)
            continue
        why = _unfit(AttentionBackendEnum.__members__.get(name), config)
        if not why:
            return AttentionBackendEnum[name].get_class()
        refusals[name] = "; ".join(why)
    refusals["TILEWISE"] = "; ".join(reason.text for reason in reasons)
    by_text: dict[str, list[str]] = {}
    for name in ("TILEWISE", *support.ORDER):
        if name in refusals:
            by_text.setdefault(refusals[name], []).append(name)
    lines = [f"{', '.join(names)}: {text}" for text, names in by_text.items()]
    raise UnsupportedConfig(f"no attention backend computes {layer.name}:\n  " + "\n  ".join(lines))


def _unfit(member: Any, config: Mapping[str, Any]) -> list[str]:
    """What vLLM has against a backend for this layer."""
    if member is None:
        return ["this vLLM does not have it"]
    config = dict(config)
    if config["device_capability"] is None:
        from vllm.platforms.interface import DeviceCapability

        config["device_capability"] = DeviceCapability(*support.MIN_COMPUTE_CAPABILITY)
    try:
        return list(member.get_class().validate_configuration(**config))
    except (ImportError, OSError) as error:
        return [f"{type(error).__name__}: {error}"]


# -- the layers ------------------------------------------------------------------------------------


def _features(owner: object, named: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``support.Request`` that a layer's constructor was called with.

    Parameters
    ----------
    owner : object
        The layer.
    named, extra : Mapping[str, Any]
        Its arguments, and those of them that it passes on.
    """
    given = {**named, **extra}
    found: dict[str, Any] = {
        "has_sink": given.get("sinks") is not None,
        "has_sliding_window": _window(given) is not None,
        "alibi": given.get("alibi_slopes") is not None,
        "alibi_sqrt": bool(given.get("use_alibi_sqrt")),
        "soft_cap": given.get("logits_soft_cap") or None,
        "shares_kv": given.get("kv_sharing_target_layer_name") is not None,
        "head_size_v": given.get("head_size_v"),
    }
    found = {name: value for name, value in found.items() if value not in (None, False)}
    if (given.get("chunk_lookback") or 0) > -1 and "chunk_lookback" in given:
        found["chunk_lookback"] = given["chunk_lookback"]
    if given.get("num_heads") and given.get("num_kv_heads"):
        found["group_size"] = given["num_heads"] // given["num_kv_heads"]
    kinds = support.LAYER_KINDS.intersection(cls.__name__ for cls in type(owner).__mro__)
    return {**found, "layer_kind": min(kinds)} if kinds else found


def _window(given: Mapping[str, Any]) -> int | None:
    """Sliding window of a layer, by the rule of vLLM's ``Attention``."""
    window = given.get("per_layer_sliding_window")
    if window is None:
        window = getattr(given.get("cache_config"), "sliding_window", None)
    return window


_KNOWN_OPTIONS = frozenset({"sinks", "chunk_lookback", "use_alibi_sqrt", "block_m", "block_n"})


def _unknown_option(extra: Mapping[str, Any]) -> dict[str, str]:
    """The first option for implementations that is switched on and not in the table."""
    for name, value in extra.items():
        off = value is None or value is False or (isinstance(value, int) and value < 0)
        if name not in _KNOWN_OPTIONS and not off:
            return {"option": name}
    return {}


def _note(layer: _Layer, owner: object, signature: inspect.Signature, bound: Any) -> None:
    """Add what a constructor of the layer was called with to what is known of the layer."""
    extra: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            extra |= bound.arguments.get(name, {})
    layer.name = bound.arguments.get("prefix") or extra.get("prefix") or layer.name
    layer.features |= _features(owner, bound.arguments, extra)
    if "extra_impl_args" in bound.arguments and "alibi_slopes" in signature.parameters:
        layer.features |= _unknown_option(bound.arguments["extra_impl_args"])


def _wrap_init(cls: Any) -> None:
    """Let the constructor of an attention layer tell the selector about the layer."""
    original = cls.__dict__.get("__init__")
    if original is None or hasattr(original, "tilewise_original"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:  # wrong arguments: the constructor says it best
            return original(self, *args, **kwargs)
        outer = _building.get()
        if outer is None or outer.owner is not self:
            layer = _Layer(self)
            _note(layer, self, signature, bound)
            return _build(layer, functools.partial(original, self, *args, **kwargs))
        # A layer class calling its base: the selector may have answered the outer one already.
        _note(outer, self, signature, bound)
        _refuse_late(outer, bound.arguments.get("attn_backend"))
        return original(self, *args, **kwargs)

    __init__.tilewise_original = original  # type: ignore[attr-defined]
    cls.__init__ = __init__


def _refuse_late(layer: _Layer, backend: Any) -> None:
    """Raise if a layer was given to us before we knew that it is not ours."""
    ours = layer.config is not None and layer.choice is None
    if ours and backend is not None and (reasons := _reasons(layer)):
        raise UnsupportedFeature("; ".join(reason.text for reason in reasons))


def _build(layer: _Layer, construct: Callable[[], None]) -> None:
    """Build a layer; once more, without us, if our implementation refuses it."""
    with _as_current(layer):
        try:
            construct()
        except UnsupportedFeature as refusal:
            if layer.config is None or layer.choice is not None:
                raise
            layer.refusal = str(refusal)
            construct()
    if layer.choice is not None:
        _pending.setdefault(layer.choice, []).append(layer.name)
        for reason in layer.choice.reasons:
            counters.add("fallback_layers", reason=reason.key, target=layer.choice.target)


@contextmanager
def _as_current(layer: _Layer) -> Iterator[None]:
    token, built = _building.set(layer), False
    try:
        yield
        built = True
    finally:
        _building.reset(token)
        if not built:
            log_pending()  # vLLM stops here: say what became of the layers before this one


def log_pending() -> None:
    """Log the layers that fell back since the last call: a line for each target and reason."""
    for choice, names in _pending.items():
        _log(choice, names)
    _pending.clear()


def _log(choice: Choice, names: list[str]) -> None:
    logger.warning(
        "tilewise leaves %d layer%s to %s (%s): %s",
        len(names),
        "" if len(names) == 1 else "s",
        choice.target,
        "; ".join(reason.text for reason in choice.reasons),
        abridged(names),
    )


def abridged(names: list[str]) -> str:
    """Join layer names; those that differ in their first number only become one.

    >>> abridged(["model.layers.0.attn", "model.layers.2.attn"])
    'model.layers.{0,2}.attn'
    """
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in names:
        head, number, tail = re.fullmatch(r"(\D*)(\d*)(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
        numbers.setdefault((head, tail), []).append(number)
    return ", ".join(
        head + (found[0] if len(found) == 1 else "{" + ",".join(found) + "}") + tail
        for (head, tail), found in numbers.items()
    )


# -- installation ----------------------------------------------------------------------------------


def install() -> None:
    """Wrap vLLM's selector and attention layers, now or when vLLM imports them; idempotent.

    The layers' modules are not imported for this: they are heavy, and a process that serves no
    model never needs them.
    """
    when_imported(SELECTOR, _wrap_selector)
    for module, name in LAYERS.items():
        when_imported(module, functools.partial(_wrap_layers, name=name))


def _wrap_selector(module: Any) -> None:
    original = getattr(module, "_cached_get_attn_backend", None)
    if original is None or "attn_selector_config" not in inspect.signature(original).parameters:
        logger.warning("tilewise does not know this vLLM's selector: no layer falls back")
        return
    if hasattr(original, "tilewise_original"):
        return
    wrapper: Any = functools.wraps(original)(functools.partial(select, original))
    for name in ("cache_clear", "cache_info", "cache_parameters"):
        if hasattr(original, name):
            setattr(wrapper, name, getattr(original, name))
    wrapper.tilewise_original = original
    module._cached_get_attn_backend = wrapper


def _wrap_layers(module: Any, name: str) -> None:
    base = getattr(module, name, None)
    if base is None:
        return
    classes = [base]
    for cls in classes:
        _wrap_init(cls)
        classes += cls.__subclasses__()
    if "tilewise_watched" in vars(base):
        return
    base.tilewise_watched = True

    def subclassed(cls: type[Any], /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _wrap_init(cls)

    base.__init_subclass__ = classmethod(subclassed)
    # The first moment when vLLM has built all layers of a model.
    loaded = base.process_weights_after_loading

    @functools.wraps(loaded)
    def process_weights_after_loading(self: Any, *args: Any, **kwargs: Any) -> Any:
        log_pending()
        return loaded(self, *args, **kwargs)

    base.process_weights_after_loading = process_weights_after_loading
