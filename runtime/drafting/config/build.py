"""From what `drafter=` says to the drafter."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.config.fields import PolicyError, integer
from runtime.config.registry import Method
from runtime.drafting.config.amounts import amounts_of, check_memory, inherited, lengths_of, rule_of, said
from runtime.drafting.config.artifact_draft import brought, own_draft, place_of
from runtime.drafting.config.measured_choice import CHOICE
from runtime.drafting.config.parse import check, find, read_settings, settings_of
from runtime.drafting.config.registry import (
    COMPOSITIONS,
    FREE,
    GIVEN,
    GIVEN_COMPOSED,
    HEADS,
    MODELS,
    OWN,
    SELF,
    configured,
)
from runtime.drafting.config.target import Target, UnfitError
from runtime.drafting.drafters.base import Drafter
from runtime.drafting.speculation import Speculation
from runtime.errors import ArtifactError, RequestError

_log = logging.getLogger("compress.speculation")


def drafter_of(value: Any, target: Target) -> Drafter:
    """The drafter that a value means.

    Raises:
        PolicyError: there is none such. UnfitError: the engine cannot serve it.
        RequestError, ArtifactError: its directory is another target's, or cannot be read.
    """
    check(value)
    return _built(value, target)


def check_ids(drafter: Drafter, target: Target) -> None:
    """PolicyError where a drafter proposes tokens that the model does not have."""
    if drafter.vocabulary is not None:
        size = integer(("vocabulary",), drafter.vocabulary, 1)
        if size > target.engine.vocab_size:
            raise PolicyError(
                (), f"{drafter.name} proposes {size} tokens, and the model has {target.engine.vocab_size}"
            )


def _built(value: Any, target: Target) -> Drafter:
    """`drafter_of` of a value that was checked."""
    if isinstance(value, Drafter):
        return value
    if value is True:
        return _own(target)
    if isinstance(value, (list, tuple)):
        return _composed(value, {}, (), target)
    if isinstance(value, (str, Path)):
        if not (find(FREE, value) or find(SELF, value)):
            with _of_the_whole("model"):
                return _of_model({"model": value}, target)
        value = {"method": value}
    if "of" in value:
        return _composed(value["of"], value, ("of",), target)
    if "model" in value:
        return _of_model(value if value["model"] is not True else {**value, "model": _own_model(target)}, target)
    method = find(FREE, value["method"])
    if method is not None:
        return configured(method, settings_of(value), ())  # type: ignore[no-any-return]
    return _self(value, target)


def _self(value: Mapping[str, Any], target: Target) -> Drafter:
    """A drafter that is a part of the target."""
    from runtime.drafting.drafters import early_exit, skip

    method = find(SELF, value["method"])
    build = skip.build if method is not None and method.name == "skip" else early_exit.build
    return build(target, settings_of(value))


def _heads(name: str, path: Path, facts: Mapping[str, Any], value: Mapping[str, Any], target: Target) -> Drafter:
    """Heads, or an adapter, that stand in a directory."""
    from runtime.drafting.drafters import kangaroo, medusa, mtp

    if value.get("method", name) != name:
        raise PolicyError(("method",), f"{path} holds a draft of the method {name}; leave the key out")
    own = settings_of(value)
    if name == "kangaroo":
        return kangaroo.build(target, {**own, "model": str(path)})
    return {"medusa": medusa.build_medusa, "mtp": mtp.build_mtp}[name](target, path, facts, own)


@contextmanager
def _of_the_whole(*keys: str) -> Iterator[None]:
    """What is wrong with keys that nobody wrote is said of the whole."""
    try:
        yield
    except PolicyError as error:
        if error.path and error.path[0] in keys:
            raise type(error)(error.path[1:], error.text) from None
        raise


# ---------------------------------------------------------------- draft models
def _own(target: Target) -> Drafter:
    """The artifact's own draft."""
    value = own_draft(target.artifact)
    if value is None:
        raise PolicyError((), f"{target.artifact.path} brings no draft of its own")
    try:
        return drafter_of(value, target)
    except PolicyError as error:
        raise type(error)((), str(error.at(place_of(target.artifact)))) from None


def _own_model(target: Target) -> str:
    """The directory of the artifact's own draft, where it has one."""
    own = own_draft(target.artifact)
    if own is None or "model" not in own:
        raise PolicyError(("model",), f"{target.artifact.path} brings no draft of its own that is in a directory")
    return str(own["model"])


def _of_model(value: Mapping[str, Any], target: Target) -> Drafter:
    from runtime.drafting.drafters.draft_model import draft_facts, load_draft
    from runtime.drafting.guard import within

    path = Path(str(value["model"]))
    if not path.is_dir():  # the artifact's own
        raise PolicyError(("model",), f"there is no directory {str(path)!r}")
    facts = draft_facts(path)
    heads = find(HEADS, facts.get("method"))
    if heads is not None:
        return _heads(heads.name, path, facts, value, target)
    name = value.get("method", next((method for key, method in OWN.items() if key in facts), "chain"))
    method = find(MODELS, name)
    if method is None:
        raise PolicyError(("method",), f"{path} holds no draft of the method {name}")
    settings = read_settings(method, value, GIVEN)
    draft = target.drafts.get(str(path))
    if draft is None:
        draft = load_draft(path, target.artifact, target.engine.device, target.trust_remote_code)
    try:
        with _of_the_whole(*(() if "method" in value else ("method",))):
            drafter = _with_draft(method, draft, path, settings, target)
    except UnfitError as error:
        if not target.lenient:
            raise
        _log.warning("the draft %s is used as a chain: %s", path, error.text)
        drafter = _with_draft(MODELS.find("chain") or method, draft, path, {}, target)
    return within(drafter, draft, target.engine.context_length)


