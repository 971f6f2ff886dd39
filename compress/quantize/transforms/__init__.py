"""Input transforms, one file each; a new one is a file and an argument of `registry`, or an entry point of another package."""

from __future__ import annotations

from compress.core.method import registry
from compress.quantize.transforms import flatquant, hadamard, outliers_last
from compress.quantize.transforms.method import Basis, Layers, TransformMethod

METHODS: dict[str, TransformMethod] = registry(
    "compress.transforms", hadamard.METHOD, hadamard.BY_GROUP, flatquant.METHOD, outliers_last.METHOD
)

__all__ = ["METHODS", "Basis", "Layers", "TransformMethod"]
