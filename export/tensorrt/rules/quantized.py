"""Rules of quantized weights and activations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from export.tensorrt.graph import Graph, Node
from export.tensorrt.rules.base import FLOATS, of, rule, size

QUANTIZED = {"INT4": 21, "INT8": 13, "FLOAT8E4M3FN": 19, "FLOAT4E2M1": 23}  # and the opset that brought it
BLOCKS = (64, 128)
LARGEST = 2**31 - 1


def _quantizers(graph: Graph) -> list[Node]:
    return graph.of("QuantizeLinear", "DequantizeLinear")


def _codes(graph: Graph, node: Node) -> str | None:
    """Type of the codes that a node reads or writes."""
    tensor = graph.type(node.input(0) if node.kind == "DequantizeLinear" else node.proto.output[0])
    return None if tensor is None else tensor.dtype


@rule("quantized-type", f"codes are {', '.join(QUANTIZED)}", "[parser] QuantDequantLinearHelper")
def _quantized_type(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        kind = _codes(graph, node)
        if kind is not None and kind not in QUANTIZED:
            yield of(node), f"has codes of type {kind}"


@rule("quantized-opset", "each type of codes needs the opset that brought it", "[docs] ONNX support of quantization")
def _quantized_opset(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        kind = _codes(graph, node) or ""
        if kind in QUANTIZED and (graph.opset or 0) < QUANTIZED[kind]:
            yield of(node), f"has {kind} codes at opset {graph.opset}, which came with {QUANTIZED[kind]}"


@rule(
    "zero-point", "only symmetric quantization is possible: zero points are left out or 0", "[parser] shiftIsAllZeros"
)
def _zero_point(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        values = graph.constant(node.input(2))
        if node.input(2) is not None and (values is None or bool(np.any(values != 0))):
            yield of(node), "has a zero point that is not 0" if values is not None else "has a computed zero point"


@rule(
    "positive-scale",
    "scales are constants above 0",
    "[parser] 'Scale coefficients must all be positive', [docs] IDequantizeLayer",
)
def _positive_scale(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        values = graph.constant(node.input(1))
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
        scale = graph.type(node.input(1))
        if scale is not None and scale.dtype not in FLOATS:
            yield of(node), f"has scales of type {scale.dtype}"


@rule(
    "scale-shape",
    "a scale is one number, one a channel, or one a block of the last or second to last dimension",
    "[docs] IDequantizeLayer",
)
def _scale_shape(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        data, scale = graph.type(node.input(0)), graph.type(node.input(1))
        if data is None or scale is None or data.shape is None or scale.shape is None or size(scale.shape) == 1:
            continue
        if len(scale.shape) == 1:
            axis = int(node.attributes.get("axis", 1))
            width = data.shape[axis] if -len(data.shape) <= axis < len(data.shape) else None
            if width != scale.shape[0]:
                yield of(node), f"has {scale.shape[0]} scales for {width} channels"
        elif len(scale.shape) != len(data.shape):
            yield of(node), f"has a scale of rank {len(scale.shape)} for data of rank {len(data.shape)}"
        else:
            blocked = [i for i, (d, s) in enumerate(zip(data.shape, scale.shape, strict=True)) if d != s]
            if len(blocked) > 1 or (blocked and blocked[0] < len(data.shape) - 2):
                yield of(node), f"has blocks along dimensions {blocked}"


@rule(
    "block-size",
    f"blocks of INT4 hold {' or '.join(map(str, BLOCKS))} numbers and divide the dimension",
    "[docs] quantization schemes",
)
def _block_size(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("DequantizeLinear"):
        data, scale = graph.type(node.input(0)), graph.type(node.input(1))
        if data is None or scale is None or data.dtype != "INT4" or not data.shape or not scale.shape:
            continue
        pairs = [(d, s) for d, s in zip(data.shape, scale.shape, strict=False) if d != s]
        if len(scale.shape) != len(data.shape) or not pairs:
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
    for name, tensor in graph.values().items():
        if (
            tensor.dtype in ("INT4", "FLOAT4E2M1")
            and tensor.shape is not None
            and None not in tensor.shape
            and size(tensor.shape) % 2
        ):
            yield f"tensor {name}", f"holds {size(tensor.shape)} of them"


@rule("int4-weights", "INT4 is for weights: what is dequantized is a constant", "[docs] quantized types")
def _int4_weights(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("DequantizeLinear"):
        data = graph.type(node.input(0))
        if data is not None and data.dtype == "INT4" and not graph.is_constant(node.input(0)):
            yield of(node), "dequantizes INT4 codes that are computed"


@rule("activation-scale", "activations have one scale for the tensor", "[docs] quantization granularities")
def _activation_scale(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("QuantizeLinear"):
        scale = graph.type(node.input(1))
        if (
            scale is not None
            and scale.shape is not None
            and size(scale.shape) != 1
            and not graph.is_constant(node.input(0))
        ):
            yield of(node), f"has {size(scale.shape)} scales for an activation"


@rule("volume", "what is quantized has at most 2^31 - 1 elements", "[docs] Quantize, Dequantize: volume limits")
def _volume(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        data = graph.type(node.input(0))
        if data is not None and data.shape is not None and None not in data.shape and size(data.shape) > LARGEST:
            yield of(node), f"has {size(data.shape)} elements"
