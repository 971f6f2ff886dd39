"""Pruning methods, one file each; a new one is a file and an argument of `registry`, or an entry point of another package."""

from __future__ import annotations

from compress.core.method import registry
from compress.prune import magnitude, sparsegpt, wanda
from compress.prune.config import PruneConfig

METHODS = registry("compress.prune", magnitude.METHOD, wanda.METHOD, sparsegpt.METHOD)

__all__ = ["METHODS", "PruneConfig"]
