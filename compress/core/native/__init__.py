"""The inner loops in C (`columns.c`), for float32 matrices in CPU memory; `None` or False where there is no compiled library.

The rows of a call are divided among threads; they do not depend on each other, so the result does not depend on the division.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from runtime.formats.grid import Rounding
from runtime.system.native import library
from runtime.system.row_threads import run_on_rows

#: Columns of the widest block the routines take (`MOST` in the source).
MOST = 512


def usable(*tensors: torch.Tensor | None) -> bool:
    """Whether the routines are there and can read these matrices in place."""
    fits = all(
        t is None or (t.device.type == "cpu" and (t.stride(-1) == 1 or t.shape[-1] == 1 or t.numel() == 0))
        for t in tensors
    )
    return fits and _library() is not None


def round_block(
    work: torch.Tensor, error: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor | None, first: int, last: int,
    upper: torch.Tensor, inverse: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: torch.Tensor,
    limits: tuple[float, float], rounding: Rounding,
) -> None:  # fmt: skip
    """The column loop over the columns `first:last` of a block.

    Args:
        work: float32 `[block, rows]`, contiguous; these columns become their values, later ones take their share of the error.
        error: float32 like `work`; these columns are set to what they owe, divided by `U_jj`.
        codes: int8 like `work`.
        mask: bool like `work`, or None.
        upper: float32 `[block, block]`, the corner of U; `inverse [block]` is `1 / U_jj`.
        scale, zero: float32 `[groups, rows]`; `group [block]` int64 says which is whose.
        limits, rounding: what codes there are, see `GridScheme`.
    """
    upper, (width, rows) = upper.contiguous(), work.shape
    _expect(torch.float32, work, error, upper, inverse, scale, zero)
    _expect(torch.int8, codes)
    _expect(torch.bool, mask)
    _expect(torch.int64, group)
    routine = _library().round_block  # type: ignore[union-attr]
    run_on_rows(
        rows, routine, work, error, codes, mask, rows, first, last, width, upper, inverse, scale, zero, group, scale.stride(0),
        *map(float, limits), int(rounding),
    )  # fmt: skip


def descend_block(
    gradient: torch.Tensor, old: torch.Tensor, codes: torch.Tensor, moved: torch.Tensor, mask: torch.Tensor | None,
    hessian: torch.Tensor, inverse: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, limits: tuple[float, float],
    rounding: Rounding,
) -> None:  # fmt: skip
    """Coordinate descent over the columns of a block that share one scale `[rows]`; all matrices float32 `[block, rows]`, contiguous.

    `gradient` is kept true for the block, `codes` become the new ones, `moved` is set to the old values less the new ones.
    """
    hessian, (width, rows) = hessian.contiguous(), gradient.shape
    inverse, scale = inverse.contiguous(), scale.contiguous()
    group = torch.zeros(width, dtype=torch.int64)
    _expect(torch.float32, gradient, old, codes, moved, hessian, inverse, scale, zero)
    _expect(torch.bool, mask)
    routine = _library().descend_block  # type: ignore[union-attr]
    run_on_rows(
        rows, routine, gradient, old, codes, moved, mask, rows, width, hessian, inverse, scale, zero, group, rows,
        *map(float, limits), int(rounding),
    )  # fmt: skip


def search_grid(
    columns: torch.Tensor, cost: torch.Tensor | None, scale: torch.Tensor, zero: torch.Tensor | None,
    limits: tuple[float, float], rounding: Rounding,
) -> torch.Tensor:  # fmt: skip
    """Index `[rows]` of the candidate grid with the smallest squared error over `columns [n, rows]`; the first of equals.

    `cost [n]` weighs the columns; `scale`, `zero` are `[candidates, rows]`, at most 64 candidates.
    """
    best = torch.empty(columns.shape[1], dtype=torch.int64)
    cost = None if cost is None else cost.contiguous()
    if columns.stride(-1) != 1 and columns.shape[1] > 1:
        columns = columns.contiguous()
    _expect(torch.float32, cost, scale, zero, columns[:0].contiguous())
    routine = _library().search_grid  # type: ignore[union-attr]
    run_on_rows(
        columns.shape[1], routine, columns, columns.stride(0), columns.shape[0], cost, scale, zero, scale.shape[0], scale.stride(0),
        *map(float, limits), int(rounding), best,
    )  # fmt: skip
    return best


@cache
def _library() -> ctypes.CDLL | None:
    return library(Path(__file__).with_name("columns.c"))


def _expect(dtype: torch.dtype, *tensors: torch.Tensor | None) -> None:
    """C trusts what it is given."""
    for tensor in tensors:
        if tensor is not None and (tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous()):
            raise TypeError(f"expected contiguous {dtype} in CPU memory, not {tensor.dtype} on {tensor.device}")
