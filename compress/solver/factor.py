"""The factor of the inverse Hessian that the column loop runs on.

`H^-1 = U^T U` with U upper triangular. `U_jj^2` is the variance of column j once all columns before it are fixed (the divisor of the
OBS saliency), and row j of `U / U_jj` says how the later columns best make up for a change of column j. U is the inverse of
the factor R of `H = R R^T`, so one Cholesky (of H in reverse order) and one triangular inverse are enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.errors import CompressError

#: Damping is multiplied by ten up to this many times before the layer fails.
RETRIES = 3


@dataclass
class Factor:
    """`upper [in, in]`: U; `damping` that was needed, as a fraction of the mean diagonal; `retries` it took."""

    upper: torch.Tensor
    damping: float
    retries: int


def factorize(hessian: torch.Tensor, damping: float, name: str = "layer") -> Factor:
    """Factor `hessian [in, in]` (float32, not changed) plus `damping * mean(diagonal)` on its diagonal.

    Raises:
        CompressError: the matrix is not positive definite even with `damping * 10^RETRIES`.
    """
    identity = torch.eye(hessian.shape[0], device=hessian.device)
    mean = float(hessian.diagonal().mean())
    if mean <= 0:  # No input ever reached this layer: all columns are alike, and rounding to nearest is optimal.
        return Factor(identity, damping, 0)
    for retry in range(RETRIES + 1):
        damped = hessian.flip(0, 1)
        damped.diagonal().add_(damping * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        del damped
        if int(info) == 0 and bool(torch.isfinite(lower.diagonal()).all()):
            inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
            del lower, identity
            return Factor(inverse.flip(0, 1), damping, retry)
        damping *= 10
    raise CompressError(
        f"{name}: the Hessian is not positive definite even with damping {damping / 10:g}; "
        "give more calibration samples or a larger 'damping'"
    )
