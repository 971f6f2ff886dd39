"""Quantization of a layer's input inside a graph, the same arithmetic as `runtime.kernels.activations`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from export.onnx.builder import Builder
from export.source import Source
from runtime.formats.scheme import ActivationScheme
from runtime.kernels.activations import code_limits

if TYPE_CHECKING:
    import onnx_ir

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Quantized:
    """An input on its grid.

    Attributes:
        codes: int8 or float8_e4m3fn, shape of the input.
        scale: one a token `[..., 1]`, or one for all.
        zero_point: like `scale`, as a float (`dynamic`) or as a code (`static`); None when symmetric and dynamic.
    """

    codes: onnx_ir.Value
    scale: onnx_ir.Value
    zero_point: onnx_ir.Value | None


def static(
    b: Builder, x: onnx_ir.Value, module: str, scheme: ActivationScheme, source: Source, dtype: torch.dtype
) -> Quantized:
    """`QuantizeLinear` with the calibrated scale: codes, one scale and one zero point for all."""
    scale = source.input_scale(module)
    assert scale is not None
    code = FLOAT8 if scheme.type == "float" else torch.int8
    zero = source.input_zero_point(module)
    zero = torch.zeros(1, dtype=code) if zero is None else zero.to(code)
    step = b.stored(f"{module}.input_scale", scale.reshape(()), dtype)
    point = b.store.add(f"{module}.input_zero_point", zero.reshape(()))
    return Quantized(b.op("QuantizeLinear", [x, step, point], "QuantizeLinear"), step, point)


def rounded(b: Builder, quantized: Quantized, like: onnx_ir.Value) -> onnx_ir.Value:
    """`DequantizeLinear` of what `static` made: the rounded input."""
    inputs = [quantized.codes, quantized.scale, quantized.zero_point]
    return b.op("DequantizeLinear", inputs, "input/DequantizeLinear", like=like)


def dynamic(b: Builder, x: onnx_ir.Value, scheme: ActivationScheme, dtype: torch.dtype) -> Quantized:
    """Codes and scale made at run time, for each token or for the whole tensor."""
    smallest, largest = code_limits(scheme)
    axes = [b.constant([-1])] if scheme.strategy == "token" else []
    zero, eps = b.constant(0.0, dtype), b.constant(float(torch.finfo(dtype).eps), dtype)

    def positive(scale: onnx_ir.Value) -> onnx_ir.Value:
        empty = b.op("Equal", [scale, zero], "input/empty")
        return b.op("Where", [empty, eps, scale], "input/scale")

    point = None
    if scheme.symmetric:
        extreme = b.op("ReduceMax", [b.op("Abs", [x], "input/Abs"), *axes], "input/extreme", keepdims=1)
        scale = positive(b.op("Div", [extreme, b.constant((largest - smallest) / 2, dtype)], "input/step"))
        codes = b.op("Div", [x, scale], "input/scaled")
    else:
        low = b.op("Min", [b.op("ReduceMin", [x, *axes], "input/lowest", keepdims=1), zero], "input/low")
        high = b.op("Max", [b.op("ReduceMax", [x, *axes], "input/highest", keepdims=1), zero], "input/high")
        width = b.constant(largest - smallest, dtype)
        scale = positive(b.op("Div", [b.op("Sub", [high, low], "input/range"), width], "input/step"))
        least, most = b.constant(smallest, dtype), b.constant(largest, dtype)
        offset = b.op("Sub", [least, b.op("Div", [low, scale], "input/lowest_code")], "input/offset")
        clipped = b.op("Clip", [offset, least, most], "input/offset_clipped")
        point = b.op("Round", [clipped], "input/zero_point")
        codes = b.op("Add", [b.op("Div", [x, scale], "input/scaled"), point], "input/shifted")
    codes = b.op("Clip", [codes, b.constant(smallest, dtype), b.constant(largest, dtype)], "input/clipped")
    if scheme.type == "float":
        codes = b.cast(codes, FLOAT8, "input/codes")
    else:
        codes = b.cast(b.op("Round", [codes], "input/rounded"), torch.int8, "input/codes")
    return Quantized(codes, scale, point)


def dequantize(b: Builder, quantized: Quantized, like: onnx_ir.Value, dtype: torch.dtype) -> onnx_ir.Value:
    """The rounded input in `dtype`."""
    values = b.cast(quantized.codes, dtype, "input/values")
    if quantized.zero_point is not None:
        values = b.op("Sub", [values, quantized.zero_point], "input/centred")
    return b.op("Mul", [values, quantized.scale], "input/rounded_input", like=like)
