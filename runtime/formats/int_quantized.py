"""`int-quantized` of compressed-tensors: one int8 a weight, mostly for layers whose activations are int8 too (W8A8)."""

from __future__ import annotations

import torch

from runtime.formats.base import Format
from runtime.formats.checks import Shape, Tensors, TensorSpec, ragged, why_not_weights
from runtime.formats.scheme import CompressedWeight, Scheme


class IntQuantized(Format):
    """`weight` int8 `[out, in]`, `weight_scale`; asymmetric: `weight_zero_point` int8; static activations:
    `input_scale` [1].
    """

    name = "int-quantized"
    own = False

    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        reason = why_not_weights(scheme, shape)
        if reason is not None:
            return reason
        if scheme.weights is None or scheme.weights.type != "int":
            return "it stores integer weights only"
        if scheme.activations is not None and scheme.activations.type != "int":
            return "it is for layers with integer activations, or none"
        if ragged(scheme.weights, shape):
            return f"compressed-tensors wants groups that divide the row: {shape[1]} % {scheme.weights.group_size} != 0"
        return None

    def weight_tensors(
        self, scheme: Scheme, shape: Shape, dtype: torch.dtype, count: int | None
    ) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec(shape, torch.int8)}

    def pack_weight(self, weight: CompressedWeight) -> Tensors:
        return {"weight": weight.values}

    def unpack_weight(
        self, tensors: Tensors, scheme: Scheme, shape: Shape, zero: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return tensors["weight"], None
