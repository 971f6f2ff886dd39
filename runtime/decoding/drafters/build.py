"""From what `drafter=` says to the drafter."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.decoding.drafters.amounts import OF_THE_WHOLE
from runtime.decoding.drafters.base import Drafter
from runtime.decoding.drafters.brought import own_draft
from runtime.decoding.drafters.fit import Target, UnfitError
from runtime.decoding.drafters.methods import FREE, GIVEN, HEADS, MODELS, OWN, SELF, names
from runtime.decoding.methods import configured
from runtime.engines.base import SpeculativeEngine
from runtime.kv_cache.methods import Method
from runtime.kv_cache.policy_fields import PolicyError, found, integer, read_fields, unknown

_KEYS = ("method", "model", "of", *OF_THE_WHOLE)  # beside the settings of the method
_log = logging.getLogger("compress.speculation")


def drafter_of(value: Any, target: Target) -> Drafter:
    """The drafter that a value means.

    Raises:
        PolicyError: there is none such. UnfitError: the engine cannot serve it.
        RequestError, ArtifactError: its directory is another target's, or cannot be read.
    """
    if value is True:
        value = own_draft(target.artifact)
        if value is None:
            raise PolicyError((), f"{target.artifact.path} brings no draft of its own")
    if isinstance(value, Drafter):
        return value
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, (list, tuple)):
        return _composed(value, target)
    if isinstance(value, str):
        method, own = FREE.find(value), SELF.find(value)
        if own is not None:
            return _self(own.name, {}, target)
        if method is not None:
            return configured(method, {}, ())  # type: ignore[no-any-return]
        if Path(value).is_dir():
            return _of_model({"model": value}, target)
        if MODELS.find(value) is not None:
            whole = f'{{"model": DIRECTORY, "method": "{value}"}}'
            raise PolicyError((), f"'{value}' drafts with a model: {whole}, with true for the artifact's own draft")
        raise _unknown((), value)
    if not isinstance(value, Mapping):
        raise PolicyError(
            (), f"expected a name ({', '.join(names())}), a directory, settings or a list of these, got {found(value)}"
        )
    if "of" in value:
        return _composed(value["of"], target, {key: each for key, each in value.items() if key != "of"})
    if "model" in value:
        return _of_model(value if value["model"] is not True else {**value, "model": _own_model(target)}, target)
    name = value.get("method")
    method = FREE.find(name) if isinstance(name, str) else None
    if method is None:
        own = SELF.find(name) if isinstance(name, str) else None
        if own is not None:
            return _self(own.name, value, target)
        if isinstance(name, str) and MODELS.find(name) is not None:
            raise PolicyError(("model",), f"the key is missing: '{name}' drafts with a model, whose directory it is")
        raise _unknown(("method",), name)
    return configured(method, _own_settings(value), ())  # type: ignore[no-any-return]


def check_ids(drafter: Drafter, target: Target) -> None:
    """PolicyError where a drafter proposes tokens that the model does not have."""
    if drafter.vocabulary is not None:
        size = integer(("vocabulary",), drafter.vocabulary, 1)
        if size > target.engine.vocab_size:
            raise PolicyError(
                (), f"{drafter.name} proposes {size} tokens, and the model has {target.engine.vocab_size}"
            )


def _own_settings(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key not in _KEYS}


def _self(name: str, value: Mapping[str, Any], target: Target) -> Drafter:
    """A drafter that is a part of the target."""
    from runtime.decoding.drafters import early_exit, skip

    build = {"skip": skip.build, "early-exit": early_exit.build}[name]
    return build(target, _own_settings(value))


def _heads(name: str, path: Path, facts: Mapping[str, Any], value: Mapping[str, Any], target: Target) -> Drafter:
    """Heads, or an adapter, that stand in a directory."""
    from runtime.decoding.drafters import kangaroo, medusa, mtp

    if value.get("method", name) != name:
        raise PolicyError(("method",), f"{path} holds a draft of the method {name}; leave the key out")
    own = _own_settings(value)
    if name == "kangaroo":
        return kangaroo.build(target, {**own, "model": str(path)})
    return {"medusa": medusa.build_medusa, "mtp": mtp.build_mtp}[name](target, path, facts, own)


# ---------------------------------------------------------------- draft models
def _own_model(target: Target) -> str:
    """The directory of the artifact's own draft, where it has one."""
    own = own_draft(target.artifact)
    if own is None or "model" not in own:
        raise PolicyError(("model",), f"{target.artifact.path} brings no draft of its own that is in a directory")
    return str(own["model"])


