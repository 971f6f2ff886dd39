"""Rotations folded into the weights of a model, which spread outliers and keep its function.

A method is one file and one line in `METHODS`, or an entry point `compress.rotate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compress.core.method import registry
from compress.rotate import hadamard, orthogonal, spinquant
from compress.rotate.method import RotateMethod

METHODS: dict[str, RotateMethod] = registry("compress.rotate", hadamard.METHOD, orthogonal.METHOD, spinquant.METHOD)


def seeded(seed: int) -> torch.Generator:
    """A generator for what is random."""
    return torch.Generator().manual_seed(seed)


def hidden_matrix(method: str, facts: Mapping[str, Any]) -> torch.Tensor:
    """What a stage has rotated the hidden state by, or what a learned matrix started as: float64 `[size, size]`, a row for each dimension
    before.

    Args:
        facts: "matrix" of the stage's record: "size", "seed", and "keeps_mean" where a vector of equal numbers stays as it is.
    """
    matrix = METHODS[method].matrix(facts["size"], seeded(facts["seed"]))
    return keep_mean(matrix) if facts["keeps_mean"] else matrix


def keep_mean(matrix: torch.Tensor) -> torch.Tensor:
    """The rotation followed by a reflection, so that a vector of equal numbers stays as it is.

    A norm that takes the mean away first (LayerNorm) then gives the rotated output for a rotated input.
    """
    ones = torch.full((len(matrix),), len(matrix) ** -0.5, dtype=matrix.dtype)
    difference = ones @ matrix - ones
    size = difference.norm()
    if size < 1e-12:
        return matrix
    axis = difference / size
    return matrix - 2 * torch.outer(matrix @ axis, axis)
