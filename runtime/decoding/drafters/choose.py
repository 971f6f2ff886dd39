"""What `drafter=` asks for: a name, settings, the directory of a draft model, several of them, a drafter of the caller's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.artifact import MANIFEST, Artifact
from runtime.checkpoint import read_json
from runtime.decoding.drafters.base import Drafter
from runtime.decoding.drafters.methods import FREE, GIVEN, HEADS, MODELS, SELF, names
from runtime.decoding.lengths.base import Lengths
from runtime.decoding.lengths.goodput import Goodput
from runtime.decoding.methods import LENGTHS, RULES, configured, read_method
from runtime.decoding.speculation import Speculation
from runtime.decoding.verify.exact import Exact
from runtime.engines.base import SpeculativeEngine
from runtime.errors import RequestError
from runtime.kv_cache.policy_fields import PolicyError, found, integer, read_fields, unknown

WHERE = "drafter"
CHOICE = "drafter.json"  # in an artifact: what `compress bench --drafters` found to be the fastest
_OFF = ("none", "off")
#: What a draft.json has, and the method that goes with it.
_OWN = {"depths": "nested", "parallel": "parallel", "accept_head": "confident"}
_KEYS = ("method", "model", "of", "nodes", "depth", "lengths", "acceptance")  # beside the settings of the method


@dataclass
class Target:
    """What is drafted for.

    Attributes:
        artifact: its directory. engine: computes it.
        trust_remote_code: of drafts too.
    """

    artifact: Artifact
    engine: Any
    trust_remote_code: bool = False


def choose_speculation(value: Any, target: Target) -> Speculation | None:
    """How a model is decoded speculatively; None: it is not.

    Args:
        value: what `runtime.load` was given as drafter.

    Raises:
        RequestError: there is no such drafter, it does not fit the model, or the model's engine verifies no drafts.
    """
    if value is False or (isinstance(value, str) and value.lower() in _OFF):
        return None
    written = (target.artifact.manifest or {}).get("draft")
    chosen = target.artifact.path / CHOICE
    if value is None and chosen.is_file():
        return _chosen(chosen, target)
    if value is None or value is True:
        if written is None:
            if value:
                raise RequestError(
                    f"drafter: {target.artifact.path} brings no draft; name one, such as 'lookup', or a directory"
                )
            return None
        reason = why_not(target.engine)
        if reason is not None:
            if value:
                raise RequestError(f"drafter: {reason}")
            return None
        return _made(_own(written, target.artifact), target, f"{target.artifact.path / MANIFEST}: draft")
    reason = why_not(target.engine)
    if reason is not None:
        raise RequestError(f"drafter: {reason}")
    return _made(value, target, WHERE)


def _chosen(file: Path, target: Target) -> Speculation | None:
    """What was found to be fastest for this directory; an engine that cannot draft goes without."""
    value = read_json(file).get("drafter")
    if value in (None, False) or why_not(target.engine) is not None:
        return None
    try:
        _check_chosen(value)
        return _made(value, target, str(file))
    except PolicyError as error:
        raise error.at(str(file)) from None


def _check_chosen(value: Any) -> None:
    """A choice names drafters of this package and the artifact's own, never a directory somewhere else."""
    if value is True or (isinstance(value, str) and (FREE.find(value) or SELF.find(value)) is not None):
        return
    if isinstance(value, Mapping) and "model" not in value:
        for part in value.get("of", ()):
            _check_chosen(part)
        return
    raise PolicyError((), f"expected names of drafters, true (the artifact's own) or {{of: [...]}}, got {found(value)}")


def why_not(engine: Any) -> str | None:
    """Why an engine verifies no drafts; None: it does."""
    if isinstance(engine, SpeculativeEngine):
        return None
    reason = getattr(engine, "why_not_drafts", None)
    if reason is None:
        return f"{engine.description} verifies no drafts: it cannot take tokens back"
    found_: str | None = reason()
    return found_


