"""Exact changes of a number grid: more bits, smaller groups, a scale a row, a stored zero point of zero. No weight changes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from export.source import by_block
from runtime.formats.scheme import CompressedWeight, GridScheme, Scheme

# What Marlin, the kernel of vLLM and SGLang for 16-bit activations, knows beside whole rows.
KERNEL_GROUPS = (128, 64, 32)
SMALLEST_GROUP = 16  # below it the scales outweigh what the codes save


def widened(bits: int) -> int:
    """The width that kernels know and that holds every code of `bits` bits: 4 or 8."""
    return 4 if bits <= 4 else 8


def group_for(size: int, columns: int) -> int | None:
    """The largest group that divides groups of `size` in rows of `columns`, with a size kernels know where there is one.

    None where only groups below 16 would do.
    """
    common = math.gcd(size, columns)
    known = [group for group in KERNEL_GROUPS if common % group == 0]
    if known:
        return known[0]
    return common if common >= SMALLEST_GROUP else None


def union(schemes: list[GridScheme], columns: int) -> GridScheme | None:
    """The smallest integer grid of whole groups that holds all of `schemes`; None where there is none."""
    if any(scheme.type != "int" for scheme in schemes):
        return None
    bits = widened(max(scheme.bits for scheme in schemes))
    symmetric = all(scheme.symmetric for scheme in schemes)
    if all(scheme.strategy != "group" for scheme in schemes):
        return GridScheme(bits, "int", symmetric, "channel", None)
    sizes = [scheme.group_size or columns for scheme in schemes if scheme.strategy == "group"]
    size = group_for(math.gcd(columns, *sizes), columns)
    return None if size is None else GridScheme(bits, "int", symmetric, "group", size)


def regrid(weight: CompressedWeight, goal: GridScheme) -> CompressedWeight:
    """The same matrix on the grid `goal`, sparsity forgotten (zeros are values).

    Codes are signed, so they and their zero points are valid at every greater width as they are.

    Args:
        goal: a grid on which all values of the weight's lie; for float grids only one with smaller groups.
    """
    scheme, scale = weight.on_grid
    zero = weight.zero_point
    if goal.strategy != "tensor":
        width = _width(goal, weight.shape[1])
        scale = by_block(scale, scheme, weight.shape, width)
        zero = None if zero is None else by_block(zero, scheme, weight.shape, width)
    if not goal.symmetric and zero is None:
        zero = torch.zeros(scale.shape, dtype=torch.int8)
    after = Scheme(goal, weight.scheme.activations, None)
    return replace(weight, scale=scale, zero_point=zero, mask=None, scheme=after)


def reflect_low_zeros(weight: CompressedWeight) -> CompressedWeight:
    """The same matrix without the lowest zero point: in such groups codes, zero point and scale change their sign.

    `(q - z) s = ((-1 - q) - (-1 - z)) (-s)`, and -1 - q is a code for every code q. GPTQ's first layout stores z - 1 and so has
    no place for the lowest z.
    """
    (scheme, scale), zero = weight.on_grid, weight.zero_point
    if zero is None or not bool((low := zero == scheme.code_range[0]).any()):
        return weight
    width = _width(scheme, weight.values.shape[1])
    columns = low.repeat_interleave(width, 1)[:, : weight.values.shape[1]]
    return replace(
        weight,
        values=torch.where(columns, -1 - weight.values, weight.values),
        zero_point=torch.where(low, -1 - zero, zero),
        scale=torch.where(low, -scale, scale),
    )


def _width(scheme: GridScheme, columns: int) -> int:
    """How many columns share a scale."""
    return scheme.group_size if scheme.strategy == "group" and scheme.group_size else max(1, columns)
