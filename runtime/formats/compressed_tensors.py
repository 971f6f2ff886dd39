"""Dense formats of compressed-tensors (integers, float8 and block floats), and `packed` for other integer schemes."""

from __future__ import annotations

import torch

from runtime.formats.base import GridFormat, OwnFormat
from runtime.formats.block_float import BlockFloat
from runtime.formats.checks import check_weight, why_not_inputs, why_not_weights
from runtime.formats.float8_block import Float8Block
from runtime.formats.representation import Shape, Tensors, rows_of
from runtime.formats.scheme import CompressedWeight, Scheme


class Packed(GridFormat):
    """Integer weights of 2 to 8 bits, bit-packed rows: `weight_packed` int32 `[out, ceil(in * bits / 32)]`, `weight_scale`,
    `weight_shape` int64 `[2]`.

    Asymmetric schemes add `weight_zero_point`: int32, bit-packed along dimension 0 (per group or channel), or int8 `[1]` (per tensor).
    Symmetric schemes store none, because vLLM refuses one. Beyond `pack-quantized`, also a last group shorter than the others (ragged),
    and activation schemes of any kind.
    """

    name = "packed"

    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        reason = why_not_weights(scheme, shape)
        if reason is None and (scheme.grid is None or scheme.grid.type != "int"):
            reason = "it stores integer weights only"
        return reason


class PackQuantized(Packed):
    """`pack-quantized`: the tensors of `packed`, groups that divide the row (read by vLLM and SGLang); weight-only, or symmetric
    with float (W4AFP8) or integer activations below 8 bits (W4A4). With int8 activations vLLM expects `int-quantized`.
    """

    name = "pack-quantized"
    own = False

    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        reason, activations = super().why_not(scheme, shape), scheme.activations
        if reason is None and activations is not None and (activations.type, activations.bits) == ("int", 8):
            reason = "8-bit integer activations go to int-quantized"
        if reason is None and activations is not None and scheme.grid is not None and not scheme.grid.symmetric:
            reason = "transformers cannot load packed zero points beside quantized activations"
        return reason or _why_not_groups(scheme, shape)


class Naive(OwnFormat):
    """`int-quantized` and `float-quantized`: the tensors of `GridScheme` or `Float8Block` as they are, one int8 or float8 code a weight,
    mostly for layers whose activations are of the same kind (W8A8). Static activations add `input_scale` [1].
    """

    own = False

    def __init__(self, number: str) -> None:
        self.kind, self.number, self.name = Float8Block, number, f"{number}-quantized"

    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        if self.number == "float" and isinstance(scheme.weights, self.kind):
            return super().why_not(scheme, shape)
        reason = why_not_weights(scheme, shape)
        words = {"int": "integer", "float": "float8"}[self.number]
        if reason is None and (scheme.grid is None or scheme.grid.type != self.number):
            reason = f"it stores {words} weights only"
        if reason is None and scheme.activations is not None and scheme.activations.type != self.number:
            reason = f"it is for layers with {words} activations, or none"
        return reason or _why_not_groups(scheme, shape)

    def pack_weight(self, weight: CompressedWeight) -> Tensors:
        if weight.scheme.grid is not None:
            check_weight(weight)
        return super().pack_weight(weight)


class BlockFloats(OwnFormat):
    """`nvfp4-pack-quantized`, `mxfp4-pack-quantized` and `mxfp8-quantized`: the tensors of `BlockFloat`, whatever the activations."""

    own = False

    def __init__(self, name: str, bits: int, scales: str) -> None:
        self.kind, self.name, self.bits, self.scales = BlockFloat, name, bits, scales

    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        weights = scheme.weights
        if not isinstance(weights, BlockFloat) or (weights.bits, weights.scales) != (self.bits, self.scales):
            return f"it stores block floats of {self.bits} bits with {self.scales} scales"
        if scheme.sparsity is not None:
            return "it stores no pruned weights"
        return weights.why_not(shape) or why_not_inputs(scheme, shape)

    def select_rows(self, tensors: Tensors, scheme: Scheme, shape: Shape, rows: torch.Tensor) -> Tensors:
        common = "weight_global_scale"
        return {name: tensor if name == common else rows_of(tensor, rows) for name, tensor in tensors.items()}


def _why_not_groups(scheme: Scheme, shape: Shape) -> str | None:
    if scheme.grid is None or not scheme.grid.ragged(shape):
        return None
    return f"compressed-tensors wants groups that divide the row: {shape[1]} % {scheme.grid.group_size} != 0"
