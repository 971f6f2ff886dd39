"""Amounts of a drafter's settings: how much is drafted and what is accepted, checked against the engine and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from runtime.config.settings import ConfigError, Path, read_method
from runtime.drafting.config.artifact_draft import own_draft
from runtime.drafting.config.registry import LENGTHS, RULES
from runtime.drafting.config.request import AMOUNT, OF_THE_WHOLE
from runtime.drafting.config.target import Target, UnfitError
from runtime.drafting.lengths.base import Lengths
from runtime.drafting.verify.base import Rule
from runtime.drafting.verify.exact import Exact
from runtime.engines.streaming.plan import position_bytes
from runtime.system import memory


def said(value: Any) -> dict[str, Any]:
    """What a drafter's settings say of the whole."""
    return {key: value[key] for key in OF_THE_WHOLE if key in value} if isinstance(value, Mapping) else {}


def inherited(value: Any, target: Target) -> dict[str, Any]:
    """What else is said of a composition with the artifact's own draft: of both what that does, where it says nothing itself."""
    parts, given = value.get("of", ()) if isinstance(value, Mapping) else value, said(value)
    own = (own_draft(target.artifact) or {}) if _names_own(parts) else {}
    kept = [key for key in OF_THE_WHOLE if key in own and key not in given]
    if any(key in given for key in AMOUNT):
        kept = [key for key in kept if key not in AMOUNT]
    return {key: own[key] for key in kept}


def _names_own(parts: Any) -> bool:
    if isinstance(parts, Mapping):
        return _names_own(parts.get("of"))
    return parts is True or (isinstance(parts, (list, tuple)) and any(map(_names_own, parts)))


def rule_of(settings: Mapping[str, Any]) -> Rule:
    """How drafts are accepted; ConfigError where it cannot be so."""
    if "acceptance" not in settings:
        return Exact()
    rule: Rule = read_method(RULES, settings["acceptance"], ("acceptance",))
    return rule


class Amounts(NamedTuple):
    """How much is drafted, and where that was said: {"depth" or "nodes": its place}, without what nobody said."""

    lengths: Lengths
    places: Mapping[str, Path]


def amounts_of(settings: Mapping[str, Any]) -> Amounts:
    """How much is drafted; ConfigError where it cannot be so."""
    written = settings.get("lengths", "goodput")
    if isinstance(written, str):
        written = {written: {}}
    places: dict[str, Path] = {key: (key,) for key in ("nodes", "depth") if key in settings}
    if isinstance(written, Mapping) and len(written) == 1:
        ((name, fields),) = written.items()
        if isinstance(fields, Mapping) or fields is None:
            twice = next((key for key in places if key in (fields or {})), None)
            if twice is not None:
                raise ConfigError((twice,), f"it is said twice, here and in lengths.{name}.{twice}; leave one out")
            written = {name: {**{key: settings[key] for key in places}, **(fields or {})}}
            places = {key: ("lengths", str(name), key) for key in (fields or {})} | places
    try:
        lengths: Lengths = read_method(LENGTHS, written, ("lengths",))
    except ConfigError as error:
        raise ConfigError(places.get(str(error.path[-1]), error.path), error.text) from None
    return Amounts(lengths, places)


def lengths_of(settings: Mapping[str, Any], target: Target) -> Lengths:
    """How much is drafted; ConfigError where it cannot be so, or does not fit the engine."""
    lengths, places = amounts_of(settings)
    # What nobody said is cut to what fits, step by step.
    if "depth" in places:
        _check_depth(lengths, target, places["depth"])
    if "nodes" in places:
        _check_rows(lengths, target, places["nodes"])
    check_memory(lengths, target, places.get("nodes", ()))
    return lengths


def _check_depth(lengths: Lengths, target: Target, path: Path) -> None:
    """UnfitError where a branch is longer than the model's context."""
    context, depth = target.engine.context_length, getattr(lengths, "depth", 1)
    if context is not None and depth >= context:
        raise UnfitError(path, f"{depth} drafted tokens do not fit the model's context of {context}")


def _check_rows(lengths: Lengths, target: Target, path: Path) -> None:
    """UnfitError where a tree is larger than what the engine verifies at once."""
    rows, nodes = getattr(target.engine, "draft_rows", None), getattr(lengths, "nodes", 1)
    if rows is not None and nodes >= rows:
        raise UnfitError(
            path,
            f"a tree of {nodes} tokens is larger than a step of this engine, which takes {rows} with the last token",
        )


def check_memory(lengths: Lengths, target: Target, path: Path) -> None:
    """UnfitError where a tree's logits and keys do not fit the memory that is free, or that `max_memory` leaves.

    Args:
        path: where its size was said; empty where nobody did.
    """
    engine, nodes = target.engine, getattr(lengths, "nodes", 1)
    free, left = memory.available_bytes(engine.device), getattr(engine, "cache_budget", None)
    need = nodes * (4 * engine.vocab_size + _position_bytes(engine))
    takes = f"a tree of {nodes} tokens takes {need / 1e9:.3g} GB"
    if need > free:
        raise UnfitError(path, f"{takes}, and {free / 1e9:.3g} GB are free; draft fewer (nodes)")
    if left is not None and need > left:
        raise UnfitError(path, f"{takes}, and max_memory leaves {left / 1e9:.3g} GB: raise it, or draft fewer (nodes)")


def _position_bytes(engine: Any) -> int:
    """Keys and values of one token."""
    if hasattr(engine, "page_bytes"):
        return int(engine.page_bytes // engine.page_size)
    module = getattr(engine, "module", None)
    return 0 if module is None else position_bytes(module.config, module.dtype)
