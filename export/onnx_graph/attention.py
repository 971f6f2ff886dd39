"""Attention in each dialect. Keys and values are never repeated for the query heads that share them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from export.onnx_graph.builder import Builder, fixed
from export.onnx_graph.dialect import Dialect
from export.onnx_graph.marks import DOMAIN
from export.onnx_graph.matmul_nbits import MICROSOFT
from export.onnx_graph.trace import OPSET, drop_unused_inputs

if TYPE_CHECKING:
    import onnx_ir


_log = logging.getLogger("compress.export")
_NEW = 2  # tokens after the past: two rows tell where a window ends
_INPUTS, _CACHE = ("input_ids", "attention_mask", "position_ids"), "past_key_values."
_LONGEST = 1 << 24  # constants beyond are ends of slices ("to the last"), not lengths


def holds_window(mask: onnx_ir.Value, window: int) -> bool:
    """Whether `mask` `[b, 1, s, t]` is causality, padding and a window of that many tokens, the token itself counted (0: none).

    It is computed for two tokens after a past that is longer than every length the mask is made of, so that a window or chunks that
    `window` does not speak of show. False also where it is not made of the graph's inputs and constants alone.
    """
    import onnx_ir
    import onnxruntime

    if mask.graph is None:
        return False
    part = onnx_ir.convenience.extract(mask.graph, list(mask.graph.inputs), [mask])
    drop_unused_inputs(part)
    names = [str(value.name) for value in part.inputs]
    if any(node.domain == DOMAIN for node in part):
        return False
    if any(name not in _INPUTS and not name.startswith(_CACHE) for name in names):
        return False
    past = max([window, *_row_lengths(part)]) + _NEW
    feeds: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in zip(names, part.inputs, strict=True):
        if name.startswith(_CACHE):
            # Its length is all that a mask asks of the cache; the rest would be large, or bfloat16, which numpy does not have.
            value.shape = onnx_ir.Shape(["batch", "heads", "past", "size"])
            value.type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
        feeds[name] = _feed(name, past)
    total = np.arange(past + _NEW)
    row = np.arange(past, past + _NEW)[:, None]
    wanted = total[None] <= row
    if "attention_mask" in feeds:
        wanted &= feeds["attention_mask"][0] != 0
    if window:
        wanted &= total[None] > row - window
    part.opset_imports.setdefault("", OPSET)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    try:
        model = onnx_ir.to_proto(onnx_ir.Model(part, ir_version=10)).SerializeToString()
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        found = session.run(None, feeds)[0]
    except Exception as error:  # ONNX Runtime raises a class of its own for each status
        _log.info("the mask cannot be computed apart: %s", error)
        return False
    return found.dtype == np.bool_ and found.shape[-2:] == wanted.shape and bool((found == wanted).all())


def _row_lengths(part: onnx_ir.Graph) -> list[int]:
    """Integers among constants that could be a window or the size of a chunk."""
    import onnx_ir

    found: list[int] = []
    for value in (*part.initializers.values(), *(output for node in part for output in node.outputs)):
        constant = onnx_ir.convenience.get_const_tensor(value)
        if constant is not None and constant.dtype in (onnx_ir.DataType.INT64, onnx_ir.DataType.INT32):
            found += [int(number) for number in np.abs(constant.numpy()).reshape(-1) if number < _LONGEST]
    return found


def _feed(name: str, past: int) -> np.ndarray[Any, Any]:
    if name == "attention_mask":
        kept = np.ones((1, past + _NEW), np.int64)
        kept[0, past - 1] = 0  # padding is part of the mask too
        return kept
    if name == "position_ids":
        return np.arange(past, past + _NEW, dtype=np.int64)[None]
    if name == "input_ids":
        return np.zeros((1, _NEW), np.int64)
    return np.zeros((1, 1, past, 1), np.float32)


_BIAS = "compress.bias"  # where a graph keeps {mask: additive bias}


def write_attention(b: Builder, mark: onnx_ir.Node, dialect: Dialect, biases: dict[Any, Any]) -> onnx_ir.Value:
    """`[b, heads, s, d]`; `biases` shares what was made of one mask.

    For TensorRT ONNX's `Attention` (opset 23) with one output: it refuses one with a cache, and knows grouped queries by itself. Else
    two products and a softmax; the query heads that share keys lie in one matrix.
    """
    scale, softcap = mark.attributes.get_float("scale"), mark.attributes.get_float("softcap", 0.0)
    if dialect.name == "tensorrt":
        attributes: dict[str, Any] = {"scale": scale} | ({"softcap": softcap} if softcap else {})
        return b.op("Attention", mark.inputs, "Attention", like=mark.outputs[0], **attributes)
    query, key, value, mask = _states(mark)
    heads, kv_heads, width, size = _size(query, 1), _size(key, 1), _size(query, 3), _size(value, 3)
    grouped = heads != kv_heads
    query = b.op("Mul", [query, b.constant(scale, dialect.dtype)], "scaled")
    if grouped:  # query heads that share keys are neighbours: [b, kv, heads / kv * s, d]
        query = b.op("Reshape", [query, b.constant([0, kv_heads, -1, width])], "grouped")
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
    if mask.dtype is not None and mask.dtype.name != "BOOL":
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

    if "position_ids" not in inputs:
        return "the model takes no position_ids, so positions are counted from the length of the cache"
    asked: dict[tuple[Any, int], bool] = {}
    for mark in marks:
        if not mark.attributes.get_int("causal", 0):
            return "attention is not causal"
        query, key, value, mask = _states(mark)
        if mask is not None and (mask.dtype is None or mask.dtype.name != "BOOL"):
            return "attention adds a bias of its own"
        if _size(query, 3) % 8 or _size(query, 3) != _size(value, 3):
            return f"heads of {_size(query, 3)} and {_size(value, 3)} numbers"
        for state in (key, value):
            concat = state.producer()
            if concat is None or concat.op_type != "Concat" or not concat.inputs[0].is_graph_input():
                return "keys or values are not the cache and what is appended to it"
            if any(user is not mark for user, _ in state.uses()):
                return "layers share a cache"
        window = mark.attributes.get_int("window", 0)
        if mask is None:
            return "attention has no mask"
        if (mask, window) not in asked:  # of all layers alike once
            asked[mask, window] = holds_window(mask, window)
        if not asked[mask, window]:
            return f"the mask is not that of a window of {window} tokens" if window else "the mask is not causal alone"
    return None


def write_grouped(b: Builder, mark: onnx_ir.Node, dialect: Dialect, shared: dict[Any, Any]) -> onnx_ir.Value:
    """`GroupQueryAttention`: appends to the cache in place and reads it. Replaces the graph outputs `present.*` too."""
    query, key, value, _ = _states(mark)
    heads, kv_heads, size = _size(query, 1), _size(key, 1), _size(query, 3)
    merge = b.constant([0, 0, -1])
    (past_key, new_key), (past_value, new_value) = (source.producer().inputs for source in (key, value))
    states = [
        b.op("Reshape", [b.op("Transpose", [part], f"{name}_rows", perm=[0, 2, 1, 3]), merge], name)
        for name, part in (("query", query), ("key", new_key), ("value", new_value))
    ]
    last, total, bias = _lengths(b, dialect, shared)
    given = mark.attributes
    optional: dict[str, Any] = {
        "local_window_size": given.get_int("window", 0),
        "softcap": given.get_float("softcap", 0.0),
    }
    output, present_key, present_value = b.op(
        "GroupQueryAttention", [*states, past_key, past_value, last, total, None, None, None, bias],
        "GroupQueryAttention", MICROSOFT, outputs=3, num_heads=heads, kv_num_heads=kv_heads, scale=given.get_float("scale"),
        **{name: value for name, value in optional.items() if value},
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
        real = b.cast(mask, torch.bool, "lengths/kept")
        row = b.op("Where", [real, b.constant(0.0, dialect.dtype), low], "lengths/padding")
        row = b.op("Unsqueeze", [row, b.constant([1, 2])], "lengths/rows")
        sequence = b.op("Shape", [ids], "lengths/sequence", start=1, end=2)
        ones = b.constant([1])
        shape = b.op("Concat", [ones, ones, sequence, ones], "lengths/shape", axis=0)
        shared[_BIAS] = (last, total, b.op("Expand", [row, shape], "lengths/bias"))
    return shared[_BIAS]


def _states(mark: onnx_ir.Node) -> tuple[Any, ...]:
    """Query, keys, values and mask of a mark; None where there is no mask."""
    return (*mark.inputs, None)[:4]


def _size(value: Any, axis: int) -> int:
    return fixed(value.shape[axis])
