"""Draft methods: models and heads that propose what an artifact writes, one file each; a new one is a file and a line in `_MODULES`.

Other packages add theirs by the entry-point group `compress.draft_methods`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from compress.distill.draft import distillspec, kangaroo, medusa, mtp, pard, s2d, skip_search
from compress.distill.draft.config import CutConfig, DraftConfig
from compress.distill.draft.training import DraftMethod
from runtime.config.plugins import entries, merge

GROUP = "compress.draft_methods"
_MODULES = (distillspec, s2d, pard, medusa, mtp, kangaroo, skip_search)

__all__ = ["METHODS", "CutConfig", "DraftConfig", "DraftMethod"]


@cache
def _methods() -> dict[str, DraftMethod]:
    built_in = {module.METHOD.name: module.METHOD for module in _MODULES}
    return merge("draft method", GROUP, built_in, ((name, load()) for name, load in entries(GROUP).items()))


def __getattr__(name: str) -> Any:
    if name == "METHODS":  # found when it is asked for: a package that adds a method imports from this one
        return _methods()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
