"""Polish a solved weight: move codes and scales, one at a time, wherever that lowers the output error.

The column loop decides every column once, knowing only the columns before it. Afterwards each code can be set to the best grid
value given all the others (cyclic coordinate descent on `tr(E H E^T)`), and each scale to its least-squares value given the
codes. Every step lowers the error or leaves it, so the result is never worse. Removed weights stay zero.
"""

from __future__ import annotations

import torch

from compress.solver.stacked import StackedGrid

LEAF = 16
BLOCK = 128


def refine(
    weight: torch.Tensor,
    codes: torch.Tensor,
    grid: StackedGrid,
    mask: torch.Tensor | None,
    hessian: torch.Tensor,
    dtype: torch.dtype,
    sweeps: int,
    refit: bool,
) -> None:
    """Refine `codes` and `grid` in place.

    Args:
        weight: float32 `[in, rows]`, the target, in the original column order.
        codes: float32 `[in, rows]`, integers.
        grid: integer grid; its scales are representable in `dtype` and stay so.
        mask: bool `[in, rows]`, True = kept, or None.
        hessian: `[in, in]` float32.
        sweeps: passes over all columns.
        refit: also refit scales.
    """
    columns, rows = weight.shape
    scheme, scale, zero = grid.scheme, grid.scale, grid.zero
    group = scheme.group_size if scheme.strategy == "group" else columns
    assert group is not None
    low, high = scheme.code_range
    diagonal = hessian.diagonal()
    # A column without energy has no gradient either: any divisor will do.
    inverse = torch.where(diagonal > 0, 1 / diagonal.clamp(min=1e-30), 0.0).tolist()
    values = grid.values(codes)
    if mask is not None:
        values *= mask
    gradient = hessian @ (weight - values)
    value = torch.empty(rows, device=weight.device)
    for _ in range(sweeps):
        for g, start in enumerate(range(0, columns, group)):
            end = min(start + group, columns)
            s, z = scale[g], None if zero is None else zero[g]
            for first in range(start, end, BLOCK):
                last = min(first + BLOCK, end)
                moved = torch.empty(last - first, rows, device=weight.device)
                for leaf in range(first, last, LEAF):
                    upto = min(leaf + LEAF, last)
                    for j in range(leaf, upto):
                        torch.add(values[j], gradient[j], alpha=inverse[j], out=value)
                        value.div_(s).round_()
                        if z is None:
                            value.clamp_(low, high)
                            codes[j] = value
                        else:
                            value.add_(z).clamp_(low, high)
                            codes[j] = value
                            value.sub_(z)
                        value.mul_(s)
                        if mask is not None:
                            value.mul_(mask[j])
                        delta = torch.sub(values[j], value, out=moved[j - first])
                        values[j] = value
                        if j + 1 < upto:
                            gradient[j + 1 : upto].addr_(hessian[j + 1 : upto, j], delta)
                    if upto < last:
                        gradient[upto:last].addmm_(hessian[upto:last, leaf:upto], moved[leaf - first : upto - first])
                # Within the block only later columns were kept up to date; now all of them, without doing those twice.
                local_update = torch.tril(hessian[first:last, first:last], -1)
                gradient.addmm_(hessian[:, first:last], moved)
                gradient[first:last].addmm_(local_update, moved, alpha=-1)
            if refit:
                unit = codes[start:end] if z is None else codes[start:end] - z
                if mask is not None:
                    unit = unit * mask[start:end]
                along = (unit * gradient[start:end]).sum(0)
                curvature = ((hessian[start:end, start:end] @ unit) * unit).sum(0)
                wanted = (s + along / curvature.clamp(min=1e-30)).to(dtype).to(torch.float32)
                step = wanted - s
                better = (step * (curvature * step - 2 * along) < 0) & (wanted.abs() >= torch.finfo(dtype).tiny)
                step = torch.where(better, step, 0.0)
                scale[g] += step
                change = unit * step
                values[start:end] += change
                gradient.addmm_(hessian[:, start:end], change, alpha=-1)
