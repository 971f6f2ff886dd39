"""Drafters, rules and lengths built from what `drafter=` says, for a loaded target."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.config.registry import Method
from runtime.config.settings import ConfigError, Count, is_off, read, read_method
from runtime.config.settings import Path as Place
from runtime.drafting.config.artifact_draft import CHOICE, directory_drafter, own_draft, place_of
from runtime.drafting.config.registry import DRAFTERS, LENGTHS, RULES, drafters, find_drafter
from runtime.drafting.config.request import AMOUNT, OF_THE_WHOLE, Request, parse
from runtime.drafting.config.target import Target, UnfitError
from runtime.drafting.draft_cache import position_bytes
from runtime.drafting.drafters.base import Drafter
from runtime.drafting.drafters.draft_model import draft_facts
from runtime.drafting.lengths.base import Lengths
from runtime.drafting.speculation import Speculation
from runtime.drafting.verify.base import Rule
from runtime.errors import RequestError
from runtime.system import memory

__all__ = ["CHOICE", "Target", "check_written", "choose_speculation"]

WHERE = "drafter"
_log = logging.getLogger("compress.speculation")


def check_written(value: Any, where: str = WHERE) -> None:
    """RequestError where no model could be drafted for so: what can be told before one is read.

    Args:
        value: as for `choose_speculation`. where: what messages call it.
    """
    if value is None or is_off(value) or isinstance(value, Speculation):
        return
    try:
        parse(value)
        rule_of(said(value))
        amounts_of(said(value))
    except ConfigError as error:
        raise error.at(where) from None


def choose_speculation(value: Any, target: Target) -> Speculation | None:
    """How a model is decoded speculatively; None: it is not.

    Args:
        value: what `runtime.load` was given as drafter.

    Raises:
        RequestError: there is no such drafter, it does not fit the model, or the model's engine verifies no drafts.
    """
    if is_off(value):
        return None
    if value is None:
        return _unasked(target)
    where = WHERE
    if value is True:
        value, where = own_draft(target.artifact), place_of(target.artifact)
        if value is None:
            raise RequestError(
                f"drafter: {target.artifact.path} brings no draft; name one, such as 'lookup', or a directory"
            )
    reason = target.engine.why_not_drafts()
    if reason is not None:
        raise RequestError(f"drafter: {reason}")
    return _made(value, target, where)


def _unasked(target: Target) -> Speculation | None:
    """What the directory brings, as far as its engine allows: a model that nobody asked to draft loads on every machine."""
    own = directory_drafter(target.artifact, target.engine.device)
    if own is None or is_off(own.value):
        return None
    reason = target.engine.why_not_drafts()
    if reason is None:
        try:
            return _made(own.value, replace(target, lenient=True), own.where)
        except UnfitError as error:
            reason = error.text
    _log.warning("%s is not used: %s", own.where, reason)
    return None


def _made(value: Any, target: Target, where: str) -> Speculation:
    given, own = said(value), inherited(value, target)
    try:
        if isinstance(value, Speculation):
            check_ids(value.drafter, target)
            check_memory(value.lengths, target, ("lengths", "nodes"))
            return value
        rule, lengths = rule_of(given | own), lengths_of(given | own, target)
        drafter = build(parse(value), target)
    except ConfigError as error:
        said_there = bool(error.path) and error.path[0] in own
        raise error.at(place_of(target.artifact) if said_there else where) from None
    return Speculation(drafter, rule, lengths)


# ---------------------------------------------------------------- how much is drafted, and what is accepted
def said(value: Any) -> dict[str, Any]:
    """What a drafter's settings say of the whole."""
    return {key: value[key] for key in OF_THE_WHOLE if key in value} if isinstance(value, Mapping) else {}


def inherited(value: Any, target: Target) -> dict[str, Any]:
    """What else is said of a composition with the artifact's own draft: of both what that does, where it says nothing itself."""
    parts, given = value.get("of", ()) if isinstance(value, Mapping) else value, said(value)
    own = (own_draft(target.artifact) or {}) if _names_own(parts) else {}
    amount = any(key in given for key in AMOUNT)
    return {key: own[key] for key in OF_THE_WHOLE if key in own and key not in given and not (amount and key in AMOUNT)}


def _names_own(parts: Any) -> bool:
    if isinstance(parts, Mapping):
        return _names_own(parts.get("of"))
    return parts is True or (isinstance(parts, (list, tuple)) and any(map(_names_own, parts)))


def rule_of(settings: Mapping[str, Any]) -> Rule:
    """How drafts are accepted; ConfigError where it cannot be so."""
    return read_method(RULES, settings.get("acceptance", "exact"), ("acceptance",))


def amounts_of(settings: Mapping[str, Any]) -> tuple[Lengths, Mapping[str, Place]]:
    """How much is drafted, and where that was said: {"depth" or "nodes": its place}, without what nobody said.

    Raises:
        ConfigError: it cannot be so.
    """
    written = settings.get("lengths", "goodput")
    if isinstance(written, str):
        written = {written: {}}
    places: dict[str, Place] = {key: (key,) for key in ("nodes", "depth") if key in settings}
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
    return lengths, places


