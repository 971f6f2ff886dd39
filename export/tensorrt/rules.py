"""Rules of TensorRT's documentation, checked over an ONNX file without a GPU: one function a rule.

Sources: [docs] TensorRT 11 documentation (operator reference, quantization, ONNX opset guide); [parser] onnx-tensorrt's importers
(release 10.14 and later); [#n] issues of NVIDIA/TensorRT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
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


class Graph:
    """A model with the shapes and types that can be inferred; nodes of all subgraphs are among its own."""

    def __init__(self, path: Path) -> None:
        self.model = ir.load(path)
        # It leaves unknown what it cannot infer; ONNX's checker says what is wrong with a graph.
        common.ShapeInferencePass(check_type=False, strict_mode=False)(self.model)
        self.nodes = list(self.model.graph.all_nodes())
        self.opset = self.model.opset_imports.get("")  # of the default domain

    def values(self) -> Iterator[ir.Value]:
        """All values of all graphs."""
        for graph in self.model.graphs():
            yield from graph.inputs
            yield from graph.initializers.values()
        for node in self.nodes:
            yield from node.outputs


@dataclass(frozen=True)
class Rule:
    """`id`, what TensorRT wants, where that is said, and the check: what breaks it, as (where, found)."""

    id: str
    wants: str
    source: str
    check: Callable[[Graph], Iterable[tuple[str, str]]]


@dataclass(frozen=True)
class Violation:
    """A rule that a graph breaks."""

    rule: Rule
    where: str
    found: str

    def sentence(self) -> str:
        """Where, what was found, what the rule allows, and its source."""
        return f"{self.where} {self.found}, and {self.rule.wants} ({self.rule.id}; {self.rule.source})"


RULES: list[Rule] = []


def check(path: Path) -> tuple[list[Violation], int]:
    """What an ONNX file breaks, and how many rules there are."""
    graph = Graph(path)
    broken = [Violation(one, where, found) for one in RULES for where, found in one.check(graph)]
    return broken, len(RULES)


Check = Callable[[Any, Graph], str | None]  # node, value or graph, and its graph: what is wrong with it


def rule(id: str, wants: str, source: str, things: Callable[[Graph], Iterable[Any]]) -> Callable[[Check], Check]:
    """Put a check of some `things` of a graph into `RULES`."""

    def add(find: Check) -> Check:
        def run(graph: Graph) -> Iterator[tuple[str, str]]:
            for thing in things(graph):
                found = find(thing, graph)
                if found is not None:
                    yield _name(thing), found

        RULES.append(Rule(id, wants, source, run))
        return find

    return add


def _name(thing: Any) -> str:
    if isinstance(thing, Graph):
        return "the model"
    if isinstance(thing, ir.Node):
        return f"{thing.op_type} {thing.name or thing.outputs[0].name}"
    return f"tensor {thing.name}"


def _nodes(*kinds: str) -> Callable[[Graph], Iterable[ir.Node]]:
    """Nodes of these operators; of all where none is given."""
    return lambda graph: (node for node in graph.nodes if not kinds or node.op_type in kinds)


_ATTENTION, _QUANTIZERS = _nodes("Attention"), _nodes("QuantizeLinear", "DequantizeLinear")


def _given(node: ir.Node, index: int) -> ir.Value | None:
    """An input; None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def _kind(value: ir.Value | None) -> str | None:
    """ONNX's name of a value's type, where that is known."""
    return None if value is None or value.dtype is None else value.dtype.name


