"""Random orthogonal matrices, uniform over all of them (Chee et al., QuIP, 2023)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.core.orthogonal import orthogonal_matrix
from compress.rotate.method import RotateConfig, RotateMethod


class OrthogonalConfig(RotateConfig):
    """Rotate by random orthogonal matrices, for sizes that have no Hadamard matrix, or to compare with."""

    method: Literal["orthogonal"] = Field("orthogonal", description="Name of the method.")


METHOD = RotateMethod(
    OrthogonalConfig,
    orthogonal_matrix,
    summary="rotates by random orthogonal matrices",
    paper="Chee et al., QuIP, 2023, arXiv 2307.13304",
)
