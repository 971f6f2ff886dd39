"""The factor of the Hessian that the column loop runs on.

With `H = R R^T`, R upper triangular, the output error of a row is `||(w - q) R||^2`, and its j-th term only depends on columns up
to j: `R_jj^2 (w_j + sum_{i<j} (w_i - q_i) R_ij / R_jj - q_j)^2`. Choosing every q_j as the grid value nearest to that sum is GPTQ:
R is the inverse of the Cholesky factor U of the inverse Hessian (`H^-1 = U^T U`), so `R_jj^2 = 1 / U_jj^2` is the OBS saliency's
divisor. Working with R itself takes one Cholesky instead of two and an inversion, and is more accurate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.errors import CompressError

#: Damping is multiplied by ten up to this many times before the layer fails.
RETRIES = 3


@dataclass
class Factor:
    """`unit [in, in]`: R with its columns divided by the diagonal (unit upper triangular); `diagonal [in]`: R_jj^2."""

    unit: torch.Tensor
    diagonal: torch.Tensor
    damping: float
    retries: int


def factorize(hessian: torch.Tensor, damping: float, name: str = "layer") -> Factor:
    """Factor `hessian [in, in]` (float32, not changed) plus `damping * mean(diagonal)` on its diagonal.

    Raises:
        CompressError: the matrix is not positive definite even with `damping * 10^RETRIES`.
    """
    mean = float(hessian.diagonal().mean())
    if mean <= 0:  # No input ever reached this layer: all columns are alike, and rounding to nearest is optimal.
        unit = torch.eye(hessian.shape[0], device=hessian.device)
        return Factor(unit, torch.ones(hessian.shape[0], device=hessian.device), damping, 0)
    for retry in range(RETRIES + 1):
        # Cholesky gives lower factors; of the matrix in reverse order that is the upper one we want.
        damped = hessian.flip(0, 1)
        damped.diagonal().add_(damping * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        del damped
        if int(info) == 0 and bool(torch.isfinite(lower.diagonal()).all()):
            unit = lower.flip(0, 1)
            diagonal = unit.diagonal().clone()
            unit.div_(diagonal[None, :])
            return Factor(unit, diagonal.square_(), damping, retry)
        damping *= 10
    raise CompressError(
        f"{name}: the Hessian is not positive definite even with damping {damping / 10:g}; "
        "give more calibration samples or a larger 'damping'"
    )
