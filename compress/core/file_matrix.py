"""Memory-mapped matrices, for layers too wide for the memory that a run may take.

Such a matrix is an ordinary tensor whose pages are those of an unlinked file, so nothing of it remains, even after a kill. Pages that are
touched become resident; `let_go` makes them non-resident again, and the system writes them out when it needs the space. Code that
processes a matrix panel by panel and lets go of each panel has at most one panel resident.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from weakref import WeakValueDictionary

import torch

#: Rows of a matrix that are processed between two calls of `let_go`.
PANEL = 512

#: Whether this system can map matrices to files.
AVAILABLE = hasattr(mmap, "MADV_DONTNEED") and hasattr(os, "posix_fallocate")

_maps: WeakValueDictionary[int, _Map] = WeakValueDictionary()  # by address


class _Map(mmap.mmap):
    """A mapped file that knows its directory."""

    directory: Path


def in_memory(_columns: int) -> Path | None:
    """Place of a matrix with so many columns: always memory."""
    return None


def empty(rows: int, columns: int, device: torch.device | str = "cpu", directory: Path | None = None) -> torch.Tensor:
    """A float32 matrix `[rows, columns]`: uninitialized in memory, or zeros in a file in `directory` (CPU only).

    Raises:
        OSError: the disk has no room for it.
    """
    if directory is None or torch.device(device).type != "cpu":
        return torch.empty(rows, columns, device=device)
    size = max(4 * rows * columns, mmap.PAGESIZE)
    with tempfile.TemporaryFile(dir=directory) as file:
        # A write to a page that the disk has no room for would kill the process.
        os.posix_fallocate(file.fileno(), 0, size)
        held = _Map(file.fileno(), size)
    held.directory = directory
    matrix = torch.frombuffer(held, dtype=torch.float32, count=rows * columns).view(rows, columns)
    _maps[matrix.untyped_storage().data_ptr()] = held
    return matrix


def zeros(rows: int, columns: int, device: torch.device | str = "cpu", directory: Path | None = None) -> torch.Tensor:
    """As `empty`, of zeros."""
    matrix = empty(rows, columns, device, directory)
    return matrix if is_mapped(matrix) else matrix.zero_()


def empty_like(matrix: torch.Tensor) -> torch.Tensor:
    """As `empty`, in the same place as `matrix`: in a file beside it, or in memory."""
    held = _map_of(matrix)
    return empty(matrix.shape[0], matrix.shape[1], matrix.device, None if held is None else held.directory)


def is_mapped(matrix: torch.Tensor) -> bool:
    """Whether it is in a file."""
    return _map_of(matrix) is not None


def let_go(matrix: torch.Tensor) -> None:
    """Make no page of the matrix (or of the matrix that it is a view of) resident. Its values stay; one in memory is left alone."""
    held = _map_of(matrix)
    if held is not None:
        held.madvise(mmap.MADV_DONTNEED)


def panels(length: int, step: int = PANEL) -> list[slice]:
    """Rows `0:length` in slices of `step`."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def diagonal(matrix: torch.Tensor) -> torch.Tensor:
    """A copy of the diagonal, `[rows]` of a square matrix."""
    found = torch.empty(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    for part in panels(matrix.shape[0]):
        found[part] = matrix[part, part].diagonal()
        let_go(matrix)  # the system reads sixteen pages at a time, so whole rows come with their diagonal
    return found


def product(matrix: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`matrix @ other`, panel by panel."""
    out = torch.empty(matrix.shape[0], other.shape[1], device=other.device)
    for rows in panels(matrix.shape[0]):
        torch.mm(matrix[rows], other, out=out[rows])
        let_go(matrix)
    return out


def _map_of(matrix: torch.Tensor) -> _Map | None:
    if not _maps or matrix.device.type != "cpu":
        return None
    return _maps.get(matrix.untyped_storage().data_ptr())
