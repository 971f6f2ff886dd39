"""The promise that no row ends with a larger output error than rounding to nearest would have left it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from compress.solver.factor import Factor
from compress.solver.objective import column_errors
from compress.solver.stacked import StackedGrid

#: Size of the random sketch that tells rows which are plainly better from those that have to be computed.
SKETCH = 256
#: A row is plainly better if its error is below this fraction of what the sketch says of rounding to nearest. `k |S e|^2 / e^T H e` is
#: chi-square with k = SKETCH degrees of freedom, so the chance of a wrong word is below exp(-k/2 (1/f - 1 + ln f)) = 3e-9 a row.
SAFE = 0.6


@dataclass
class Rounded:
    """A solved chunk: codes `[in, rows]` (int8; fp8 grids: float32 values), their grid, and output error `[rows]`."""

    codes: torch.Tensor
    grid: StackedGrid
    lost: torch.Tensor


#: `(error, codes, grid, mask)` -> output error `[rows]`: refines in place what it is given, see `refine`.
Polish = Callable[[torch.Tensor, torch.Tensor, StackedGrid, "torch.Tensor | None"], torch.Tensor]


class Promise:
    """Keeps the promise for the chunks of one input.

    Args:
        factor: of the Hessian, visited in the order whose inverse permutation is `inverse [in]`.
    """

    def __init__(self, factor: Factor, inverse: torch.Tensor, hessian: torch.Tensor) -> None:
        self._hessian, self._added = hessian, factor.added
        # Where the exact product costs no more than the sketch, it is taken.
        self._sketch = factor.sketch(SKETCH)[:, inverse] if hessian.shape[0] > 2 * SKETCH else None

    def keep(
        self,
        rounded: Rounded,
        target: torch.Tensor,
        mask: torch.Tensor | None,
        static: StackedGrid,
        dtype: torch.dtype,
        polish: Polish,
    ) -> torch.Tensor:
        """Where rounding `target [in, rows]` to the nearest values of `static` is better, start again from those values, in place.

        Returns which rows these are, bool `[rows]`.
        """
        replaced = torch.zeros_like(rounded.lost, dtype=torch.bool)
        nearest = static.codes(target)
        difference = target - stored_values(nearest, static, mask, dtype)
        doubtful = self._doubtful(rounded.lost, difference)
        exact = column_errors(difference[:, doubtful], self._hessian)
        above = rounded.lost[doubtful] > exact
        worse, exact = doubtful[above], exact[above]
        if worse.numel() == 0:
            return replaced
        del difference
        grid = static.rows(worse)
        codes = nearest[:, worse].to(rounded.codes.dtype)
        kept = None if mask is None else mask[:, worse]
        error = target[:, worse] - stored_values(codes, grid, kept, torch.float32)
        lost = polish(error, codes, grid, kept)
        # The dtype rounds after the last step of the polish, so that it may have gained nothing.
        back = lost > exact
        start = static.rows(worse)
        rounded.lost[worse] = torch.where(back, exact, lost)
        rounded.codes[:, worse] = torch.where(back, nearest[:, worse].to(codes.dtype), codes)
        rounded.grid.scale[:, worse] = torch.where(back, start.scale, grid.scale)
        if rounded.grid.zero is not None and grid.zero is not None and start.zero is not None:
            rounded.grid.zero[:, worse] = torch.where(back, start.zero, grid.zero)
        replaced[worse] = True
        return replaced

    def _doubtful(self, lost: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
        """Indices of the rows for which the sketch does not settle it."""
        if self._sketch is None:
            return torch.arange(lost.shape[0], device=lost.device)
        damped = (self._sketch @ difference).square_().sum(0)
        least = SAFE * damped - self._added * difference.square().sum(0)
        return (lost > least).nonzero()[:, 0]


def stored_values(
    codes: torch.Tensor, grid: StackedGrid, mask: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Weights `[in, rows]` that codes stand for, as `dtype` holds them, float32; zero where removed."""
    values = grid.values(codes)
    if mask is not None:
        values *= mask
    return values if dtype == torch.float32 else values.to(dtype).float()
