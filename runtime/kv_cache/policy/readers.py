"""Readers of a policy's parts: from what a configuration says to the method or plan itself, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from runtime.config.messages import show
from runtime.config.registry import Registry
from runtime.config.settings import (
    ConfigError,
    Path,
    Share,
    calibrations_of,
    configure,
    mapping,
    read,
    settings_of,
    unknown,
)
from runtime.kv_cache.eviction import EvictionPlan
from runtime.kv_cache.offload import OffloadPlan
from runtime.kv_cache.policy.presets import find_preset
from runtime.kv_cache.policy.registries import CODECS, HEAD_BUDGETS, LAYER_BUDGETS, SCORES, SELECTIONS
from runtime.kv_cache.storage.plan import Tier

EVICT_RATIO = 0.25  # of the tokens, what a policy evicts to that says neither ratio nor tokens
SELECT_RATIO = 0.1  # of the tokens, what a selection reads that says neither


def read_method(
    registry: Registry,
    value: Any,
    path: Path,
    key: str,
    defaults: Mapping[str, Any] | None = None,
    beside: Iterable[str] = (),
) -> Any:
    """A method from its name, or from a mapping with the name under `key` and settings beside it; not calibrated yet.

    Args:
        registry: what may stand there.
        path: of the value.
        key: of the name in the mapping.
        defaults: of settings, where they are not the dataclass's.
        beside: other keys of the mapping, for messages; they are read elsewhere.
    """
    fields: dict[str, Any] = {}
    where = path
    if isinstance(value, Mapping):
        fields = {str(name): part for name, part in value.items()}
        if key not in fields:
            raise ConfigError(path, f"the key '{key}' is missing; it is one of {', '.join(registry.names)}")
        value, where = fields.pop(key), (*path, key)
    if not isinstance(value, str):
        text = f"expected the name of a {registry.what} ({', '.join(registry.names)}), got {show(value)}"
        raise ConfigError(where, text)
    method = registry.find(value)
    if method is None:
        preset = find_preset(value)
        if preset is not None:
            raise ConfigError(where, f"'{value}' is a whole method: write `method: {preset.name}` beside this key")
        raise unknown(where, value, registry.names, registry.what)
    known = settings_of(method.load(), method.fixed)
    fields = {name: default for name, default in (defaults or {}).items() if name in known} | fields
    return configure(method.load(), fields, path, method.fixed, beside, _inner_score)


def _inner_score(path: Path, value: Any) -> Any:
    inner = read_score(value, path)
    if calibrations_of(type(inner)):
        raise ConfigError(path, f"{inner.name} cannot stand inside another score")
    return inner


def settings_in(registry: Registry, method: Any) -> dict[str, Any]:
    """The settings of a registry's method by name, those that its name or calibration gives left out."""
    known = registry.find(method.name)
    return {name: getattr(method, name) for name in settings_of(type(method), known.fixed if known else ())}


def write_method(registry: Registry, method: Any, key: str, short: bool = True) -> Any:
    """As `read_method` takes it: the name alone where there is no setting, else a mapping with the name under `key`."""
    fields = settings_in(registry, method)
    for name, value in fields.items():
        if isinstance(value, tuple):
            fields[name] = list(value)
        elif hasattr(value, "name"):
            fields[name] = write_method(SCORES, value, "score")
    return method.name if short and not fields else {key: method.name, **fields}


def read_score(value: Any, path: Path) -> Any:
    """A score."""
    return read_method(SCORES, value, path, "score")


