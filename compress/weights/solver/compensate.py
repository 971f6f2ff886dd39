"""GPTQ and SparseGPT for weights that share an input: order, factor, column loop, refinement.

No row ends with a larger output error than rounding to nearest would have left it with.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from compress.core import file_matrix
from compress.core.method import ColumnLoop
from compress.prune.patterns import Pattern
from compress.quantize.grid import Grid
from compress.quantize.objective import column_errors
from compress.weights.solver import loop
from compress.weights.solver.columns import Chunk, chunks, column_order, rows_are_independent, stacked_grid
from compress.weights.solver.factor import Factor, factorize
from compress.weights.solver.masks import exact_mask_chooser, mask_chooser, reconstruct, scale_chooser, searchable, swap
from compress.weights.solver.refine import refine
from runtime.formats.grid import GridScheme
from runtime.formats.representation import Representation
from runtime.formats.scheme import CompressedWeight, Scheme

#: Size of the random sketch that tells rows which are plainly better from those that have to be computed.
SKETCH = 256
#: A row is plainly better if its error is below this fraction of what the sketch says of rounding to nearest. `k |S e|^2 / e^T H e` is
#: chi-square with k = SKETCH degrees of freedom, so the chance of a wrong word is below exp(-k/2 (1/f - 1 + ln f)) = 3e-9 a row.
SAFE = 0.6


@dataclass
class Constraint:
    """What the weights must become. `masks`: fixed, one a weight; `pattern` and `sparsity`: masks are chosen in the loop."""

    scheme: Scheme
    dtype: torch.dtype
    masks: list[torch.Tensor] | None = None
    pattern: Pattern | None = None
    sparsity: tuple[float, ...] = ()


@dataclass
class Solved:
    """A compressed weight, its output error `tr(E H E^T)` (None: not known), and what a report should know of it."""

    weight: CompressedWeight
    lost: float | None
    notes: dict[str, Any]


def keep_float(weight: torch.Tensor, mask: torch.Tensor | None, scheme: Scheme, dtype: torch.dtype) -> CompressedWeight:
    """Float values with the removed ones set to zero."""
    values = weight if mask is None else weight * mask
    return CompressedWeight(values.to(dtype), None, None, mask, scheme, dtype)


def compensate(
    weights: list[torch.Tensor], hessian: torch.Tensor, constraint: Constraint, options: ColumnLoop, name: str
) -> list[Solved]:
    """Solve weights `[out_i, in]` (any float dtype) with one input on one Hessian.

    Masks first (chosen by the column loop, or given), then the kept weights by least squares, then the column loop again on the
    grid under those masks. The least-squares values are the projection of the target onto what the masks allow, so rounding
    them is rounding the target: both losses are compensated against the same output. Each pass goes over the rows in chunks,
    and only one factor of the Hessian is in memory at a time. Weights of another representation than a grid are solved one at a
    time, without masks.
    """
    pattern, scheme = constraint.pattern, constraint.scheme.weights
    parts = chunks([w.shape[0] for w in weights], weights[0].shape[1], rows_are_independent(pattern, scheme))
    notes: dict[str, Any] = {}
    if dead := int((file_matrix.diagonal(hessian) <= 0).sum()):
        notes["dead_columns"] = dead
    masks = constraint.masks
    goals: list[torch.Tensor] | None = None
    if pattern is not None:
        goals, masks = _prune(weights, parts, hessian, constraint, options, name, notes)
    if scheme is None:
        assert goals is not None
        assert masks is not None
        return [
            Solved(keep_float(goal, mask, constraint.scheme, constraint.dtype), None, dict(notes))
            for goal, mask in zip(goals, masks, strict=True)
        ]
    if isinstance(scheme, GridScheme):
        return _GridSolver(scheme, hessian, constraint, options, name).solve(weights, goals, masks, parts, notes)
    order = visiting_order(options.order, file_matrix.diagonal(hessian).clamp(min=0), scheme, None)
    factor = factorize(hessian, order, options.damping, name)
    notes |= {"damping": factor.damping, "retries": factor.retries}
    return [_represent(weight, scheme, factor, order, hessian, constraint, options, notes) for weight in weights]


def _prune(weights, parts: list[Chunk], hessian, constraint: Constraint, options: ColumnLoop, name: str, notes):
    """Choose masks and fit the kept weights: float32 values and masks, `[out, in]` each."""
    pattern = constraint.pattern
    assert pattern is not None
    order = visiting_order(options.order, file_matrix.diagonal(hessian), None, pattern)
    inverse = order.argsort()
    factor = factorize(hessian, order, options.damping, name)
    notes |= {"damping": factor.damping, "retries": factor.retries}
    goals = [torch.empty(w.shape, device=w.device) for w in weights]
    masks = [torch.empty(w.shape, dtype=torch.bool, device=w.device) for w in weights]
    for chunk in parts:
        target = chunk.stack(weights).float()
        unit = pattern.unit
        if options.mask_search == "exact" and searchable(pattern):
            choose = exact_mask_chooser(pattern, factor)
        else:
            shares = [constraint.sparsity[index] for index, _, _ in chunk.parts]
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
    """A solved chunk: codes `[in, rows]` (int8; fp8 grids: float32 values), their grid, and output error `[rows]`."""

    codes: torch.Tensor
    grid: Grid
    lost: torch.Tensor


@dataclass
class _GridSolver:
    """The column loop on a grid, for weights on one Hessian: its order and factor, and the steps of one chunk of rows.

    No row ends with a larger output error than rounding to nearest would have left it with.
    """

    scheme: GridScheme
    hessian: torch.Tensor
    constraint: Constraint
    options: ColumnLoop
    name: str

    def __post_init__(self) -> None:
        energy = file_matrix.diagonal(self.hessian).clamp(min=0)
        self.order = visiting_order(self.options.order, energy, self.scheme, None)
        self.factor = factorize(self.hessian, self.order, self.options.damping, self.name)
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
    ) -> list[Solved]:
        """Round `goals` (None: the weights) so that the output of `weights` is kept; masks may move if the loop chose them."""
        scheme, hessian, options = self.scheme, self.hessian, self.options
        notes = notes | {"damping": self.factor.damping, "retries": self.factor.retries}
        groups = scheme.groups(hessian.shape[0])
        codes = [torch.empty(w.shape, dtype=scheme.code_dtype, device=w.device) for w in weights]
        scales = [torch.empty(w.shape[0], groups, device=w.device) for w in weights]
        zeros = None if scheme.symmetric else [torch.empty_like(s) for s in scales]
        lost, replaced = [0.0] * len(weights), [0] * len(weights)
        for chunk in parts:
            target = chunk.stack(weights).float()
            mask = None if masks is None else chunk.stack(masks)
            if goals is not None:
                goal = chunk.stack(goals)
            elif mask is not None:
                goal = reconstruct(target, target * mask, mask, hessian, options.damping, options.reconstruction)
            else:
                goal = target
            rounded, worse = self._round(target, goal, mask, chunk.heights)
            chunk.unstack(rounded.codes.to(scheme.code_dtype), codes)
            chunk.unstack(rounded.grid.scale, scales)
            if zeros is not None and rounded.grid.zero is not None:
                chunk.unstack(rounded.grid.zero, zeros)
            if masks is not None and mask is not None and self.constraint.pattern is not None:
                chunk.unstack(mask, masks)
            for (index, _, _), error, rows in zip(
                chunk.parts, rounded.lost.split(chunk.heights), worse.split(chunk.heights), strict=True
            ):
                lost[index] += float(error.sum())
                replaced[index] += int(rows.sum())
        solved = []
        for i, code in enumerate(codes):
            rows = slice(0, 1) if scheme.strategy == "tensor" else slice(None)
            grid = Grid(scheme, scales[i][rows], None if zeros is None else zeros[i][rows])
            kept = None if masks is None else masks[i]
            weight = grid.weight(code, kept, self.constraint.scheme, self.constraint.dtype)
            solved.append(Solved(weight, lost[i], notes | {"rows_replaced": replaced[i]}))
        return solved

    def _round(
        self, target: torch.Tensor, goal: torch.Tensor, mask: torch.Tensor | None, heights: list[int]
    ) -> tuple[Rounded, torch.Tensor]:
        """One chunk, `[in, rows]`: the column loop, refinement, and which rows (bool) were better rounded to nearest."""
        scheme, dtype, order = self.scheme, self.constraint.dtype, self.order
        options, pattern = self.options, self.constraint.pattern
        whole = [g.T for g in goal.split(heights, dim=1)]
        kept = None if mask is None else [m.T for m in mask.split(heights, dim=1)]
        static = stacked_grid(whole, scheme, dtype, options.scales, kept, self.hessian)
        grid = self._column_grid(static)
        ordered = None if mask is None else mask[order]
        solution = loop.run(goal[order], self.factor, grid, ordered, block=options.block_size)
        inverse = self._inverse
        solved = Grid(scheme, grid.scale, grid.zero, dim=0)
        error = solution.error[inverse]
        codes = solution.codes[inverse] if solution.codes is not None else solved.codes(goal - error)
        del solution
        if goal is not target:
            error += target - goal
        if scheme.type == "int" and options.swaps and mask is not None and searchable(pattern):
            assert pattern is not None
            values = stored_values(codes, solved, mask, torch.float32)
            swap(target, codes, values, solved, mask, self.hessian, pattern, options.swaps)
            error = target - values
        rounded = Rounded(codes, solved, self._polish(error, codes, solved, mask))
        return rounded, self._keep_nearest(rounded, target, mask, static)

    def _keep_nearest(
        self, rounded: Rounded, target: torch.Tensor, mask: torch.Tensor | None, static: Grid
    ) -> torch.Tensor:
        """Where rounding `target [in, rows]` to the nearest values of `static` is better, start again from those values, in place.

        Returns which rows these are, bool `[rows]`.
        """
        dtype, replaced = self.constraint.dtype, torch.zeros_like(rounded.lost, dtype=torch.bool)
        nearest = static.codes(target)
        difference = target - stored_values(nearest, static, mask, dtype)
        doubtful = self._doubtful(rounded.lost, difference)
        exact = column_errors(difference[:, doubtful], self.hessian)
        above = rounded.lost[doubtful] > exact
        worse, exact = doubtful[above], exact[above]
        if worse.numel() == 0:
            return replaced
        del difference
        grid, start = static.rows(worse), static.rows(worse)
        codes = nearest[:, worse].to(rounded.codes.dtype)
        kept = None if mask is None else mask[:, worse]
        error = target[:, worse] - stored_values(codes, grid, kept, torch.float32)
        lost = self._polish(error, codes, grid, kept)
        # The dtype rounds after the last step of the polish, so that it may have gained nothing.
        back = lost > exact
        rounded.lost[worse] = torch.where(back, exact, lost)
        rounded.codes[:, worse] = torch.where(back, nearest[:, worse].to(codes.dtype), codes)
        rounded.grid.scale[:, worse] = torch.where(back, start.scale, grid.scale)
        if rounded.grid.zero is not None and grid.zero is not None and start.zero is not None:
            rounded.grid.zero[:, worse] = torch.where(back, start.zero, grid.zero)
        replaced[worse] = True
        return replaced

    def _doubtful(self, lost: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
        """Indices of the rows for which the sketch does not settle it."""
        if self._sketch is None:
            return torch.arange(lost.shape[0], device=lost.device)
        damped = (self._sketch @ difference).square_().sum(0)
        least = SAFE * damped - self.factor.added * difference.square().sum(0)
        return (lost > least).nonzero()[:, 0]

    def _polish(self, error: torch.Tensor, codes: torch.Tensor, grid: Grid, mask: torch.Tensor | None) -> torch.Tensor:
        """The output error of every row, after refinement where the recipe asks for it; `codes`, grid and mask may change."""
        options, dtype = self.options, self.constraint.dtype
        refit = options.refit_scales and self.scheme.strategy != "tensor"
        if self.scheme.type == "int" and options.sweeps:
            return refine(error, codes, grid, mask, self.hessian, dtype, options.sweeps, refit)
        if dtype != torch.float32:
            exact = stored_values(codes, grid, mask, torch.float32)
            error += exact - exact.to(dtype)
        return column_errors(error, self.hessian)

    def _column_grid(self, static: Grid) -> loop.ColumnGrid:
        """The grid in visiting order; its scales are set on arrival where a group's columns are visited one after the other."""
        scheme, options = self.scheme, self.options
        group = static.group_of(self.order.shape[0])[self.order].tolist()
        runs = 1 + sum(a != b for a, b in pairwise(group))
        choose = None
        grouped = scheme.strategy == "group" and scheme.type == "int"
        if grouped and not options.static_groups and runs == static.scale.shape[0]:
            choose = scale_chooser(scheme, self.constraint.dtype, options.scales, self.order, self.hessian)
        zero = None if static.zero is None else static.zero.clone()
        return loop.ColumnGrid(scheme, static.scale.clone(), zero, group, choose)


