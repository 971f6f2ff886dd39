"""Rules of quantized weights and activations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from export.tensorrt.graph import Graph, attribute, constant, given, is_constant, kind, shape
from export.tensorrt.rules.base import FLOATS, of, rule, size

QUANTIZED = {"INT4": 21, "INT8": 13, "FLOAT8E4M3FN": 19, "FLOAT4E2M1": 23}  # and the opset that brought it
BLOCKS = (64, 128)
LARGEST = 2**31 - 1


def _quantizers(graph: Graph) -> list[ir.Node]:
    return graph.of("QuantizeLinear", "DequantizeLinear")


def _codes(node: ir.Node) -> str | None:
    """Type of the codes that a node reads or writes."""
    return kind(node.inputs[0] if node.op_type == "DequantizeLinear" else node.outputs[0])


@rule("quantized-type", f"codes are {', '.join(QUANTIZED)}", "[parser] QuantDequantLinearHelper")
def _quantized_type(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        codes = _codes(node)
        if codes is not None and codes not in QUANTIZED:
            yield of(node), f"has codes of type {codes}"


@rule("quantized-opset", "each type of codes needs the opset that brought it", "[docs] ONNX support of quantization")
def _quantized_opset(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        codes = _codes(node) or ""
        if codes in QUANTIZED and (graph.opset or 0) < QUANTIZED[codes]:
            yield of(node), f"has {codes} codes at opset {graph.opset}, which came with {QUANTIZED[codes]}"


@rule(
    "zero-point", "only symmetric quantization is possible: zero points are left out or 0", "[parser] shiftIsAllZeros"
)
def _zero_point(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        values = constant(given(node, 2))
        if given(node, 2) is not None and (values is None or bool(np.any(values != 0))):
            yield of(node), "has a zero point that is not 0" if values is not None else "has a computed zero point"


@rule(
    "positive-scale",
    "scales are constants above 0",
    "[parser] 'Scale coefficients must all be positive', [docs] IDequantizeLayer",
)
def _positive_scale(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        values = constant(given(node, 1))
        if values is None:
            yield of(node), "has a computed scale"
        elif not bool(np.all(values > 0)) or not bool(np.all(np.isfinite(values))):
            yield of(node), f"has a scale of {float(np.min(values)):g}"


@rule(
    "scale-type",
    "scales are float32, float16 or bfloat16, and what comes out of a dequantizer is of their type",
    "[parser], [docs] Dequantize",
)
def _scale_type(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        scale = kind(given(node, 1))
        if scale is not None and scale not in FLOATS:
            yield of(node), f"has scales of type {scale}"


@rule(
    "scale-shape",
    "a scale is one number, one a channel, or one a block of the last or second to last dimension",
    "[docs] IDequantizeLayer",
)
def _scale_shape(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        data, scale = shape(given(node, 0)), shape(given(node, 1))
        if data is None or scale is None or size(scale) == 1:
            continue
        if len(scale) == 1:
            axis = int(attribute(node, "axis", 1))
            width = data[axis] if -len(data) <= axis < len(data) else None
            if width != scale[0]:
                yield of(node), f"has {scale[0]} scales for {width} channels"
        elif len(scale) != len(data):
            yield of(node), f"has a scale of rank {len(scale)} for data of rank {len(data)}"
        else:
            blocked = [i for i, (d, s) in enumerate(zip(data, scale, strict=True)) if d != s]
            if len(blocked) > 1 or (blocked and blocked[0] < len(data) - 2):
                yield of(node), f"has blocks along dimensions {blocked}"


@rule(
    "block-size",
    f"blocks of INT4 hold {' or '.join(map(str, BLOCKS))} numbers and divide the dimension",
    "[docs] quantization schemes",
)
def _block_size(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("DequantizeLinear"):
        data, scale = shape(given(node, 0)), shape(given(node, 1))
        if not data or not scale or _codes(node) != "INT4":
            continue
        pairs = [(d, s) for d, s in zip(data, scale, strict=False) if d != s]
        if len(scale) != len(data) or not pairs:
            yield of(node), "has INT4 codes without blocks"
        for width, count in pairs:
            if not width or not count or width % count or width // count not in BLOCKS:
                yield of(node), f"has {count} blocks for {width} numbers"


@rule(
    "even-codes",
    "a tensor of 4-bit codes holds an even number of them",
    "[parser] '4-bit quantization requires an even number of elements'",
)
def _even_codes(graph: Graph) -> Iterator[tuple[str, str]]:
    for value in graph.values():
        found = shape(value)
        if kind(value) in ("INT4", "FLOAT4E2M1") and found is not None and None not in found and size(found) % 2:
            yield f"tensor {value.name}", f"holds {size(found)} of them"


@rule("int4-weights", "INT4 is for weights: what is dequantized is a constant", "[docs] quantized types")
def _int4_weights(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("DequantizeLinear"):
        if _codes(node) == "INT4" and not is_constant(given(node, 0)):
            yield of(node), "dequantizes INT4 codes that are computed"


@rule("activation-scale", "activations have one scale for the tensor", "[docs] quantization granularities")
def _activation_scale(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("QuantizeLinear"):
        scale = shape(given(node, 1))
        if scale is not None and size(scale) != 1 and not is_constant(given(node, 0)):
            yield of(node), f"has {size(scale)} scales for an activation"


@rule("volume", "what is quantized has at most 2^31 - 1 elements", "[docs] Quantize, Dequantize: volume limits")
def _volume(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        data = shape(given(node, 0))
        if data is not None and None not in data and size(data) > LARGEST:
            yield of(node), f"has {size(data)} elements"
