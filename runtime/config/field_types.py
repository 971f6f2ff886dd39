"""Descriptions of what a type or a pydantic field accepts, for error messages and listings."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from runtime.config.messages import show


def describe_field(field: FieldInfo) -> str:
    """What a pydantic field accepts: "an integer between 2 and 8"."""
    return describe_type(field.annotation, list(field.metadata))


def describe_type(kind: Any, metadata: Iterable[Any] = ()) -> str:
    """What an annotated type accepts: "an integer between 2 and 8", "one of token, channel"."""
    metadata, origin = list(metadata), get_origin(kind)
    if origin in (Union, types.UnionType):
        left_out = (type(None), int) if float in get_args(kind) else (type(None),)  # an integer is a number
        parts = [describe_type(part, metadata) for part in get_args(kind) if part not in left_out]
        return " or ".join(dict.fromkeys(parts))
    if origin is Literal:
        words = ", ".join(choice if isinstance(choice, str) else show(choice) for choice in get_args(kind))
        return f"one of {words}" if len(get_args(kind)) > 1 else words
    if hasattr(kind, "__metadata__"):
        return describe_type(kind.__origin__, [*metadata, *kind.__metadata__])
    if kind in (bool, int, float, str):
        name = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}[kind]
        return name + (_bounds(metadata) if kind in (int, float) else "")
    if origin in (list, tuple, set, frozenset):
        inner = [part for part in get_args(kind) if part is not Ellipsis]
        one = describe_type(inner[0]) if inner else "a value"
        noun, _, bounds = one.partition(" ")[2].partition(" ")
        what = {"text": "texts", "integer": "integers", "number": "numbers", "list": "lists"}.get(noun)
        return f"a list of {_length(metadata)}{'values' if what is None else f'{what} {bounds}'.strip()}"
    if origin is dict or kind is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "a mapping"
    return "another kind of value"


def choices_of(kind: Any) -> list[str]:
    """The texts that a type allows by name; none where it is something else."""
    if hasattr(kind, "__metadata__"):
        return choices_of(kind.__origin__)
    parts = (kind, *get_args(kind)) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [str(choice) for part in parts if get_origin(part) is Literal for choice in get_args(part)]


_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _length(metadata: list[Any]) -> str:
    """ "2 or more " of a list that must have so many."""
    flat = _flatten(metadata)
    least = next((item.min_length for item in flat if isinstance(item, annotated_types.MinLen)), 0)
    most = next((item.max_length for item in flat if isinstance(item, annotated_types.MaxLen)), None)
    if most is not None:
        return f"{least} to {most} "
    return f"{least} or more " if least else ""


def _bounds(metadata: list[Any]) -> str:
    flat = _flatten(metadata)
    found = {word: getattr(item, name) for name, word in _BOUNDS.items() for item in flat if hasattr(item, name)}
    words = [f"{word} {value}" for word, value in found.items()]
    if found.keys() == {"at least", "at most"}:
        words = [f"between {found['at least']} and {found['at most']}"]
    if any(isinstance(item, annotated_types.Predicate) for item in flat):
        words.append("odd")
    return f" {' and '.join(words)}" if words else ""


def _flatten(metadata: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for item in metadata:
        if isinstance(item, FieldInfo):  # of a `Field` inside of an Annotated
            flat.extend(_flatten(list(item.metadata)))
        else:
            flat.extend(item if isinstance(item, annotated_types.GroupedMetadata) else [item])
    return flat
