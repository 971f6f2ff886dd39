"""Rankings of the units that structure pruning removes: one file each and one line in `METHODS`, or an entry point `compress.structure`."""

from __future__ import annotations

from compress.core.method import registry
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

_RANKINGS = (
    magnitude, wanda, gradient_free, taylor, obs, block_influence, activation, routing, reap, frequency, prefix, random,
)  # fmt: skip
METHODS: dict[str, StructureMethod] = registry("compress.structure", *(ranking.METHOD for ranking in _RANKINGS))
