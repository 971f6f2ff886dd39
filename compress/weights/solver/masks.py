"""Sparsity masks: chosen in the column loop, fitted by least squares, and N:M masks reconsidered by swapping zeros inside a block.

Swaps: with all other weights fixed, the error as a function of one block's values is a small quadratic. Every way to keep N of the M
weights is tried with its best values (rounded one after the other, each making up for those before it), and the block takes
the best if it beats what it has. Block coordinate descent: the output error never rises.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb

import torch

from compress.core import file_matrix
from compress.prune.patterns import Pattern
from compress.quantize.grid import Grid, Search, search_groups
from compress.weights.solver.factor import Factor
from compress.weights.solver.loop import MaskChooser, ScaleChooser
from runtime.formats.scheme import GridScheme

# What the column loop asks when it arrives at a column whose mask or scale is not decided yet.


def mask_chooser(pattern: Pattern, variance: torch.Tensor, heights: list[int], sparsity: list[float]) -> MaskChooser:
    """Choose by the cost of removing a weight while the later columns compensate: `w_j^2 / U_jj^2` (SparseGPT).

    Args:
        pattern: what the mask must look like.
        variance: `[in]` squared diagonal of the factor of the inverse Hessian, in visiting order.
        heights: rows of each of the stacked weights.
        sparsity: of each of the stacked weights (not used by N:M).
    """
    transposed = replace(pattern, rows=pattern.columns, columns=pattern.rows)

    def choose(
        first: int, last: int, adjusted: torch.Tensor, _corner: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        score = adjusted.square() / variance[first:last, None]
        if pattern.kind == "n:m":
            return pattern.mask(score.T, 0.0).T, None
        parts = []
        for part, rows, fraction in zip(score.split(heights, dim=1), heights, sparsity, strict=True):
            # The columns passed so far decide how many zeros are due, so that the rounding never adds up.
            due = pattern.units(rows, last, fraction) - pattern.units(rows, first, fraction)
            parts.append(transposed.without(part, due))
        return torch.cat(parts, dim=1), None

    return choose


def exact_mask_chooser(pattern: Pattern, factor: Factor) -> MaskChooser:
    """N:M by trying every way to keep `n` of `m` weights, each at its exact cost.

    The cost of removing the set S of a block is `w_S^T ((H^-1)_SS)^-1 w_S`, with the inverse Hessian of the columns not visited
    yet: all of them, also the kept ones of the block, make up for the loss (the multi-weight form of Optimal Brain Surgeon).
    The kept weights of the block are moved accordingly.
    """
    device = factor.reversed_upper.device
    removed = torch.tensor(list(combinations(range(pattern.m), pattern.m - pattern.n)), device=device)
    sets = torch.zeros(len(removed), pattern.m, dtype=torch.bool, device=device).scatter_(1, removed, True)

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


def scale_chooser(
    scheme: GridScheme, dtype: torch.dtype, search: Search, order: torch.Tensor, hessian: torch.Tensor
) -> ScaleChooser:
    """Fit the scale of a group to its weights as earlier columns have left them.

    `order [in]` is the visiting order; the squared error is weighted by the diagonal of `hessian [in, in]`, or by all of it.
    """

    energy = file_matrix.diagonal(hessian).clamp(min=0)

    def choose(first: int, last: int, adjusted: torch.Tensor, kept: torch.Tensor | None) -> Grid:
        groups = adjusted.T if kept is None else adjusted.T * kept.T
        span = order[first:last]
        if scheme.unit(order.shape[0]) > scheme.width(order.shape[0]):  # several groups, which their places tell apart
            span, place = span.sort()
            groups = groups[:, place]
        cost = energy[span]
        if search == "hessian":
            cost = hessian[span[:, None], span]
            file_matrix.let_go(hessian)
        return search_groups(groups, scheme, dtype, search, cost)

    return choose


# Best values of the kept weights, given which ones are removed: least squares on the layer's outputs, row by row.


def reconstruct(
    target: torch.Tensor,
    start: torch.Tensor,
    mask: torch.Tensor,
    hessian: torch.Tensor,
    damping: float,
    iterations: int,
) -> torch.Tensor:
    """Minimise `(t - v)^T (H + d I) (t - v)` over `v` that are zero where the mask says so.

    All rows at once by conjugate gradients (Jacobi-preconditioned), one matrix product an iteration; the error falls with
    every iteration, so the result is never worse than `start`.

    Args:
        target: float32 `[in, rows]`.
        start: first guess, zero where removed.
        mask: bool `[in, rows]`, True = kept.
        hessian: `[in, in]`.
        damping: `d` as a fraction of the mean of the diagonal.
    """
    if iterations == 0:
        return start
    energy = file_matrix.diagonal(hessian)
    extra = damping * float(energy.mean())
    inverse = (1 / (energy + extra).clamp(min=1e-30))[:, None]
    values = start.clone()
    difference = target - values
    residual = file_matrix.product(hessian, difference).add_(difference, alpha=extra).mul_(mask)
    del difference
    direction = residual * inverse
    old = (residual * direction).sum(0)
    for _ in range(iterations):
        product = file_matrix.product(hessian, direction).add_(direction, alpha=extra)
        step = old / (direction * product).sum(0).clamp(min=1e-30)
        values.addcmul_(direction, step[None, :])
        residual.addcmul_(product.mul_(mask), step[None, :], value=-1)
        conditioned = torch.mul(residual, inverse, out=product)
        new = (residual * conditioned).sum(0)
        direction.mul_((new / old.clamp(min=1e-30))[None, :]).add_(conditioned)
        old = new
    return values


#: Columns whose effect on all other columns is applied together.
BLOCK = 128
#: Patterns with more ways to choose than this are not searched.
MAX_SETS = 70


def swap(
    weight: torch.Tensor,
    codes: torch.Tensor | None,
    values: torch.Tensor,
    grid: Grid | None,
    mask: torch.Tensor,
    hessian: torch.Tensor,
    pattern: Pattern,
    sweeps: int,
) -> None:
    """Improve `values`, `codes` and `mask` in place.

    Args:
        weight: float32 `[in, rows]`, the target, in the original column order.
        codes: float32 `[in, rows]`, or None for float values.
        values: float32 `[in, rows]`, zero where removed.
        grid: integer grid of the codes, or None.
        mask: bool `[in, rows]`, True = kept; has the pattern and keeps it.
        hessian: `[in, in]`, positive definite on every block of M columns.
    """
    columns, m = weight.shape[0], pattern.m
    choices = _Choices(hessian, pattern)
    gradient = file_matrix.product(hessian, weight - values)
    step = max(m, BLOCK // m * m)
    for _ in range(sweeps):
        for here in file_matrix.panels(columns, step):
            start, end = here.start, here.stop
            moved = torch.zeros(end - start, weight.shape[1], device=weight.device)
            for first in range(start, end, m):
                span = slice(first, first + m)
                own = None
                if grid is not None:
                    group = torch.arange(first, first + m, device=weight.device) // grid.scheme.width(columns)
                    own = grid[group]
                better, new, new_codes, kept = choices.best(first // m, values[span], gradient[span], own)
                new = torch.where(better, new, values[span])
                delta = torch.sub(values[span], new, out=moved[first - start : first - start + m])
                values[span] = new
                mask[span] = torch.where(better, kept, mask[span])
                if codes is not None and new_codes is not None:
                    codes[span] = torch.where(better, new_codes, codes[span])
                if first + m < end:
                    gradient[first + m : end].addmm_(hessian[first + m : end, span], delta)
            # The later columns of the stretch are up to date; everything else is not.
            gradient.addmm_(hessian[start:end].T, moved)  # as the columns, which are not together
            block = torch.arange(end - start, device=weight.device) // m
            done = hessian[start:end, start:end] * (block[:, None] > block[None, :])
            gradient[start:end].addmm_(done, moved, alpha=-1)
            file_matrix.let_go(hessian)


def searchable(pattern: Pattern | None) -> bool:
    """Whether the pattern is N:M with few enough choices."""
    return pattern is not None and pattern.kind == "n:m" and comb(pattern.m, pattern.n) <= MAX_SETS


class _Choices:
    """All ways to keep `n` of the `m` weights of each block, and the best values for each way.

    Per block `b` and choice `c`: kept columns `[C, n]`, cost matrices `[B, C, m, m]`, targets `[B, C, n, m]`, and the factor `[B, C, n, n]`
    by which weights that are rounded later make up for those before.
    """

    def __init__(self, hessian: torch.Tensor, pattern: Pattern) -> None:
        m, n, device = pattern.m, pattern.n, hessian.device
        blocks = hessian.shape[0] // m
        small = torch.empty(blocks, m, m, dtype=torch.float64, device=device)
        for block in range(blocks):
            small[block] = hessian[block * m : (block + 1) * m, block * m : (block + 1) * m]
            if block % file_matrix.PANEL == 0:
                file_matrix.let_go(hessian)
        # Columns without energy would make a block singular.
        small = small + 1e-6 * file_matrix.diagonal(hessian).mean().clamp(min=1e-30) * torch.eye(m, device=device)
        self.kept = torch.tensor(list(combinations(range(m), n)), device=device)
        others = [[j for j in range(m) if j not in k] for k in self.kept.tolist()]
        removed = torch.tensor(others, device=device)
        inverse = torch.linalg.inv(small)
        cost, target, upper = (
            torch.zeros(blocks, len(others), *size, dtype=torch.float64, device=device)
            for size in ((m, m), (n, m), (n, n))
        )
        for c, (k, r) in enumerate(zip(self.kept, removed, strict=True)):
            kk = small[:, k][:, :, k]
            cost[:, c, r[:, None], r[None, :]] = torch.linalg.inv(inverse[:, r][:, :, r])
            target[:, c, torch.arange(n), k] = 1
            target[:, c][:, :, r] = torch.linalg.solve(kk, small[:, k][:, :, r])
            upper[:, c] = torch.linalg.cholesky(torch.linalg.inv(kk), upper=True)
        self.cost, self.target, self.upper, self.inverse = cost.float(), target.float(), upper.float(), inverse.float()

    def best(self, block: int, values: torch.Tensor, gradient: torch.Tensor, grid: Grid | None):
        """Which rows of `values [m, rows]` improve, `[rows]`, and to which values, codes (None without a grid) and mask, `[m, rows]`.

        Args:
            grid: of the block's columns, `scale [m, rows]`; None keeps float values.
        """
        m, rows = values.shape
        wanted = values + self.inverse[block] @ gradient
        costs = ((self.cost[block] @ wanted) * wanted).sum(1)
        targets, upper = self.target[block] @ wanted, self.upper[block]
        results = targets if grid is None else torch.empty_like(targets)
        found = None if grid is None else torch.empty_like(targets)
        if grid is not None and found is not None:
            for i in range(self.kept.shape[1]):
                target = targets[:, i]
                own = grid[self.kept[:, i]]
                code = grid.scheme.codes(target, own.scale, own.zero)
                value = grid.scheme.values(code, own.scale, own.zero)
                found[:, i], results[:, i] = code, value
                lost = (target - value) / upper[:, i, i, None]
                costs += lost.square()
                for later in range(i + 1, self.kept.shape[1]):
                    targets[:, later] -= upper[:, i, later, None] * lost
        cost, choice = costs.min(0)
        # The same quadratic at the present values: gradient and values say how far they are from the optimum.
        present = ((wanted - values) * gradient).sum(0)
        better = cost < present * (1 - 1e-5)
        index = choice[None, None, :].expand(1, self.kept.shape[1], rows)
        positions = self.kept[choice].T
        new = torch.zeros_like(values).scatter_(0, positions, results.gather(0, index)[0])
        kept = torch.zeros(m, rows, dtype=torch.bool, device=values.device).scatter_(0, positions, True)
        codes = None
        if grid is not None and found is not None:
            codes = torch.zeros_like(values) if grid.zero is None else grid.zero.clone()
            codes.scatter_(0, positions, found.gather(0, index)[0])
        return better, new, codes, kept
