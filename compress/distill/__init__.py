"""Training drafts: models and heads that propose what an artifact writes. A method is one file and one line in `METHODS`."""

from __future__ import annotations

from compress.distill import distillspec, pard, s2d
from compress.distill.config import CutConfig, DraftConfig, DraftMethod

METHODS: dict[str, DraftMethod] = {module.METHOD.name: module.METHOD for module in (distillspec, s2d, pard)}

__all__ = ["METHODS", "CutConfig", "DraftConfig", "DraftMethod"]
