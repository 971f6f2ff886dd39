"""What `drafter=` asks for: a name, settings, the directory of a draft model, several of them, a drafter of the caller's own."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from runtime.decoding.drafters.amounts import amounts_of, check_memory, inherited, lengths_of, rule_of, said
from runtime.decoding.drafters.brought import brought, own_draft, place_of
from runtime.decoding.drafters.build import check_ids, drafter_of
from runtime.decoding.drafters.choice import CHOICE
from runtime.decoding.drafters.fit import Target, UnfitError, why_not
from runtime.decoding.drafters.written import check
from runtime.decoding.speculation import Speculation
from runtime.errors import RequestError
from runtime.kv_cache.policy_fields import PolicyError

__all__ = ["CHOICE", "Target", "check_written", "choose_speculation", "is_none", "why_not"]

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
        check(value)
        rule_of(said(value))
        amounts_of(said(value))
    except PolicyError as error:
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
    reason = why_not(target.engine)
    if reason is not None:
        raise RequestError(f"drafter: {reason}")
    return _made(value, target, where)


def _unasked(target: Target) -> Speculation | None:
    """What the directory brings, as far as its engine allows: a model that nobody asked to draft loads on every machine."""
    own = brought(target.artifact, target.engine.device)
    if own is None or is_none(own.value):
        return None
    reason = why_not(target.engine)
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
        drafter = drafter_of(value, target)
        check_ids(drafter, target)
    except PolicyError as error:
        said_there = bool(error.path) and error.path[0] in own
        raise error.at(place_of(target.artifact) if said_there else where) from None
    return Speculation(drafter, rule, lengths)
