"""`float-quantized` of compressed-tensors: float8 e4m3 weights, with or without float8 activations."""

from __future__ import annotations

import torch

from runtime.formats.base import Format
from runtime.formats.checks import FLOAT8, Shape, Tensors, TensorSpec, ragged, why_not_weights
from runtime.formats.scheme import CompressedWeight, Scheme


class FloatQuantized(Format):
    """`weight` float8_e4m3fn `[out, in]`, `weight_scale`; static activations: `input_scale` [1]."""

    name = "float-quantized"
    own = False

    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        reason = why_not_weights(scheme, shape)
        if reason is not None:
            return reason
        if scheme.weights is None or scheme.weights.type != "float":
            return "it stores float8 weights only"
        if scheme.activations is not None and scheme.activations.type != "float":
            return "it is for layers with float activations"
        if ragged(scheme.weights, shape):
            return f"compressed-tensors wants groups that divide the row: {shape[1]} % {scheme.weights.group_size} != 0"
        return None

    def weight_tensors(
        self, scheme: Scheme, shape: Shape, dtype: torch.dtype, count: int | None
    ) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec(shape, FLOAT8)}

    def pack_weight(self, weight: CompressedWeight) -> Tensors:
        return {"weight": weight.values}

    def unpack_weight(
        self, tensors: Tensors, scheme: Scheme, shape: Shape, zero: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return tensors["weight"], None
