"""Training drafts: models and heads that propose what an artifact writes. A method is one file and one line in `METHODS`."""

from __future__ import annotations

from compress.distill.draft import distillspec, fastmtp, kangaroo, medusa, pard, s2d, skip_search
from compress.distill.draft.config import CutConfig, DraftConfig, DraftMethod

_MODULES = (distillspec, s2d, pard, medusa, fastmtp, kangaroo, skip_search)
METHODS: dict[str, DraftMethod] = {module.METHOD.name: module.METHOD for module in _MODULES}

__all__ = ["METHODS", "CutConfig", "DraftConfig", "DraftMethod"]
