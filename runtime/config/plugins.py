"""Entry points: what other packages add to the registries.

A package announces an addition in its own `pyproject.toml`:

    [project.entry-points."compress.quantize"]
    my_method = "my_package.my_method:METHOD"

The groups are named in CONTRIBUTING.md. Nothing of a package is imported before its entry is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from runtime.errors import CompressError


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


def _loader(name: str, value: str, package: str, load: Callable[[], Any]) -> Callable[[], Any]:
    def loaded() -> Any:
        try:
            return load()
        except (ImportError, AttributeError) as error:
            raise CompressError(f"{name!r} of the package {package} cannot be imported ({value}): {error}") from error

    return loaded
