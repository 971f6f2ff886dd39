"""Solve stacked weights with the column loop: order, factor, loop, and the promise that no row ends above rounding to nearest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from compress.prune.patterns import Pattern
from compress.quantize.grid import Grid, Search, make_grid
from compress.solver import loop
from compress.solver.choosers import mask_chooser, scale_chooser
from compress.solver.factor import factorize
from compress.solver.nearest import assemble, keep_float
from compress.solver.objective import row_errors
from compress.solver.order import column_order
from runtime.scheme import CompressedWeight, Scheme, WeightScheme


@dataclass(frozen=True)
class Options:
    """Settings of the column loop; see the fields of `GPTQConfig` and `SparseGPTConfig`."""

    damping: float = 0.01
    order: Literal["activation", "group", "natural"] = "activation"
    block_size: int = 128
    scales: Search = "mse"


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
    scheme, grid_scheme = constraint.scheme, constraint.scheme.weights
    heights = [w.shape[0] for w in weights]
    columns = weights[0].shape[1]
    energy = hessian.diagonal().clamp(min=0)
    order = visiting_order(options.order, energy, grid_scheme, constraint.pattern)
    sorted_hessian = hessian[order][:, order]
    factor = factorize(sorted_hessian, options.damping, name)
    stacked = torch.cat([w[:, order].T for w in weights], dim=1)
    static = [
        make_grid(w, grid_scheme, constraint.dtype, options.scales, energy, m, hessian)
        for w, m in zip(weights, constraint.masks or [None] * len(weights), strict=True)
    ] if grid_scheme is not None else []  # fmt: skip
    grid = _column_grid(static, heights, order, grid_scheme, constraint.dtype, options, energy)
    mask = None if constraint.masks is None else torch.cat([m[:, order].T for m in constraint.masks], dim=1)
    choose, unit = None, 1
    if constraint.pattern is not None:
        choose = mask_chooser(constraint.pattern, factor.diagonal, heights, list(constraint.sparsity))
        unit = (
            constraint.pattern.m
            if constraint.pattern.kind == "n:m"
            else max(1, options.block_size // constraint.pattern.unit) * constraint.pattern.unit
        )
    solution = loop.run(stacked, factor, grid, mask, choose, unit, options.block_size)
    notes = {"damping": factor.damping, "retries": factor.retries, "dead_columns": int((energy == 0).sum())}

    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(columns, device=order.device)
    results = []
    position = 0
    for i, height in enumerate(heights):
        rows = slice(position, position + height)
        position += height
        kept = None if solution.mask is None else solution.mask[:, rows][inverse].T.contiguous()
        values = solution.values[:, rows][inverse].T.contiguous()
        if grid_scheme is None:
            results.append((keep_float(values, kept, scheme, constraint.dtype), dict(notes)))
            continue
        assert grid is not None
        if solution.codes is not None:
            codes = solution.codes[:, rows][inverse].T.contiguous()
        else:
            codes = static[i].codes(values)
        final = Grid(
            grid_scheme,
            grid.scale[:, rows].T.contiguous(),
            None if grid.zero is None else grid.zero[:, rows].T.contiguous(),
        )
        if grid_scheme.strategy == "tensor":
            final = static[i]
        replaced = _never_above_nearest(weights[i], hessian, codes, values, final, static[i], kept)
        results.append((assemble(codes, final, kept, scheme, constraint.dtype), notes | {"rows_replaced": replaced}))
    return results


def visiting_order(kind: str, energy: torch.Tensor, grid: WeightScheme | None, pattern: Pattern | None) -> torch.Tensor:
    """Permutation `[in]` of the columns; units of a pattern stay together, and groups too where the kind of order says so."""
    unit = pattern.unit if pattern is not None else 1
    columns = energy.shape[0]
    if kind == "natural":
        return torch.arange(columns, device=energy.device)
    units = [unit]
    if kind == "group" and grid is not None and grid.strategy == "group":
        assert grid.group_size is not None
        if grid.group_size % unit == 0:
            units = [grid.group_size, unit]
    return column_order(energy, units)


def _column_grid(static, heights, order, scheme, dtype, options, energy) -> loop.ColumnGrid | None:
    if scheme is None:
        return None
    low, high = scheme.code_range
    size = scheme.group_size if scheme.strategy == "group" else order.shape[0]
    group = (order // size).tolist()
    scale = torch.cat(
        [g.scale.T.expand(-1, height) for g, height in zip(static, heights, strict=True)], dim=1
    ).contiguous()
    zero = None
    if not scheme.symmetric:
        zero = torch.cat(
            [g.zero.T.expand(-1, height) for g, height in zip(static, heights, strict=True)], dim=1
        ).contiguous()
    contiguous = sum(a != b for a, b in zip(group, group[1:], strict=False)) + 1 == scheme.groups(order.shape[0])
    choose = None
    if contiguous and scheme.strategy == "group" and scheme.type == "int":
        choose = scale_chooser(scheme, dtype, options.scales, energy[order])
    return loop.ColumnGrid(low, high, scheme.type == "float", scale, zero, group, choose)


def _never_above_nearest(weight, hessian, codes, values, grid: Grid, static: Grid, kept) -> int:
    """Give rows whose output error is above that of rounding to nearest the nearest codes; returns how many. In place."""
    nearest = static.codes(weight)
    rounded = static.values(nearest)
    if kept is not None:
        rounded *= kept
    worse = row_errors(weight - values, hessian) > row_errors(weight - rounded, hessian)
    count = int(worse.sum())
    if count:
        codes[worse] = nearest[worse].to(codes.dtype)
        values[worse] = rounded[worse]
        if grid is not static:
            grid.scale[worse] = static.scale[worse]
            if grid.zero is not None and static.zero is not None:
                grid.zero[worse] = static.zero[worse]
    return count
