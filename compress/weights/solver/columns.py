"""Chunks of rows that are solved together, and the order in which the column loop visits their columns.

A chunk has enough rows for efficient matrix products, and few enough that the working memory stays small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import methodcaller

import torch

from compress.core import file_matrix
from compress.prune.patterns import Pattern
from compress.quantize.grid import Grid, Search, make_grid
from runtime.formats.grid import GridScheme
from runtime.formats.representation import Representation

#: Float32 elements of one working matrix (`[in, rows]`).
ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Chunk:
    """Rows of several weights with one input: parts `(weight, first row, end)`, in order."""

    parts: tuple[tuple[int, int, int], ...]

    @property
    def heights(self) -> list[int]:
        """Number of rows of each part."""
        return [end - start for _, start, end in self.parts]

    def stack(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """These rows of the weights `[out_i, in]`, transposed and side by side: `[in, rows]`, in the widest of their dtypes."""
        dtype = reduce(torch.promote_types, (weights[index].dtype for index, _, _ in self.parts))
        out = torch.empty(weights[0].shape[1], sum(self.heights), dtype=dtype, device=weights[0].device)
        for (index, start, end), place in zip(self.parts, out.split(self.heights, dim=1), strict=True):
            place.copy_(weights[index][start:end].T)
        return out

    def unstack(self, stacked: torch.Tensor, weights: list[torch.Tensor]) -> None:
        """Write `stacked [in, rows]` into the rows of `weights [out_i, in]` (any dtype)."""
        for (index, start, end), part in zip(self.parts, stacked.split(self.heights, dim=1), strict=True):
            weights[index][start:end] = part.T


def rows_at_a_time(columns: int) -> int:
    """How many rows of this width are worked on together."""
    return max(256, ELEMENTS // columns)


def nearest_rows(columns: int) -> int:
    """How many rows of this width are rounded to nearest together: what is made of them stays in the caches."""
    return max(256, ELEMENTS // 8 // columns)


def rows_are_independent(pattern: Pattern | None, weights: Representation | None) -> bool:
    """Whether rows can be solved apart: not if they share a scale or a codebook, or a number of zeros to choose."""
    return (weights is None or weights.rows_apart) and (pattern is None or pattern.kind == "n:m")


def chunks(heights: list[int], columns: int, split_rows: bool) -> list[Chunk]:
    """Cut stacked weights of `heights` rows. `split_rows`: rows do not depend on each other; otherwise a weight stays whole."""
    limit = rows_at_a_time(columns)
    found: list[Chunk] = []
    parts: list[tuple[int, int, int]] = []
    room = limit
    for index, height in enumerate(heights):
        start = 0
        while start < height:
            end = min(height, start + room) if split_rows else height
            parts.append((index, start, end))
            room -= end - start
            start = end
            if room <= 0:
                found.append(Chunk(tuple(parts)))
                parts, room = [], limit
    return [*found, Chunk(tuple(parts))] if parts else found


def column_order(diagonal: torch.Tensor, units: list[int]) -> torch.Tensor:
    """Columns by falling energy, with consecutive columns kept together in nested units.

    Args:
        diagonal: `[in]` diagonal of the Hessian.
        units: sizes of the units, outermost first, each dividing the one before (1 = single columns move freely). Units are
            ordered by the mean energy of their columns, then the columns inside a unit by the next size. A ragged last unit
            is one of them. The innermost size keeps its columns in their original order.

    Returns:
        Permutation `[in]`.
    """
    order = torch.arange(diagonal.shape[0], device=diagonal.device)
    ranks = []
    for size in units:
        index = order // size
        count = int(index[-1]) + 1
        total = torch.zeros(count, dtype=diagonal.dtype, device=diagonal.device).index_add_(0, index, diagonal)
        energy = total / torch.bincount(index, minlength=count)
        rank = torch.empty(count, dtype=torch.long, device=diagonal.device)
        rank[energy.argsort(descending=True, stable=True)] = torch.arange(count, device=diagonal.device)
        ranks.append(rank[index])
    # From the inside out: a stable sort of the outer units keeps the inner order.
    key = order
    for rank in reversed(ranks):
        key = key[rank[key].argsort(stable=True)]
    return key


def stacked_grid(
    weights: list[torch.Tensor],
    scheme: GridScheme,
    dtype: torch.dtype,
    search: Search,
    masks: list[torch.Tensor] | None,
    hessian: torch.Tensor,
) -> Grid:
    """One transposed grid for float weights `[out_i, in]` that are solved together, each fitted by itself (see `make_grid`).

    `scale` and `zero` are `[groups, rows of all weights]`; the tensor strategy repeats its scale for every row.
    """
    energy = file_matrix.diagonal(hessian).clamp(min=0)
    grids = [
        make_grid(w, scheme, dtype, search, energy, None if masks is None else masks[i], hessian)
        for i, w in enumerate(weights)
    ]
    rows = [methodcaller("expand", -1, w.shape[0]) for w in weights]
    wide = [grid.map(torch.t).map(expand) for grid, expand in zip(grids, rows, strict=True)]
    return replace(Grid.joined(wide, lambda parts: torch.cat(parts, dim=1).contiguous()), dim=0)