def lengths_of(settings: Mapping[str, Any], target: Target) -> Lengths:
    """How much is drafted; ConfigError where it cannot be so, UnfitError where it does not fit the engine."""
    lengths, places = amounts_of(settings)
    context, rows = target.engine.context_length, target.engine.draft_rows
    depth, nodes = getattr(lengths, "depth", 1), getattr(lengths, "nodes", 1)
    # What nobody said is cut to what fits, step by step.
    if "depth" in places and context is not None and depth >= context:
        raise UnfitError(places["depth"], f"{depth} drafted tokens do not fit the model's context of {context}")
    if "nodes" in places and nodes >= rows:
        raise UnfitError(
            places["nodes"],
            f"a tree of {nodes} tokens is larger than a step of this engine, which takes {rows} with the last token",
        )
    check_memory(lengths, target, places.get("nodes", ()))
    return lengths


def check_memory(lengths: Lengths, target: Target, place: Place) -> None:
    """UnfitError where a tree's logits and keys do not fit the memory that is free, or that `max_memory` leaves.

    Args:
        place: where its size was said; empty where nobody did.
    """
    engine, nodes = target.engine, getattr(lengths, "nodes", 1)
    free, left = memory.available_bytes(engine.device), engine.cache_budget
    need = nodes * (4 * engine.vocab_size + position_bytes(engine))
    takes = f"a tree of {nodes} tokens takes {need / 1e9:.3g} GB"
    if need > free:
        raise UnfitError(place, f"{takes}, and {free / 1e9:.3g} GB are free; draft fewer (nodes)")
    if left is not None and need > left:
        raise UnfitError(
            place,
            f"{takes}, and max_memory or cache_memory leaves {left / 1e9:.3g} GB: raise it, or draft fewer (nodes)",
        )


# ---------------------------------------------------------------- drafters
def build(request: Request, target: Target) -> Drafter:
    """The drafter that was asked for.

    Raises:
        ConfigError: there is none such. UnfitError: the engine cannot serve it.
        RequestError, ArtifactError: its directory is another target's, or cannot be read.
    """
    if request.parts:
        assert request.method is not None
        parts = [build(part, target) for part in request.parts]
        return request.method.load()(parts, **request.read_settings(request.method))
    try:
        drafter = _built(request, target)
        check_ids(drafter, target)
    except ConfigError as error:
        # What is wrong with keys that nobody wrote is said of the whole.
        unwritten = error.path and error.path[0] in ("method", "model") and error.path[0] not in request.keys
        raise type(error)((*request.path, *error.path[bool(unwritten) :]), error.text) from None
    return drafter


def check_ids(drafter: Drafter, target: Target) -> None:
    """ConfigError where a drafter proposes tokens that the model does not have."""
    if drafter.vocabulary is not None:
        size = read(Count, drafter.vocabulary, ("vocabulary",))
        if size > target.engine.vocab_size:
            text = f"{drafter.name} proposes {size} tokens, and the model has {target.engine.vocab_size}"
            raise ConfigError((), text)


def _own(target: Target) -> Drafter:
    """The artifact's own draft."""
    value = own_draft(target.artifact)
    if value is None:
        raise ConfigError((), f"{target.artifact.path} brings no draft of its own")
    try:
        return build(parse(value), target)
    except ConfigError as error:
        raise type(error)((), str(error.at(place_of(target.artifact)))) from None


def _built(request: Request, target: Target) -> Drafter:
    if request.drafter is not None:
        return request.drafter
    if request.is_own:
        return _own(target)
    method, directory, facts = request.method, target.artifact.path, {}
    if request.model is not None:
        directory = _directory(request, target)
        facts = draft_facts(directory)
        method = _method(request, directory, facts)
    assert method is not None
    return method.load().build(target, directory, facts, **request.read_settings(method))


def _directory(request: Request, target: Target) -> Path:
    """The directory of a draft model or of heads."""
    model = request.model
    if model is True:
        model = (own_draft(target.artifact) or {}).get("model")
        if model is None:
            raise ConfigError(("model",), f"{target.artifact.path} brings no draft of its own that is in a directory")
    directory = Path(str(model))
    if not directory.is_dir():  # the artifact's own
        raise ConfigError(("model",), f"there is no directory {str(directory)!r}")
    return directory


def _method(request: Request, directory: Path, facts: Mapping[str, Any]) -> Method | None:
    """The drafter of a directory: heads and adapters say what they are, draft models what they were trained for."""
    method, heads = request.method, find_drafter(facts.get("method"), "heads")
    if heads is not None:
        if method is not None and method is not heads:
            text = f"{directory} holds a draft of the method {heads.name}; leave the key out"
            raise ConfigError(("method",), text)
        return heads
    if method is not None and method.load().source == "heads":
        raise ConfigError(("method",), f"{directory} holds no draft of the method {method.name}")
    trained = [each for each in drafters("model") if each.load().fact in facts]
    return method or (trained[0] if trained else DRAFTERS.find("chain"))
