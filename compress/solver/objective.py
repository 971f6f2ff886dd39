"""The error that solvers minimise: how far the output of a layer moves, `tr(E H E^T)` for `E = W - W_compressed`."""

from __future__ import annotations

import torch

#: Elements of the product that are held at a time.
CHUNK = 1 << 22


def row_errors(difference: torch.Tensor, hessian: torch.Tensor | None) -> torch.Tensor:
    """Output error of every row: `e H e^T` of the rows of `difference [rows, in]`, float32 `[rows]`; H = None is the identity."""
    if hessian is None:
        return difference.square().sum(1)
    rows = max(1, CHUNK // difference.shape[1])
    parts = [((part @ hessian) * part).sum(1) for part in difference.split(rows)]
    # Rounding can push an error that is zero below it.
    return torch.cat(parts).clamp_(min=0)


def column_errors(difference: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """The same for a transposed difference `[in, rows]`, float32 `[rows]`."""
    width = max(1, CHUNK // difference.shape[0])
    return torch.cat([((hessian @ part) * part).sum(0) for part in difference.split(width, dim=1)]).clamp_(min=0)
