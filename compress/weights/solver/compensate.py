"""GPTQ and SparseGPT for weights that share an input: order, factor, column loop, refinement.

No row ends with a larger output error than rounding to nearest would have left it with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from compress.core import file_matrix
from compress.core.method import ColumnLoop, Problem
from compress.prune.patterns import Pattern
from compress.quantize.grid import Grid
from compress.quantize.objective import column_errors
from compress.weights.solver import loop
from compress.weights.solver.columns import Chunk, chunks, column_order, rows_are_independent, stacked_grid
from compress.weights.solver.factor import Factor, factorize
from compress.weights.solver.masks import exact_mask_chooser, mask_chooser, reconstruct, scale_chooser, searchable, swap
from compress.weights.solver.refine import refine
from compress.weights.solver.row_loop import RowLoop
from compress.weights.solver.vectors import VectorSolver
from runtime.formats.grid import GridScheme
from runtime.formats.representation import Representation, Tensors
from runtime.formats.scheme import CompressedWeight, Scheme

#: Size of the random sketch that tells rows which are plainly better from those that have to be computed.
SKETCH = 256
#: A row is plainly better if its error is below this fraction of what the sketch says of rounding to nearest. `k |S e|^2 / e^T H e` is
#: chi-square with k = SKETCH degrees of freedom, so the chance of a wrong word is below exp(-k/2 (1/f - 1 + ln f)) = 3e-9 a row.
SAFE = 0.6
#: Columns that are rounded to nearest at a time.
COLUMNS = 64


@dataclass
class LayerResult:
    """A solved layer.

    Attributes:
        weight: what is stored.
        lost: output error `tr(E H E^T)`; None: not known.
        notes: what a report should know: damping, retries, dead columns, rows where rounding to nearest was kept, sparsity; with the
            objective `propagated` the share of the drift that was made up for.
        error: `lost / tr(W H W^T)`, without a Hessian `|E|^2 / |W|^2`; NaN until the group is solved. With `propagated`, W are the weights
            that make up for the drift.
    """

    weight: CompressedWeight
    lost: float | None
    notes: dict[str, Any]
    error: float = math.nan


def keep_float(weight: torch.Tensor, mask: torch.Tensor | None, scheme: Scheme, dtype: torch.dtype) -> CompressedWeight:
    """Float values with the removed ones set to zero."""
    values = weight if mask is None else weight * mask
    return CompressedWeight(values.to(dtype), None, None, mask, scheme, dtype)


def compensate(problem: Problem, options: ColumnLoop, pattern: Pattern | None = None) -> list[LayerResult]:
    """Solve weights `[out_i, in]` (any float dtype) with one input on one Hessian.

    Masks first (chosen by the column loop, or given), then the kept weights by least squares, then the column loop again on the
    grid under those masks. The least-squares values are the projection of the target onto what the masks allow, so rounding
    them is rounding the target: both losses are compensated against the same output. Each pass goes over the rows in chunks,
    and only one factor of the Hessian is in memory at a time. Weights that are not on a grid are solved without
    masks, and all rows together where rows share parameters.

    Args:
        problem: its masks are fixed, its sparsity is that of `pattern`.
        pattern: of masks that are chosen in the loop; None: none are.
    """
    weights, masks, scheme = problem.weights, problem.masks, problem.scheme.weights
    hessian = second_moments(problem)
    parts = chunks([w.shape[0] for w in weights], weights[0].shape[1], rows_are_independent(pattern, scheme))
    notes: dict[str, Any] = {}
    if dead := int((file_matrix.diagonal(hessian) <= 0).sum()):
        notes["dead_columns"] = dead
    goals: list[torch.Tensor] | None = None
    if pattern is not None:
        goals, masks = _prune(problem, parts, options, pattern, notes)
    if scheme is None:
        assert goals is not None
        assert masks is not None
        return [
            LayerResult(keep_float(goal, mask, problem.scheme, problem.dtype), None, dict(notes))
            for goal, mask in zip(goals, masks, strict=True)
        ]
    order = visiting_order(options.order, file_matrix.diagonal(hessian).clamp(min=0), scheme, None)
    factor = factorize(hessian, order, options.damping, problem.names[0])
    notes |= {"damping": factor.damping, "retries": factor.retries}
    rows = None
    if problem.output_hessians is not None:
        rows = RowLoop.of(weights, problem.output_hessians, problem.names)
        parts, weights = rows.chunks(), rows.visited(weights)
        goals, masks = (None if given is None else rows.visited(given) for given in (goals, masks))
    if not isinstance(scheme, GridScheme):
        solver = VectorSolver(scheme, hessian, order, factor, problem.dtype, options)
        return _solve_vectors(weights, parts, problem, solver, rows, notes)
    return _GridSolver(scheme, problem, options, pattern, order, factor).solve(
        weights, goals, masks, parts, notes, rows
    )


def second_moments(problem: Problem) -> torch.Tensor:
    """The Hessian of a problem whose methods have asked for it."""
    assert problem.statistics is not None
    assert problem.statistics.hessian is not None
    return problem.statistics.hessian


def _prune(
    problem: Problem, parts: list[Chunk], options: ColumnLoop, pattern: Pattern, notes: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Choose masks and fit the kept weights: float32 values and masks, `[out, in]` each."""
    weights, hessian, sparsity = problem.weights, second_moments(problem), problem.sparsity
    assert sparsity is not None
    order = visiting_order(options.order, file_matrix.diagonal(hessian), None, pattern)
    inverse = order.argsort()
    factor = factorize(hessian, order, options.damping, problem.names[0])
    notes |= {"damping": factor.damping, "retries": factor.retries}
    goals = [torch.empty(w.shape, device=w.device) for w in weights]
    masks = [torch.empty(w.shape, dtype=torch.bool, device=w.device) for w in weights]
    for chunk in parts:
        target = chunk.stack(weights).float()
        unit = pattern.unit
        if options.mask_search == "exact" and searchable(pattern):
            choose = exact_mask_chooser(pattern, factor)
        else:
            shares = [sparsity[index] for index, _, _ in chunk.parts]
            choose = mask_chooser(pattern, factor.diagonal.square().reciprocal(), chunk.heights, shares)
            if pattern.kind != "n:m":
                unit *= max(1, options.block_size // unit)
        solution = loop.run(target[order], factor, None, None, choose, unit, options.block_size)
        assert solution.mask is not None
        mask = solution.mask[inverse]
        values = (target - solution.error[inverse]).mul_(mask)
        del solution
        values = reconstruct(target, values, mask, hessian, factor.damping, options.reconstruction)
        if options.swaps and searchable(pattern):
            swap(target, None, values, None, mask, hessian, pattern, options.swaps)
            # Few zeros move, so the values are close already.
            values = reconstruct(target, values, mask, hessian, factor.damping, -(-options.reconstruction // 2))
        chunk.unstack(values, goals)
        chunk.unstack(mask, masks)
    return goals, masks


@dataclass
class Rounded:
    """A solved chunk: codes `[in, rows]` (int8; fp8 grids: float32 values), their grid and mask, the output error `[rows]`, and which rows
    (bool) were better rounded to nearest."""

    codes: torch.Tensor
    grid: Grid
    mask: torch.Tensor | None
    lost: torch.Tensor
    nearest: torch.Tensor

    def put(self, rows: torch.Tensor, codes: torch.Tensor, grid: Grid, lost: torch.Tensor) -> None:
        """Replace some rows (indices)."""
        self.codes[:, rows] = codes.to(self.codes.dtype)
        self.grid.put((slice(None), rows), grid)
        self.lost[rows] = lost

    def split(self, heights: list[int]) -> Iterator[Rounded]:
        """The rows of each weight in it, codes in their final dtype."""
        codes, start = self.codes.to(self.grid.scheme.code_dtype), 0
        for height in heights:
            here = slice(start, start + height)
            mask = None if self.mask is None else self.mask[:, here]
            yield Rounded(codes[:, here], self.grid.rows(here), mask, self.lost[here], self.nearest[here])
            start += height


@dataclass
class _GridSolver:
    """The column loop on a grid, for weights on one Hessian: its order and factor, and the steps of one chunk of rows.

    No row ends with a larger output error than rounding to nearest would have left it with.
    """

    scheme: GridScheme
    problem: Problem
    options: ColumnLoop
    pattern: Pattern | None
    order: torch.Tensor
    factor: Factor

    def __post_init__(self) -> None:
        self.hessian, self.dtype = second_moments(self.problem), self.problem.dtype
        self._inverse, self._sketch = self.order.argsort(), None
        if self.hessian.shape[0] > 2 * SKETCH:  # else the exact product costs no more
            self._sketch = self.factor.sketch(SKETCH)[:, self._inverse]

    def solve(
        self,
        weights: list[torch.Tensor],
        goals: list[torch.Tensor] | None,
        masks: list[torch.Tensor] | None,
        parts: list[Chunk],
        notes: dict[str, Any],
        rows: RowLoop | None = None,
    ) -> list[LayerResult]:
        """Round `goals` (None: the weights) so that the output of the weights is kept; masks may move if the loop chose them.

        `rows`: weights, goals, masks and parts are in its order. The results are not, and what they lose is not known: the row loop makes
        something else small.
        """
        hessian, options = self.hessian, self.options
        found: list[list[Rounded]] = [[] for _ in weights]
        for chunk in parts:
            own = chunk.stack(weights).float()
            mask = None if masks is None else chunk.stack(masks)
            shift = None if rows is None else rows.compensation(chunk)
            target = own if shift is None else own + shift
            if goals is not None:
                goal = chunk.stack(goals)
                if shift is not None:
                    assert mask is not None
                    goal += reconstruct(shift, shift * mask, mask, hessian, options.damping, options.reconstruction)
            elif mask is not None:
                goal = reconstruct(target, target * mask, mask, hessian, options.damping, options.reconstruction)
            else:
                goal = target
            rounded = self._round(target, goal, mask, chunk.heights)
            if rows is not None:
                rows.record_error(chunk, own - stored_values(rounded.codes, rounded.grid, rounded.mask, self.dtype))
            for (index, _, _), part in zip(chunk.parts, rounded.split(chunk.heights), strict=True):
                found[index].append(part)
        if rows is None:
            return [self._join(own, None, notes) for own in found]
        solved = [self._join(own, order, notes) for own, order in zip(found, rows.orders, strict=True)]
        return [replace(one, lost=None) for one in solved]

    def _join(self, parts: list[Rounded], order: torch.Tensor | None, notes: dict[str, Any]) -> LayerResult:
        """A weight of its parts, whose rows are in `order`."""
        codes = torch.cat([part.codes.T for part in parts])
        masks = [part.mask.T for part in parts if part.mask is not None]
        grid = Grid.joined([part.grid.map(torch.t) for part in parts], torch.cat)
        if self.scheme.strategy == "tensor":
            grid = grid[:1]
        mask = torch.cat(masks) if masks else None
        if order is not None:
            place = order.argsort()
            codes, grid, mask = codes[place], grid[place], None if mask is None else mask[place]
        weight = replace(grid, dim=1).weight(codes, mask, self.problem.scheme, self.dtype)
        replaced = sum(int(part.nearest.sum()) for part in parts)
        return LayerResult(weight, sum(float(part.lost.sum()) for part in parts), notes | {"rows_replaced": replaced})

    def _round(
        self, target: torch.Tensor, goal: torch.Tensor, mask: torch.Tensor | None, heights: list[int]
    ) -> Rounded:
        """One chunk, `[in, rows]`: the column loop, then refinement."""
        scheme, order, options, pattern = self.scheme, self.order, self.options, self.pattern
        whole = [g.T for g in goal.split(heights, dim=1)]
        kept = None if mask is None else [m.T for m in mask.split(heights, dim=1)]
        static = stacked_grid(whole, scheme, self.dtype, options.scales, kept, self.hessian)
        rounding = self._column_grid(static)
        ordered = None if mask is None else mask[order]
        solution = loop.run(goal[order], self.factor, rounding, ordered, block=options.block_size)
        inverse, solved = self._inverse, rounding.grid
        error = solution.error[inverse]
        codes = solution.codes[inverse] if solution.codes is not None else solved.codes(goal - error)
        del solution
        if goal is not target:
            error += target - goal
        if scheme.integral and options.swaps and mask is not None and searchable(pattern):
            assert pattern is not None
            values = stored_values(codes, solved, mask, torch.float32)
            swap(target, codes, values, solved, mask, self.hessian, pattern, options.swaps)
            error = target - values
        lost = self._polish(error, codes, solved, mask)
        rounded = Rounded(codes, solved, mask, lost, torch.zeros_like(lost, dtype=torch.bool))
        self._keep_nearest(rounded, target, static)
        return rounded

    def _keep_nearest(self, rounded: Rounded, target: torch.Tensor, static: Grid) -> None:
        """Where rounding `target [in, rows]` to the nearest values of `static` is better, start again from those values, in place."""
        mask = rounded.mask
        difference = nearest_difference(target, static, mask, self.dtype)
        doubtful = self._doubtful(rounded.lost, difference)
        exact = column_errors(difference[:, doubtful], self.hessian)
        above = rounded.lost[doubtful] > exact
        worse, exact = doubtful[above], exact[above]
        if worse.numel() == 0:
            return
        del difference
        grid = static.rows(worse)
        codes = grid.codes(target[:, worse]).to(rounded.codes.dtype)
        rounded.put(worse, codes, grid, exact)
        rounded.nearest[worse] = True
        kept = None if mask is None else mask[:, worse]
        error = target[:, worse] - stored_values(codes, grid, kept, torch.float32)
        lost = self._polish(error, codes, grid, kept)
        # The dtype rounds after the last step of the polish, so that it may have gained nothing.
        gained = (lost <= exact).nonzero()[:, 0]
        rounded.put(worse[gained], codes[:, gained], grid.rows(gained), lost[gained])

    def _doubtful(self, lost: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
        """Indices of the rows for which the sketch does not settle it."""
        if self._sketch is None:
            return torch.arange(lost.shape[0], device=lost.device)
        damped = (self._sketch @ difference).square_().sum(0)
        least = SAFE * damped - self.factor.added * difference.square().sum(0)
        return (lost > least).nonzero()[:, 0]

    def _polish(self, error: torch.Tensor, codes: torch.Tensor, grid: Grid, mask: torch.Tensor | None) -> torch.Tensor:
        """The output error of every row, after refinement where the recipe asks for it; `codes`, grid and mask may change."""
        options, dtype = self.options, self.dtype
        refit = options.refit_scales and self.scheme.strategy != "tensor"
        if self.scheme.integral and options.sweeps:
            return refine(error, codes, grid, mask, self.hessian, dtype, options.sweeps, refit)
        if dtype != torch.float32:
            exact = stored_values(codes, grid, mask, torch.float32)
            error += exact - exact.to(dtype)
        return column_errors(error, self.hessian)

    def _column_grid(self, static: Grid) -> loop.ColumnGrid:
        """The grid in visiting order; its scales are set on arrival where a group's columns are visited one after the other."""
        scheme, options = self.scheme, self.options
        group = static.group_of(self.order.shape[0])[self.order].tolist()
        rounding = loop.ColumnGrid(static.map(torch.clone), group)
        units = rounding.units()
        runs = 1 + sum(a != b for a, b in pairwise(units))
        grouped = scheme.strategy == "group" and scheme.integral
        if grouped and not options.static_groups and runs == max(units) + 1:
            rounding.choose = scale_chooser(scheme, self.dtype, options.scales, self.order, self.hessian)
        return rounding


def _solve_vectors(
    weights: list[torch.Tensor],
    parts: list[Chunk],
    problem: Problem,
    solver: VectorSolver,
    rows: RowLoop | None,
    notes: dict[str, Any],
) -> list[LayerResult]:
    """Solve weights of a representation that is not a grid, a chunk of rows at a time; parameters are fitted to each chunk.

    With `rows`, weights and parts are in its visiting order; results are in the original order, and their loss is None.
    """
    found = [list[tuple[Tensors, torch.Tensor, torch.Tensor, torch.Tensor]]() for _ in weights]
    for chunk in parts:
        shifts = [None] * len(chunk.parts) if rows is None else rows.compensation(chunk).split(chunk.heights, dim=1)
        for part, shift in zip(chunk.parts, shifts, strict=True):
            index, start, end = part
            own = weights[index][start:end].float()
            target = own if shift is None else own + shift.T
            codes, parameters, lost, worse = solver.solve(target, solver.fit(target))
            found[index].append((parameters, codes, lost, worse))
            if rows is not None:
                rows.record_error(Chunk((part,)), (own - solver.stored(codes, parameters)).T)
    results = []
    for index, solved in enumerate(found):
        fitted, *others = zip(*solved, strict=True)
        parameters, (codes, lost, worse) = solver.scheme.join_rows(fitted), map(torch.cat, others)
        if rows is not None:
            place = rows.orders[index].argsort()
            codes, parameters = codes[place], solver.scheme.rows(parameters, place)
        weight = CompressedWeight.of(codes, parameters, None, problem.scheme, problem.dtype)
        replaced = {"rows_replaced": int(worse.sum())}
        results.append(LayerResult(weight, None if rows is not None else float(lost.sum()), notes | replaced))
    return results


def visiting_order(
    kind: str, energy: torch.Tensor, weights: Representation | None, pattern: Pattern | None
) -> torch.Tensor:
    """Permutation `[in]` of the columns; units of a pattern and vectors stay together, and groups too where the kind of order says so."""
    unit = pattern.unit if pattern is not None else 1 if weights is None else weights.vector
    if kind == "natural":
        return torch.arange(energy.shape[0], device=energy.device)
    units = [unit]
    if kind == "group" and isinstance(weights, GridScheme) and weights.strategy == "group":
        together = weights.unit(energy.shape[0])
        if together % unit == 0:
            units = [together, unit]
    return column_order(energy, units)


def nearest_difference(target: torch.Tensor, grid: Grid, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What rounding `target [in, rows]` to the nearest values of a grid loses, likewise; a few columns at a time stay in the cache."""
    columns, scheme = target.shape[0], grid.scheme
    found, width = torch.empty_like(target), scheme.width(columns)
    for number, group in enumerate(file_matrix.panels(columns, width)):
        own = grid[number]
        for start in range(group.start, group.stop, COLUMNS):
            here = slice(start, min(start + COLUMNS, group.stop))
            values = scheme.values(scheme.codes(target[here], own.scale, own.zero), own.scale, own.zero)
            if mask is not None:
                values *= mask[here]
            torch.sub(target[here], values if dtype == torch.float32 else values.to(dtype), out=found[here])
    return found


def stored_values(codes: torch.Tensor, grid: Grid, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Weights `[in, rows]` that codes stand for, as `dtype` holds them, float32; zero where removed."""
    values = grid.values(codes)
    if mask is not None:
        values *= mask
    return values if dtype == torch.float32 else values.to(dtype).float()
