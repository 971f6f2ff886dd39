"""The column loop: GPTQ, SparseGPT and both at once.

Weights are held transposed, `[in, rows]`, so that a column of the layer is contiguous and one vector operation handles all rows
(of all weights that share the input). Column j becomes its projection onto the constraint (nearest grid value, zero where the mask
says so); what is lost is carried to the later columns through the factor of the Hessian: at once within a leaf of a few
columns, as one matrix product for the rest of a block, and as another for the columns beyond.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from compress.quantize.grid import round_fp8
from compress.solver.factor import Factor

LEAF = 16

#: `(first, last, adjusted)` -> the mask, bool `[last - first, rows]` (True = kept), of the columns `first:last` of the visiting order,
#: chosen when the loop arrives there; `adjusted [last - first, rows]` are the weights by then. The second value is None, or how
#: the weights of these columns are best changed, given the mask, before they are visited (zero where removed).
MaskChooser = Callable[[int, int, torch.Tensor], "tuple[torch.Tensor, torch.Tensor | None]"]
#: `(first, last, adjusted, kept)` -> scale and zero point `[rows]` of the group of columns `first:last`, likewise; `kept` is the mask
#: or None.
ScaleChooser = Callable[[int, int, torch.Tensor, "torch.Tensor | None"], "tuple[torch.Tensor, torch.Tensor | None]"]


@dataclass
class ColumnGrid:
    """Grid of stacked rows: `scale` and `zero` are `[groups, rows]`; `group[j]` is the group of visited column j.

    `choose`: the scales of a group are set when the loop arrives at it (its columns must be visited one after the other);
    None: they are as given.
    """

    low: float
    high: float
    is_float: bool
    scale: torch.Tensor
    zero: torch.Tensor | None
    group: list[int]
    choose: ScaleChooser | None = None

    def round(self, column: torch.Tensor, group: int, out: torch.Tensor, codes: torch.Tensor | None) -> None:
        """Nearest grid values of `column [rows]` into `out [rows]`, and their codes (int8) into `codes`."""
        scale = self.scale[group]
        torch.div(column, scale, out=out)
        if self.is_float:
            out.copy_(round_fp8(out))
        else:
            out.round_()
            if self.zero is None:
                out.clamp_(self.low, self.high)
                if codes is not None:
                    codes.copy_(out)
            else:
                zero = self.zero[group]
                out.add_(zero).clamp_(self.low, self.high)
                if codes is not None:
                    codes.copy_(out)
                out.sub_(zero)
        out.mul_(scale)


@dataclass
class Solution:
    """In visiting order, `[in, rows]`: the values, their codes (int grids; else None), and the mask (True = kept; None = dense)."""

    values: torch.Tensor
    codes: torch.Tensor | None
    mask: torch.Tensor | None


def run(
    weight: torch.Tensor,
    factor: Factor,
    grid: ColumnGrid | None = None,
    mask: torch.Tensor | None = None,
    choose_mask: MaskChooser | None = None,
    mask_columns: int = 1,
    block: int = 128,
) -> Solution:
    """Visit every column once.

    Args:
        weight: float32 `[in, rows]`, contiguous, in visiting order.
        factor: of the Hessian in visiting order.
        grid: None keeps float values.
        mask: bool `[in, rows]`, fixed beforehand; or
        choose_mask: called for every `mask_columns` columns (with float values, or a grid fixed beforehand).
        block: columns whose updates are applied together to the rest; made a multiple of the units that are chosen together.
    """
    columns, rows = weight.shape
    groups = _starts(grid.group) if grid is not None and grid.choose is not None else {}
    masks = {}
    if choose_mask is not None:
        masks = {j: min(j + mask_columns, columns) for j in range(0, columns, mask_columns)}
        mask = torch.empty(columns, rows, dtype=torch.bool, device=weight.device)
    work = weight.clone()
    codes = None
    if grid is not None and not grid.is_float:
        codes = torch.empty(columns, rows, dtype=torch.int8, device=weight.device)
    value = torch.empty(rows, device=weight.device)
    upper = factor.upper
    inverse = (1 / upper.diagonal()).tolist()
    for start, end in _blocks(columns, block, masks, groups):
        # What every column owes to the later ones, divided by U_jj.
        error = torch.zeros(end - start, rows, device=weight.device)
        first = start
        while first < end:
            # A leaf never reaches into a unit that is yet to be chosen: its columns must be up to date then.
            last = min(first + LEAF, end)
            last = next((j for j in range(first + 1, last) if j in masks or j in groups), last)
            if first in groups and grid is not None and grid.choose is not None:
                upto = groups[first]
                kept = None if mask is None else mask[first:upto]
                scale, zero = grid.choose(first, upto, work[first:upto], kept)
                grid.scale[grid.group[first]] = scale
                if grid.zero is not None and zero is not None:
                    grid.zero[grid.group[first]] = zero
            if first in masks and choose_mask is not None and mask is not None:
                upto = masks[first]
                mask[first:upto], better = choose_mask(first, upto, work[first:upto])
                if better is not None:
                    last = upto
                    owed = torch.linalg.solve_triangular(
                        upper[first:last, first:last].T, work[first:last] - better, upper=False
                    )
                    error[first - start : last - start] = owed
                    work[first:last] = better
            for j in range(first, last):
                adjusted = work[j]
                if grid is not None:
                    grid.round(adjusted, grid.group[j], value, None if codes is None else codes[j])
                else:
                    value.copy_(adjusted)
                if mask is not None:
                    value.mul_(mask[j])
                adjusted.sub_(value).mul_(inverse[j])
                error[j - start] += adjusted
                if j + 1 < last:
                    work[j + 1 : last].addr_(upper[j, j + 1 : last], adjusted, alpha=-1)
                adjusted.copy_(value)
            if last < end:
                work[last:end].addmm_(upper[first:last, last:end].T, error[first - start : last - start], alpha=-1)
            first = last
        if end < columns:
            work[end:].addmm_(upper[start:end, end:].T, error, alpha=-1)
    if codes is not None and mask is not None and grid is not None:
        group = torch.tensor(grid.group, device=weight.device)
        codes = codes * mask if grid.zero is None else torch.where(mask, codes, grid.zero[group].to(torch.int8))
    return Solution(work, codes, mask)


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
