"""Former paths of documented modules, kept importable: the same module object under both names."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ModuleAliases(MetaPathFinder, Loader):
    """Finder of modules that moved.

    Args:
        places: present path by former path, parent packages included.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def install(self) -> None:
        """Import the former paths from now on."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for a former path; None for any other."""
        return ModuleSpec(fullname, self) if fullname in self._places else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module at its present path."""
        module = import_module(self._places[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back; it has run already."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state
