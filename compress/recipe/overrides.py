"""`--set a.b.c=value`: change a recipe from the command line, with the paths and the value syntax of the file."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from compress.recipe.origin import Origin
from compress.recipe.problems import show
from compress.recipe.yaml_source import Path, dotted, parse
from runtime.config.messages import did_you_mean, listing
from runtime.errors import RequestError


def apply_overrides(data: dict[str, Any], overrides: Iterable[str] | Mapping[str, Any], origin: Origin) -> None:
    """Apply `KEY=VALUE` texts (or, from Python, values by dotted key) to recipe data in place, and note in `origin` who gave the value.

    Keys of mappings that are absent are made (validation then says whether they exist); list entries must be there.

    Raises:
        RequestError: no `=`, a path through a value without keys, a list index out of range, a value that is not YAML.
    """
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            label = f"set={{{key!r}: ...}}"
            if not isinstance(key, str) or any(not part for part in key.split(".")):
                raise RequestError(f"{label}: expected a dotted key, such as calibration.samples")
            origin.overrides[assign(data, key.split("."), copy.deepcopy(value), label)] = label
        return
    if isinstance(overrides, str):
        overrides = [overrides]
    for text in overrides:
        label = f"--set {text}"
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or any(not part for part in key.strip().split(".")):
            raise RequestError(f"{label}: expected KEY=VALUE with a dotted key, such as --set calibration.samples=64")
        parsed, _ = parse(value, label)
        path = assign(data, key.strip().split("."), parsed, label)
        origin.overrides[path] = label


def assign(data: dict[str, Any], parts: list[str], value: Any, label: str) -> Path:
    """Put a value into recipe data in place, as `apply_overrides` does, and return its path.

    Args:
        parts: the dotted key, split.
        label: who gives the value, for messages.
    """
    here: Any = data
    path: Path = ()
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        step: str | int = part
        if isinstance(here, list):
            step = _index(here, part, path, label)
        elif not isinstance(here, dict):
            raise RequestError(f"{label}: '{dotted(path)}' is {show(here)}, which has no key '{part}'")
        elif len(path) == 2 and path[0] == "stages" and part not in here:
            raise RequestError(
                f"{label}: stage {path[1]} is '{next(iter(here), '')}', not '{part}'{did_you_mean(part, here)}"
            )
        if last:
            here[step] = value
        elif isinstance(here, dict) and here.get(part) is None:
            here[step] = {}
        path = (*path, step)
        here = here[step]
    return path


def _index(entries: list[Any], part: str, path: Path, label: str) -> int:
    if not part.isascii() or not part.isdigit() or int(part) >= len(entries):
        names = [next(iter(entry)) if isinstance(entry, dict) and entry else "?" for entry in entries]
        there = listing(f"{index} ({name})" for index, name in enumerate(names)) or "no entry"
        raise RequestError(f"{label}: '{dotted((*path, part))}' does not exist; '{dotted(path)}' has {there}")
    return int(part)
