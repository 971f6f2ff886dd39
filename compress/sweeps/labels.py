"""Short names for the keys of a sweep, and short words for their values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compress.sweeps.models import Sweep


class Labels:
    """Of all keys of a sweep.

    Attributes:
        names: for every dotted key the shortest end of it that no other has: `quantize.bits`, or `bits`.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.names = short_names(list(sweep.vary))

    def words(self, values: Mapping[str, Any]) -> list[str]:
        """The values, in the order of the keys."""
        return [word(values.get(key)) for key in self.names]

    def sentence(self, values: Mapping[str, Any]) -> str:
        """`bits=4 group_size=64`."""
        return " ".join(f"{name}={word(values.get(key))}" for key, name in self.names.items())


def short_names(keys: list[str]) -> dict[str, str]:
    """For every dotted key the shortest end of it that is no end of another, numbers of stages left out where they can be."""
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
