"""Structured pruning: whole channels, heads, layers, experts, dimensions and tokens are removed, and the shapes really shrink."""

from __future__ import annotations

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod
from compress.prune.structure.rankings import METHODS

__all__ = ["METHODS", "StructureConfig", "StructureMethod"]
