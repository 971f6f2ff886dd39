"""Rankings of the units that structure pruning removes: one file each and one line in `METHODS`, or an entry point `compress.structure`."""

from __future__ import annotations

from compress.prune.structure.method import StructureMethod
from compress.prune.structure.rankings import (
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
from runtime.config.plugins import entries

_OWN = (
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
METHODS: dict[str, StructureMethod] = {module.METHOD.name: module.METHOD for module in _OWN}
METHODS |= {name: load() for name, load in entries("compress.structure").items()}
