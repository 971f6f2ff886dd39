"""Scales and zero points in panels of 16 rows, `[panels, groups, 16]`, there and back."""

from __future__ import annotations

import torch

from runtime import formats
from runtime.formats.bitpack import unpack_columns
from runtime.formats.checks import Tensors
from runtime.kernels.base import Layer
from runtime.kernels.cpu import library
from runtime.scheme import CompressedWeight

PANEL = 16


def to_panels(tensors: Tensors, layer: Layer) -> Tensors:
    """Scales and zero points of stored tensors as panels."""
    scale, weights, rows = tensors["weight_scale"], layer.entry.scheme.weights, layer.shape[0]
    assert weights is not None
    out = {"scale": _panels(scale, rows)}
    if scale.dtype not in library.TYPES:
        out |= {"scale": out["scale"].float(), "stored_scale": scale}
    if not weights.symmetric:
        zero = tensors["weight_zero_point"]
        if formats.get(layer.entry.format).zero_point_packed(weights):
            zero = unpack_columns(zero, weights.bits, scale.shape[0])
        out["zero_point"] = _panels(zero, rows)
    return out


def _panels(grid: torch.Tensor, rows: int) -> torch.Tensor:
    """`[out, groups]` (or `[1]`: one for all) -> `[panels, groups, 16]`."""
    grid = grid.view(1, 1).expand(rows, 1) if grid.dim() == 1 else grid
    panels = -(-rows // PANEL)
    high = torch.zeros(panels * PANEL, grid.shape[1], dtype=grid.dtype)
    high[:rows] = grid
    return high.view(panels, PANEL, -1).transpose(1, 2).contiguous()


def weight_of(values: torch.Tensor, mask: torch.Tensor | None, tensors: Tensors, layer: Layer) -> CompressedWeight:
    """The weight whose codes were unpacked, with its grids."""
    scheme, rows = layer.entry.scheme, layer.shape[0]

    def grid(name: str) -> torch.Tensor | None:
        panels = tensors.get(name)
        if panels is None:
            return None
        flat = panels.transpose(1, 2).reshape(-1, panels.shape[1])[:rows]
        tensor_wide = scheme.weights is not None and scheme.weights.strategy == "tensor"
        return flat[:1, 0].clone() if tensor_wide else flat.contiguous()

    scale = tensors.get("stored_scale")
    return CompressedWeight(
        values, grid("scale") if scale is None else scale, grid("zero_point"), mask, scheme, layer.dtype
    )