def _own(written: Any, artifact: Artifact) -> dict[str, Any]:
    """The drafter of an artifact, whose model lies inside it."""
    place = artifact.path / MANIFEST
    if not isinstance(written, Mapping) or not isinstance(written.get("drafter"), Mapping):
        raise RequestError(f"{place}: draft must be an object with a drafter, not {found(written)}")
    value = dict(written["drafter"])
    if "model" in value:
        path = Path(str(value["model"]))
        if (
            path.is_absolute()
            or ".." in path.parts
            or not (artifact.path / path).resolve().is_relative_to(artifact.path.resolve())
        ):
            raise RequestError(
                f"{place}: draft.drafter.model must be a directory inside the artifact, not {str(path)!r}"
            )
        value["model"] = str(artifact.path / path)
    return value


def _made(value: Any, target: Target, where: str) -> Speculation:
    try:
        if isinstance(value, Speculation):
            return value
        if isinstance(value, Mapping):
            drafter = _drafter(value, target)
            rule = read_method(RULES, value["acceptance"], where, ("acceptance",)) if "acceptance" in value else Exact()
            lengths = _lengths(value, target, where)
        else:
            drafter, rule, lengths = _drafter(value, target), Exact(), Goodput()
    except PolicyError as error:
        raise error.at(where) from None
    return Speculation(drafter, rule, lengths)


def _lengths(value: Mapping[str, Any], target: Target, where: str) -> Lengths:
    written = value.get("lengths", "goodput")
    if isinstance(written, str):
        written = {written: {}}
    if isinstance(written, Mapping) and len(written) == 1:
        ((name, fields),) = written.items()
        written = {name: {**{key: value[key] for key in ("nodes", "depth") if key in value}, **(fields or {})}}
    lengths: Lengths = read_method(LENGTHS, written, where, ("lengths",))
    depth, nodes = getattr(lengths, "depth", 1), getattr(lengths, "nodes", 1)
    context, rows = target.engine.context_length, getattr(target.engine, "most_rows", None)
    if context is not None and depth >= context:
        raise PolicyError(("depth",), f"{depth} drafted tokens do not fit the model's context of {context}")
    if rows is not None and nodes >= rows:
        raise PolicyError(
            ("nodes",),
            f"a tree of {nodes} tokens is larger than a step of this engine, which takes {rows} with the last token",
        )
    _check_memory(nodes, target)
    return lengths


