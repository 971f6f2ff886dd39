"""N:M masks reconsidered: move zeros inside a block of M columns wherever that lowers the output error, rounding included.

With all other weights fixed, the error as a function of one block's values is a small quadratic. Every way to keep N of the M
weights is tried with its best values (rounded one after the other, each making up for those before it), and the block takes
the best if it beats what it has. Block coordinate descent: the output error never rises.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch

from compress import mapped
from compress.prune.patterns import Pattern
from compress.solver.stacked import StackedGrid

#: Columns whose effect on all other columns is applied together.
BLOCK = 128
#: Patterns with more ways to choose than this are not searched.
MAX_SETS = 70


@dataclass
class _Choices:
    """Per block `b` and choice `c`: kept columns `[C, n]`, cost matrices `[B, C, m, m]`, targets `[B, C, n, m]`, rounding order."""

    kept: torch.Tensor
    cost: torch.Tensor
    target: torch.Tensor
    upper: torch.Tensor
    inverse: torch.Tensor


def swap(
    weight: torch.Tensor,
    codes: torch.Tensor | None,
    values: torch.Tensor,
    grid: StackedGrid | None,
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
    choices = _prepare(hessian, pattern)
    gradient = mapped.product(hessian, weight - values)
    group = grid.group_of(columns) if grid is not None else None
    step = max(m, BLOCK // m * m)
    for _ in range(sweeps):
        for start in range(0, columns, step):
            end = min(start + step, columns)
            moved = torch.zeros(end - start, weight.shape[1], device=weight.device)
            for first in range(start, end, m):
                span = slice(first, first + m)
                scale = zero = None
                if grid is not None and group is not None:
                    scale = grid.scale[group[span]]
                    zero = None if grid.zero is None else grid.zero[group[span]]
                better, new, new_codes, kept = _best(
                    choices, first // m, values[span], gradient[span], scale, zero, grid
                )
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
            mapped.let_go(hessian)


def searchable(pattern: Pattern | None) -> bool:
    """Whether the pattern is N:M with few enough choices."""
    return (
        pattern is not None
        and pattern.kind == "n:m"
        and len(list(combinations(range(pattern.m), pattern.n))) <= MAX_SETS
    )


def _prepare(hessian: torch.Tensor, pattern: Pattern) -> _Choices:
    m, n = pattern.m, pattern.n
    blocks = hessian.shape[0] // m
    small = torch.empty(blocks, m, m, dtype=torch.float64, device=hessian.device)
    for block in range(blocks):
        small[block] = hessian[block * m : (block + 1) * m, block * m : (block + 1) * m]
        if block % mapped.PANEL == 0:
            mapped.let_go(hessian)
    # Columns without energy would make a block singular.
    small = small + 1e-6 * mapped.diagonal(hessian).mean().clamp(min=1e-30) * torch.eye(m, device=hessian.device)
    kept = torch.tensor(list(combinations(range(m), n)), device=hessian.device)
    others = [[j for j in range(m) if j not in k] for k in kept.tolist()]
    removed = torch.tensor(others, device=hessian.device)
    inverse = torch.linalg.inv(small)
    choices = len(others)
    cost = torch.zeros(blocks, choices, m, m, dtype=torch.float64, device=hessian.device)
    target = torch.zeros(blocks, choices, n, m, dtype=torch.float64, device=hessian.device)
    upper = torch.empty(blocks, choices, n, n, dtype=torch.float64, device=hessian.device)
    for c in range(choices):
        k, r = kept[c], removed[c]
        kk = small[:, k][:, :, k]
        schur = torch.linalg.inv(inverse[:, r][:, :, r])
        cost[:, c, r[:, None], r[None, :]] = schur
        target[:, c, torch.arange(n), k] = 1
        target[:, c][:, :, r] = torch.linalg.solve(kk, small[:, k][:, :, r])
        upper[:, c] = torch.linalg.cholesky(torch.linalg.inv(kk), upper=True)
    return _Choices(kept, cost.float(), target.float(), upper.float(), inverse.float())


def _best(choices: _Choices, block: int, values, gradient, scale, zero, grid: StackedGrid | None):
    """Which rows improve, `[rows]`, and to which values, codes and mask, `[m, rows]`."""
    m, rows = values.shape
    wanted = values + choices.inverse[block] @ gradient
    costs = ((choices.cost[block] @ wanted) * wanted).sum(1)
    targets = choices.target[block] @ wanted
    n = choices.kept.shape[1]
    upper = choices.upper[block]
    results = torch.empty_like(targets)
    found = torch.empty_like(targets) if grid is not None else None
    for i in range(n):
        target = targets[:, i]
        if grid is None or found is None:
            results[:, i] = target
            continue
        low, high = grid.scheme.code_range
        s = scale[choices.kept[:, i]]
        code = (target / s).round_()
        if zero is None:
            code.clamp_(low, high)
            value = code * s
        else:
            z = zero[choices.kept[:, i]]
            code.add_(z).clamp_(low, high)
            value = (code - z) * s
        found[:, i], results[:, i] = code, value
        lost = (target - value) / upper[:, i, i, None]
        costs += lost.square()
        for later in range(i + 1, n):
            targets[:, later] -= upper[:, i, later, None] * lost
    cost, choice = costs.min(0)
    # The same quadratic at the present values: gradient and values say how far they are from the optimum.
    present = ((wanted - values) * gradient).sum(0)
    better = cost < present * (1 - 1e-5)
    index = choice[None, None, :].expand(1, n, rows)
    positions = choices.kept[choice].T
    new = torch.zeros_like(values).scatter_(0, positions, results.gather(0, index)[0])
    kept = torch.zeros(m, rows, dtype=torch.bool, device=values.device).scatter_(0, positions, True)
    codes = None
    if found is not None:
        codes = torch.zeros_like(values) if zero is None else zero.clone()
        codes.scatter_(0, positions, found.gather(0, index)[0])
    return better, new, codes, kept
