"""What TensorRT documents that it refuses, checked before anybody has a GPU: one function a rule.

Sources: [docs] TensorRT 11 documentation (operator reference, quantization, ONNX opset guide); [parser] onnx-tensorrt's importers
(release 10.14 and later); [#n] issues of NVIDIA/TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from export.tensorrt.graph import Graph, Node

Check = Callable[[Graph], Iterator[tuple[str, str]]]  # (where, what was found)


@dataclass(frozen=True)
class Rule:
    """`id`, what TensorRT wants, where that is said, and the check: it yields what breaks it."""

    id: str
    wants: str
    source: str
    check: Check


@dataclass(frozen=True)
class Broken:
    """A rule that a graph breaks."""

    rule: Rule
    where: str
    found: str

    def sentence(self) -> str:
        return f"{self.where} {self.found}, and {self.rule.wants} ({self.rule.id}; {self.rule.source})"


RULES: list[Rule] = []
OPSETS = range(9, 25)
TYPES = {
    "FLOAT",
    "FLOAT16",
    "BFLOAT16",
    "INT8",
    "INT32",
    "INT64",
    "BOOL",
    "UINT8",
    "FLOAT8E4M3FN",
    "INT4",
    "FLOAT4E2M1",
}
FLOATS = {"FLOAT", "FLOAT16", "BFLOAT16"}
QUANTIZED = {"INT4": 21, "INT8": 13, "FLOAT8E4M3FN": 19, "FLOAT4E2M1": 23}  # and the opset that brought it
BLOCKS = (64, 128)
HEAD = 256
LARGEST = 2**31 - 1
UNSUPPORTED = {
    "DynamicQuantizeLinear", "MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv", "BitShift", "Compress", "Unique",
    "SequenceConstruct", "SequenceAt", "SequenceInsert", "SplitToSequence", "ConcatFromSequence", "Optional", "StringNormalizer",
    "Det", "Multinomial", "MaxUnpool", "Adagrad", "Adam", "Gradient", "ImageDecoder", "StringConcat", "StringSplit",
}  # fmt: skip
ATTENTION_ATTRIBUTES = {"scale", "is_causal", "q_num_heads", "kv_num_heads", "softmax_precision"}


def rule(id: str, wants: str, source: str) -> Callable[[Check], Check]:
    """Put a check into `RULES`."""

    def add(check: Check) -> Check:
        RULES.append(Rule(id, wants, source, check))
        return check

    return add


def check(path: Path) -> tuple[list[Broken], int]:
    """What an ONNX file breaks, and how many rules there are."""
    graph = Graph(path)
    broken = [Broken(one, where, found) for one in RULES for where, found in one.check(graph)]
    return broken, len(RULES)


def _of(node: Node) -> str:
    return f"{node.kind} {node.name}"


# ---------------------------------------------------------------- the graph
@rule("opset", f"the parser reads opsets {OPSETS.start} to {OPSETS.stop - 1}", "[docs] ONNX Opset Guide")
def _opset(graph: Graph) -> Iterator[tuple[str, str]]:
    if graph.opset not in OPSETS:
        yield "the model", f"has opset {graph.opset}"


@rule("domain", "the parser knows operators of the default domain only", "[parser] operators.md")
def _domain(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.nodes:
        if node.proto.domain not in ("", "ai.onnx"):
            yield _of(node), f"is of the domain {node.proto.domain}"


@rule("operator", "the parser has no importer for it", "[parser] operators.md")
def _operator(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.nodes:
        if node.kind in UNSUPPORTED:
            yield _of(node), "is in the graph"


@rule("type", f"TensorRT has {', '.join(sorted(TYPES))}", "[docs] data types")
def _type(graph: Graph) -> Iterator[tuple[str, str]]:
    for name, tensor in graph.values().items():
        if tensor.dtype not in TYPES and tensor.dtype != "UNDEFINED":
            yield f"tensor {name}", f"is of type {tensor.dtype}"


@rule("same-type", "a strongly typed network converts nothing by itself", "[docs] strongly typed networks")
def _same_type(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("MatMul", "Gemm", "Add", "Sub", "Mul", "Div"):
        kinds = {t.dtype for t in (graph.type(n) for n in node.proto.input) if t is not None}
        if len(kinds) > 1:
            yield _of(node), f"joins {' and '.join(sorted(kinds))}"


# ---------------------------------------------------------------- quantized weights and activations
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
            yield _of(node), f"has codes of type {kind}"


@rule("quantized-opset", "each type of codes needs the opset that brought it", "[docs] ONNX support of quantization")
def _quantized_opset(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        kind = _codes(graph, node) or ""
        if kind in QUANTIZED and (graph.opset or 0) < QUANTIZED[kind]:
            yield _of(node), f"has {kind} codes at opset {graph.opset}, which came with {QUANTIZED[kind]}"


@rule(
    "zero-point", "only symmetric quantization is possible: zero points are left out or 0", "[parser] shiftIsAllZeros"
)
def _zero_point(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        values = graph.constant(node.input(2))
        if node.input(2) is not None and (values is None or bool(np.any(values != 0))):
            yield _of(node), "has a zero point that is not 0" if values is not None else "has a computed zero point"


@rule(
    "positive-scale",
    "scales are constants above 0",
    "[parser] 'Scale coefficients must all be positive', [docs] IDequantizeLayer",
)
def _positive_scale(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        values = graph.constant(node.input(1))
        if values is None:
            yield _of(node), "has a computed scale"
        elif not bool(np.all(values > 0)) or not bool(np.all(np.isfinite(values))):
            yield _of(node), f"has a scale of {float(np.min(values)):g}"


@rule(
    "scale-type",
    "scales are float32, float16 or bfloat16, and what comes out of a dequantizer is of their type",
    "[parser], [docs] Dequantize",
)
def _scale_type(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        scale = graph.type(node.input(1))
        if scale is not None and scale.dtype not in FLOATS:
            yield _of(node), f"has scales of type {scale.dtype}"


@rule(
    "scale-shape",
    "a scale is one number, one a channel, or one a block of the last or second to last dimension",
    "[docs] IDequantizeLayer",
)
def _scale_shape(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        data, scale = graph.type(node.input(0)), graph.type(node.input(1))
        if data is None or scale is None or data.shape is None or scale.shape is None or _size(scale.shape) == 1:
            continue
        if len(scale.shape) == 1:
            axis = int(node.attributes.get("axis", 1))
            width = data.shape[axis] if -len(data.shape) <= axis < len(data.shape) else None
            if width != scale.shape[0]:
                yield _of(node), f"has {scale.shape[0]} scales for {width} channels"
        elif len(scale.shape) != len(data.shape):
            yield _of(node), f"has a scale of rank {len(scale.shape)} for data of rank {len(data.shape)}"
        else:
            blocked = [i for i, (d, s) in enumerate(zip(data.shape, scale.shape, strict=True)) if d != s]
            if len(blocked) > 1 or (blocked and blocked[0] < len(data.shape) - 2):
                yield _of(node), f"has blocks along dimensions {blocked}"


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
            yield _of(node), "has INT4 codes without blocks"
        for size, count in pairs:
            if not size or not count or size % count or size // count not in BLOCKS:
                yield _of(node), f"has {count} blocks for {size} numbers"


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
            and _size(tensor.shape) % 2
        ):
            yield f"tensor {name}", f"holds {_size(tensor.shape)} of them"


@rule("int4-weights", "INT4 is for weights: what is dequantized is a constant", "[docs] quantized types")
def _int4_weights(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("DequantizeLinear"):
        data = graph.type(node.input(0))
        if data is not None and data.dtype == "INT4" and not graph.is_constant(node.input(0)):
            yield _of(node), "dequantizes INT4 codes that are computed"


@rule("activation-scale", "activations have one scale for the tensor", "[docs] quantization granularities")
def _activation_scale(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("QuantizeLinear"):
        scale = graph.type(node.input(1))
        if (
            scale is not None
            and scale.shape is not None
            and _size(scale.shape) != 1
            and not graph.is_constant(node.input(0))
        ):
            yield _of(node), f"has {_size(scale.shape)} scales for an activation"


@rule("volume", "what is quantized has at most 2^31 - 1 elements", "[docs] Quantize, Dequantize: volume limits")
def _volume(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in _quantizers(graph):
        data = graph.type(node.input(0))
        if data is not None and data.shape is not None and None not in data.shape and _size(data.shape) > LARGEST:
            yield _of(node), f"has {_size(data.shape)} elements"


# ---------------------------------------------------------------- attention
@rule(
    "attention-outputs",
    "Attention has one output",
    "[#4738], [parser] 'TensorRT only supports Attention nodes with one output'",
)
def _attention_outputs(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        if len(node.proto.output) != 1:
            yield _of(node), f"has {len(node.proto.output)} outputs"


@rule(
    "attention-past",
    "Attention takes no cache; it is joined before",
    "[parser] 'Setting past_key ... is not supported'",
)
def _attention_past(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        if node.input(4) is not None or node.input(5) is not None or node.input(6) is not None:
            yield _of(node), "takes past keys or values"


@rule("attention-in-if", "Attention does not lie in a branch", "[#4739]")
def _attention_in_if(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        if "If" in node.inside:
            yield _of(node), "lies in an If"


@rule(
    "attention-attributes",
    "the parser reads no other attribute of Attention, and would leave it out in silence",
    "[parser] Attention",
)
def _attention_attributes(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        odd = sorted(n for n, value in node.attributes.items() if n not in ATTENTION_ATTRIBUTES and value)
        if odd:
            yield _of(node), f"has {odd[0]}"


@rule(
    "attention-shape",
    f"query, key and value have the same rank, 3 or 4, and heads of at most {HEAD}",
    "[parser], [#4705]",
)
def _attention_shape(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        shapes = [
            t.shape for t in (graph.type(node.input(i)) for i in range(3)) if t is not None and t.shape is not None
        ]
        ranks = {len(shape) for shape in shapes}
        if ranks - {3, 4} or len(ranks) > 1:
            yield _of(node), f"has inputs of rank {' and '.join(map(str, sorted(ranks)))}"
        size = max((shape[3] or 0 for shape in shapes if len(shape) == 4), default=0)
        if size > HEAD:
            yield _of(node), f"has heads of {size}"


@rule(
    "attention-mask",
    "a mask is boolean or of the query's type, of rank 4 at most, and excludes is_causal",
    "[parser] convertToMaskTensor, [docs] IAttention",
)
def _attention_mask(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        mask, query = graph.type(node.input(3)), graph.type(node.input(0))
        if node.input(3) is None:
            continue
        if node.attributes.get("is_causal"):
            yield _of(node), "has a mask and is_causal"
        if mask is not None and query is not None and mask.dtype not in ("BOOL", query.dtype):
            yield _of(node), f"has a mask of type {mask.dtype} for queries of type {query.dtype}"
        if mask is not None and mask.shape is not None and len(mask.shape) > 4:
            yield _of(node), f"has a mask of rank {len(mask.shape)}"


def _size(shape: tuple[int | None, ...]) -> int:
    result = 1
    for number in shape:
        result *= number or 0
    return result
