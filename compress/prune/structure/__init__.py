"""Structured pruning: whole channels, heads, layers, experts, dimensions and tokens are removed, and the shapes really shrink. A ranking is
one file and one line in `METHODS`."""

from __future__ import annotations

from compress.prune.structure import (
    activation,
    block_influence,
    frequency,
    gradient_free,
    magnitude,
    obs,
    prefix,
    random,
    reap,
    routing,
    taylor,
    wanda,
)
from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod

_MODULES = (
    magnitude,
    wanda,
    gradient_free,
    taylor,
    obs,
    block_influence,
    activation,
    routing,
    reap,
    frequency,
    prefix,
    random,
)
METHODS: dict[str, StructureMethod] = {module.METHOD.name: module.METHOD for module in _MODULES}

__all__ = ["METHODS", "StructureConfig", "StructureMethod"]
