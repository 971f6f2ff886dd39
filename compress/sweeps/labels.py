"""Short names for the keys of a sweep, and short words for their values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def sentence(values: Mapping[str, Any]) -> str:
    """`bits=4 group_size=64`."""
    names = short_names(list(values))
    return " ".join(f"{names[key]}={word(value)}" for key, value in values.items())


def short_names(keys: list[str]) -> dict[str, str]:
    """For every dotted key its shortest end that no other key has, without leading numbers of stages: `quantize.bits`, or `bits`."""
    found = {}
    for key in keys:
        parts = key.split(".")
        for length in range(1, len(parts) + 1):
            end = parts[-length:]
            if end[0].isdigit() and length < len(parts):
                continue
            if not any(other != key and other.split(".")[-length:] == end for other in keys):
                break
        found[key] = ".".join(end)
    return found


def word(value: Any) -> str:
    """A value in a cell: as YAML has it, without quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(word(v) if k == "method" else f"{k} {word(v)}" for k, v in value.items())
    if isinstance(value, list):
        return "[" + ", ".join(map(word, value)) + "]"
    return json.dumps(value)
