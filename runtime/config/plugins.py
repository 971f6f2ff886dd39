"""Entry points: what other packages add to the registries.

A package announces an addition in its own `pyproject.toml`:

    [project.entry-points."compress.quantize"]
    my_method = "my_package.my_method:METHOD"

The groups are named in CONTRIBUTING.md. Nothing of a package is imported before its entry is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from runtime.errors import CompressError, RequestError

Entry = TypeVar("Entry")


@cache
def entries(group: str) -> dict[str, Callable[[], Any]]:
    """Loaders of the entry points of a group by name, in order of their names.

    Raises:
        CompressError: two packages use the same name; or, from a loader, the object cannot be imported.
    """
    found: dict[str, Callable[[], Any]] = {}
    packages: dict[str, str] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist is not None else entry.module
        if packages.setdefault(entry.name, package) != package:
            raise CompressError(f"the packages {packages[entry.name]} and {package} both add {entry.name!r} to {group}")
        found[entry.name] = _loader(entry.name, entry.value, package, entry.load)
    return found


def merge(what: str, group: str, built_in: Mapping[str, Entry], added: Iterable[tuple[str, Entry]]) -> dict[str, Entry]:
    """The built-in entries of a registry and, after them, those that other packages add under the entry-point group.

    Raises:
        RequestError: an added one has the name of another; `what` says in the message what an entry is.
    """
    found = dict(built_in)
    for name, entry in added:
        if name in found:
            raise RequestError(f"an entry point of {group} adds {name!r}, which is the name of another {what}")
        found[name] = entry
    return found


def _loader(name: str, value: str, package: str, load: Callable[[], Any]) -> Callable[[], Any]:
    def loaded() -> Any:
        try:
            return load()
        except (ImportError, AttributeError) as error:
            raise CompressError(f"{name!r} of the package {package} cannot be imported ({value}): {error}") from error

    return loaded
