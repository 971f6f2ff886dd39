"""float8 weights and activations on GPUs with float8 matrix units, through torch's `_scaled_mm`."""

from __future__ import annotations

import torch

from runtime.formats.float8 import FLOAT8
from runtime.formats.representation import Tensors
from runtime.kernels.activations import quantize_input
from runtime.kernels.base import Kernel, Layer
from runtime.kernels.triton import gpu


class Float8Cuda(Kernel):
    """`y = s_x s_w (q_x · q_w)`, summed in float32, one scale a token and one an output channel (or one for all).

    The weight stays as stored; the codes of the activations are the reference's. Scales are handed over in float32.
    """

    name = "fp8-cuda"
    device = "cuda"
    formats = frozenset({"float-quantized"})

    def why_not(self, layer: Layer) -> str | None:
        reason = layer.why_not_sum_of_codes()
        if reason is not None:
            return reason
        if layer.dtype != torch.bfloat16:
            return "torch scales row by row into bfloat16 only"
        if layer.shape[0] % 16 or layer.shape[1] % 16:
            return f"float8 matrix units want sizes of a multiple of 16, not {layer.shape[0]} x {layer.shape[1]}"
        if gpu.capability(layer.device) < (9, 0):
            return "it needs a GPU of compute capability 9.0 or later"
        return None

    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        rows, weight = x.shape[0], tensors["weight"]
        if rows == 0:
            return x.new_zeros(0, weight.shape[0])
        codes, scale, _ = quantize_input(x, layer.activations, tensors)
        left = scale.float().reshape(-1, 1).expand(rows, 1).contiguous()
        right = tensors["weight_scale"].float().reshape(1, -1).expand(1, weight.shape[0]).contiguous()
        y = torch._scaled_mm(codes.to(FLOAT8), weight.t(), scale_a=left, scale_b=right, out_dtype=x.dtype)
        return y if bias is None else y + bias

    def path(self, rows: int) -> str:
        return "quantize input + torch float8 matmul"
