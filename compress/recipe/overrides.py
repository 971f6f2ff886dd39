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
    """Apply `KEY=VALUE` texts (or, from Python, values by dotted key) to recipe data in place, and note them in `origin`.

    Absent keys of mappings are added (validation then says whether they are known); list entries must exist.

    Raises:
        RequestError: no `=`, a path through a value without keys, a list index out of range, a value that is not YAML.
    """
    if isinstance(overrides, Mapping):
        given = [(f"set={{{key!r}: ...}}", key, copy.deepcopy(value)) for key, value in overrides.items()]
    else:
        given = [_split(text) for text in ([overrides] if isinstance(overrides, str) else overrides)]
    for label, key, value in given:
        if not isinstance(key, str) or not all(key.split(".")):
            raise RequestError(f"{label}: expected a dotted key, such as calibration.samples")
        origin.overrides[assign(data, key.split("."), value, label)] = label


def _split(text: str) -> tuple[str, str, Any]:
    """Label, key and value of a `KEY=VALUE`."""
    label = f"--set {text}"
    key, equals, value = text.partition("=")
    if not equals:
        raise RequestError(f"{label}: expected KEY=VALUE with a dotted key, such as --set calibration.samples=64")
    return label, key.strip(), parse(value, label)[0]


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
            stage = next(iter(here), "")
            raise RequestError(f"{label}: stage {path[1]} is '{stage}', not '{part}'{did_you_mean(part, here)}")
        if last:
            here[step] = value
        elif isinstance(here, dict) and here.get(part) in (None, "auto"):
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
