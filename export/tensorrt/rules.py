"""Rules of TensorRT's documentation, checked over an ONNX file without a GPU.

Sources: [docs] TensorRT 11 documentation (operator reference, quantization, ONNX opset guide); [parser] onnx-tensorrt's importers
(release 10.14 and later); [#n] issues of NVIDIA/TensorRT.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from export.tensorrt.profiles import HEAD

ATTENTION_ATTRIBUTES = {"scale", "is_causal", "q_num_heads", "kv_num_heads", "softmax_precision"}
OPSETS = range(9, 25)
FLOATS = {"FLOAT", "FLOAT16", "BFLOAT16"}
QUANTIZED = {"INT4": 21, "INT8": 13, "FLOAT8E4M3FN": 19, "FLOAT4E2M1": 23}  # and the opset that brought it
TYPES = {*FLOATS, *QUANTIZED, "INT32", "INT64", "BOOL", "UINT8"}
BLOCKS = (64, 128)
LARGEST = 2**31 - 1
UNSUPPORTED = {
    "DynamicQuantizeLinear", "MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv", "BitShift", "Compress", "Unique",
    "SequenceConstruct", "SequenceAt", "SequenceInsert", "SplitToSequence", "ConcatFromSequence", "Optional", "StringNormalizer",
    "Det", "Multinomial", "MaxUnpool", "Adagrad", "Adam", "Gradient", "ImageDecoder", "StringConcat", "StringSplit",
}  # fmt: skip
#: {rule: (what TensorRT wants, where that is said)}
RULES = {
    "opset": (f"the parser reads opsets {OPSETS.start} to {OPSETS.stop - 1}", "[docs] ONNX Opset Guide"),
    "domain": ("the parser knows operators of the default domain only", "[parser] operators.md"),
    "operator": ("the parser has no importer for it", "[parser] operators.md"),
    "type": (f"TensorRT has {', '.join(sorted(TYPES))}", "[docs] data types"),
    "same-type": ("a strongly typed network converts nothing by itself", "[docs] strongly typed networks"),
    "attention-outputs": ("Attention has one output", "[#4738], [parser]"),
    "attention-past": ("Attention takes no cache; it is joined before", "[parser] 'Setting past_key'"),
    "attention-in-if": ("Attention does not lie in a branch", "[#4739]"),
    "attention-attributes": ("the parser leaves other attributes out in silence", "[parser] Attention"),
    "attention-shape": (f"inputs have rank 3 or 4 and heads of at most {HEAD}", "[parser], [#4705]"),
    "attention-mask": ("a mask is boolean or of the query's type, without is_causal", "[docs]"),
    "quantized-type": (f"codes are {', '.join(QUANTIZED)}", "[parser] QuantDequantLinearHelper"),
    "quantized-opset": ("codes need the opset that brought their type", "[docs] quantization"),
    "zero-point": ("zero points are left out or 0", "[parser] shiftIsAllZeros"),
    "positive-scale": ("scales are constants above 0", "[parser], [docs] IDequantizeLayer"),
    "scale-type": ("scales and dequantized values are floats of 16 or 32 bits", "[docs]"),
    "scale-shape": ("scales are one, one a channel, or one a block of the last dimensions", "[docs]"),
    "block-size": (f"blocks of INT4 hold {BLOCKS[0]} or {BLOCKS[1]} numbers", "[docs]"),
    "even-codes": ("a tensor of 4-bit codes holds an even number of them", "[parser]"),
    "int4-weights": ("INT4 is for weights: what is dequantized is a constant", "[docs] quantized types"),
    "activation-scale": ("activations have one scale", "[docs] quantization granularities"),
    "volume": ("at most 2^31 - 1 elements are quantized", "[docs] Quantize, Dequantize"),
}
Shape = tuple[int | None, ...]  # None for free dimensions
Found = Iterator[tuple[str, str]]  # a rule that is broken, and what was found


@dataclass(frozen=True)
class Violation:
    """A rule that a graph breaks."""

    rule: str
    where: str
    found: str

    def sentence(self) -> str:
        """Where, what was found, what the rule allows, and its source."""
        wants, source = RULES[self.rule]
        return f"{self.where} {self.found}, and {wants} ({self.rule}; {source})"


def check(path: Path) -> list[Violation]:
    """What an ONNX file breaks, by the shapes and types that can be inferred; nodes of all subgraphs are looked at."""
    model = ir.load(path)
    # It leaves unknown what it cannot infer; ONNX's checker says what is wrong with a graph.
    common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    opset = model.opset_imports.get("") or 0  # of the default domain
    broken = [] if opset in OPSETS else [Violation("opset", "the model", f"has opset {opset or None}")]
    for node in model.graph.all_nodes():
        broken += [Violation(rule, _name(node), found) for rule, found in _node(node, opset)]
    for value in values(model):
        broken += [Violation(rule, f"tensor {value.name}", found) for rule, found in _value(value)]
    return broken


def values(model: ir.Model) -> Iterator[ir.Value]:
    """Every value of every graph."""
    for graph in model.graphs():
        yield from graph.inputs
        yield from graph.initializers.values()
        for node in graph:
            yield from node.outputs


def _value(value: ir.Value) -> Found:
    kind, shape = _kind(value), _shape(value)
    if kind not in (*TYPES, "UNDEFINED", None):
        yield "type", f"is of type {kind}"
    if kind in ("INT4", "FLOAT4E2M1") and shape is not None and None not in shape and _size(shape) % 2:
        yield "even-codes", f"holds {_size(shape)} of them"


def _node(node: ir.Node, opset: int) -> Found:
    if node.domain not in ("", "ai.onnx"):
        yield "domain", f"is of the domain {node.domain}"
    if node.op_type in UNSUPPORTED:
        yield "operator", "is in the graph"
    kinds = {kind for kind in map(_kind, node.inputs) if kind is not None}
    if node.op_type in ("MatMul", "Gemm", "Add", "Sub", "Mul", "Div") and len(kinds) > 1:
        yield "same-type", f"joins {' and '.join(sorted(kinds))}"
    if node.op_type == "If":
        inner = (each for branch in node.attributes.values() for each in branch.as_graph().all_nodes())
        hidden = next((each for each in inner if each.op_type == "Attention"), None)
        if hidden is not None:
            yield "attention-in-if", f"has {_name(hidden)} in a branch"
    if node.op_type == "Attention":
        yield from _attention(node)
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        yield from _quantizer(node, opset)


def _attention(node: ir.Node) -> Found:
    if len(node.outputs) != 1:
        yield "attention-outputs", f"has {len(node.outputs)} outputs"
    if any(_given(node, index) is not None for index in (4, 5, 6)):
        yield "attention-past", "takes past keys or values"
    odd = sorted(name for name in node.attributes if name not in ATTENTION_ATTRIBUTES and node.attributes[name].value)
    if odd:
        yield "attention-attributes", f"has {odd[0]}"
    shapes = [shape for shape in (_shape(_given(node, i)) for i in range(3)) if shape is not None]
    ranks = {len(shape) for shape in shapes}
    widest = max((shape[3] or 0 for shape in shapes if len(shape) == 4), default=0)
    if ranks - {3, 4} or len(ranks) > 1:
        yield "attention-shape", f"has inputs of rank {' and '.join(map(str, sorted(ranks)))}"
    elif widest > HEAD:
        yield "attention-shape", f"has heads of {widest}"
    mask, query, causal = _given(node, 3), _kind(_given(node, 0)), node.attributes.get_int("is_causal", 0)
    rank = len(_shape(mask) or ())
    if mask is not None and causal:
        yield "attention-mask", "has a mask and is_causal"
    elif query is not None and _kind(mask) not in ("BOOL", query, None):
        yield "attention-mask", f"has a mask of type {_kind(mask)} for queries of type {query}"
    elif rank > 4:
        yield "attention-mask", f"has a mask of rank {rank}, above 4"


def _quantizer(node: ir.Node, opset: int) -> Found:
    data, scale, zero = (_given(node, index) for index in range(3))
    shape, shape_of_scale, writes = _shape(data), _shape(scale), node.op_type == "QuantizeLinear"
    codes = _kind(node.outputs[0] if writes else data)
    computed = data is None or ir.convenience.get_const_tensor(data) is None
    if codes not in (*QUANTIZED, None):
        yield "quantized-type", f"has codes of type {codes}"
    needed = QUANTIZED.get(codes or "", 0)
    if opset < needed:
        yield "quantized-opset", f"has {codes} codes at opset {opset or None}, which came with {needed}"
    zeros, scales = _constant(zero), _constant(scale)
    if zeros is None and zero is not None:
        yield "zero-point", "has a computed zero point"
    if zeros is not None and bool(np.any(zeros != 0)):
        yield "zero-point", "has a zero point that is not 0"
    if scales is None:
        yield "positive-scale", "has a computed scale"
    elif not (np.all(scales > 0) and np.all(np.isfinite(scales))):
        yield "positive-scale", f"has a scale of {float(np.min(scales)):g}"
    if _kind(scale) not in (*FLOATS, None):
        yield "scale-type", f"has scales of type {_kind(scale)}"
    if shape is not None and None not in shape and _size(shape) > LARGEST:
        yield "volume", f"has {_size(shape)} elements"
    several = shape_of_scale is not None and _size(shape_of_scale) != 1
    if writes and several and computed:
        yield "activation-scale", f"has {_size(shape_of_scale or ())} scales for an activation"
    if not writes and codes == "INT4" and computed:
        yield "int4-weights", "dequantizes INT4 codes that are computed"
    if shape is not None and shape_of_scale is not None:
        wrong = _wrong_shape(node, shape, shape_of_scale) if several else None
        if wrong is not None:
            yield "scale-shape", wrong
        wrong = _wrong_blocks(shape, shape_of_scale) if not writes and codes == "INT4" else None
        if wrong is not None:
            yield "block-size", wrong


def _wrong_shape(node: ir.Node, data: Shape, scale: Shape) -> str | None:
    if len(scale) == 1:
        axis = node.attributes.get_int("axis", 1)
        width = data[axis] if -len(data) <= axis < len(data) else None
        return None if width == scale[0] else f"has {scale[0]} scales for {width} channels"
    if len(scale) != len(data):
        return f"has a scale of rank {len(scale)} for data of rank {len(data)}"
    blocked = [i for i, (d, s) in enumerate(zip(data, scale, strict=True)) if d != s]
    odd = len(blocked) > 1 or (blocked and blocked[0] < len(data) - 2)
    return f"has blocks along dimensions {blocked}" if odd else None


def _wrong_blocks(data: Shape, scale: Shape) -> str | None:
    pairs = [(d, s) for d, s in zip(data, scale, strict=False) if d != s]
    if len(scale) != len(data) or not pairs:
        return "has INT4 codes without blocks" if data and scale else None
    for width, count in pairs:
        if not width or not count or width % count or width // count not in BLOCKS:
            return f"has {count} blocks for {width} numbers"
    return None


def _name(node: ir.Node) -> str:
    return f"{node.op_type} {node.name or node.outputs[0].name}"


def _given(node: ir.Node, index: int) -> ir.Value | None:
    """An input; None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def _kind(value: ir.Value | None) -> str | None:
    """ONNX's name of a value's type, where that is known."""
    return None if value is None or value.dtype is None else value.dtype.name


def _shape(value: ir.Value | None) -> Shape | None:
    """A value's shape, where that is known; None for free dimensions."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def _size(shape: Shape) -> int:
    return math.prod(number or 0 for number in shape)


def _constant(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """Value of an initializer or a Constant node (floats as float32); None where it is computed."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None:
        return None
    values = tensor.numpy()
    return values.astype(np.float32) if values.dtype.kind not in "iub" else values
