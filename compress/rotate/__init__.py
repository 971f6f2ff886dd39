"""Rotations folded into the weights of a model, which spread outliers and keep its function.

A method is one file and one line in `METHODS`, or an entry point `compress.rotate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compress.core.method import registry
from compress.core.orthogonal import keep_mean
from compress.rotate import hadamard, orthogonal, spinquant
from compress.rotate.method import RotateMethod
from runtime.errors import CompressError

METHODS: dict[str, RotateMethod] = registry("compress.rotate", hadamard.METHOD, orthogonal.METHOD, spinquant.METHOD)


def seeded(seed: int) -> torch.Generator:
    """A generator for what is random."""
    return torch.Generator().manual_seed(seed)


def start_matrix(method: str, facts: Mapping[str, Any]) -> torch.Tensor:
    """What a method that learns begins with, and others rotate the hidden state by: float64 `[size, size]`, a row for each dimension
    before.

    Args:
        facts: "matrix" of the stage's record: "size", "seed", and "keeps_mean" where a vector of equal numbers stays as it is.
    """
    matrix = METHODS[method].matrix(facts["size"], seeded(facts["seed"]))
    return keep_mean(matrix) if facts["keeps_mean"] else matrix


def hidden_matrix(method: str, facts: Mapping[str, Any]) -> torch.Tensor:
    """What a stage has rotated the hidden state by, from its record; see `start_matrix`.

    Raises:
        CompressError: it was learned, and is kept nowhere but in the weights.
    """
    if METHODS[method].learn is not None:
        raise CompressError(f"the rotation that {method} has learned is kept nowhere but in the weights")
    return start_matrix(method, facts)