def _with_draft(method: Method, draft: Any, path: Path, settings: Mapping[str, Any], target: Target) -> Drafter:
    """The drafter of a method over a loaded draft."""
    from runtime.drafting.caches.lanes import TreeLanes, lanes_of
    from runtime.drafting.drafters.model import Candidates
    from runtime.drafting.drafters.model_tree import DynamicTree

    candidates = Candidates(target.engine.vocab_size, draft.kept)
    if method.name == "nested":
        from runtime.drafting.drafters.cascade import nested

        return nested(draft.engine, _depths(draft.facts, path), candidates, draft.weight_bytes, **settings)
    given = {**method.fixed, **settings}
    if method.name == "parallel":
        given |= _trained(draft.facts, path)
    if method.name == "confident":
        return _confident(draft, path, candidates, given)
    cls, lanes = method.load(), lanes_of(draft.engine)
    if issubclass(cls, DynamicTree) and not isinstance(lanes, TreeLanes):
        reason = f"{method.name} needs a draft whose engine computes trees, such as the decoder in C"
        raise UnfitError(("method",), f"{reason}; this one runs on {draft.engine.description}")
    drafter: Drafter = cls(lanes=lanes, candidates=candidates, weights=draft.weight_bytes, **given)
    return drafter


def _confident(draft: Any, path: Path, candidates: Any, settings: Mapping[str, Any]) -> Drafter:
    from runtime.drafting.drafters.confident import FILE, AcceptHead, Confident, StateLanes

    if not (path / FILE).is_file():
        raise PolicyError(("method",), f"{path} has no head that foresees acceptance; use chain")
    hidden = getattr(getattr(draft.engine, "module", None), "config", None)
    if draft.engine.lockstep or hidden is None:
        raise UnfitError(
            ("method",), f"confident needs the states of the draft, which {draft.engine.description} does not give"
        )
    head = AcceptHead.load(path, int(hidden.hidden_size))
    lanes = StateLanes(draft.engine)
    return Confident(lanes=lanes, candidates=candidates, weights=draft.weight_bytes, head=head, **settings)


def _depths(facts: Mapping[str, Any], path: Path) -> list[int]:
    """The depths that a nested draft was trained at."""
    depths, layers = facts.get("depths"), facts.get("layers")
    if not isinstance(depths, list):
        depths = []
    good = all(isinstance(each, int) and not isinstance(each, bool) for each in depths)
    if not good or len(depths) < 2 or depths != sorted(set(depths)) or depths[0] < 1 or depths[-1] != layers:
        raise PolicyError(("method",), f"{path} was not trained at several depths; use chain")
    return list(depths)


def _trained(facts: Mapping[str, Any], path: Path) -> dict[str, int]:
    """What a parallel draft was trained for."""
    parallel = facts.get("parallel")
    if not isinstance(parallel, Mapping):
        raise PolicyError(("method",), f"{path} was not trained to propose several tokens at once; use chain")
    try:
        mask, most = (
            integer(("mask_token",), parallel.get("mask_token")),
            integer(("tokens",), parallel.get("tokens"), 1),
        )
    except PolicyError as error:
        raise ArtifactError(str(error.at(f"{path / 'draft.json'}: parallel"))) from None
    return {"mask_token": mask, "most": most}


# ---------------------------------------------------------------- compositions
def _composed(values: Sequence[Any], settings: Mapping[str, Any], path: tuple[str, ...], target: Target) -> Drafter:
    """A composition of the drafters of a list, which stands at `path`."""
    method = find(COMPOSITIONS, settings.get("method", "first"))
    assert method is not None, "it was checked"
    read = read_settings(method, settings, GIVEN_COMPOSED)
    parts = [_part(value, (*path, place), target) for place, value in enumerate(values)]
    drafter: Drafter = method.load()(parts, **read)
    return drafter


def _part(value: Any, path: tuple[str | int, ...], target: Target) -> Drafter:
    """One drafter of a composition, whose place is `path`."""
    try:
        drafter = _built(value, target)
        check_ids(drafter, target)
    except PolicyError as error:
        raise type(error)((*path, *error.path), error.text) from None
    return drafter


# What `drafter=` asks for: a name, settings, the directory of a draft model, several of them, a drafter of the caller's own.

__all__ = ["CHOICE", "Target", "check_written", "choose_speculation", "is_none"]

WHERE = "drafter"
_OFF = ("none", "off")


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
    reason = target.engine.why_not_drafts()
    if reason is not None:
        raise RequestError(f"drafter: {reason}")
    return _made(value, target, where)


def _unasked(target: Target) -> Speculation | None:
    """What the directory brings, as far as its engine allows: a model that nobody asked to draft loads on every machine."""
    own = brought(target.artifact, target.engine.device)
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
        drafter = drafter_of(value, target)
        check_ids(drafter, target)
    except PolicyError as error:
        said_there = bool(error.path) and error.path[0] in own
        raise error.at(place_of(target.artifact) if said_there else where) from None
    return Speculation(drafter, rule, lengths)
