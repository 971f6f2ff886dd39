"""Integer weights and integer activations on a CPU: exact int32 sums by `torch._int_mm`."""

from __future__ import annotations

import torch

from runtime.formats.checks import Tensors
from runtime.kernels.activations import quantize_input
from runtime.kernels.base import Kernel, Layer

_EXACT = 1 << 15  # columns up to which a sum of int8 products, zero points included, stays inside int32


class W8A8Cpu(Kernel):
    """`y = s_x s_w (sum q_x q_w - z_w sum q_x - z_x sum q_w + in z_x z_w)`, the bracket in exact integers.

    Codes of the activations are the reference's; only the order of the last multiplications differs, which here are in
    float32. The weight stays as stored.
    """

    name = "w8a8-cpu"
    device = "cpu"
    formats = frozenset({"int-quantized"})

    def why_not(self, layer: Layer) -> str | None:
        weights, activations = layer.entry.scheme.weights, layer.entry.scheme.activations
        if weights is None or activations is None or activations.type != "int" or activations.bits > 8:
            return "it computes integer weights with integer activations"
        if weights.strategy == "group":
            return "an integer sum cannot run across groups of different scale"
        if layer.shape[1] >= _EXACT:
            return f"rows of {_EXACT} weights or more could overflow an int32 sum"
        return None

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        # What the activations' zero point is multiplied with, summed once.
        return tensors | {"row_sum": tensors["weight"].sum(1, dtype=torch.int32)}

    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        activations = layer.entry.scheme.activations
        assert activations is not None
        rows, columns = layer.shape
        if x.shape[0] == 0:
            return x.new_zeros(0, rows)
        given = tensors.get("input_scale"), tensors.get("input_zero_point")
        codes, scale, zero = quantize_input(x, activations, *given)
        codes = codes.to(torch.int8)
        total = torch._int_mm(codes, tensors["weight"].t())
        weight_zero = tensors.get("weight_zero_point")
        if weight_zero is not None:
            weight_zero = weight_zero.reshape(1, -1).to(torch.int32)
            total -= weight_zero * codes.sum(1, keepdim=True, dtype=torch.int32)
        if zero is not None:
            zero = zero.to(torch.int32).reshape(-1, 1)
            total -= zero * tensors["row_sum"]
            if weight_zero is not None:
                total += columns * zero * weight_zero
        y = total.float() * scale.reshape(-1, 1).float() * tensors["weight_scale"].reshape(1, -1).float()
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    def path(self, rows: int) -> str:
        return "quantize input + torch int8 matmul"
