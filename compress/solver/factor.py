"""The factor of the Hessian that the column loop runs on.

With the columns in visiting order, `H = T^T T` with T lower triangular, so the output error of a row is
`e^T H e = sum_j T_jj^2 (e_j + sum_{k<j} T_jk / T_jj e_k)^2`: term j knows only the columns visited before it, and is zero where
column j takes the value that makes up best for them. This is the LDL form of GPTQ (Chee et al., QuIP, arXiv 2307.13304, theorem 6):
one Cholesky, in place, and no inverse. `U = T^-T` is the factor of the inverse Hessian of the GPTQ paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.errors import CompressError

#: Damping is multiplied by ten up to this many times before the layer fails.
RETRIES = 3
#: Rows of the Hessian that are gathered at a time.
CHUNK = 512


@dataclass
class Factor:
    """T of a damped Hessian, kept as LAPACK gives it: the lower factor of the Hessian in reversed order, `T_jk = L_{n-1-k,n-1-j}`.

    Attributes:
        reversed_lower: L, float32 `[in, in]`.
        damping: what was needed, as a fraction of the mean diagonal; `added` is the same in absolute terms.
        retries: how often the damping had to be raised.
    """

    reversed_lower: torch.Tensor
    damping: float
    retries: int
    added: float

    @property
    def columns(self) -> int:
        return self.reversed_lower.shape[0]

    @property
    def diagonal(self) -> torch.Tensor:
        """`T_jj`, `[in]`: the standard deviation of column j that the columns before it cannot explain."""
        return self.reversed_lower.diagonal().flip(0)

    def panel(self, start: int, end: int) -> torch.Tensor:
        """`T[start:end, :start]`: what columns visited before `start` mean for those of a stretch."""
        n = self.columns
        return self.reversed_lower[n - start :, n - end : n - start].flip(0, 1).T

    def corner(self, start: int, end: int) -> torch.Tensor:
        """`T[start:end, start:end]`, lower triangular."""
        n = self.columns
        return self.reversed_lower[n - end : n - start, n - end : n - start].flip(0, 1).T

    def sketch(self, rows: int) -> torch.Tensor:
        """`G T / sqrt(rows)` with G random normal (fixed seed), `[rows, in]` in visiting order: `|sketch e|^2` estimates `e^T H e`."""
        generator = torch.Generator(self.reversed_lower.device).manual_seed(0)
        shape = (rows, self.columns)
        random = torch.randn(shape, generator=generator, device=self.reversed_lower.device)
        return (random @ self.reversed_lower.T).flip(1).div_(rows**0.5)


def factorize(hessian: torch.Tensor, order: torch.Tensor, damping: float, name: str = "layer") -> Factor:
    """Factor `hessian [in, in]` (float32, not changed) in the visiting `order [in]`, with `damping * mean(diagonal)` added.

    Raises:
        CompressError: the matrix is not positive definite even with `damping * 10^RETRIES`.
    """
    columns = hessian.shape[0]
    mean = float(hessian.diagonal().mean())
    if mean <= 0:  # No input ever reached this layer: all columns are alike, and rounding to nearest is optimal.
        return Factor(torch.eye(columns, device=hessian.device), damping, 0, 0.0)
    backwards = order.flip(0)
    work = torch.empty_like(hessian)
    info = torch.empty((), dtype=torch.int32, device=hessian.device)
    for retry in range(RETRIES + 1):
        for start in range(0, columns, CHUNK):
            torch.index_select(hessian[backwards[start : start + CHUNK]], 1, backwards, out=work[start : start + CHUNK])
        work.diagonal().add_(damping * mean)
        # The matrix is symmetric, so its transpose is itself in the order LAPACK wants: no copy is made.
        lower = work.T
        torch.linalg.cholesky_ex(lower, out=(lower, info))
        if int(info) == 0 and bool(torch.isfinite(lower.diagonal()).all()):
            return Factor(lower, damping, retry, damping * mean)
        damping *= 10
    raise CompressError(
        f"{name}: the Hessian is not positive definite even with damping {damping / 10:g}; "
        "give more calibration samples or a larger 'damping'"
    )
