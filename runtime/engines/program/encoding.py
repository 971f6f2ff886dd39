"""JSON of programs: their dataclasses by name, tuples as lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from runtime.engines.program import operations

_TYPES: dict[str, Any] = {name: each for name, each in vars(operations).items() if is_dataclass(each)}
_NAMES = {each: name for name, each in _TYPES.items()}
_TYPE, _DTYPE = "type", "dtype"


def encode(value: Any) -> Any:
    """A program, or a part of one, as JSON has it: every number comes back as it was."""
    if isinstance(value, tuple):
        return [encode(each) for each in value]
    if isinstance(value, torch.dtype):
        return {_TYPE: _DTYPE, "name": str(value).removeprefix("torch.")}
    if is_dataclass(value):
        return {
            _TYPE: _NAMES[type(value)],  # type: ignore[index]
            **{each.name: encode(getattr(value, each.name)) for each in fields(value)},
        }
    return value


def decode(value: Any) -> Any:
    """Inverse of `encode`; KeyError, TypeError, AttributeError: it is of something else."""
    if isinstance(value, list):
        return tuple(decode(each) for each in value)
    if not isinstance(value, dict):
        return value
    content = {name: decode(each) for name, each in value.items()}
    kind = content.pop(_TYPE)
    return getattr(torch, content["name"]) if kind == _DTYPE else _TYPES[kind](**content)


def parts(value: Any) -> Iterator[Any]:
    """A program and all dataclasses in it."""
    if isinstance(value, tuple):
        for each in value:
            yield from parts(each)
    elif is_dataclass(value):
        yield value
        for each in fields(value):
            yield from parts(getattr(value, each.name))