def _represent(
    weight: torch.Tensor,
    scheme: Representation,
    factor: Factor,
    order: torch.Tensor,
    hessian: torch.Tensor,
    constraint: Constraint,
    options: ColumnLoop,
    notes: dict[str, Any],
) -> Solved:
    """The column loop with any other representation, whose parameters are fitted to the weight as it is."""
    weight = weight.float()
    parameters = scheme.fit(weight, constraint.dtype, file_matrix.diagonal(hessian).clamp(min=0))
    rounding = loop.VectorRounding(scheme, parameters, order)
    loop.run(weight.T[order], factor, rounding, block=options.block_size)

    def lost(codes: torch.Tensor) -> torch.Tensor:
        return column_errors((weight - scheme.dequantize(codes, parameters, constraint.dtype).float()).T, hessian)

    codes, nearest = rounding.codes, scheme.round(weight, parameters)
    error, rounded = lost(codes), lost(nearest)
    worse = error > rounded
    codes = torch.where(worse[:, None], nearest, codes)
    solved = CompressedWeight.of(codes, parameters, None, constraint.scheme, constraint.dtype)
    replaced = {"rows_replaced": int(worse.sum())}
    return Solved(solved, float(torch.minimum(error, rounded).sum()), notes | replaced)


def visiting_order(
    kind: str, energy: torch.Tensor, weights: Representation | None, pattern: Pattern | None
) -> torch.Tensor:
    """Permutation `[in]` of the columns; units of a pattern and vectors stay together, and groups too where the kind of order says so."""
    unit = pattern.unit if pattern is not None else 1 if weights is None else weights.vector
    if kind == "natural":
        return torch.arange(energy.shape[0], device=energy.device)
    units = [unit]
    if kind == "group" and isinstance(weights, GridScheme) and weights.strategy == "group":
        assert weights.group_size is not None
        if weights.group_size % unit == 0:
            units = [weights.group_size, unit]
    return column_order(energy, units)


def stored_values(codes: torch.Tensor, grid: Grid, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Weights `[in, rows]` that codes stand for, as `dtype` holds them, float32; zero where removed."""
    values = grid.values(codes)
    if mask is not None:
        values *= mask
    return values if dtype == torch.float32 else values.to(dtype).float()
