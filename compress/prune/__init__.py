"""Pruning methods, one file each; a new one is a file and a line in `METHODS`."""

from __future__ import annotations

from compress.core.method import Method
from compress.prune import magnitude, sparsegpt, wanda
from compress.prune.config import PruneConfig

METHODS: dict[str, Method] = {module.METHOD.name: module.METHOD for module in (magnitude, wanda, sparsegpt)}

__all__ = ["METHODS", "PruneConfig"]
