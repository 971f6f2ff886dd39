"""Solver of the weights that share one input: prune, quantize, or both, on one Hessian."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from compress.core import file_matrix
from compress.core.method import Problem
from compress.core.statistics import Statistics
from compress.prune import METHODS as PRUNE
from compress.quantize import METHODS as QUANTIZE
from compress.quantize.grid import Grid, make_grid
from compress.quantize.objective import row_errors
from compress.quantize.weight_constraint import WeightConstraint
from compress.weights.solver.columns import nearest_rows, rows_at_a_time
from compress.weights.solver.compensate import LayerResult, compensate, keep_float
from compress.weights.solver.factor import Factor, factorize
from runtime.errors import CompressError
from runtime.formats.scheme import CompressedWeight, GridScheme

#: `d` of `propagated`, as a fraction of the mean of the Hessian's diagonal.
DAMPING = 0.05
#: Of the drift of what a layer's output is added to, the part that the layer makes up for.
RESIDUAL_SHARE = 0.7
#: Random directions that tell how much of the drift inputs explain.
DIRECTIONS = 64


@torch.no_grad()
def solve_group(problem: Problem) -> list[LayerResult]:
    """Solve weights that read the same input together.

    Args:
        problem: weights and statistics are finite; shapes fit scheme and pattern.

    Raises:
        CompressError: a Hessian that cannot be factored; constraints that are gone.
    """
    original = [weight.detach() for weight in problem.weights]
    names = problem.names or [f"weight {i}" for i in range(len(original))]
    prune, quantize, settled = problem.prune, problem.quantize, list[WeightConstraint]()
    problem = replace(problem, weights=original, names=names)
    if problem.constraints is not None:
        if len(problem.constraints) != len(original):
            raise CompressError(f"{names[0]}: what recovery has left of it is gone; run again without --resume")
        settled = [own.to(weight.device) for own, weight in zip(problem.constraints, original, strict=True)]
        if settled[0].grid is not None:
            return [_on_grid(weight, own, problem) for weight, own in zip(original, settled, strict=True)]
    statistics, noted = problem.statistics, dict[str, Any]()
    if (
        quantize is not None
        and quantize.objective != "layer"
        and statistics is not None
        and statistics.drift is not None
    ):
        original, share = propagated(original, statistics, names[0])
        problem, noted = replace(problem, weights=original), {"propagated": round(share, 4)}
    if problem.basis is not None:
        original = [problem.basis.weight(weight) for weight in original]
        statistics = None if statistics is None else problem.basis.statistics(statistics)
        problem = replace(problem, weights=original, statistics=statistics)
    problem = replace(problem, scheme=problem.scheme.for_weights(original))
    if prune is not None:
        problem.sparsity = problem.sparsity or [prune.target_sparsity] * len(original)
        problem.masks = [own.mask for own in settled if own.mask is not None] or _ranked_masks(problem)
    pattern = prune.parsed if prune is not None and problem.masks is None else None
    hessian = None if statistics is None else statistics.hessian

    settings = None if quantize is None else quantize.column_loop()
    solve = None if quantize is None else QUANTIZE[quantize.method].solve
    apart = pattern is not None and (settings is None or solve is not None or not settings.joint)
    notes: list[dict[str, Any]] = [{} for _ in original]
    if pattern is not None and apart:
        # Pruning is a pass of its own; what follows rounds the pruned weights under its masks.
        floats = replace(problem, scheme=replace(problem.scheme, weights=None), dtype=torch.float32)
        pruned = compensate(floats, prune.column_loop(), pattern)
        notes, pattern = [p.notes for p in pruned], None
        masks = [p.weight.mask for p in pruned if p.weight.mask is not None]
        problem = replace(problem, weights=[p.weight.values for p in pruned], masks=masks)
    if solve is not None:
        solved = [LayerResult(weight, None, note) for weight, note in zip(solve(problem), notes, strict=True)]
    elif settings is not None:
        if pattern is not None:  # masks are chosen inside the loop
            settings = quantize.column_loop(prune.column_loop())
        solved = compensate(problem, settings, pattern)
    else:
        solved = [LayerResult(nearest(problem, i), None, note) for i, note in enumerate(notes)]
    if apart:  # what rounding lost of weights that were pruned before says nothing of the original ones
        solved = [replace(one, lost=None) for one in solved]
    solved = [replace(one, notes=one.notes | noted) for one in solved]
    return [_result(weight, one, hessian) for weight, one in zip(original, solved, strict=True)]


def _on_grid(weight: torch.Tensor, constraint: WeightConstraint, problem: Problem) -> LayerResult:
    """A weight that is on its grid already, as it is stored."""
    grid = constraint.grid
    assert grid is not None
    found = _rounded(weight, constraint.mask, problem, lambda part, kept, rows: grid.rows(rows))
    return _result(weight, LayerResult(found, None, {"held": True}), None)


def _ranked_masks(problem: Problem) -> list[torch.Tensor] | None:
    """Masks of a method that ranks the weights beforehand; None for one that chooses inside the column loop."""
    pattern, method = problem.prune.parsed, PRUNE[problem.prune.method]
    if method.score is None:
        return None
    return [
        pattern.mask(method.score(weight.float(), problem.statistics), share, method.per_row)
        for weight, share in zip(problem.weights, problem.sparsity or [], strict=True)
    ]


def nearest(problem: Problem, index: int) -> CompressedWeight:
    """Round one weight `[out, in]` of a problem to nearest, or keep its float values, under its mask."""
    weight, mask = problem.weights[index], None if problem.masks is None else problem.masks[index]
    scheme, dtype, statistics = problem.scheme, problem.dtype, problem.statistics
    if scheme.weights is None or problem.quantize is None:
        return keep_float(weight, mask, scheme, dtype)
    importance = statistics.square_mean if statistics is not None else None
    hessian = statistics.hessian if statistics is not None else None
    if not isinstance(scheme.weights, GridScheme):
        own = scheme.weights.for_weight(weight)
        step = nearest_rows(weight.shape[1]) if own.rows_apart else len(weight)
        parts = [part.float() for part in weight.split(max(1, step))]
        fitted = [own.fit(part, dtype, importance) for part in parts]
        codes = torch.cat([own.round(part, parameters) for part, parameters in zip(parts, fitted, strict=True)])
        return CompressedWeight.of(codes, own.join_rows(fitted), mask, replace(scheme, weights=own), dtype)
    form = scheme.weights

    def fit(part: torch.Tensor, kept: torch.Tensor | None, _rows: slice) -> Grid:
        return make_grid(part, form, dtype, problem.quantize.scales, importance, kept, hessian)

    if form.strategy == "tensor":  # one grid for all rows
        whole = fit(weight.float(), mask, slice(None))
        return _rounded(weight, mask, problem, lambda part, kept, rows: whole)
    return _rounded(weight, mask, problem, fit)


def _rounded(
    weight: torch.Tensor,
    mask: torch.Tensor | None,
    problem: Problem,
    grid_of: Callable[[torch.Tensor, torch.Tensor | None, slice], Grid],
) -> CompressedWeight:
    """Round some rows at a time; `grid_of(part, mask, rows)` is the grid of the float32 weights `part` of some rows."""
    step = nearest_rows(weight.shape[1])
    found = []
    for rows in file_matrix.panels(weight.shape[0], step):
        part, kept = weight[rows].float(), None if mask is None else mask[rows]
        grid = grid_of(part, kept, rows)
        found.append(grid.weight(grid.codes(part), kept, problem.scheme, problem.dtype))
    first = found[0]
    if len(found) == 1:
        return first
    parameters = grid.scheme.join_rows([part.parameters for part in found])
    return CompressedWeight.of(torch.cat([part.values for part in found]), parameters, mask, first.scheme, first.dtype)


def _result(weight: torch.Tensor, solved: LayerResult, hessian: torch.Tensor | None) -> LayerResult:
    """With the relative output error, which is computed where the solver does not know it."""
    lost, notes = solved.lost, solved.notes
    rows = nearest_rows(weight.shape[1]) if hessian is None else rows_at_a_time(weight.shape[1])
    total = sum(float(row_errors(part.float(), hessian).sum()) for part in weight.split(rows))
    if lost is None:
        pairs = zip(weight.split(rows), solved.weight.dequantize().split(rows), strict=True)
        lost = sum(float(row_errors(a.float() - b.float(), hessian).sum()) for a, b in pairs)
    if solved.weight.mask is not None:
        notes = notes | {"sparsity": 1 - float(solved.weight.mask.float().mean())}
    return replace(solved, lost=lost, error=lost / total if total > 0 else 0.0, notes=notes)


def propagated(weights: Sequence[torch.Tensor], statistics: Statistics, name: str) -> tuple[list[torch.Tensor], float]:
    """The weights `[out_i, in]` of layers with one input, float32, moved towards what they give in the original model.

    With `x` the input and `o` what is read in its place in the original model, `W' = W + W E[(o - x) x^T] (H + d I)^-1` minimizes
    `E |W' x - W o|^2 + d |W' - W|^2`. Every solver that then keeps the output of `W'` keeps that of the original model: the asymmetric
    calibration of GPTAQ (Li et al., 2025, arXiv 2504.02692) in closed form.

    Args:
        weights: any float dtype; not changed.
        statistics: of the input, with Hessian and drift.
        name: of the first layer, for messages.

    Returns:
        The weights, and the share of the move that was made (`_share`).
    """
    hessian, drift = statistics.hessian, statistics.drift
    assert hessian is not None
    assert drift is not None
    factor = factorize(hessian, torch.arange(hessian.shape[0], device=hessian.device), DAMPING, name)
    along = partial(file_matrix.product, drift)
    share = _share(factor, along, statistics.drifted, statistics.tokens)
    residual_share = 0.0
    if statistics.residual is not None:
        along = partial(_transposed_product, statistics.residual)
        residual_share = _share(factor, along, statistics.residual_square, statistics.tokens)
    found = []
    for weight in weights:
        moved = weight.to(torch.float32, copy=True)
        for rows in file_matrix.panels(weight.shape[0], rows_at_a_time(weight.shape[1])):
            wanted = share * file_matrix.product(drift, moved[rows].T)
            if statistics.residual is not None:
                wanted += residual_share * RESIDUAL_SHARE * statistics.residual[rows].T
                file_matrix.let_go(statistics.residual)
            moved[rows] += factor.solve(wanted).T
        found.append(moved)
    return found, share


def _transposed_product(matrix: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`matrix^T other`, panel by panel."""
    out = torch.zeros(matrix.shape[1], other.shape[1], device=other.device)
    for rows in file_matrix.panels(matrix.shape[0]):
        out.addmm_(matrix[rows].T, other[rows])
        file_matrix.let_go(matrix)
    return out


def _share(
    factor: Factor, product: Callable[[torch.Tensor], torch.Tensor], drifted: torch.Tensor | None, tokens: int
) -> float:
    """Of the drift that inputs explain on the calibration text, the share that they explain on other text too.

    Least squares with p inputs explain p / n of any noise in n tokens and leave the rest, so what is explained, `F = tr(D^T H^-1 D)`, has
    `p / (n - p)` times the rest in it. F is estimated from random directions (Hutchinson, 1990).
    """
    columns = factor.columns
    if tokens <= columns:
        return 0.0
    assert drifted is not None
    generator = torch.Generator(drifted.device).manual_seed(0)
    along = product(torch.randn(len(drifted), DIRECTIONS, generator=generator, device=drifted.device))
    explained = float((along * factor.solve(along)).sum()) / DIRECTIONS
    if explained <= 0:
        return 0.0
    rest = max(0.0, float(drifted.sum()) - explained)
    return max(0.0, 1 - columns / (tokens - columns) * rest / explained)
