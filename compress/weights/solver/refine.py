"""Refinement of a solved weight: codes and scales move, one at a time, wherever that lowers the output error.

The column loop decides every column once, knowing only the columns before it. Afterwards each code can be set to the best grid
value given all the others (cyclic coordinate descent on `tr(E H E^T)`), and each scale to its least-squares value given the
codes. Every step lowers the error or leaves it, so the result is never worse. Removed weights stay zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from compress.core import file_matrix
from compress.core import native as columns_in_c
from compress.quantize.grid import Grid
from compress.quantize.objective import column_errors
from compress.quantize.super_blocks import factors_of
from runtime.formats.k_quant import KQuant
from runtime.formats.representation import Representation, Tensors

LEAF = 16
#: Columns (whole groups) whose gradient is computed together, from all that is lost at that time.
BLOCK = 128


def refine(
    error: torch.Tensor,
    codes: torch.Tensor,
    grid: Grid,
    mask: torch.Tensor | None,
    hessian: torch.Tensor,
    dtype: torch.dtype,
    sweeps: int,
    refit: bool,
) -> torch.Tensor:
    """Refine `codes` and `grid` in place.

    Args:
        error: float32 `[in, rows]`, target minus grid values, in the original column order. Becomes target minus the values as
            `dtype` holds them.
        codes: int8 `[in, rows]`.
        grid: integer grid; its scales are representable in `dtype` and stay so.
        mask: bool `[in, rows]`, True = kept, or None.
        hessian: `[in, in]` float32.
        dtype: of scales and dequantized weights.
        sweeps: passes over all columns, at least one.
        refit: also refit scales.

    Returns:
        Output error of every row at the end, float32 `[rows]`.
    """
    columns = error.shape[0]
    group, unit = grid.scheme.width(columns), grid.scheme.unit(columns)
    step = unit * max(1, BLOCK // unit)
    factors = None
    if refit and isinstance(grid.scheme, KQuant):
        factors = replace(grid, scale=factors_of(grid.scheme, grid.scale), zero=None)
        if grid.zero is not None:
            factors.zero = factors_of(grid.scheme, grid.zero, minimum=True)
    diagonal = file_matrix.diagonal(hessian)
    # A column without energy has no gradient either: any divisor will do.
    divisors = torch.where(diagonal > 0, 1 / diagonal.clamp(min=1e-30), 0.0)
    lost = torch.zeros(error.shape[1], device=error.device)
    for sweep in range(sweeps):
        for here in file_matrix.panels(columns, step):
            start, end = here.start, here.stop
            before = hessian[here, :start] @ error[:start] if start else None
            gradient = hessian[here, start:] @ error[start:]
            if before is not None:
                gradient += before
            part = _Part(
                codes[here].float(), gradient, hessian[here, here], None if mask is None else mask[here],
                divisors[start:end], error[here], dtype, sweep == sweeps - 1,
            )  # fmt: skip
            for first in range(start, end, group):
                part.group(first - start, min(first + group, end) - start, grid, first // group, refit, factors)
            if factors is not None:
                for first in range(start, end, unit):
                    part.unit(first - start, slice(first // group, (first + unit) // group), grid, factors)
            codes[here] = part.codes.to(torch.int8)
            if sweep == sweeps - 1:
                # Every pair of columns once: with those before it, which do not move any more.
                lost += column_errors(error[here], hessian[here, here])
                if before is not None:
                    lost += (2 * before * error[here]).sum(0)
            file_matrix.let_go(hessian)
    return lost.clamp_(min=0)


def refine_vectors(
    target: torch.Tensor,
    codes: torch.Tensor,
    form: Representation,
    parameters: Tensors,
    hessian: torch.Tensor,
    added: float,
    sweeps: int,
) -> torch.Tensor:
    """Refine the codes of a representation that is not a grid, with its parameters fixed: coordinate descent over vectors, each set to the
    best value found given all others.

    Args:
        target: float32 `[rows, in]`.
        codes: `[rows, in / vector]`.
        parameters: of these rows.
        hessian: float32 `[in, in]`.
        added: damping added to the diagonal of each vector's block of the Hessian, which makes it positive definite.
        sweeps: passes over all vectors.

    Returns:
        The new codes.
    """
    vector, codes = form.vector, codes.clone()
    values = form.dequantize(codes, parameters, torch.float32).T.contiguous()
    error = target.T - values
    damping = added * torch.eye(vector, device=target.device)
    for _ in range(sweeps):
        for here in file_matrix.panels(len(values), max(1, BLOCK // vector) * vector):
            corner, gradient = hessian[here, here], hessian[here] @ error
            file_matrix.let_go(hessian)
            for first in range(0, len(gradient), vector):
                own, there = (slice(start, start + vector) for start in (first, here.start + first))
                metric = corner[own, own] + damping
                wanted = torch.linalg.solve(metric, gradient[own])  # how far the values best move
                found, code = form.nearest(values[there] + wanted, parameters, there.start, metric)
                move = found - values[there]
                better = column_errors(move - wanted, metric) < column_errors(wanted, metric)
                column = codes[:, there.start // vector]
                column.copy_(torch.where(better, code.to(codes.dtype), column))
                move *= better
                values[there] += move
                error[there] -= move
                gradient -= corner[:, own] @ move
    return codes


class _Part:
    """A stretch of whole groups: its codes, the gradient `H e` of its columns, and what is lost in them.

    `gradient` is kept true for the columns of the stretch while codes and scales move; `error` takes the moves when a group is done
    (and, in the last sweep, what the dtype rounds away).
    """

    def __init__(self, codes, gradient, hessian, mask, divisors, error, dtype, last) -> None:
        self.codes, self.gradient, self.hessian, self.mask = codes, gradient, hessian, mask
        self.divisors, self.error, self.dtype, self.last = divisors, error, dtype, last
        self.value = torch.empty_like(codes[0])

    def group(self, start: int, end: int, grid: Grid, g: int, refit: bool, factors: Grid | None) -> None:
        """All codes of one group, one column after the other, then its scale, and its minimum where it has one."""
        own = grid[g]  # views
        old = self._values(start, end, own)
        for first in range(start, end, BLOCK):
            self._block(first, min(first + BLOCK, end), start, old, own)
        if refit:
            self._refit(start, end, own, None if factors is None else factors[g])
        values = self._values(start, end, own)
        # What the dtype rounds away is lost too, once the values are final; the groups to come make up for it.
        self.error[start:end] += old.sub_(values.to(self.dtype) if self.last else values)

    def _values(self, start: int, end: int, own: Grid) -> torch.Tensor:
        values = own.scheme.values(self.codes[start:end], own.scale, own.zero)
        if self.mask is not None:
            values *= self.mask[start:end]
        return values

    def _block(self, first: int, last: int, origin: int, old: torch.Tensor, own: Grid) -> None:
        """Coordinate descent over the columns `first:last` of the stretch; `old` are the values of the group, from `origin` on."""
        gradient, hessian, codes, value = self.gradient, self.hessian, self.codes, self.value
        moved = torch.empty(last - first, codes.shape[1], device=codes.device)
        here = slice(first, last)
        if columns_in_c.usable(gradient, codes, self.mask):
            columns_in_c.descend_block(
                gradient[here], old[first - origin : last - origin], codes[here], moved, None if self.mask is None else self.mask[here],
                hessian[here, here], self.divisors[here], own.scale, own.zero, own.scheme.code_range, own.scheme.rounding,
            )  # fmt: skip
            for rest in (slice(0, first), slice(last, gradient.shape[0])):
                if rest.start < rest.stop:
                    gradient[rest].addmm_(hessian[rest, here], moved)
            return
        inverse = self.divisors.tolist()
        for leaf in range(first, last, LEAF):
            upto = min(leaf + LEAF, last)
            for j in range(leaf, upto):
                torch.add(old[j - origin], gradient[j], alpha=inverse[j], out=value)
                codes[j] = own.scheme.codes(value, own.scale, own.zero, out=value)
                value.copy_(own.scheme.values(codes[j], own.scale, own.zero))
                if self.mask is not None:
                    value.mul_(self.mask[j])
                delta = torch.sub(old[j - origin], value, out=moved[j - first])
                if j + 1 < upto:
                    gradient[j + 1 : upto].addr_(hessian[j + 1 : upto, j], delta)
            if upto < last:
                gradient[upto:last].addmm_(hessian[upto:last, leaf:upto], moved[leaf - first : upto - first])
        # Within the block only later columns were kept up to date; now all of the stretch, without doing those twice.
        gradient.addmm_(hessian[:, first:last], moved)
        gradient[first:last].addmm_(torch.tril(hessian[first:last, first:last], -1), moved, alpha=-1)

    def _refit(self, start: int, end: int, own: Grid, factors: Grid | None) -> None:
        """The scale that suits the codes best, as it can be stored; the old one where that is no better. `factors`: of k-quants."""
        scheme, zero, unit = own.scheme, own.zero, self.codes[start:end]
        if not isinstance(scheme, KQuant) or factors is None:
            unit = unit if zero is None else unit - zero
            if self.mask is not None:
                unit = unit * self.mask[start:end]
            self._step(start, end, unit, own.scale, lambda wanted: scheme.storable(wanted, self.dtype), False)
            return
        of_scale, of_minimum = factors.scale, factors.zero
        self._step(start, end, unit, own.scale, lambda wanted: scheme.on_levels(wanted, of_scale))
        if zero is not None and of_minimum is not None:
            all_alike = torch.full_like(unit, -1.0)
            self._step(start, end, all_alike, zero, lambda wanted: scheme.on_levels(wanted, of_minimum, minimum=True))

    def unit(self, start: int, groups: slice, grid: Grid, factors: Grid) -> None:
        """The factors of a block of k-quants, whose columns start at `start`, in place like what they multiply."""
        scheme, own, of_unit = grid.scheme, grid[groups], factors[groups]
        assert isinstance(scheme, KQuant)
        width, end = scheme.facts.width, start + scheme.facts.block
        old = self._rounded(own.values(self.codes[start:end]))
        for products, factor in ((own.scale, of_unit.scale), (own.zero, of_unit.zero)):
            if products is None or factor is None:
                continue
            levels, found = (products / factor).round_(), factor[0].clone()
            wide = levels.repeat_interleave(width, 0)
            self._step(
                start, end, wide * self.codes[start:end] if products is own.scale else -wide, found, scheme.factor
            )
            factor.copy_(found.expand_as(factor))
            products.copy_(levels * found)
        self.error[start:end] += old - self._rounded(own.values(self.codes[start:end]))

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        """As the dtype holds them, once they are final."""
        return values.to(self.dtype).float() if self.last else values

    def _step(
        self,
        start: int,
        end: int,
        direction: torch.Tensor,
        parameter: torch.Tensor,
        storable: Callable[[torch.Tensor], torch.Tensor],
        more: bool = True,
    ) -> None:
        """Move `parameter [rows]`, of which the values of the columns `start:end` change by `direction`, to its least-squares value.

        `more`: other parameters of these columns are to come.
        """
        along = (direction * self.gradient[start:end]).sum(0)
        curvature = column_errors(direction, self.hessian[start:end, start:end])
        wanted = storable(parameter + along / curvature.clamp(min=1e-30))
        step = wanted - parameter
        better = step * (curvature * step - 2 * along) < 0
        step = torch.where(better, step, 0.0)
        if more or self.gradient.shape[0] > end:  # what is to come wants to know
            self.gradient.addmm_(self.hessian[:, start:end], direction * step, alpha=-1)
        parameter.copy_(torch.where(better, wanted, parameter))
