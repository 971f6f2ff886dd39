"""Attention in each dialect. Keys and values are never repeated for the query heads that share them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from export.onnx.builder import Builder
from export.onnx.dialect import Dialect
from export.onnx.matmul_nbits import MICROSOFT

if TYPE_CHECKING:
    import onnx_ir

_BIAS = "compress.bias"  # where a graph keeps {mask: additive bias}


def write_attention(b: Builder, mark: onnx_ir.Node, dialect: Dialect, biases: dict[Any, Any]) -> onnx_ir.Value:
    """`[b, heads, s, d]`; `biases` shares what was made of one mask."""
    if dialect.name == "tensorrt":
        return _operator(b, mark)
    return _products(b, mark, dialect, biases)


def _operator(b: Builder, mark: onnx_ir.Node) -> onnx_ir.Value:
    """ONNX's `Attention` (opset 23) with one output: TensorRT refuses it with a cache, and knows grouped queries by itself."""
    attributes: dict[str, Any] = {"scale": mark.attributes.get_float("scale")}
    softcap = mark.attributes.get_float("softcap", 0.0)
    if softcap:
        attributes["softcap"] = softcap
    return b.op("Attention", mark.inputs, "Attention", like=mark.outputs[0], **attributes)


def _products(b: Builder, mark: onnx_ir.Node, dialect: Dialect, biases: dict[Any, Any]) -> onnx_ir.Value:
    """Two products and a softmax; the query heads that share keys lie in one matrix."""
    query, key, value = mark.inputs[:3]
    mask = mark.inputs[3] if len(mark.inputs) > 3 else None
    heads, kv_heads, size = _size(query, 1), _size(key, 1), _size(value, 3)
    grouped = heads != kv_heads
    scale, softcap = mark.attributes.get_float("scale"), mark.attributes.get_float("softcap", 0.0)
    query = b.op("Mul", [query, b.constant(scale, dialect.dtype)], "scaled")
    if grouped:  # query heads that share keys are neighbours: [b, kv, heads / kv * s, d]
        query = b.op("Reshape", [query, b.constant([0, kv_heads, -1, _size(mark.inputs[0], 3)])], "grouped")
    scores = b.op("MatMul", [query, b.op("Transpose", [key], "keys", perm=[0, 1, 3, 2])], "scores")
    if grouped:
        scores = b.op("Reshape", [scores, b.constant([0, heads, -1, 0])], "of_heads")
    if softcap:
        limit = b.constant(softcap, dialect.dtype)
        scores = b.op("Mul", [b.op("Tanh", [b.op("Div", [scores, limit], "to_cap")], "capped"), limit], "softcap")
    if mask is not None:
        scores = b.op("Add", [scores, _bias(b, mask, dialect, biases)], "masked")
    weights = b.op("Softmax", [scores], "Softmax", axis=-1)
    if grouped:
        weights = b.op("Reshape", [weights, b.constant([0, kv_heads, -1, 0])], "weights")
    output = b.op("MatMul", [weights, value], "values")
    if grouped:
        output = b.op("Reshape", [output, b.constant([0, heads, -1, size])], "output", like=mark.outputs[0])
    return output


def _bias(b: Builder, mask: onnx_ir.Value, dialect: Dialect, biases: dict[Any, Any]) -> onnx_ir.Value:
    """0 where the mask is true, else so low that it never counts; half the lowest number, so that adding a score stays finite."""
    if mask.dtype is not None and mask.dtype != _bool():
        return mask
    if mask not in biases:
        low = b.constant(torch.finfo(dialect.dtype).min / 2, dialect.dtype)
        biases[mask] = b.op("Where", [mask, b.constant(0.0, dialect.dtype), low], "bias")
    return biases[mask]


# ---------------------------------------------------------------- ONNX Runtime's grouped-query attention
def why_not_grouped(marks: list[onnx_ir.Node], inputs: dict[str, onnx_ir.Value]) -> str | None:
    """Why `GroupQueryAttention` cannot take the place of these marks; None when it can.

    It masks causally and by a window itself, so that of the traced mask only padding is left, which the input `attention_mask` says.
    """
    from export.onnx.mask import holds_window

    if "position_ids" not in inputs:
        return "the model takes no position_ids, so positions are counted from the length of the cache"
    asked: dict[tuple[Any, int], bool] = {}
    for mark in marks:
        if not mark.attributes.get_int("causal", 0):
            return "attention is not causal"
        if len(mark.inputs) > 3 and mark.inputs[3] is not None and mark.inputs[3].dtype != _bool():
            return "attention adds a bias of its own"
        if _size(mark.inputs[0], 3) % 8 or _size(mark.inputs[0], 3) != _size(mark.inputs[2], 3):
            return f"heads of {_size(mark.inputs[0], 3)} and {_size(mark.inputs[2], 3)} numbers"
        for value in _states(mark)[1:]:
            concat = value.producer()
            if concat is None or concat.op_type != "Concat" or not concat.inputs[0].is_graph_input():  # type: ignore[union-attr]
                return "keys or values are not the cache and what is appended to it"
            if any(user is not mark for user, _ in value.uses()):
                return "layers share a cache"
        mask, window = mark.inputs[3] if len(mark.inputs) > 3 else None, mark.attributes.get_int("window", 0)
        if mask is None:
            return "attention has no mask"
        if (mask, window) not in asked:  # of all layers alike once
            asked[mask, window] = holds_window(mask, window)
        if not asked[mask, window]:
            return f"the mask is not that of a window of {window} tokens" if window else "the mask is not causal alone"
    return None


