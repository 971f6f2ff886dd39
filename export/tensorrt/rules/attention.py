"""Rules of attention."""

from __future__ import annotations

from collections.abc import Iterator

from export.tensorrt.graph import Graph
from export.tensorrt.rules.base import of, rule

HEAD = 256
ATTENTION_ATTRIBUTES = {"scale", "is_causal", "q_num_heads", "kv_num_heads", "softmax_precision"}


@rule(
    "attention-outputs",
    "Attention has one output",
    "[#4738], [parser] 'TensorRT only supports Attention nodes with one output'",
)
def _attention_outputs(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        if len(node.proto.output) != 1:
            yield of(node), f"has {len(node.proto.output)} outputs"


@rule(
    "attention-past",
    "Attention takes no cache; it is joined before",
    "[parser] 'Setting past_key ... is not supported'",
)
def _attention_past(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        if node.input(4) is not None or node.input(5) is not None or node.input(6) is not None:
            yield of(node), "takes past keys or values"


@rule("attention-in-if", "Attention does not lie in a branch", "[#4739]")
def _attention_in_if(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        if "If" in node.inside:
            yield of(node), "lies in an If"


@rule(
    "attention-attributes",
    "the parser reads no other attribute of Attention, and would leave it out in silence",
    "[parser] Attention",
)
def _attention_attributes(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        odd = sorted(n for n, value in node.attributes.items() if n not in ATTENTION_ATTRIBUTES and value)
        if odd:
            yield of(node), f"has {odd[0]}"


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
            yield of(node), f"has inputs of rank {' and '.join(map(str, sorted(ranks)))}"
        widest = max((shape[3] or 0 for shape in shapes if len(shape) == 4), default=0)
        if widest > HEAD:
            yield of(node), f"has heads of {widest}"


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
            yield of(node), "has a mask and is_causal"
        if mask is not None and query is not None and mask.dtype not in ("BOOL", query.dtype):
            yield of(node), f"has a mask of type {mask.dtype} for queries of type {query.dtype}"
        if mask is not None and mask.shape is not None and len(mask.shape) > 4:
            yield of(node), f"has a mask of rank {len(mask.shape)}"
