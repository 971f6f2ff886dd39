"""Registries of methods: names that stand for classes, of this package and, by entry points, of others.

A method of this package is one file and one line in its registry; another package registers a class under the registry's group.
Files are imported when their name is used, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pkgutil import resolve_name
from typing import Any

from runtime.config.messages import plain
from runtime.config.plugins import entries, merge


@dataclass(frozen=True)
class Method:
    """One name of a registry.

    Attributes:
        name: as configurations say it.
        target: "package.module:Class", or a function that gives the class.
        fixed: settings that the name itself gives ("int4": bits).
    """

    name: str
    target: str | Callable[[], Any] = field(compare=False)
    fixed: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def load(self) -> Any:
        """The class, whose fields are the method's settings (`runtime.config.settings`)."""
        return resolve_name(self.target) if isinstance(self.target, str) else self.target()


class Registry:
    """The methods of one axis.

    Args:
        what: what messages call one of them.
        group: entry points of other packages that are methods of this axis; empty: none.
        methods: of this package, in the order in which they are listed.
        accepts: which of a group's classes belong here, where several registries share it.
    """

    def __init__(
        self, what: str, group: str, *methods: Method, accepts: Callable[[Any], bool] = lambda method: True
    ) -> None:
        self.what = what
        self._group, self._own, self._accepts = group, methods, accepts

    @cached_property
    def _methods(self) -> dict[str, Method]:
        loaders = entries(self._group) if self._group else {}
        added = ((name, Method(name, load)) for name, load in loaders.items() if self._accepts(load()))
        return merge(self.what, self._group, {method.name: method for method in self._own}, added)

    @cached_property
    def _by_plain_name(self) -> dict[str, Method]:
        return {plain(name): method for name, method in self._methods.items()}

    def __iter__(self) -> Iterator[Method]:
        return iter(self._methods.values())

    @property
    def names(self) -> list[str]:
        """Names of all methods, in order of registration."""
        return list(self._methods)

    def find(self, name: object) -> Method | None:
        """By name; case, hyphens and underscores do not count. None: there is none, or it is no name."""
        return self._by_plain_name.get(plain(name)) if isinstance(name, str) else None