def write_grouped(b: Builder, mark: onnx_ir.Node, dialect: Dialect, shared: dict[Any, Any]) -> onnx_ir.Value:
    """`GroupQueryAttention`: appends to the cache in place and reads it. Replaces the graph outputs `present.*` too."""
    query, key, value = _states(mark)
    heads, kv_heads, size = _size(query, 1), _size(key, 1), _size(query, 3)
    merge = b.constant([0, 0, -1])
    appended = [source.producer().inputs for source in (key, value)]  # type: ignore[union-attr]
    states = [
        b.op("Reshape", [b.op("Transpose", [part], f"{name}_rows", perm=[0, 2, 1, 3]), merge], name)
        for name, part in (("query", query), ("key", appended[0][1]), ("value", appended[1][1]))
    ]
    lengths = _lengths(b, dialect, shared)
    window, softcap = mark.attributes.get_int("window", 0), mark.attributes.get_float("softcap", 0.0)
    attributes: dict[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "scale": mark.attributes.get_float("scale"),
    }
    if window:
        attributes["local_window_size"] = window
    if softcap:
        attributes["softcap"] = softcap
    last, total, bias = lengths
    output, present_key, present_value = b.op(
        "GroupQueryAttention", [*states, appended[0][0], appended[1][0], last, total, None, None, None, bias],
        "GroupQueryAttention", MICROSOFT, outputs=3, **attributes,
    )  # fmt: skip
    for old, new in ((key, present_key), (value, present_value)):
        new.shape, new.type, name = old.shape, old.type, old.name
        mark.replace_input_with(1 if old is key else 2, None)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = f"{name}.traced", name
    rows = b.op("Reshape", [output, b.constant([0, 0, heads, size])], "rows")
    return b.op("Transpose", [rows], "output", perm=[0, 2, 1, 3])


def _lengths(b: Builder, dialect: Dialect, shared: dict[Any, Any]) -> tuple[Any, Any, Any]:
    """`seqlens_k` int32 `[b]`, `total_sequence_length` int32, and the bias of padding `[b, 1, s, t]`, made once a graph."""
    if _BIAS not in shared:
        inputs = {value.name: value for value in b.store.graph.inputs}
        mask, ids = inputs["attention_mask"], inputs["input_ids"]
        batch = b.op("Shape", [mask], "lengths/batch", start=0, end=1)
        length = b.cast(b.op("Shape", [mask], "lengths/length", start=1, end=2), torch.int32, "lengths/total")
        shorter = b.op("Sub", [length, b.constant([1], torch.int32)], "lengths/last")
        last = b.op("Expand", [shorter, batch], "lengths/seqlens_k")
        total = b.op("Squeeze", [length], "lengths/total_sequence_length")
        low = b.constant(torch.finfo(dialect.dtype).min / 2, dialect.dtype)
        row = b.op(
            "Where", [b.cast(mask, torch.bool, "lengths/kept"), b.constant(0.0, dialect.dtype), low], "lengths/padding"
        )
        row = b.op("Unsqueeze", [row, b.constant([1, 2])], "lengths/rows")
        sequence = b.op("Shape", [ids], "lengths/sequence", start=1, end=2)
        ones = b.constant([1])
        shape = b.op("Concat", [ones, ones, sequence, ones], "lengths/shape", axis=0)
        shared[_BIAS] = (last, total, b.op("Expand", [row, shape], "lengths/bias"))
    return shared[_BIAS]


def _bool() -> Any:
    import onnx_ir as ir

    return ir.DataType.BOOL


def _states(mark: onnx_ir.Node) -> list[onnx_ir.Value]:
    """Query, keys and values of a mark."""
    states = mark.inputs[:3]
    return [state for state in states if state is not None]


def _size(value: onnx_ir.Value | None, axis: int) -> int:
    """A fixed dimension; the exporter writes some of them as symbols ("64")."""
    assert value is not None
    assert value.shape is not None
    dimension = value.shape[axis]
    return dimension if isinstance(dimension, int) else int(str(dimension.value))
