"""8-bit weights, unquantized bfloat16 activations, on a CPU: torch's `_weight_int8pack_mm` for few rows."""

from __future__ import annotations

import torch

from runtime.formats.representation import Tensors
from runtime.formats.scheme import CompressedWeight
from runtime.kernels.base import Kernel, Layer

# Measured on x86 with AVX-512 (CPU time of one thread on a busy machine, 2048 x 2048): torch's kernel takes 0.3 ms at
# 1 row, 0.9 at 8, 1.5 at 16 (groups of 128: 0.5 and 1.5 at 1 and 8); dequantizing and multiplying 3 to 5 up to 64.
FEW_ROWS = 16


class Int8Cpu(Kernel):
    """Codes of 5-8 bits as int8 `[groups, out, width]`, group by group, so that each group is a matrix of its own.

    A group's sum is `scale * (x · q) - scale * zero_point * sum(x)`; groups are added in float32. torch's kernel reads
    past the end of a row whose width is not a multiple of its vectors, so other widths take the dense path.
    """

    name = "int8-cpu"
    device = "cpu"
    formats = frozenset({"pack-quantized", "packed", "int-quantized"})

    def why_not(self, layer: Layer) -> str | None:
        reason = layer.why_not_weight_only(5, 8)
        if reason is not None:
            return reason
        if layer.dtype != torch.bfloat16:
            return "torch's int8 kernel is fast with bfloat16 activations only"
        if layer.shape[1] % _width(layer):
            return "it wants groups that divide the row"
        if _width(layer) < 32:
            return f"groups of {_width(layer)} are too small for it"
        return None

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        weight = layer.unpack(tensors)
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
        if layer.grid.strategy == "tensor":
            scale = scale[0, :1]
        return CompressedWeight(values, scale, zero, None, layer.entry.scheme, layer.dtype)

    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        width = tensors["weight"].shape[2]
        if x.shape[0] > FEW_ROWS or width % 64:
            return self.multiply_dense(x, tensors, layer, bias)
        scale, zero = tensors["scale"].to(torch.bfloat16), tensors.get("zero_point")
        groups, rows = scale.shape
        parts = x.view(-1, groups, width)
        y = torch.zeros(x.shape[0], rows, dtype=torch.float32)
        for group in range(groups):
            part = parts[:, group].contiguous()
            y += torch.ops.aten._weight_int8pack_mm(part, tensors["weight"][group], scale[group])
        if zero is not None:
            y -= parts.float().sum(-1) @ (scale.float() * zero.expand(rows, groups).t())
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    def path(self, rows: int) -> str:
        return "torch int8 matmul" if rows <= FEW_ROWS else "dequantize + dense matmul"


def _width(layer: Layer) -> int:
    return layer.group or layer.shape[1]
