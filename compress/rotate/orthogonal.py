"""Random orthogonal matrices, uniform over all of them (Chee et al., QuIP, 2023)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.rotate.method import RotateConfig, RotateMethod


class OrthogonalConfig(RotateConfig):
    """Rotate by random orthogonal matrices, for sizes that have no Hadamard matrix, or to compare with."""

    method: Literal["orthogonal"] = Field("orthogonal", description="Name of the method.")


def orthogonal_matrix(size: int, generator: torch.Generator) -> torch.Tensor:
    """Float64 `[size, size]`: of the QR decomposition of a Gaussian matrix, with the signs that make it uniform (Mezzadri, 2007)."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


METHOD = RotateMethod(
    OrthogonalConfig,
    orthogonal_matrix,
    summary="rotates by random orthogonal matrices",
    paper="Chee et al., QuIP, 2023, arXiv 2307.13304",
)
