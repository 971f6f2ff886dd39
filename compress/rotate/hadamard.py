"""Randomized Hadamard matrices (Ashkboos et al., QuaRot, 2024): all entries of one size, so that an outlier is spread evenly."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.core.orthogonal import random_hadamard_matrix, why_not
from compress.rotate.method import RotateConfig, RotateMethod


class HadamardConfig(RotateConfig):
    """Rotate by Hadamard matrices with random signs: an outlier in one dimension becomes a small part of all of them."""

    method: Literal["hadamard"] = Field("hadamard", description="Name of the method.")


METHOD = RotateMethod(
    HadamardConfig,
    random_hadamard_matrix,
    summary="rotates by randomized Hadamard matrices, which spread outliers",
    paper="Ashkboos et al., QuaRot, 2024, arXiv 2404.00456",
    why_not=why_not,
)
