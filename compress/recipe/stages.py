"""Stages: the registry of stage kinds, and the validation of one entry of `stages` against its method's config class.

A stage is a mapping of one key, its kind; what may stand below is the config class of the method it names. A new kind
is one line in `KINDS`, a new method needs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from compress.recipe.origin import Origin
from compress.recipe.problems import key_named_in, problems_of, show
from compress.recipe.targets import check_pattern
from compress.recipe.yaml_source import Path
from runtime.config.messages import did_you_mean, listing
from runtime.errors import RequestError


@dataclass(frozen=True)
class StageKind:
    """One word that may stand as a stage.

    Attributes:
        name: the word.
        summary: one line for `compress methods`.
        methods: gives the registry of its methods (called late: the registries import torch).
        check: raises `RequestError` when the fields of a valid config cannot be combined.
        parse: reads all that stands below the word, where that is more than one method with its fields; raises `ConfigError`.
    """

    name: str
    summary: str
    methods: Callable[[], Mapping[str, Any]]
    check: Callable[[Any], None] = lambda config: None
    parse: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Stage:
    """One validated stage: `config` is an instance of the method's config class (or a policy), `index` its place in the recipe."""

    kind: str
    method: str
    config: Any
    index: int

    def resolved(self) -> dict[str, Any]:
        """The stage as plain data, every default filled in."""
        if KINDS[self.kind].parse is not None:
            return {self.kind: self.config.resolved()}
        fields = self.config.model_dump(mode="json", exclude_none=True)
        return {self.kind: {"method": self.method, **fields}}


def _prune_methods() -> Mapping[str, Any]:
    from compress.prune import METHODS

    return METHODS


def _structure_methods() -> Mapping[str, Any]:
    from compress.prune.structure import METHODS

    return METHODS


def _quantize_methods() -> Mapping[str, Any]:
    from compress.quantize import METHODS

    return METHODS


def _recover_methods() -> Mapping[str, Any]:
    from compress.distill.recover import METHODS

    return METHODS


def _cache_methods() -> Mapping[str, Any]:
    from runtime.kv_cache.policy.presets import PRESETS

    return PRESETS


def _draft_methods() -> Mapping[str, Any]:
    from compress.distill.draft import METHODS

    return METHODS


def _cache_policy(value: Any) -> Any:
    from runtime.kv_cache.policy.policy import Policy

    return Policy.parse(value)


def _check_scheme(config: Any) -> None:
    from compress.quantize import resolve_scheme

    _check_targets(config)
    resolve_scheme(config, None)


def _check_targets(config: Any) -> None:
    for key in ("targets", "ignore"):
        for pattern in getattr(config, key):
            try:
                check_pattern(pattern)
            except RequestError as error:
                raise RequestError(f"{key}: {error}") from None
    if not config.targets:
        raise RequestError("targets: the list is empty; give a class name, a module name, a glob or re:EXPRESSION")


KINDS: dict[str, StageKind] = {
    kind.name: kind
    for kind in (
        StageKind("structure", "remove channels, heads, layers, experts: the shapes shrink", _structure_methods),
        StageKind("prune", "set weights to zero", _prune_methods, _check_targets),
        StageKind("quantize", "store weights (and compute activations) in few bits", _quantize_methods, _check_scheme),
        StageKind(
            "recover", "train what the stages before have left, towards the model's own outputs", _recover_methods
        ),
        StageKind(
            "kv_cache", "how keys and values are held while the model writes", _cache_methods, parse=_cache_policy
        ),
        StageKind("draft", "make a small model that proposes what the artifact writes", _draft_methods),
    )
}


def parse_stage(entry: Any, index: int, origin: Origin) -> tuple[Stage | None, list[str]]:
    """Validate one entry of `stages`.

    Returns:
        The stage, or None and the sentences that say why not.
    """
    path: Path = ("stages", index)
    if not isinstance(entry, dict) or len(entry) != 1:
        found = show(entry) if not isinstance(entry, dict) or not entry else f"the keys {listing(map(str, entry))}"
        return None, [
            origin.at(path, f"a stage is one key with its settings below, one of {listing(KINDS)}; got {found}")
        ]
    ((name, fields),) = entry.items()
    kind = KINDS.get(name)
    if kind is None:
        text = f"unknown stage{did_you_mean(name, KINDS) or '.'} Allowed: {listing(KINDS)}"
        return None, [origin.at((*path, name), text)]
    path = (*path, name)
    if kind.parse is not None:
        return _whole(kind, kind.parse, fields, index, origin)
    methods = kind.methods()
    if not isinstance(fields, dict):
        text = f"expected a mapping with a method, such as {{method: {next(iter(methods), '...')}}}, got {show(fields)}"
        return None, [origin.at(path, text)]
    if "method" not in fields:
        return None, [origin.at(path, f"the key 'method' is missing; it is one of {listing(methods)}")]
    word = fields["method"]
    if not isinstance(word, str) or word not in methods:
        text = f"unknown method {show(word)}{did_you_mean(str(word), methods) or '.'} Allowed: {listing(methods)}"
        return None, [origin.at((*path, "method"), text)]
    method = methods[word]
    return _configure(kind, word, method.config, fields, index, origin)


def _whole(
    kind: StageKind, parse: Callable[[Any], Any], fields: Any, index: int, origin: Origin
) -> tuple[Stage | None, list[str]]:
    from runtime.config.settings import ConfigError

    try:
        config = parse(fields)
    except ConfigError as error:
        return None, [origin.at(("stages", index, kind.name, *error.path), error.text)]
    return Stage(kind.name, config.method or "", config, index), []


def _configure(
    kind: StageKind, method: str, model: type[BaseModel], fields: dict[str, Any], index: int, origin: Origin
) -> tuple[Stage | None, list[str]]:
    path: Path = ("stages", index, kind.name)
    try:
        config = model.model_validate(fields, strict=True)
    except ValidationError as error:
        return None, problems_of(error, model, path, origin, given=fields)
    try:
        kind.check(config)
    except RequestError as error:
        where = key_named_in(str(error), fields, path, origin)
        return None, [origin.at(where, str(error).removeprefix(f"{where[-1]}: "))]
    return Stage(kind.name, method, config, index), []
