"""Turn pydantic's validation errors into sentences a person can act on: place, key, what was found, what is allowed."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from compress.core.suggest import did_you_mean, listing
from compress.recipe.origin import Origin
from compress.recipe.yaml_source import Path
from runtime.errors import RequestError


def problems_of(
    error: ValidationError, model: type[BaseModel], prefix: Path, origin: Origin, given: Mapping[str, Any]
) -> list[str]:
    """One sentence a wrong key of `model`, found at `prefix` in the recipe.

    Args:
        error: what pydantic raised for `model`.
        model: the pydantic class that was validated.
        prefix: path of the mapping in the recipe.
        origin: where the keys were written.
        given: the keys and values that were validated.
    """
    sentences: dict[Path, str] = {}
    for item in error.errors():
        path, field, owner = _walk(model, item["loc"])
        where = prefix + path
        kind = item["type"]
        if kind == "extra_forbidden":
            allowed = _field_names(owner)
            text = f"unknown key{did_you_mean(str(path[-1]), allowed) or '.'} Allowed: {listing(allowed)}"
        elif kind == "missing":
            text = f"this key is required: {describe_field(field)}" if field is not None else "this key is required"
        elif kind in ("value_error", "assertion_error"):
            text = str(item["ctx"]["error"])
            where = where if path else key_named_in(text, given, prefix, origin)
        elif kind in ("model_type", "model_attributes_type", "dict_type"):
            text = f"expected a mapping of keys ({listing(_field_names(owner))}), got {show(item['input'])}"
        elif field is not None:
            text = f"expected {describe_field(field)}, got {show(item['input'])}{_nearest_choice(field, item['input'])}"
        else:
            text = f"{item['msg']}, got {show(item['input'])}"
        sentences.setdefault(where, origin.at(where, text))
    return list(sentences.values())


def key_named_in(text: str, given: Mapping[str, Any], prefix: Path, origin: Origin) -> Path:
    """The key an error about several keys should point at: the first that it mentions, overridden ones first."""
    words = [word for word in re.findall(r"\w+", text) if word in given and word != "method"]
    words.sort(key=lambda word: origin.override_of((*prefix, word)) is None)
    return (*prefix, words[0]) if words else prefix


def raise_all(problems: list[str]) -> None:
    """Raise one `RequestError` with a line a problem, if there is any."""
    if problems:
        raise RequestError("\n".join(problems))


def show(value: Any) -> str:
    """A value as it may be put into a sentence, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return f"a mapping with {listing(map(str, value), 4)}" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def describe_field(field: FieldInfo) -> str:
    """What a field accepts, in words: `an integer between 2 and 8`."""
    return _describe(field.annotation, list(field.metadata))


def _describe(annotation: Any, metadata: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        parts = [_describe(part, metadata) for part in get_args(annotation) if part is not type(None)]
        return " or ".join(dict.fromkeys(parts))
    if origin is Literal:
        choices = get_args(annotation)
        words = ", ".join(show(choice) if not isinstance(choice, str) else choice for choice in choices)
        return f"one of {words}" if len(choices) > 1 else words
    if hasattr(annotation, "__metadata__"):
        return _describe(annotation.__origin__, [*metadata, *annotation.__metadata__])
    if annotation is bool:
        return "true or false"
    if annotation is int:
        return f"an integer{_bounds(metadata)}"
    if annotation is float:
        return f"a number{_bounds(metadata)}"
    if annotation is str:
        return "a text"
    if origin in (list, tuple, set, frozenset):
        inner = [part for part in get_args(annotation) if part is not Ellipsis]
        one = _describe(inner[0], []) if inner else "a value"
        kind, _, bounds = one.partition(" ")[2].partition(" ")
        what = {"text": "texts", "integer": "integers", "number": "numbers"}.get(kind)
        return f"a list of {_length(metadata)}{'values' if what is None else f'{what} {bounds}'.strip()}"
    if origin is dict or annotation is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "a mapping"
    return "another kind of value"


def _length(metadata: list[Any]) -> str:
    """ "2 or more " of a list that must have so many."""
    least = next((item.min_length for item in _flatten(metadata) if isinstance(item, annotated_types.MinLen)), 0)
    most = next((item.max_length for item in _flatten(metadata) if isinstance(item, annotated_types.MaxLen)), None)
    if most is not None:
        return f"{least} to {most} "
    return f"{least} or more " if least else ""


def _bounds(metadata: list[Any]) -> str:
    low: tuple[Any, str] | None = None
    high: tuple[Any, str] | None = None
    for item in _flatten(metadata):
        if isinstance(item, annotated_types.Ge):
            low = (item.ge, "at least")
        elif isinstance(item, annotated_types.Gt):
            low = (item.gt, "above")
        elif isinstance(item, annotated_types.Le):
            high = (item.le, "at most")
        elif isinstance(item, annotated_types.Lt):
            high = (item.lt, "below")
    if low and high and (low[1], high[1]) == ("at least", "at most"):
        return f" between {low[0]} and {high[0]}"
    return "".join(
        f" {'and ' if index else ''}{word} {value}" for index, (value, word) in enumerate(x for x in (low, high) if x)
    )


def _flatten(metadata: list[Any]) -> list[Any]:
    flat: list[Any] = []
    for item in metadata:
        if isinstance(item, FieldInfo):  # of a `Field` inside of an Annotated
            flat.extend(_flatten(list(item.metadata)))
        else:
            flat.extend(item if isinstance(item, annotated_types.GroupedMetadata) else [item])
    return flat


def _walk(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[Path, FieldInfo | None, type[BaseModel]]:
    """Follow pydantic's error location through nested models; what lies inside a field (a union's branch) drops."""
    path: Path = ()
    owner = model
    field: FieldInfo | None = None
    for key in location:
        path = (*path, key)
        found = _field_of(owner, str(key))
        if found is None:
            return path, None, owner
        field = found
        inner = _model_of(field.annotation)
        if inner is None:
            return path, field, owner
        owner = inner
    return path, field, owner


def _field_of(model: type[BaseModel], key: str) -> FieldInfo | None:
    for name, field in model.model_fields.items():
        if key in (field.alias, name):
            return field
    return None


def _field_names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _nearest_choice(field: FieldInfo, found: Any) -> str:
    choices = [
        choice
        for part in (field.annotation, *get_args(field.annotation))
        if get_origin(part) is Literal
        for choice in get_args(part)
    ]
    return did_you_mean(found, [str(choice) for choice in choices]) if isinstance(found, str) and choices else ""
