"""The column loop: GPTQ, SparseGPT and both at once.

Weights are transposed, `[in, rows]`, so that a column of the layer is contiguous and one vector operation handles all rows
(of all weights that share the input). Column j becomes its projection onto the constraint (nearest grid value, zero where the mask
says so); what is lost is carried to the later columns through the factor of the Hessian: at once within a leaf of a few
columns, as one matrix product for the rest of a block, and as another when a block looks back at all that was lost before it.
On a CPU with a C compiler, integer grids are rounded in C (`compress/core/native/columns.c`), a whole block at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from compress.core import native as columns_in_c
from compress.quantize.grid import Grid
from compress.weights.solver.factor import Factor
from runtime.formats.representation import Representation, Tensors

LEAF = 16

#: `(first, last, adjusted, corner)` -> the mask, bool `[last - first, rows]` (True = kept), of the columns `first:last` of the
#: visiting order, chosen when the loop arrives there; `adjusted [last - first, rows]` are the weights by then, `corner` that part of U
#: if it is at hand. The second value is None, or how the weights of these columns are best changed, given the mask, before they
#: are visited (zero where removed).
MaskChooser = Callable[[int, int, torch.Tensor, "torch.Tensor | None"], "tuple[torch.Tensor, torch.Tensor | None]"]
#: `(first, last, adjusted, kept)` -> scale and zero point `[rows]` of the group of columns `first:last`, likewise; `kept` is the mask
#: or None.
ScaleChooser = Callable[[int, int, torch.Tensor, "torch.Tensor | None"], Grid]


@dataclass
class ColumnGrid:
    """Grid of stacked rows: its parameters are `[groups, rows]`; `group[j]` is the group of visited column j.

    `choose`: the scales of a unit (a group, or the groups of a block of k-quants) are set when the loop arrives at it (its columns must
    be visited one after the other); None: they are as given. `codes` `[in, rows]` int8, in visiting order, are set by the loop (int grids).
    """

    grid: Grid
    group: list[int]
    choose: ScaleChooser | None = None
    codes: torch.Tensor | None = None
    vector: int = field(default=1, init=False)

    def round(self, columns: torch.Tensor, first: int, out: torch.Tensor) -> None:
        """Nearest grid values of column `first` into `out`, both `[rows]`; integer codes are noted."""
        own = self.grid[self.group[first]]
        codes = own.scheme.codes(columns, own.scale, own.zero, out=out)
        if self.codes is not None:
            self.codes[first] = codes
        out.copy_(own.scheme.values(codes, own.scale, own.zero))

    def units(self) -> list[int]:
        """Unit of every visited column."""
        per = self.grid.scheme.unit(len(self.group)) // self.grid.scheme.width(len(self.group))
        return [group // per for group in self.group]

    def set_unit(self, unit: int, found: Grid) -> None:
        """Take over the scales of a unit, `[rows]` or `[rows, groups]`."""
        per = self.grid.scheme.unit(len(self.group)) // self.grid.scheme.width(len(self.group))
        self.grid.put(slice(unit * per, (unit + 1) * per), found.map(torch.t))


class VectorRounding:
    """Rounding to any representation whose parameters are fitted to the whole weight beforehand.

    Args:
        order: visiting order `[in]`, in which the columns of a vector stay together.
    """

    def __init__(self, weights: Representation, parameters: Tensors, order: torch.Tensor) -> None:
        self.weights, self.parameters, self.vector = weights, parameters, weights.vector
        self._first = order[:: self.vector].tolist()
        self._codes: list[torch.Tensor | None] = [None] * len(self._first)

    def round(self, columns: torch.Tensor, first: int, out: torch.Tensor, corner: torch.Tensor | None = None) -> None:
        """Round `columns` `[vector, rows]`, from visited column `first` on, into `out` (same shape) and keep their codes.

        `corner` `[vector, vector]`: the diagonal block of T for these columns (`H = T^T T`, `factor.py`); errors `e` of them cost
        `|corner e|^2`. None: their squares.
        """
        own = self._first[first // self.vector]
        values, self._codes[own // self.vector] = self.weights.nearest(
            columns.view(self.vector, -1), self.parameters, own, None if corner is None else corner.T @ corner
        )
        out.copy_(values.reshape(out.shape))

    @property
    def codes(self) -> torch.Tensor:
        """`[rows, in / vector]`, columns as in the weight."""
        return torch.stack([code for code in self._codes if code is not None], dim=1)


@dataclass
class Solution:
    """In visiting order, `[in, rows]`: what is lost (weight - value), the codes (int grids; else None), the mask (True = kept; None =
    dense)."""

    error: torch.Tensor
    codes: torch.Tensor | None
    mask: torch.Tensor | None


def run(
    weight: torch.Tensor,
    factor: Factor,
    rounding: ColumnGrid | VectorRounding | None = None,
    mask: torch.Tensor | None = None,
    choose_mask: MaskChooser | None = None,
    mask_columns: int = 1,
    block: int = 128,
) -> Solution:
    """Visit every column once.

    Args:
        weight: float32 `[in, rows]`, contiguous, in visiting order. Its memory becomes `Solution.error`.
        factor: of the Hessian in visiting order.
        rounding: a `ColumnGrid`, or another representation; None keeps float values.
        mask: bool `[in, rows]`, fixed beforehand; or
        choose_mask: called for every `mask_columns` columns (with float values, or a grid fixed beforehand).
        block: columns that look back together at those before them; made a multiple of the units that are chosen together.
    """
    columns, rows = weight.shape
    stepwise = rounding if isinstance(rounding, ColumnGrid) else None
    vector = 1 if rounding is None else rounding.vector
    leaf, block = max(1, LEAF // vector) * vector, max(1, block // vector) * vector
    choose_scale = None if stepwise is None else stepwise.choose
    units = [] if stepwise is None or choose_scale is None else stepwise.units()
    groups = _starts(units) if units else {}
    masks = {}
    if choose_mask is not None:
        masks = {j: min(j + mask_columns, columns) for j in range(0, columns, mask_columns)}
        mask = torch.empty(columns, rows, dtype=torch.bool, device=weight.device)
    codes = None
    if stepwise is not None and stepwise.grid.scheme.integral:
        codes = stepwise.codes = torch.empty(columns, rows, dtype=torch.int8, device=weight.device)
        group, grid = torch.tensor(stepwise.group, device=weight.device), stepwise.grid
    values = torch.empty(vector, rows, device=weight.device)
    value = values[0]
    for start, end in _blocks(columns, block, masks, groups):
        corner = factor.corner(start, end)
        upper = torch.linalg.solve_triangular(corner, torch.eye(end - start, device=weight.device), upper=False).T
        inverse = corner.diagonal().contiguous()  # 1 / U_jj
        work = _adjusted(weight, factor, start, end, upper)
        # What every column of the block owes to the later ones, divided by U_jj.
        error = torch.zeros(end - start, rows, device=weight.device)
        divisors = inverse.tolist()
        native = (
            codes is not None
            and choose_mask is None
            and end - start <= columns_in_c.MOST
            and columns_in_c.usable(work, mask)
        )
        first = start
        while first < end:
            # A leaf never reaches into a unit that is yet to be chosen: its columns must be up to date then.
            last = end if native else min(first + leaf, end)
            last = next((j for j in range(first + 1, last) if j in masks or j in groups), last)
            if first in groups and stepwise is not None and choose_scale is not None:
                upto = groups[first]
                ahead = work[first - start : upto - start] if upto <= end else _adjusted(weight, factor, first, upto)
                found = choose_scale(first, upto, ahead, None if mask is None else mask[first:upto])
                stepwise.set_unit(units[first], found)
            if first in masks and choose_mask is not None and mask is not None:
                upto = masks[first]
                here = slice(first - start, upto - start)
                if upto <= end:
                    mask[first:upto], better = choose_mask(first, upto, work[here], upper[here, here])
                else:
                    mask[first:upto], better = choose_mask(first, upto, _adjusted(weight, factor, first, upto), None)
                if better is not None:
                    # Only the values inside this block move now; a unit that goes on beyond it is decided column by column.
                    last = min(upto, end)
                    here = slice(first - start, last - start)
                    better = better[: last - first]
                    error[here] = torch.linalg.solve_triangular(upper[here, here].T, work[here] - better, upper=False)
                    work[here] = better
            if native:
                assert codes is not None
                columns_in_c.round_block(
                    work, error, codes[start:end], None if mask is None else mask[start:end], first - start, last - start,
                    upper, inverse, grid.scale, grid.zero, group[start:end], grid.scheme.code_range, grid.scheme.rounding,
                )  # fmt: skip
                first = last
                continue
            for j in range(first - start, last - start):
                adjusted = work[j]
                if rounding is None:
                    value.copy_(adjusted)
                elif vector == 1:
                    rounding.round(adjusted, start + j, value)
                else:
                    if (start + j) % vector == 0:
                        assert isinstance(rounding, VectorRounding)
                        here = slice(j, j + vector)
                        rounding.round(work[here], start + j, values, corner[here, here])
                    value = values[(start + j) % vector]
                if mask is not None:
                    value.mul_(mask[start + j])
                adjusted.sub_(value).mul_(divisors[j])
                error[j] += adjusted
                if start + j + 1 < last:
                    work[j + 1 : last - start].addr_(upper[j, j + 1 : last - start], adjusted, alpha=-1)
                adjusted.copy_(value)
            if last < end:
                done, rest = slice(first - start, last - start), slice(last - start, end - start)
                work[rest].addmm_(upper[done, rest].T, error[done], alpha=-1)
            first = last
        weight[start:end] -= work
    if codes is not None and mask is not None:
        codes = torch.where(mask, codes, codes.new_zeros(()) if grid.zero is None else grid.zero[group].to(torch.int8))
    return Solution(weight, codes, mask)


def _adjusted(
    weight: torch.Tensor, factor: Factor, start: int, end: int, upper: torch.Tensor | None = None
) -> torch.Tensor:
    """Columns `start:end` as they would best be, given what was lost in all columns before them (`weight[:start]`) and nothing since.

    `upper`: the corner of U for these columns, where it is at hand.
    """
    work = weight[start:end].clone()
    if start == 0:
        return work
    owed = factor.panel(start, end) @ weight[:start]
    if upper is not None:
        return work.addmm_(upper.T, owed)
    return work.add_(torch.linalg.solve_triangular(factor.corner(start, end), owed, upper=False))


def _starts(group: list[int]) -> dict[int, int]:
    """First column of every run of one group -> one past its last."""
    cuts = [j for j in range(len(group)) if j == 0 or group[j] != group[j - 1]]
    return dict(zip(cuts, [*cuts[1:], len(group)], strict=True))


def _blocks(columns: int, block: int, *units: dict[int, int]) -> list[tuple[int, int]]:
    """Cut the columns about every `block`, never inside a unit smaller than a block (a larger one must begin with a block)."""
    blocks = []
    start = 0
    while start < columns:
        end = min(start + block, columns)
        for unit in units:
            for first, last in unit.items():
                if (start < first < end < last) or (first == start and end < last < start + 2 * block):
                    end = first if first > start else last
        blocks.append((start, end))
        start = end
    return blocks
