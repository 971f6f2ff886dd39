"""Solving without compensation: round to nearest, or keep the float values, under a given mask."""

from __future__ import annotations

import torch

from compress.quantize.grid import Grid
from runtime.scheme import CompressedWeight, Scheme


def assemble(
    codes: torch.Tensor, grid: Grid, mask: torch.Tensor | None, scheme: Scheme, dtype: torch.dtype
) -> CompressedWeight:
    """A compressed weight from codes `[out, in]` (float32 or int8; fp8 grids: the fp8 values) and their grid.

    Removed positions get the code of zero.
    """
    assert scheme.weights is not None
    per_tensor = scheme.weights.strategy == "tensor"
    scale = (grid.scale.reshape(1) if per_tensor else grid.scale).to(dtype)
    zero = None if grid.zero is None else (grid.zero.reshape(1) if per_tensor else grid.zero).to(torch.int8)
    if mask is not None:
        of_zero = torch.zeros((), device=codes.device)
        if grid.zero is not None:
            expanded = grid.expand(codes.shape[1])[1]
            assert expanded is not None
            of_zero = expanded
        codes = torch.where(mask, codes, of_zero.to(codes.dtype))
    storage = torch.float8_e4m3fn if scheme.weights.type == "float" else torch.int8
    return CompressedWeight(codes.to(storage), scale, zero, mask, scheme, dtype)


def keep_float(weight: torch.Tensor, mask: torch.Tensor | None, scheme: Scheme, dtype: torch.dtype) -> CompressedWeight:
    """Float values with the removed ones set to zero."""
    values = weight if mask is None else weight * mask
    return CompressedWeight(values.to(dtype), None, None, mask, scheme, dtype)
