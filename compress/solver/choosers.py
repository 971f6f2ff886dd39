"""What the column loop asks when it arrives at a column whose mask or scale is not decided yet."""

from __future__ import annotations

import torch

from compress.prune.patterns import Pattern, keep_largest
from compress.quantize.grid import Search, search_groups
from compress.solver.loop import MaskChooser, ScaleChooser
from runtime.scheme import WeightScheme


def mask_chooser(pattern: Pattern, diagonal: torch.Tensor, heights: list[int], sparsity: list[float]) -> MaskChooser:
    """Choose by the cost of removing a weight while the later columns compensate: `w_j^2 R_jj^2` (SparseGPT).

    Args:
        pattern: what the mask must look like.
        diagonal: `[in]` squared diagonal of the factor, in visiting order.
        heights: rows of each of the stacked weights.
        sparsity: of each of the stacked weights (not used by N:M).
    """

    def choose(first: int, last: int, adjusted: torch.Tensor) -> torch.Tensor:
        score = adjusted.square() * diagonal[first:last, None]
        if pattern.kind == "n:m":
            columns, rows = score.shape
            # [blocks, m, rows]: the weights of one block lie along the middle.
            return keep_largest(score.T.reshape(-1, pattern.m), pattern.n).reshape(rows, columns).T
        parts = []
        for part, fraction in zip(score.split(heights, dim=1), sparsity, strict=True):
            # The columns passed so far decide how many zeros are due, so that the rounding never adds up.
            due = pattern_zeros(pattern, part.shape[1], last, fraction) - pattern_zeros(
                pattern, part.shape[1], first, fraction
            )
            parts.append(_mask_part(pattern, part, due))
        return torch.cat(parts, dim=1)

    return choose


def pattern_zeros(pattern: Pattern, rows: int, columns: int, sparsity: float) -> int:
    """How many units (weights, or blocks) of the first `columns` columns are zero."""
    units = (rows // pattern.rows) * (columns // pattern.columns) if pattern.kind == "block" else rows * columns
    return round(sparsity * units)


def _mask_part(pattern: Pattern, score: torch.Tensor, zeros: int) -> torch.Tensor:
    if pattern.kind == "unstructured":
        return keep_largest(score.reshape(1, -1), score.numel() - zeros).reshape(score.shape)
    columns, rows = score.shape
    pooled = score.reshape(columns // pattern.columns, pattern.columns, rows // pattern.rows, pattern.rows).sum((1, 3))
    kept = keep_largest(pooled.reshape(1, -1), pooled.numel() - zeros).reshape(pooled.shape)
    return kept.repeat_interleave(pattern.columns, 0).repeat_interleave(pattern.rows, 1)


def scale_chooser(scheme: WeightScheme, dtype: torch.dtype, search: Search, cost: torch.Tensor) -> ScaleChooser:
    """Fit the scale of a group to its weights as earlier columns have left them.

    `cost`, in visiting order: `[in]` weights of the squared error, or the Hessian `[in, in]`.
    """

    def choose(first: int, last: int, adjusted: torch.Tensor, kept: torch.Tensor | None):
        groups = adjusted.T.contiguous() if kept is None else adjusted.T * kept.T
        return search_groups(groups, scheme, dtype, search, cost[first:last] if cost.dim() == 1 else cost[first:last, first:last])

    return choose
