"""Drafters, rules and lengths built from what `drafter=` says, for a loaded target."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.config.registry import Method
from runtime.config.settings import ConfigError, Count, read
from runtime.drafting.config.amounts import amounts_of, check_memory, inherited, lengths_of, rule_of, said
from runtime.drafting.config.artifact_draft import CHOICE, directory_drafter, own_draft, place_of
from runtime.drafting.config.registry import DRAFTERS, drafters, find_drafter
from runtime.drafting.config.request import Request, parse
from runtime.drafting.config.target import Target, UnfitError
from runtime.drafting.drafters.base import Drafter
from runtime.drafting.drafters.draft_model import draft_facts
from runtime.drafting.speculation import Speculation
from runtime.errors import RequestError

__all__ = ["CHOICE", "Target", "check_written", "choose_speculation", "is_none"]

WHERE = "drafter"
_OFF = ("none", "off")
_log = logging.getLogger("compress.speculation")


def is_none(value: Any) -> bool:
    """Whether it asks for plain decoding."""
    return value is False or (isinstance(value, str) and value.lower() in _OFF)


def check_written(value: Any, where: str = WHERE) -> None:
    """RequestError where no model could be drafted for so: what can be told before one is read.

    Args:
        value: as for `choose_speculation`. where: what messages call it.
    """
    if value is None or is_none(value) or isinstance(value, Speculation):
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
    if is_none(value):
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
    if own is None or is_none(own.value):
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
        drafter: Drafter = request.method.load()(parts, **request.read_settings(request.method))
        return drafter
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
    drafter: Drafter = method.load().build(target, directory, facts, **request.read_settings(method))
    return drafter


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
