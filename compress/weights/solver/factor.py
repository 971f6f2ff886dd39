"""The factor of the Hessian that the column loop runs on.

With the columns in visiting order, `H = T^T T` with T lower triangular, so the output error of a row is
`e^T H e = sum_j T_jj^2 (e_j + sum_{k<j} T_jk / T_jj e_k)^2`: term j knows only the columns visited before it, and is zero where
column j takes the value that makes up best for them. This is the LDL form of GPTQ (Chee et al., QuIP, arXiv 2307.13304, theorem 6):
one Cholesky, in place, and no inverse. `U = T^-T` is the factor of the inverse Hessian of the GPTQ paper.

The Cholesky goes over panels of rows, and looks back at those before; so Hessian and factor may be in files
(`compress.core.file_matrix`), with no
more than two panels resident, and the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.core import file_matrix
from runtime.errors import CompressError

#: Damping is multiplied by ten up to this many times before the layer fails.
RETRIES = 3
#: Columns that are factored together.
PANEL = 1024


@dataclass
class Factor:
    """T of a damped Hessian, kept as the factor of the Hessian in reversed order, `R^T R` with `T_jk = R_{n-1-j,n-1-k}`.

    Attributes:
        reversed_upper: R, float32 `[in, in]`, upper triangular; what is below the diagonal blocks of `PANEL` columns is not set.
        damping: what was needed, as a fraction of the mean diagonal; `added` is the same in absolute terms.
        retries: how often the damping had to be raised.
    """

    reversed_upper: torch.Tensor
    damping: float
    retries: int
    added: float

    @property
    def columns(self) -> int:
        """Number of input columns."""
        return self.reversed_upper.shape[0]

    @property
    def diagonal(self) -> torch.Tensor:
        """`T_jj`, `[in]`: the standard deviation of column j that the columns before it cannot explain."""
        return file_matrix.diagonal(self.reversed_upper).flip(0)

    def panel(self, start: int, end: int) -> torch.Tensor:
        """`T[start:end, :start]`: what columns visited before `start` mean for those of a stretch."""
        n = self.columns
        return self._part(slice(n - end, n - start), slice(n - start, n))

    def corner(self, start: int, end: int) -> torch.Tensor:
        """`T[start:end, start:end]`, lower triangular."""
        n = self.columns
        return self._part(slice(n - end, n - start), slice(n - end, n - start)).tril_()

    def _part(self, rows: slice, columns: slice) -> torch.Tensor:
        found = self.reversed_upper[rows, columns].flip(0, 1)
        file_matrix.let_go(self.reversed_upper)
        return found

    def solve(self, right: torch.Tensor) -> torch.Tensor:
        """`(H + added I)^-1 right`, both `[in, n]` in visiting order."""
        upper, found = self.reversed_upper, right.flip(0)
        parts = file_matrix.panels(self.columns, PANEL)
        for here in parts:  # R^T z = right
            found[here] -= upper[: here.start, here].T @ found[: here.start]
            found[here] = torch.linalg.solve_triangular(upper[here, here].triu().T, found[here], upper=False)
            file_matrix.let_go(upper)
        for here in reversed(parts):  # R y = z
            found[here] -= upper[here, here.stop :] @ found[here.stop :]
            found[here] = torch.linalg.solve_triangular(upper[here, here].triu(), found[here], upper=True)
            file_matrix.let_go(upper)
        return found.flip(0)

    def sketch(self, rows: int) -> torch.Tensor:
        """`G T / sqrt(rows)` with G random normal (fixed seed), `[rows, in]` in visiting order: `|sketch e|^2` estimates `e^T H e`."""
        upper = self.reversed_upper
        generator = torch.Generator(upper.device).manual_seed(0)
        random = torch.randn(rows, self.columns, generator=generator, device=upper.device)
        found = torch.zeros_like(random)
        for here in file_matrix.panels(self.columns, PANEL):
            found[:, here.start :].addmm_(random[:, here], upper[here, here.start :])
            file_matrix.let_go(upper)
        return found.flip(1).div_(rows**0.5)


def factorize(hessian: torch.Tensor, order: torch.Tensor, damping: float, name: str = "layer") -> Factor:
    """Factor `hessian [in, in]` (float32, not changed) in the visiting `order [in]`, with `damping * mean(diagonal)` added.

    Raises:
        CompressError: the matrix is not positive definite even with `damping * 10^RETRIES`.
    """
    columns = hessian.shape[0]
    mean = float(file_matrix.diagonal(hessian).mean())
    if mean <= 0:  # No input ever reached this layer: all columns are alike, and rounding to nearest is optimal.
        return Factor(torch.eye(columns, device=hessian.device), damping, 0, 0.0)
    upper = file_matrix.empty_like(hessian)
    for retry in range(RETRIES + 1):
        if _cholesky(hessian, order.flip(0), damping * mean, upper):
            return Factor(upper, damping, retry, damping * mean)
        damping *= 10
    raise CompressError(
        f"{name}: the Hessian is not positive definite even with damping {damping / 10:g}; "
        "give more calibration samples or a larger 'damping'"
    )


def _cholesky(hessian: torch.Tensor, order: torch.Tensor, added: float, upper: torch.Tensor) -> bool:
    """`upper` becomes R with `R^T R = hessian[order][:, order] + added I`; False where there is none."""
    for here in file_matrix.panels(hessian.shape[0], PANEL):
        panel = upper[here, here.start :]
        for part in file_matrix.panels(here.stop - here.start):
            rows = order[here.start + part.start : here.start + part.stop]
            torch.index_select(hessian[rows], 1, order[here.start :], out=panel[part])
            file_matrix.let_go(hessian)
        panel.diagonal().add_(added)
        for before in file_matrix.panels(here.start, PANEL):
            panel.addmm_(upper[before, here].T, upper[before, here.start :], alpha=-1)
            file_matrix.let_go(upper)
        width = here.stop - here.start
        lower, info = torch.linalg.cholesky_ex(panel[:, :width])
        if int(info) != 0 or not bool(torch.isfinite(lower.diagonal()).all()):
            return False
        panel[:, :width] = lower.T
        if here.stop < hessian.shape[0]:
            panel[:, width:] = torch.linalg.solve_triangular(lower, panel[:, width:], upper=False)
        file_matrix.let_go(upper)
    return True
