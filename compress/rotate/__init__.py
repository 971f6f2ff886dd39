"""Rotations that leave the function of a model as it is and make its weights and inputs easier to round: one file each, and one line in
`METHODS`, or an entry point `compress.rotate`."""

from __future__ import annotations

from compress.core.method import registry
from compress.rotate import hadamard, orthogonal
from compress.rotate.method import RotateMethod

METHODS: dict[str, RotateMethod] = registry("compress.rotate", hadamard.METHOD, orthogonal.METHOD)