# ---------------------------------------------------------------- eviction
def read_eviction(value: Any, path: Path) -> EvictionPlan:
    """What is evicted: a score, or a mapping with its settings and those of the plan side by side."""
    given = dict(value) if isinstance(value, Mapping) else {"score": value}
    kinds = settings_of(EvictionPlan)
    own = {key: given.pop(key) for key in kinds if key in given and key != "score"}
    own = {key: entry for key, entry in own.items() if entry is not None}
    parts = (
        read_method(SCORES, given, path, "score", beside=kinds),
        read_method(LAYER_BUDGETS, own.pop("layers", "uniform"), (*path, "layers"), "share"),
        read_method(HEAD_BUDGETS, own.pop("heads", "equal"), (*path, "heads"), "share"),
    )
    if own.keys().isdisjoint(("ratio", "tokens")):
        own["ratio"] = EVICT_RATIO
    own = {key: read(kinds[key].kind, entry, (*path, key)) for key, entry in own.items()}
    try:
        return EvictionPlan(*parts, **own)
    except ConfigError as error:
        raise error.within(*path) from error


def write_eviction(plan: EvictionPlan) -> dict[str, Any]:
    """As `read_eviction` takes it."""
    budget = {"ratio": plan.ratio} if plan.tokens is None else {"tokens": plan.tokens}
    shares = {
        "layers": write_method(LAYER_BUDGETS, plan.layers, "share"),
        "heads": write_method(HEAD_BUDGETS, plan.heads, "share"),
    }
    when = {"interval": plan.interval, "prompt": plan.prompt}
    return {**write_method(SCORES, plan.score, "score", short=False), **budget, **shares, **when}


# ---------------------------------------------------------------- storage
def read_tiers(settings: Mapping[str, Any]) -> tuple[Tier, ...]:
    """The tiers of a policy's settings, or its only one, which `keys` and `values` say; none where all stay floats."""
    if "tiers" not in settings:
        tiers = [_tier(settings, (), 1.0)]
    else:
        value, tiers = settings["tiers"], []
        if not isinstance(value, (list, tuple)) or not value:
            raise ConfigError(("tiers",), "expected a list of tiers, such as {keys: int4, values: int4, share: 0.4}")
        for number, entry in enumerate(value):
            here = ("tiers", number)
            given = mapping(here, entry, ("keys", "values", "share"), "a tier")
            share = given.get("share", 1.0 if len(value) == 1 else None)
            if share is None:
                raise ConfigError(here, "the key 'share' is missing; the shares of all tiers add up to 1")
            tiers.append(_tier(given, here, read(Share, share, (*here, "share"))))
        total = sum(tier.share for tier in tiers)
        if abs(total - 1) > 1e-6:
            raise ConfigError(("tiers",), f"the shares of the tiers add up to {total:g}, not to 1")
    return () if all(tier.is_plain for tier in tiers) else tuple(tiers)


def _tier(given: Mapping[str, Any], path: Path, share: float) -> Tier:
    return Tier(_codec(given, path, "keys", "channel"), _codec(given, path, "values", "token"), share)


def _codec(given: Mapping[str, Any], path: Path, key: str, axis: str) -> Any:
    """A codec; where its grids are a token's and it says no group, 32 channels share one."""
    value, path = given.get(key), (*path, key)
    value = "plain" if value is None else value
    axis = value.get("axis", axis) if isinstance(value, Mapping) else axis
    defaults = {"axis": axis, "group": 32 if axis == "token" else 0}
    codec = read_method(CODECS, value, path, "codec", defaults)
    if getattr(codec, "axis", "token") == "channel" and codec.group:
        raise ConfigError((*path, "group"), "group is for grids a token (axis: token)")
    return codec


def write_tier(tier: Tier) -> dict[str, Any]:
    """As a tier is read."""
    return {
        "keys": write_method(CODECS, tier.keys, "codec"),
        "values": write_method(CODECS, tier.values, "codec"),
        "share": tier.share,
    }


# ---------------------------------------------------------------- selection, offload
def read_selection(value: Any, path: Path) -> Any:
    """What a step reads."""
    given = dict(value) if isinstance(value, Mapping) else {"method": value}
    if given.get("tokens") is None and given.get("ratio") is None:
        given["ratio"] = SELECT_RATIO
    return read_method(SELECTIONS, given, path, "method")


def read_offload(value: Any, path: Path) -> OffloadPlan:
    """Where older tokens lie."""
    return configure(OffloadPlan, {"to": value} if isinstance(value, str) else value, path)