def _shape(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """A value's shape, where that is known; None for free dimensions."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def _size(shape: tuple[int | None, ...]) -> int:
    return math.prod(number or 0 for number in shape)


def _constant(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """Value of an initializer or a Constant node (floats as float32); None where it is computed."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None:
        return None
    values = tensor.numpy()
    return values.astype(np.float32) if values.dtype.kind not in "iub" else values


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and ir.convenience.get_const_tensor(value) is not None


def _attribute(node: ir.Node, name: str, otherwise: Any = None) -> Any:
    return node.attributes[name].value if name in node.attributes else otherwise


def _codes(node: ir.Node) -> str | None:
    """Type of the codes that a quantizer or dequantizer writes or reads."""
    return _kind(node.inputs[0] if node.op_type == "DequantizeLinear" else node.outputs[0])


# ---------------------------------------------------------------- the graph
@rule("opset", f"the parser reads opsets {OPSETS.start} to {OPSETS.stop - 1}", "[docs] ONNX Opset Guide", lambda g: [g])
def _opset(graph: Graph, _: Graph) -> str | None:
    return None if graph.opset in OPSETS else f"has opset {graph.opset}"


@rule("domain", "the parser knows operators of the default domain only", "[parser] operators.md", _nodes())
def _domain(node: ir.Node, graph: Graph) -> str | None:
    return None if node.domain in ("", "ai.onnx") else f"is of the domain {node.domain}"


@rule("operator", "the parser has no importer for it", "[parser] operators.md", _nodes(*UNSUPPORTED))
def _operator(node: ir.Node, graph: Graph) -> str | None:
    return "is in the graph"


@rule("type", f"TensorRT has {', '.join(sorted(TYPES))}", "[docs] data types", Graph.values)
def _type(value: ir.Value, graph: Graph) -> str | None:
    return None if _kind(value) in (*TYPES, "UNDEFINED", None) else f"is of type {_kind(value)}"


_ARITHMETIC = _nodes("MatMul", "Gemm", "Add", "Sub", "Mul", "Div")


@rule("same-type", "a strongly typed network converts nothing by itself", "[docs] strongly typed networks", _ARITHMETIC)
def _same_type(node: ir.Node, graph: Graph) -> str | None:
    kinds = {found for found in map(_kind, node.inputs) if found is not None}
    return f"joins {' and '.join(sorted(kinds))}" if len(kinds) > 1 else None


# ---------------------------------------------------------------- attention
@rule("attention-outputs", "Attention has one output", "[#4738], [parser]", _ATTENTION)
def _attention_outputs(node: ir.Node, graph: Graph) -> str | None:
    return None if len(node.outputs) == 1 else f"has {len(node.outputs)} outputs"


@rule("attention-past", "Attention takes no cache; it is joined before", "[parser] 'Setting past_key'", _ATTENTION)
def _attention_past(node: ir.Node, graph: Graph) -> str | None:
    return "takes past keys or values" if any(_given(node, index) is not None for index in (4, 5, 6)) else None


@rule("attention-in-if", "Attention does not lie in a branch", "[#4739]", _nodes("If"))
def _attention_in_if(node: ir.Node, graph: Graph) -> str | None:
    inner = (each for branch in node.attributes.values() for each in branch.as_graph().all_nodes())
    return next((f"has {_name(each)} in a branch" for each in inner if each.op_type == "Attention"), None)


@rule("attention-attributes", "the parser leaves other attributes out in silence", "[parser] Attention", _ATTENTION)
def _attention_attributes(node: ir.Node, graph: Graph) -> str | None:
    odd = sorted(name for name in node.attributes if name not in ATTENTION_ATTRIBUTES and _attribute(node, name))
    return f"has {odd[0]}" if odd else None


@rule("attention-shape", f"inputs have rank 3 or 4 and heads of at most {HEAD}", "[parser], [#4705]", _ATTENTION)
def _attention_shape(node: ir.Node, graph: Graph) -> str | None:
    shapes = [found for found in (_shape(_given(node, i)) for i in range(3)) if found is not None]
    ranks = {len(each) for each in shapes}
    if ranks - {3, 4} or len(ranks) > 1:
        return f"has inputs of rank {' and '.join(map(str, sorted(ranks)))}"
    widest = max((each[3] or 0 for each in shapes if len(each) == 4), default=0)
    return f"has heads of {widest}" if widest > HEAD else None


@rule("attention-mask", "a mask is boolean or of the query's type, without is_causal", "[docs]", _ATTENTION)
def _attention_mask(node: ir.Node, graph: Graph) -> str | None:
    mask, query = _given(node, 3), _kind(_given(node, 0))
    if mask is None:
        return None
    if _attribute(node, "is_causal"):
        return "has a mask and is_causal"
    if _kind(mask) is not None and query is not None and _kind(mask) not in ("BOOL", query):
        return f"has a mask of type {_kind(mask)} for queries of type {query}"
    rank = len(_shape(mask) or ())
    return f"has a mask of rank {rank}, above 4" if rank > 4 else None


# ---------------------------------------------------------------- quantized weights and activations
@rule("quantized-type", f"codes are {', '.join(QUANTIZED)}", "[parser] QuantDequantLinearHelper", _QUANTIZERS)
def _quantized_type(node: ir.Node, graph: Graph) -> str | None:
    return None if _codes(node) in (*QUANTIZED, None) else f"has codes of type {_codes(node)}"


@rule("quantized-opset", "codes need the opset that brought their type", "[docs] quantization", _QUANTIZERS)
def _quantized_opset(node: ir.Node, graph: Graph) -> str | None:
    needed = QUANTIZED.get(_codes(node) or "", 0)
    if (graph.opset or 0) >= needed:
        return None
    return f"has {_codes(node)} codes at opset {graph.opset}, which came with {needed}"


@rule("zero-point", "zero points are left out or 0", "[parser] shiftIsAllZeros", _QUANTIZERS)
def _zero_point(node: ir.Node, graph: Graph) -> str | None:
    values = _constant(_given(node, 2))
    if values is None:
        return None if _given(node, 2) is None else "has a computed zero point"
    return "has a zero point that is not 0" if bool(np.any(values != 0)) else None


@rule("positive-scale", "scales are constants above 0", "[parser], [docs] IDequantizeLayer", _QUANTIZERS)
def _positive_scale(node: ir.Node, graph: Graph) -> str | None:
    values = _constant(_given(node, 1))
    if values is None:
        return "has a computed scale"
    positive = bool(np.all(values > 0)) and bool(np.all(np.isfinite(values)))
    return None if positive else f"has a scale of {float(np.min(values)):g}"


@rule("scale-type", "scales and dequantized values are floats of 16 or 32 bits", "[docs]", _QUANTIZERS)
def _scale_type(node: ir.Node, graph: Graph) -> str | None:
    scale = _kind(_given(node, 1))
    return None if scale is None or scale in FLOATS else f"has scales of type {scale}"


@rule("scale-shape", "scales are one, one a channel, or one a block of the last dimensions", "[docs]", _QUANTIZERS)
def _scale_shape(node: ir.Node, graph: Graph) -> str | None:
    data, scale = _shape(_given(node, 0)), _shape(_given(node, 1))
    if data is None or scale is None or _size(scale) == 1:
        return None
    if len(scale) == 1:
        axis = int(_attribute(node, "axis", 1))
        width = data[axis] if -len(data) <= axis < len(data) else None
        return None if width == scale[0] else f"has {scale[0]} scales for {width} channels"
    if len(scale) != len(data):
        return f"has a scale of rank {len(scale)} for data of rank {len(data)}"
    blocked = [i for i, (d, s) in enumerate(zip(data, scale, strict=True)) if d != s]
    odd = len(blocked) > 1 or (blocked and blocked[0] < len(data) - 2)
    return f"has blocks along dimensions {blocked}" if odd else None


_DEQUANTIZERS = _nodes("DequantizeLinear")


@rule("block-size", f"blocks of INT4 hold {BLOCKS[0]} or {BLOCKS[1]} numbers", "[docs]", _DEQUANTIZERS)
def _block_size(node: ir.Node, graph: Graph) -> str | None:
    data, scale = _shape(_given(node, 0)), _shape(_given(node, 1))
    if not data or not scale or _codes(node) != "INT4":
        return None
    pairs = [(d, s) for d, s in zip(data, scale, strict=False) if d != s]
    if len(scale) != len(data) or not pairs:
        return "has INT4 codes without blocks"
    for width, count in pairs:
        if not width or not count or width % count or width // count not in BLOCKS:
            return f"has {count} blocks for {width} numbers"
    return None


@rule("even-codes", "a tensor of 4-bit codes holds an even number of them", "[parser]", Graph.values)
def _even_codes(value: ir.Value, graph: Graph) -> str | None:
    found = _shape(value)
    odd = _kind(value) in ("INT4", "FLOAT4E2M1") and found is not None and None not in found and _size(found) % 2
    return f"holds {_size(found or ())} of them" if odd else None


@rule("int4-weights", "INT4 is for weights: what is dequantized is a constant", "[docs] quantized types", _DEQUANTIZERS)
def _int4_weights(node: ir.Node, graph: Graph) -> str | None:
    computed = _codes(node) == "INT4" and not _is_constant(_given(node, 0))
    return "dequantizes INT4 codes that are computed" if computed else None


@rule("activation-scale", "activations have one scale", "[docs] quantization granularities", _nodes("QuantizeLinear"))
def _activation_scale(node: ir.Node, graph: Graph) -> str | None:
    scale = _shape(_given(node, 1))
    if scale is None or _size(scale) == 1 or _is_constant(_given(node, 0)):
        return None
    return f"has {_size(scale)} scales for an activation"


@rule("volume", "at most 2^31 - 1 elements are quantized", "[docs] Quantize, Dequantize", _QUANTIZERS)
def _volume(node: ir.Node, graph: Graph) -> str | None:
    data = _shape(_given(node, 0))
    large = data is not None and None not in data and _size(data) > LARGEST
    return f"has {_size(data or ())} elements" if large else None
