"""Sentences for pydantic's validation errors: place, key, what was found, what is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from compress.recipe.origin import Origin
from compress.recipe.yaml_source import Path
from runtime.config.field_types import choices_of, describe_field
from runtime.config.messages import did_you_mean, listing, show
from runtime.errors import RequestError


def problems_of(
    error: ValidationError, model: type[BaseModel], prefix: Path, origin: Origin, given: Mapping[str, Any]
) -> list[str]:
    """One sentence per wrong key of `model`.

    Args:
        error: what pydantic raised for `model`.
        model: the pydantic class that was validated.
        prefix: path of the validated mapping in the recipe.
        origin: where the keys were written.
        given: the keys and values that were validated.
    """
    sentences: dict[Path, str] = {}
    for item in error.errors():
        path, field, owner = _walk(model, item["loc"])
        where = prefix + path
        kind = item["type"]
        if kind == "extra_forbidden":
            allowed = owner.model_fields
            text = f"unknown key{did_you_mean(str(path[-1]), allowed) or '.'} Allowed: {listing(allowed)}"
        elif kind == "missing":
            text = f"this key is required: {describe_field(field)}" if field is not None else "this key is required"
        elif kind in ("value_error", "assertion_error"):
            text = str(item["ctx"]["error"])
            where = where if path else key_named_in(text, given, prefix, origin)
        elif kind in ("model_type", "model_attributes_type", "dict_type"):
            text = f"expected a mapping of keys ({listing(owner.model_fields)}), got {show(item['input'])}"
        elif field is not None:
            found, choices = item["input"], choices_of(field.annotation)
            hint = did_you_mean(found, choices) if isinstance(found, str) and choices else ""
            text = f"expected {describe_field(field)}, got {show(found)}{hint}"
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


def _walk(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[Path, FieldInfo | None, type[BaseModel]]:
    """Follow pydantic's error location through nested models and lists of them; what lies inside a field (a union's branch) drops."""
    owner, field, path, left = model, None, list[int | str](), list(location)
    while left:
        path.append(left.pop(0))
        field = owner.model_fields.get(str(path[-1]))
        if field is None:
            break
        inner, entry = _model_of(field.annotation), _entry_of(field.annotation)
        if inner is None and entry is not None:
            left = left[next((place for place, key in enumerate(left) if isinstance(key, int)), len(left)) :]
            path, inner = [*path, *left[:1]], entry if left else None
            left = left[1:]
        if inner is None:
            break
        owner = inner
    return tuple(path), field, owner


def _entry_of(annotation: Any) -> type[BaseModel] | None:
    """The model that the entries of a list are."""
    if get_origin(annotation) is list:
        return _model_of(annotation)
    return next((found for part in get_args(annotation) if (found := _entry_of(part)) is not None), None)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None
