"""8-bit weights, unquantized bfloat16 activations, on a CPU: torch's `_weight_int8pack_mm` for few rows."""

from __future__ import annotations

import torch

from runtime import formats
from runtime.formats.base import Tensors
from runtime.kernels.base import Kernel, Layer
from runtime.scheme import CompressedWeight

# Measured on x86 with AVX-512 (one thread, 2048 x 2048): torch's kernel 0.21 ms at 1 row, 0.37 at 4, 1.46 at 16;
# converting to bfloat16 and multiplying 0.9 ms up to 32 rows.
FEW_ROWS = 8
_SLICE = 1 << 20  # weights converted at once


class Int8Cpu(Kernel):
    """Codes of 5-8 bits held as int8 `[groups, out, width]`, group by group, so that each group is a matrix of its own.

    A group's sum is `scale * (x · q) - scale * zero_point * sum(x)`; groups are added in float32. torch's kernel reads
    past the end of a row whose width is not a multiple of its vectors, so other widths take the dense path.
    """

    name = "int8-cpu"
    device = "cpu"
    formats = frozenset({"pack-quantized", "packed", "int-quantized"})

    def why_not(self, layer: Layer) -> str | None:
        weights = layer.entry.scheme.weights
        if weights is None or weights.type != "int" or weights.bits < 5:
            return "it computes integer weights of 5 to 8 bits"
        if layer.entry.scheme.activations is not None:
            return "it computes with unquantized activations"
        if layer.dtype != torch.bfloat16:
            return "torch's int8 kernel is fast with bfloat16 activations only"
        if layer.shape[1] % _width(layer):
            return "it wants groups that divide the row"
        if _width(layer) < 32:
            return f"groups of {_width(layer)} are too small for it"
        return None

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        weight = formats.get(layer.entry.format).unpack(tensors, layer.entry.scheme, layer.shape, layer.dtype)
        rows, width = layer.shape[0], _width(layer)
        assert weight.scale is not None
        out = {
            "weight": weight.values.view(rows, -1, width).transpose(0, 1).contiguous(),
            "scale": weight.scale.expand(rows, layer.shape[1] // width).t().contiguous(),  # [groups, out]
        }
        if weight.zero_point is not None:
            out["zero_point"] = weight.zero_point
        return out

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        values = tensors["weight"].transpose(0, 1).reshape(layer.shape)
        scale, zero = tensors["scale"].t().contiguous(), tensors.get("zero_point")
        if layer.entry.scheme.weights is not None and layer.entry.scheme.weights.strategy == "tensor":
            scale = scale[0, :1]
        return CompressedWeight(values, scale, zero, None, layer.entry.scheme, layer.dtype)

    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        groups, rows, width = tensors["weight"].shape
        scale, zero = tensors["scale"], tensors.get("zero_point")
        parts = x.view(-1, groups, width)
        y = torch.zeros(x.shape[0], rows, dtype=torch.float32)
        few = self._few(x.shape[0], width)
        for group in range(groups):
            part, codes = parts[:, group].contiguous(), tensors["weight"][group]
            if few:
                y += torch.ops.aten._weight_int8pack_mm(part, codes, scale[group].to(torch.bfloat16))
            else:
                y += _dense(part, codes) * scale[group]
        if zero is not None:
            offset = scale.float() * zero.expand(rows, groups).t().float()
            y -= parts.float().sum(-1) @ offset
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    def path(self, rows: int) -> str:
        return "torch int8 matmul" if rows <= FEW_ROWS else "convert slices + dense matmul"

    @staticmethod
    def _few(rows: int, width: int) -> bool:
        return rows <= FEW_ROWS and width % 64 == 0


def _dense(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """`x · q` in bfloat16 (every int8 is a bfloat16), the codes converted some rows at a time."""
    out = torch.empty(x.shape[0], codes.shape[0], dtype=x.dtype)
    step = max(1, _SLICE // codes.shape[1])
    for start in range(0, codes.shape[0], step):
        out[:, start : start + step] = torch.nn.functional.linear(x, codes[start : start + step].to(x.dtype))
    return out


def _width(layer: Layer) -> int:
    scheme = layer.entry.scheme.weights
    assert scheme is not None
    return scheme.group_size if scheme.strategy == "group" and scheme.group_size else layer.shape[1]
