"""Rules of the graph: opset, operators, types."""

from __future__ import annotations

from collections.abc import Iterator

from export.tensorrt.graph import Graph, kind
from export.tensorrt.rules.base import of, rule

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
UNSUPPORTED = {
    "DynamicQuantizeLinear", "MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv", "BitShift", "Compress", "Unique",
    "SequenceConstruct", "SequenceAt", "SequenceInsert", "SplitToSequence", "ConcatFromSequence", "Optional", "StringNormalizer",
    "Det", "Multinomial", "MaxUnpool", "Adagrad", "Adam", "Gradient", "ImageDecoder", "StringConcat", "StringSplit",
}  # fmt: skip


@rule("opset", f"the parser reads opsets {OPSETS.start} to {OPSETS.stop - 1}", "[docs] ONNX Opset Guide")
def _opset(graph: Graph) -> Iterator[tuple[str, str]]:
    if graph.opset not in OPSETS:
        yield "the model", f"has opset {graph.opset}"


@rule("domain", "the parser knows operators of the default domain only", "[parser] operators.md")
def _domain(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.nodes:
        if node.domain not in ("", "ai.onnx"):
            yield of(node), f"is of the domain {node.domain}"


@rule("operator", "the parser has no importer for it", "[parser] operators.md")
def _operator(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.nodes:
        if node.op_type in UNSUPPORTED:
            yield of(node), "is in the graph"


@rule("type", f"TensorRT has {', '.join(sorted(TYPES))}", "[docs] data types")
def _type(graph: Graph) -> Iterator[tuple[str, str]]:
    for value in graph.values():
        if kind(value) not in (*TYPES, "UNDEFINED", None):
            yield f"tensor {value.name}", f"is of type {kind(value)}"


@rule("same-type", "a strongly typed network converts nothing by itself", "[docs] strongly typed networks")
def _same_type(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("MatMul", "Gemm", "Add", "Sub", "Mul", "Div"):
        kinds = {found for found in map(kind, node.inputs) if found is not None}
        if len(kinds) > 1:
            yield of(node), f"joins {' and '.join(sorted(kinds))}"
