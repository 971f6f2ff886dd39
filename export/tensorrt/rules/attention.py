"""Rules of attention."""

from __future__ import annotations

from collections.abc import Iterator

from export.tensorrt.graph import Graph, attribute, given, kind, shape
from export.tensorrt.model import HEAD
from export.tensorrt.rules.base import of, rule

ATTENTION_ATTRIBUTES = {"scale", "is_causal", "q_num_heads", "kv_num_heads", "softmax_precision"}


@rule(
    "attention-outputs",
    "Attention has one output",
    "[#4738], [parser] 'TensorRT only supports Attention nodes with one output'",
)
def _attention_outputs(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        if len(node.outputs) != 1:
            yield of(node), f"has {len(node.outputs)} outputs"


@rule(
    "attention-past",
    "Attention takes no cache; it is joined before",
    "[parser] 'Setting past_key ... is not supported'",
)
def _attention_past(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        if any(given(node, index) is not None for index in (4, 5, 6)):
            yield of(node), "takes past keys or values"


@rule("attention-in-if", "Attention does not lie in a branch", "[#4739]")
def _attention_in_if(graph: Graph) -> Iterator[tuple[str, str]]:
    branches = {
        inner for node in graph.of("If") for each in node.attributes.values() for inner in each.as_graph().all_nodes()
    }
    for node in graph.of("Attention"):
        if node in branches:
            yield of(node), "lies in an If"


@rule(
    "attention-attributes",
    "the parser reads no other attribute of Attention, and would leave it out in silence",
    "[parser] Attention",
)
def _attention_attributes(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        odd = sorted(name for name in node.attributes if name not in ATTENTION_ATTRIBUTES and attribute(node, name))
        if odd:
            yield of(node), f"has {odd[0]}"


@rule(
    "attention-shape",
    f"query, key and value have the same rank, 3 or 4, and heads of at most {HEAD}",
    "[parser], [#4705]",
)
def _attention_shape(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        shapes = [found for found in (shape(given(node, i)) for i in range(3)) if found is not None]
        ranks = {len(each) for each in shapes}
        if ranks - {3, 4} or len(ranks) > 1:
            yield of(node), f"has inputs of rank {' and '.join(map(str, sorted(ranks)))}"
        widest = max((each[3] or 0 for each in shapes if len(each) == 4), default=0)
        if widest > HEAD:
            yield of(node), f"has heads of {widest}"


@rule(
    "attention-mask",
    "a mask is boolean or of the query's type, of rank 4 at most, and excludes is_causal",
    "[parser] convertToMaskTensor, [docs] IAttention",
)
def _attention_mask(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.of("Attention"):
        mask, query = given(node, 3), kind(given(node, 0))
        if mask is None:
            continue
        if attribute(node, "is_causal"):
            yield of(node), "has a mask and is_causal"
        if kind(mask) is not None and query is not None and kind(mask) not in ("BOOL", query):
            yield of(node), f"has a mask of type {kind(mask)} for queries of type {query}"
        if len(shape(mask) or ()) > 4:
            yield of(node), f"has a mask of rank {len(shape(mask) or ())}"
