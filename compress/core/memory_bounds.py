"""Memory bound of a pass over the blocks, and the measures that reduce memory.

Hidden states in files and Hessians in files (`compress.core.file_matrix`) give the same bytes as those in memory. Fewer rows in a
batch do not: products of another height are summed in another order. So they are the last resort, and the run records them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compress.core import file_matrix

#: Part of the free memory that a run may plan with.
MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class Bounds:
    """Measures by which a run needs less memory.

    Attributes:
        spill: hidden states live in files.
        in_files: number of inputs from which the second moments of a layer, and their factor, are in files; None: all in memory.
        rows: most rows of a batch of calibration text; None: as the recipe says.
    """

    spill: bool = False
    in_files: int | None = None
    rows: int | None = None

    def filed(self, columns: int) -> bool:
        """Whether the second moments of a layer with so many inputs are in a file."""
        return self.in_files is not None and columns >= self.in_files

    def place(self, directory: Path | None, columns: int) -> Path | None:
        """Directory of the file that holds them; None: they are in memory."""
        return directory if self.filed(columns) else None

    def describe(self) -> str:
        """The measures in words; empty where there are none."""
        done = []
        if self.spill:
            done.append("hidden states in files")
        if self.in_files is not None:
            done.append(f"second moments of layers with {self.in_files} inputs or more in files")
        if self.rows is not None:
            done.append(f"at most {self.rows} rows in a batch")
        return ", ".join(done)


def ways(widths: Sequence[int], rows: int, given: int | None, fewer: bool, filed: bool = True) -> Iterator[Bounds]:
    """Measures in the order in which they are tried; each needs less memory than the one before.

    Args:
        widths: inputs of the layers whose second moments are collected. rows: of the largest batch; 0: there is none.
        given: rows of a batch that an earlier run has settled; None: as the recipe says. fewer: batches may have fewer rows.
        filed: second moments may be in files (not those that a GPU accumulates).
    """
    bounds = Bounds(rows=given)
    yield bounds
    if rows:
        bounds = replace(bounds, spill=True)
        yield bounds
    if filed and file_matrix.AVAILABLE:
        for width in sorted(set(widths), reverse=True):
            bounds = replace(bounds, in_files=width)
            yield bounds
    while fewer and given is None and rows > 1:
        rows = -(-rows // 2)
        bounds = replace(bounds, rows=rows)
        yield bounds


def choose(found: Iterable[Bounds], needed: Callable[[Bounds], int], limit: float) -> tuple[Bounds, int]:
    """The first of some measures that fits in `limit` bytes, else the one that needs least; and the bytes it needs."""
    tried = []
    for bounds in found:
        tried.append((bounds, needed(bounds)))
        if tried[-1][1] <= limit:
            return tried[-1]
    return min(tried, key=lambda one: one[1])


def cut(batch: tuple[torch.Tensor, torch.Tensor], rows: int | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A batch (ids and mask, `[n, s]` each) as batches of at most `rows` rows."""
    if rows is None:
        return [batch]
    return list(zip(*(part.split(rows) for part in batch), strict=True))  # type: ignore[arg-type]
