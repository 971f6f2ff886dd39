"""Former paths of documented modules, kept importable: the same module object under both names."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class ModuleAliases(MetaPathFinder, Loader):
    """Finder of modules that moved.

    Args:
        places: present path by former path, parent packages included; submodules of a former package follow it.
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
        present = self._present(fullname)
        found = present is not None and (fullname in self._places or find_spec(present) is not None)
        return ModuleSpec(fullname, self) if found else None

    def _present(self, fullname: str) -> str | None:
        head, tail = fullname, ""
        while head not in self._places:
            head, dot, last = head.rpartition(".")
            if not dot:
                return None
            tail = f".{last}{tail}"
        return self._places[head] + tail

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module at its present path."""
        present = self._present(spec.name)
        assert present is not None  # find_spec has found it
        module = import_module(present)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back; it has run already."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state
