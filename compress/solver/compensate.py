"""Solve stacked weights: order, factor, column loop, the promise that no row ends above rounding to nearest, refinement."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch

from compress.prune.patterns import Pattern
from compress.quantize.grid import Search
from compress.solver import loop
from compress.solver.choosers import exact_mask_chooser, mask_chooser, scale_chooser
from compress.solver.factor import factorize
from compress.solver.nearest import assemble, keep_float
from compress.solver.objective import column_errors
from compress.solver.order import column_order
from compress.solver.reconstruct import reconstruct
from compress.solver.refine import refine
from compress.solver.stacked import StackedGrid
from compress.solver.swap import searchable, swap
from runtime.scheme import CompressedWeight, Scheme, WeightScheme


@dataclass(frozen=True)
class Options:
    """Settings of the column loop; see the fields of `GPTQConfig` and `SparseGPTConfig`."""

    damping: float = 0.01
    order: Literal["activation", "group", "natural"] = "activation"
    block_size: int = 128
    scales: Search = "mse"
    static_groups: bool = False
    mask_search: Literal["exact", "greedy"] = "exact"
    reconstruction: int = 10
    swaps: int = 0
    sweeps: int = 0
    refit_scales: bool = False


@dataclass
class Constraint:
    """What the weights must become. `masks`: fixed, one a weight; `pattern` and `sparsity`: masks are chosen in the loop."""

    scheme: Scheme
    dtype: torch.dtype
    masks: list[torch.Tensor] | None = None
    pattern: Pattern | None = None
    sparsity: tuple[float, ...] = ()


def compensate(
    weights: list[torch.Tensor], hessian: torch.Tensor, constraint: Constraint, options: Options, name: str
) -> list[tuple[CompressedWeight, dict[str, Any]]]:
    """Solve float32 weights `[out_i, in]` with one input on one Hessian; returns each with its notes.

    Masks first (chosen by the column loop, or given), then the kept weights by least squares, then the column loop again on the
    grid under those masks. The least-squares values are the projection of the target onto what the masks allow, so rounding
    them is rounding the target: both losses are compensated against the same output.
    """
    heights = [w.shape[0] for w in weights]
    energy = hessian.diagonal().clamp(min=0)
    notes: dict[str, Any] = {}
    if dead := int((energy == 0).sum()):
        notes["dead_columns"] = dead
    target = torch.cat([w.T for w in weights], dim=1)
    goal, mask = target, None
    if constraint.pattern is not None:
        goal, mask = _prune(target, heights, hessian, constraint, options, name, notes)
    elif constraint.masks is not None:
        mask = torch.cat([m.T for m in constraint.masks], dim=1)
        goal = reconstruct(target, target * mask, mask, hessian, options.damping, options.reconstruction)
    if constraint.scheme.weights is None:
        return [
            (keep_float(v.T, m, constraint.scheme, constraint.dtype), dict(notes))
            for v, m in zip(goal.split(heights, dim=1), _split(mask, heights), strict=True)
        ]
    codes, grid, replaced = _round(target, goal, mask, heights, hessian, constraint, options, name, notes)
    grids, rows = grid.split(heights), replaced.split(heights)
    return [
        (assemble(c.T, grids[i], m, constraint.scheme, constraint.dtype), notes | {"rows_replaced": int(rows[i].sum())})
        for i, (c, m) in enumerate(zip(codes.split(heights, dim=1), _split(mask, heights), strict=True))
    ]


def _prune(target, heights, hessian, constraint: Constraint, options: Options, name: str, notes: dict[str, Any]):
    """Choose masks and fit the kept weights: float values and mask, `[in, rows]`."""
    pattern = constraint.pattern
    assert pattern is not None
    order = visiting_order(options.order, hessian.diagonal(), None, pattern)
    factor = factorize(hessian[order][:, order], options.damping, name)
    notes |= {"damping": factor.damping, "retries": factor.retries}
    unit = pattern.unit
    if options.mask_search == "exact" and searchable(pattern):
        choose = exact_mask_chooser(pattern, factor.upper)
    else:
        choose = mask_chooser(pattern, factor.upper.diagonal().square(), heights, list(constraint.sparsity))
        if pattern.kind != "n:m":
            unit *= max(1, options.block_size // unit)
    solution = loop.run(target[order], factor, None, None, choose, unit, options.block_size)
    assert solution.mask is not None
    inverse = order.argsort()
    values, mask = solution.values[inverse], solution.mask[inverse]
    values = reconstruct(target, values, mask, hessian, factor.damping, options.reconstruction)
    if options.swaps and searchable(pattern):
        swap(target, None, values, None, mask, hessian, pattern, options.swaps)
        # Few zeros move, so the values are close already.
        values = reconstruct(target, values, mask, hessian, factor.damping, -(-options.reconstruction // 2))
    return values, mask


def _round(
    target, goal, mask, heights, hessian, constraint: Constraint, options: Options, name: str, notes: dict[str, Any]
):
    """Codes `[in, rows]`, their grid, and which rows are rounded to nearest; masks may move if they were chosen here."""
    scheme = constraint.scheme.weights
    assert scheme is not None
    energy = hessian.diagonal().clamp(min=0)
    order = visiting_order(options.order, energy, scheme, None)
    factor = factorize(hessian[order][:, order], options.damping, name)
    notes |= {"damping": factor.damping, "retries": factor.retries}
    masks = None if mask is None else [m.T for m in mask.split(heights, dim=1)]
    static = StackedGrid.fit(
        [g.T for g in goal.split(heights, dim=1)], scheme, constraint.dtype, options.scales, masks, energy, hessian
    )
    grid = _column_grid(static, order, constraint.dtype, options, energy, hessian)
    solution = loop.run(goal[order], factor, grid, None if mask is None else mask[order], block=options.block_size)
    del factor
    inverse = order.argsort()
    values = solution.values[inverse]
    solved = StackedGrid(scheme, grid.scale, grid.zero)
    codes = solution.codes[inverse].to(torch.float32) if solution.codes is not None else solved.codes(values)
    del solution
    replaced = _never_above_nearest(target, codes, values, solved, static, mask, hessian)
    if scheme.type == "int":
        if options.swaps and mask is not None and constraint.pattern is not None and searchable(constraint.pattern):
            swap(target, codes, values, solved, mask, hessian, constraint.pattern, options.swaps)
        if options.sweeps:
            refit = options.refit_scales and scheme.strategy != "tensor"
            refine(target, codes, solved, mask, hessian, constraint.dtype, options.sweeps, refit)
    return codes, solved, replaced


def _split(mask: torch.Tensor | None, heights: list[int]) -> list[torch.Tensor | None]:
    return [None] * len(heights) if mask is None else [m.T.contiguous() for m in mask.split(heights, dim=1)]


def visiting_order(kind: str, energy: torch.Tensor, grid: WeightScheme | None, pattern: Pattern | None) -> torch.Tensor:
    """Permutation `[in]` of the columns; units of a pattern stay together, and groups too where the kind of order says so."""
    unit = pattern.unit if pattern is not None else 1
    if kind == "natural":
        return torch.arange(energy.shape[0], device=energy.device)
    units = [unit]
    if kind == "group" and grid is not None and grid.strategy == "group":
        assert grid.group_size is not None
        if grid.group_size % unit == 0:
            units = [grid.group_size, unit]
    return column_order(energy, units)


def _column_grid(static: StackedGrid, order, dtype, options: Options, energy, hessian) -> loop.ColumnGrid:
    """The grid in visiting order; its scales are set on arrival where a group's columns are visited one after the other."""
    scheme = static.scheme
    low, high = scheme.code_range
    group = static.group_of(order.shape[0])[order].tolist()
    runs = 1 + sum(a != b for a, b in pairwise(group))
    choose = None
    if (
        not options.static_groups
        and scheme.strategy == "group"
        and scheme.type == "int"
        and runs == static.scale.shape[0]
    ):
        cost = hessian[order][:, order] if options.scales == "hessian" else energy[order]
        choose = scale_chooser(scheme, dtype, options.scales, cost)
    zero = None if static.zero is None else static.zero.clone()
    return loop.ColumnGrid(low, high, scheme.type == "float", static.scale.clone(), zero, group, choose)


def _never_above_nearest(
    target, codes, values, solved: StackedGrid, static: StackedGrid, mask, hessian
) -> torch.Tensor:
    """Give rows whose output error is above that of rounding to nearest the nearest codes, in place; returns which, bool `[rows]`."""
    nearest = static.codes(target)
    rounded = static.values(nearest)
    if mask is not None:
        rounded *= mask
    worse = column_errors(target - values, hessian) > column_errors(target - rounded, hessian)
    if bool(worse.any()):
        values[:, worse] = rounded[:, worse]
        codes[:, worse] = nearest[:, worse]
        solved.scale[:, worse] = static.scale[:, worse]
        if solved.zero is not None and static.zero is not None:
            solved.zero[:, worse] = static.zero[:, worse]
    return worse