def _check_memory(nodes: int, target: Target) -> None:
    """A tree's logits and keys must fit the memory that is free."""
    from runtime.decoding.memory import available_bytes

    engine = target.engine
    free = available_bytes(engine.device)
    need = nodes * (4 * engine.vocab_size + getattr(engine, "page_bytes", 0) // getattr(engine, "page_size", 1))
    if need > free:
        raise PolicyError(
            ("nodes",), f"a tree of {nodes} tokens takes {need / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"
        )


def _drafter(value: Any, target: Target) -> Drafter:
    if value is True:
        written = (target.artifact.manifest or {}).get("draft")
        if written is None:
            raise PolicyError((), f"{target.artifact.path} brings no draft of its own")
        value = _own(written, target.artifact)
    if isinstance(value, Drafter):
        _check_ids(value, target)
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
        raise _unknown((), value)
    if not isinstance(value, Mapping):
        raise PolicyError(
            (), f"expected a name ({', '.join(names())}), a directory, settings or a list of these, got {found(value)}"
        )
    if "of" in value:
        return _composed(value["of"], target, {key: each for key, each in value.items() if key != "of"})
    if "model" in value:
        return _of_model(value, target)
    name = value.get("method")
    method = FREE.find(name) if isinstance(name, str) else None
    if method is None:
        own = SELF.find(name) if isinstance(name, str) else None
        if own is not None:
            return _self(own.name, value, target)
        if isinstance(name, str) and MODELS.find(name) is not None:
            raise PolicyError(("model",), f"the key is missing: '{name}' drafts with a model, whose directory it is")
        raise _unknown(("method",), name)
    return configured(method, {key: each for key, each in value.items() if key not in _KEYS}, ())  # type: ignore[no-any-return]


def _self(name: str, value: Mapping[str, Any], target: Target) -> Drafter:
    """A drafter that is a part of the target."""
    from runtime.decoding.drafters import early_exit, skip

    build = {"skip": skip.build, "early-exit": early_exit.build}[name]
    return build(target, {key: each for key, each in value.items() if key not in _KEYS})


def _heads(name: str, path: Path, facts: Mapping[str, Any], value: Mapping[str, Any], target: Target) -> Drafter:
    """Heads, or an adapter, that stand in a directory."""
    from runtime.decoding.drafters import kangaroo, medusa, mtp

    if value.get("method", name) != name:
        raise PolicyError(("method",), f"{path} holds a draft of the method {name}; leave the key out")
    own = {key: each for key, each in value.items() if key not in _KEYS}
    if name == "kangaroo":
        return kangaroo.build(target, {**own, "model": str(path)})
    return {"medusa": medusa.build_medusa, "mtp": mtp.build_mtp}[name](target, path, facts, own)


def _of_model(value: Mapping[str, Any], target: Target) -> Drafter:
    from runtime.decoding.drafters.candidates import Candidates
    from runtime.decoding.drafters.draft_model import draft_facts, load_draft
    from runtime.decoding.drafters.lanes import lanes_of

    path = Path(str(value["model"]))
    if not path.is_dir():
        raise PolicyError(("model",), f"there is no directory {str(path)!r}")
    facts = draft_facts(path)
    written = facts.get("method")
    heads = HEADS.find(written) if isinstance(written, str) else None
    if heads is not None:
        return _heads(heads.name, path, facts, value, target)
    name = value.get("method", next((method for key, method in _OWN.items() if key in facts), "chain"))
    method = MODELS.find(name) if isinstance(name, str) else None
    if method is None:
        raise unknown(("method",), name, MODELS.names, "drafter with a model")
    device: torch.device = target.engine.device
    own = {key: each for key, each in value.items() if key not in _KEYS}
    settings = read_fields(method.load(), own, (), GIVEN, _nothing, _KEYS)
    if method.name == "parallel":
        settings |= _trained(facts, path)
    draft = load_draft(path, target.artifact, device, target.trust_remote_code)
    candidates = Candidates(target.engine.vocab_size, draft.kept)
    if method.name == "nested":
        from runtime.decoding.drafters.nested import nested

        return nested(draft.engine, _depths(facts, path), candidates, draft.weight_bytes, **settings)
    if method.name == "confident":
        return _confident(draft, path, candidates, settings)
    drafter: Drafter = method.load()(
        lanes=lanes_of(draft.engine), candidates=candidates, weights=draft.weight_bytes, **settings
    )
    return drafter


def _confident(draft: Any, path: Path, candidates: Any, settings: Mapping[str, Any]) -> Drafter:
    from runtime.decoding.drafters.confident import FILE, AcceptHead, Confident, StateLanes

    if not (path / FILE).is_file():
        raise PolicyError(("method",), f"{path} has no head that foresees acceptance; use chain")
    hidden = getattr(getattr(draft.engine, "module", None), "config", None)
    if not isinstance(draft.engine, SpeculativeEngine) or hidden is None:
        raise PolicyError(
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


def _composed(values: Any, target: Target, settings: Mapping[str, Any] | None = None) -> Drafter:
    from runtime.decoding.drafters.first_of import FirstOf, Merged

    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) < 2:
        raise PolicyError(("of",), f"expected a list of two drafters or more, got {found(values)}")
    own = {key: each for key, each in (settings or {}).items() if key not in _KEYS}
    kinds = {"first": FirstOf, "merged": Merged}
    kind = (settings or {}).get("method", "first")
    if kind not in kinds:
        raise unknown(("method",), kind, kinds, "way to compose drafters")
    parts = [_drafter(value, target) for value in values]
    read = read_fields(kinds[kind], own, (), ("drafters",), _nothing, _KEYS)
    return kinds[kind](parts, **read)


def _check_ids(drafter: Drafter, target: Target) -> None:
    if drafter.vocabulary is not None:
        size = integer(("vocabulary",), drafter.vocabulary, 1)
        if size > target.engine.vocab_size:
            raise PolicyError(
                (), f"{drafter.name} proposes {size} tokens, and the model has {target.engine.vocab_size}"
            )


def _unknown(path: tuple[str, ...], name: Any) -> PolicyError:
    error = unknown(path, name, names(), "drafter")
    text = f"{error.text}; or the directory of a draft model"
    return PolicyError(path, text)


def _nothing(path: Any, value: Any) -> Any:
    raise PolicyError(path, f"expected a setting, got {found(value)}")
