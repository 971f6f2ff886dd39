"""Solve stacked weights: order, factor, column loop, the promise that no row ends above rounding to nearest, refinement."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
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
from runtime.scheme import CompressedWeight, Scheme, WeightScheme


#: N:M patterns with more ways to choose than this are pruned greedily.
MAX_SETS = 70


@dataclass(frozen=True)
class Options:
    """Settings of the column loop; see the fields of `GPTQConfig` and `SparseGPTConfig`."""

    damping: float = 0.01
    order: Literal["activation", "group", "natural"] = "activation"
    block_size: int = 128
    scales: Search = "mse"
    static_groups: bool = False
    mask_search: Literal["exact", "greedy"] = "exact"
    reconstruction: int = 0
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
    """Solve float32 weights `[out_i, in]` with one input in one pass; returns each with its notes."""
    heights = [w.shape[0] for w in weights]
    energy = hessian.diagonal().clamp(min=0)
    grid_scheme = constraint.scheme.weights
    order = visiting_order(options.order, energy, grid_scheme, constraint.pattern)
    factor = factorize(hessian[order][:, order], options.damping, name)
    notes: dict[str, Any] = {"damping": factor.damping, "retries": factor.retries}
    if dead := int((energy == 0).sum()):
        notes["dead_columns"] = dead

    target = torch.cat([w.T for w in weights], dim=1)
    mask = torch.cat([m.T for m in constraint.masks], dim=1) if constraint.masks is not None else None
    static = grid = None
    if grid_scheme is not None:
        static = StackedGrid.fit(
            weights, grid_scheme, constraint.dtype, options.scales, constraint.masks, energy, hessian
        )
        grid = _column_grid(static, order, constraint.dtype, options, energy, hessian)
    choose, unit = None, 1
    if (pattern := constraint.pattern) is not None:
        if pattern.kind == "n:m" and options.mask_search == "exact" and comb(pattern.m, pattern.n) <= MAX_SETS:
            choose = exact_mask_chooser(pattern, factor.upper)
        else:
            choose = mask_chooser(pattern, factor.upper.diagonal().square(), heights, list(constraint.sparsity))
        unit = pattern.unit if pattern.kind == "n:m" else pattern.unit * max(1, options.block_size // pattern.unit)
    visited_mask = None if mask is None else mask[order]
    solution = loop.run(target[order], factor, grid, visited_mask, choose, unit, options.block_size)
    del factor
    inverse = order.argsort()
    values = solution.values[inverse]
    mask = None if solution.mask is None else solution.mask[inverse]
    kept = [None] * len(heights) if mask is None else [m.T.contiguous() for m in mask.split(heights, dim=1)]
    if static is None or grid is None:
        if mask is not None:
            values = reconstruct(target, values, mask, hessian, options.damping, options.reconstruction)
        return [
            (keep_float(v.T, m, constraint.scheme, constraint.dtype), dict(notes))
            for v, m in zip(values.split(heights, dim=1), kept, strict=True)
        ]
    solved = StackedGrid(static.scheme, grid.scale, grid.zero)
    codes = solution.codes[inverse].to(torch.float32) if solution.codes is not None else solved.codes(values)
    del solution
    replaced = _never_above_nearest(target, codes, values, solved, static, mask, hessian)
    if options.sweeps and static.scheme.type == "int":
        refit = options.refit_scales and static.scheme.strategy != "tensor"
        refine(target, codes, solved, mask, hessian, constraint.dtype, options.sweeps, refit)
    return [
        (assemble(c, g, m, constraint.scheme, constraint.dtype), notes | {"rows_replaced": int(r.sum())})
        for c, g, m, r in zip(
            (part.T for part in codes.split(heights, dim=1)),
            solved.split(heights),
            kept,
            replaced.split(heights),
            strict=True,
        )
    ]


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
    runs = 1 + sum(a != b for a, b in zip(group, group[1:], strict=False))
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
        codes[:, worse] = nearest[:, worse]
        solved.scale[:, worse] = static.scale[:, worse]
        if solved.zero is not None and static.zero is not None:
            solved.zero[:, worse] = static.zero[:, worse]
    return worse
