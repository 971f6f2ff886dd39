"""Which rows are solved together: enough for efficient matrix products, few enough that the working memory stays small."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch

from compress.prune.patterns import Pattern
from runtime.scheme import WeightScheme

#: Float32 elements of one working matrix (`[in, rows]`).
ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Chunk:
    """Rows of several weights with one input: pieces `(weight, first row, end)`, in order."""

    pieces: tuple[tuple[int, int, int], ...]

    @property
    def heights(self) -> list[int]:
        return [end - start for _, start, end in self.pieces]

    def stack(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """These rows of the weights `[out_i, in]`, transposed and side by side: `[in, rows]`, in the widest of their dtypes."""
        dtype = reduce(torch.promote_types, (weights[index].dtype for index, _, _ in self.pieces))
        out = torch.empty(weights[0].shape[1], sum(self.heights), dtype=dtype, device=weights[0].device)
        for (index, start, end), place in zip(self.pieces, out.split(self.heights, dim=1), strict=True):
            place.copy_(weights[index][start:end].T)
        return out

    def unstack(self, stacked: torch.Tensor, weights: list[torch.Tensor]) -> None:
        """Write `stacked [in, rows]` into the rows of `weights [out_i, in]` (any dtype)."""
        for (index, start, end), part in zip(self.pieces, stacked.split(self.heights, dim=1), strict=True):
            weights[index][start:end] = part.T


def rows_at_a_time(columns: int) -> int:
    """How many rows of this width are worked on together."""
    return max(256, ELEMENTS // columns)


def rows_are_independent(pattern: Pattern | None, scheme: WeightScheme | None) -> bool:
    """Whether rows can be solved apart: not if they share a scale, or a number of zeros to choose."""
    return (pattern is None or pattern.kind == "n:m") and (scheme is None or scheme.strategy != "tensor")


def chunks(heights: list[int], columns: int, split_rows: bool) -> list[Chunk]:
    """Cut stacked weights of `heights` rows. `split_rows`: rows do not depend on each other; otherwise a weight stays whole."""
    limit = rows_at_a_time(columns)
    found: list[Chunk] = []
    pieces: list[tuple[int, int, int]] = []
    room = limit
    for index, height in enumerate(heights):
        start = 0
        while start < height:
            end = min(height, start + room) if split_rows else height
            pieces.append((index, start, end))
            room -= end - start
            start = end
            if room <= 0:
                found.append(Chunk(tuple(pieces)))
                pieces, room = [], limit
    return [*found, Chunk(tuple(pieces))] if pieces else found
