"""Draft methods: models and heads that propose what an artifact writes, one file each; a new one is a file and a line in `METHODS`.

Other packages add theirs by the entry-point group `compress.draft_methods`.
"""

from __future__ import annotations

from compress.distill.draft import distillspec, kangaroo, medusa, mtp, pard, s2d, skip_search
from compress.distill.draft.config import CutConfig, DraftConfig
from compress.distill.draft.making import DraftMethod
from runtime.config.plugins import entries

_MODULES = (distillspec, s2d, pard, medusa, mtp, kangaroo, skip_search)
METHODS: dict[str, DraftMethod] = {
    **{module.METHOD.name: module.METHOD for module in _MODULES},
    **{name: load() for name, load in entries("compress.draft_methods").items()},
}

__all__ = ["METHODS", "CutConfig", "DraftConfig", "DraftMethod"]
