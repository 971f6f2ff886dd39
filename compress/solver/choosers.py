"""What the column loop asks when it arrives at a column whose mask or scale is not decided yet."""

from __future__ import annotations

from itertools import combinations

import torch

from compress import mapped
from compress.prune.patterns import Pattern, keep_largest
from compress.quantize.grid import Search, search_groups
from compress.solver.factor import Factor
from compress.solver.loop import MaskChooser, ScaleChooser
from runtime.scheme import WeightScheme


def mask_chooser(pattern: Pattern, variance: torch.Tensor, heights: list[int], sparsity: list[float]) -> MaskChooser:
    """Choose by the cost of removing a weight while the later columns compensate: `w_j^2 / U_jj^2` (SparseGPT).

    Args:
        pattern: what the mask must look like.
        variance: `[in]` squared diagonal of the factor of the inverse Hessian, in visiting order.
        heights: rows of each of the stacked weights.
        sparsity: of each of the stacked weights (not used by N:M).
    """

    def choose(
        first: int, last: int, adjusted: torch.Tensor, _corner: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        score = adjusted.square() / variance[first:last, None]
        if pattern.kind == "n:m":
            columns, rows = score.shape
            # [blocks, m, rows]: the weights of one block lie along the middle.
            return keep_largest(score.T.reshape(-1, pattern.m), pattern.n).reshape(rows, columns).T, None
        parts = []
        for part, fraction in zip(score.split(heights, dim=1), sparsity, strict=True):
            # The columns passed so far decide how many zeros are due, so that the rounding never adds up.
            due = pattern_zeros(pattern, part.shape[1], last, fraction) - pattern_zeros(
                pattern, part.shape[1], first, fraction
            )
            parts.append(_mask_part(pattern, part, due))
        return torch.cat(parts, dim=1), None

    return choose


def exact_mask_chooser(pattern: Pattern, factor: Factor) -> MaskChooser:
    """N:M by trying every way to keep `n` of `m` weights, each at its exact cost.

    The cost of removing the set S of a block is `w_S^T ((H^-1)_SS)^-1 w_S`, with the inverse Hessian of the columns not visited
    yet: all of them, also the kept ones of the block, make up for the loss (the multi-weight form of Optimal Brain Surgeon).
    The kept weights of the block are moved accordingly.
    """
    removed = list(combinations(range(pattern.m), pattern.m - pattern.n))
    sets = torch.zeros(len(removed), pattern.m, dtype=torch.bool)
    for i, chosen in enumerate(removed):
        sets[i, list(chosen)] = True
    device = factor.reversed_upper.device
    sets = sets.to(device)

    def choose(
        first: int, last: int, adjusted: torch.Tensor, corner: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if corner is None:
            whole = factor.corner(first, last)
            corner = torch.linalg.solve_triangular(whole, torch.eye(last - first, device=device), upper=False).T
        inverse = corner.T @ corner
        # [sets, m, m]: ((H^-1)_SS)^-1, zero elsewhere; the unit diagonal outside S makes the matrix invertible.
        both = sets[:, :, None] & sets[:, None, :]
        padded = torch.where(both, inverse, torch.eye(pattern.m, device=device))
        costs = torch.where(both, torch.linalg.inv(padded), 0.0)
        multipliers = torch.matmul(costs, adjusted)  # [sets, m, rows]
        best = (multipliers * adjusted).sum(1).argmin(0)
        kept = ~sets[best].T
        multiplier = multipliers.gather(0, best[None, None, :].expand(1, pattern.m, -1))[0]
        return kept, (adjusted - inverse @ multiplier).mul_(kept)

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


def scale_chooser(
    scheme: WeightScheme, dtype: torch.dtype, search: Search, order: torch.Tensor, hessian: torch.Tensor
) -> ScaleChooser:
    """Fit the scale of a group to its weights as earlier columns have left them.

    `order [in]` is the visiting order; the squared error is weighted by the diagonal of `hessian [in, in]`, or by all of it.
    """

    energy = mapped.diagonal(hessian).clamp(min=0)

    def choose(first: int, last: int, adjusted: torch.Tensor, kept: torch.Tensor | None):
        groups = adjusted.T if kept is None else adjusted.T * kept.T
        span = order[first:last]
        cost = energy[span]
        if search == "hessian":
            cost = hessian[span[:, None], span]
            mapped.let_go(hessian)
        return search_groups(groups, scheme, dtype, search, cost)

    return choose
