"""`pack-quantized` of compressed-tensors: integer weights of 2-8 bits, weight only, bit-packed rows (read by vLLM and
SGLang).
"""

from __future__ import annotations

import torch

from runtime.formats.base import Format
from runtime.formats.bitpack import pack_rows, packed_words, unpack_rows
from runtime.formats.checks import Shape, Tensors, TensorSpec, ragged, why_not_weights
from runtime.formats.scheme import CompressedWeight, Scheme, WeightScheme


class PackQuantized(Format):
    """`weight_packed` int32 `[out, ceil(in * bits / 32)]`, `weight_scale`, `weight_shape` int64 `[2]`.

    Asymmetric schemes add `weight_zero_point`: int32, bit-packed along dimension 0 (per group or channel), or int8
    `[1]` (per tensor). Symmetric schemes store none, because vLLM refuses one.
    """

    name = "pack-quantized"
    own = False

    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        reason = why_not_weights(scheme, shape)
        if reason is not None:
            return reason
        if scheme.weights is None or scheme.weights.type != "int":
            return "it stores integer weights only"
        if scheme.activations is not None:
            return "it stores weight-only schemes; quantized activations go to int-quantized"
        if ragged(scheme.weights, shape):
            return f"compressed-tensors wants groups that divide the row: {shape[1]} % {scheme.weights.group_size} != 0"
        return None

    def zero_point_packed(self, scheme: WeightScheme) -> bool:
        return scheme.strategy != "tensor"

    def weight_tensors(
        self, scheme: Scheme, shape: Shape, dtype: torch.dtype, count: int | None
    ) -> dict[str, TensorSpec]:
        assert scheme.weights is not None
        words = packed_words(shape[1], scheme.weights.bits)
        return {
            "weight_packed": TensorSpec((shape[0], words), torch.int32),
            "weight_shape": TensorSpec((2,), torch.int64),
        }

    def pack_weight(self, weight: CompressedWeight) -> Tensors:
        assert weight.scheme.weights is not None
        return {
            "weight_packed": pack_rows(weight.values, weight.scheme.weights.bits),
            "weight_shape": torch.tensor(weight.values.shape, dtype=torch.int64),
        }

    def unpack_weight(
        self, tensors: Tensors, scheme: Scheme, shape: Shape, zero: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert scheme.weights is not None
        return unpack_rows(tensors["weight_packed"], scheme.weights.bits, shape[1]), None
