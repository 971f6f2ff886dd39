"""Objective of the solvers: the output error of a layer, `tr(E H E^T)` for `E = W - W_compressed`."""

from __future__ import annotations

import torch

from compress.core import file_matrix

#: Rows that are multiplied at a time.
ROWS = 8192
#: Columns whose products are taken together. H is symmetric, so only what lies below the diagonal is multiplied, and counted twice.
BLOCK = 512


def row_errors(difference: torch.Tensor, hessian: torch.Tensor | None) -> torch.Tensor:
    """Output error of every row: `e H e^T` of the rows of `difference [rows, in]`, float32 `[rows]`; H = None is the identity."""
    if hessian is None:
        return difference.square().sum(1)
    return column_errors(difference.T, hessian)


def column_errors(difference: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """The same for a transposed difference `[in, rows]`, float32 `[rows]`."""
    columns = difference.shape[0]
    errors = []
    for part in difference.split(ROWS, dim=1):
        total = torch.zeros(part.shape[1], device=part.device)
        for span in file_matrix.panels(columns, BLOCK):
            product = hessian[span, span] @ part[span]
            if span.start:
                product.addmm_(hessian[span, : span.start], part[: span.start], alpha=2)
            file_matrix.let_go(hessian)
            total += product.mul_(part[span]).sum(0)
        errors.append(total)
    # Rounding can push an error that is zero below it.
    return torch.cat(errors).clamp_(min=0)
