"""Import hook that registers our quantizer the moment transformers loads its own, without importing transformers.

transformers keeps its quantizers in a table in `transformers.quantizers.auto`. When that module is loaded already,
ours is added at once; otherwise a finder waits for its import, adds ours right after, and takes itself away.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

TABLE = "transformers.quantizers.auto"
QUANTIZER = "runtime.layers.hf"  # registers itself when it is imported


def install_hook() -> None:
    """Make `quant_method: "compress"` known to transformers, now or when it is imported. Calling it again does
    nothing.
    """
    if TABLE in sys.modules:
        import_module(QUANTIZER)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                import_module(QUANTIZER)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
