"""The reference: dequantize the weight, round the input where the scheme says so, multiply. Plain torch, any device.

It defines what every other kernel must compute. The weight is dequantized anew in each call, so memory stays packed
and the result is bit for bit that of a dense layer holding the dequantized weight.
"""

from __future__ import annotations

import torch

from runtime import formats
from runtime.formats.representation import Tensors
from runtime.formats.scheme import CompressedWeight
from runtime.kernels.activations import fake_quantize
from runtime.kernels.base import Kernel, Layer


class Reference(Kernel):
    """Always fits."""

    name = "reference"
    device = None

    @property
    def formats(self) -> frozenset[str]:  # type: ignore[override]
        """All of them, those of other packages too, whose modules may import this one."""
        return frozenset(formats.names())

    def why_not(self, layer: Layer) -> str | None:
        return None

    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        return self.multiply(x, self.restore(tensors, layer), tensors, layer, bias)

    def multiply(
        self, x: torch.Tensor, weight: CompressedWeight, tensors: Tensors, layer: Layer, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`run` for a weight that has been unpacked; of `tensors` only static scales of activations are read."""
        activations = layer.entry.scheme.activations
        if activations is not None:
            x = fake_quantize(x, activations, tensors)
        return torch.nn.functional.linear(x, weight.dequantize(), bias)

    def path(self, rows: int) -> str:
        return "dequantize + dense matmul"