def _of_model(value: Mapping[str, Any], target: Target) -> Drafter:
    from runtime.decoding.drafters.draft_model import draft_facts, load_draft
    from runtime.decoding.drafters.limits import within

    path = Path(str(value["model"]))
    if not path.is_dir():
        raise PolicyError(("model",), f"there is no directory {str(path)!r}")
    facts = draft_facts(path)
    written = facts.get("method")
    heads = HEADS.find(written) if isinstance(written, str) else None
    if heads is not None:
        return _heads(heads.name, path, facts, value, target)
    name = value.get("method", next((method for key, method in OWN.items() if key in facts), "chain"))
    method = MODELS.find(name) if isinstance(name, str) else None
    if method is None:
        raise unknown(("method",), name, MODELS.names, "drafter with a model")
    settings = read_fields(method.load(), _own_settings(value), (), (*GIVEN, *method.fixed), _nothing, _KEYS)
    draft = target.drafts.get(str(path))
    if draft is None:
        draft = load_draft(path, target.artifact, target.engine.device, target.trust_remote_code)
    try:
        drafter = _with_draft(method, draft, path, settings, target)
    except UnfitError as error:
        if not target.lenient:
            raise
        _log.warning("the draft %s is used as a chain: %s", path, error.text)
        drafter = _with_draft(MODELS.find("chain") or method, draft, path, {}, target)
    return within(drafter, draft, target.engine.context_length)


def _with_draft(method: Method, draft: Any, path: Path, settings: Mapping[str, Any], target: Target) -> Drafter:
    """The drafter of a method over a loaded draft."""
    from runtime.decoding.drafters.candidates import Candidates
    from runtime.decoding.drafters.lanes import TreeLanes, lanes_of
    from runtime.decoding.drafters.model_tree import DynamicTree

    candidates = Candidates(target.engine.vocab_size, draft.kept)
    if method.name == "nested":
        from runtime.decoding.drafters.nested import nested

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
    from runtime.decoding.drafters.confident import FILE, AcceptHead, Confident, StateLanes

    if not (path / FILE).is_file():
        raise PolicyError(("method",), f"{path} has no head that foresees acceptance; use chain")
    hidden = getattr(getattr(draft.engine, "module", None), "config", None)
    if not isinstance(draft.engine, SpeculativeEngine) or hidden is None:
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
    return {
        "mask_token": integer(("mask_token",), parallel.get("mask_token")),
        "most": integer(("tokens",), parallel.get("tokens"), 1),
    }


# ---------------------------------------------------------------- compositions
def _composed(values: Any, target: Target, settings: Mapping[str, Any] | None = None) -> Drafter:
    from runtime.decoding.drafters.first_of import FirstOf, Merged

    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) < 2:
        raise PolicyError(("of",), f"expected a list of two drafters or more, got {found(values)}")
    own = _own_settings(settings or {})
    kinds = {"first": FirstOf, "merged": Merged}
    kind = (settings or {}).get("method", "first")
    if kind not in kinds:
        raise unknown(("method",), kind, kinds, "way to compose drafters")
    read = read_fields(kinds[kind], own, (), ("drafters",), _nothing, _KEYS)
    before = () if settings is None else ("of",)
    return kinds[kind]([_part(value, (*before, place), target) for place, value in enumerate(values)], **read)


def _part(value: Any, path: tuple[str | int, ...], target: Target) -> Drafter:
    """One drafter of a composition, whose place is `path`."""
    key = next((key for key in OF_THE_WHOLE if key in value), None) if isinstance(value, Mapping) else None
    if key is not None:
        raise PolicyError(
            (*path, key), f"it is said of the whole, not of a part: {{'of': [...], '{key}': {_written(value[key])}}}"
        )
    try:
        drafter = drafter_of(value, target)
        check_ids(drafter, target)
    except PolicyError as error:
        raise type(error)((*path, *error.path), error.text) from None
    return drafter


def _written(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, float)) else "..."


def _unknown(path: tuple[str, ...], name: Any) -> PolicyError:
    error = unknown(path, name, names(), "drafter")
    text = f"{error.text}; or the directory of a draft model"
    return PolicyError(path, text)


def _nothing(path: Any, value: Any) -> Any:
    raise PolicyError(path, f"expected a setting, got {found(value)}")
