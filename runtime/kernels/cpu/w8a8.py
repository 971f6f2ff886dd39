"""Integer weights and integer activations on a CPU: exact int32 sums, by `torch._int_mm` where the CPU multiplies int8.

Elsewhere `_int_mm` is tens of times slower than a float32 product, which is exact too while the sums stay below 2^24: that many
columns are summed at a time. Used without a C compiler, in float64, and for one scale over all tokens.
"""

from __future__ import annotations

import torch

from runtime.formats.representation import Tensors
from runtime.kernels.activations import quantize_input
from runtime.kernels.base import Kernel, Layer
from runtime.system import processes

_FLOAT_EXACT = (1 << 24) >> 14  # columns whose int8 products, at most 2^14 each, add up exactly in float32


class W8A8Cpu(Kernel):
    """`y = s_x s_w (sum q_x q_w - z_w sum q_x - z_x sum q_w + in z_x z_w)`, the bracket in exact integers.

    Codes of the activations are the reference's; only the order of the last multiplications differs, which here are in
    float32. The weight stays as stored. Where inputs have a scale a token, a row's result does not depend on the other rows.
    """

    name = "w8a8-cpu"
    device = "cpu"
    formats = frozenset({"int-quantized"})

    def why_not(self, layer: Layer) -> str | None:
        return layer.why_not_sum_of_codes()

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        # What the activations' zero point is multiplied with, summed once.
        return tensors | {"row_sum": tensors["weight"].sum(1, dtype=torch.int32)}

    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        rows, columns = layer.shape
        if x.shape[0] == 0:
            return x.new_zeros(0, rows)
        codes, scale, zero = quantize_input(x, layer.activations, tensors)
        codes = codes.to(torch.int8)
        total = integer_product(codes, tensors["weight"])
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
        how = "int8" if processes.multiplies(torch.int8) else "float32, exactly"
        return f"quantize input + torch matmul in {how}"


def integer_product(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`codes weight^T` in exact integers: int8 `[n, in]` and `[out, in]` to int32 `[n, out]`."""
    if codes.shape[1] == 1:  # torch._int_mm (2.13) leaves all but the first column of such a product unwritten
        return codes.int() * weight.int().t()
    if processes.multiplies(torch.int8):
        return torch._int_mm(codes, weight.t())
    total = torch.zeros(codes.shape[0], weight.shape[0], dtype=torch.int32)
    for start in range(0, codes.shape[1], _FLOAT_EXACT):
        part = slice(start, start + _FLOAT_EXACT)
        total += torch.mm(codes[:, part].float(), weight[:, part].float().t()).to(torch.int32)
    return total
