"""Windows of traced attention masks: computed, since the arguments that a model passes beside its mask need not agree with it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx_ir as ir

from export.onnx.marks import DOMAIN

_log = logging.getLogger("compress.export")
_NEW = 2  # tokens after the past: two rows tell where a window ends
_INPUTS, _CACHE = ("input_ids", "attention_mask", "position_ids"), "past_key_values."
_LONGEST = 1 << 24  # constants beyond are ends of slices ("to the last"), not lengths


def holds_window(mask: ir.Value, window: int) -> bool:
    """Whether `mask` `[b, 1, s, t]` is causality, padding and a window of that many tokens, the token itself counted (0: none).

    It is computed for two tokens after a past that is longer than every length the mask is made of, so that a window or chunks that
    `window` does not speak of show. False also where it is not made of the graph's inputs and constants alone.
    """
    nodes, leaves = _origin(mask)
    graph = mask.graph
    if graph is None or any(node.domain == DOMAIN for node in nodes):
        return False
    inputs = [value for value in leaves if value.is_graph_input()]
    if any(str(value.name) not in _INPUTS and not str(value.name).startswith(_CACHE) for value in inputs):
        return False
    past = max([window, *_lengths(leaves)]) + _NEW
    part = ir.convenience.extract(graph, inputs, [mask])
    feeds: dict[str, np.ndarray[Any, Any]] = {}
    for value in part.inputs:
        name = str(value.name)
        if name.startswith(_CACHE):
            # Its length is all that a mask asks of the cache; the rest would be large, or bfloat16, which numpy does not have.
            value.shape, value.type = ir.Shape(["batch", "heads", "past", "size"]), ir.TensorType(ir.DataType.FLOAT)
        feeds[name] = _feed(name, past)
    total = np.arange(past + _NEW)
    row = np.arange(past, past + _NEW)[:, None]
    wanted = total[None] <= row
    if "attention_mask" in feeds:
        wanted &= feeds["attention_mask"][0] != 0
    if window:
        wanted &= total[None] > row - window
    try:
        found = _compute(part, feeds)
    except Exception as error:  # ONNX Runtime raises a class of its own for each status
        _log.info("the mask cannot be computed apart: %s", error)
        return False
    return found.dtype == np.bool_ and found.shape[-2:] == wanted.shape and bool((found == wanted).all())


def _origin(value: ir.Value) -> tuple[set[ir.Node], set[ir.Value]]:
    """Nodes that a value is computed by, and the inputs and constants that they start from."""
    nodes: set[ir.Node] = set()
    leaves: set[ir.Value] = set()
    pending = [value]
    while pending:
        found = pending.pop()
        node = found.producer()
        if node is None:
            leaves.add(found)
        elif node not in nodes:
            nodes.add(node)
            pending += [source for source in node.inputs if source is not None]
            if node.op_type == "Constant":
                leaves.add(found)
    return nodes, leaves


def _lengths(leaves: set[ir.Value]) -> list[int]:
    """Integers among constants that could be a window or the size of a chunk."""
    found: list[int] = []
    for value in leaves:
        constant = ir.convenience.get_const_tensor(value)
        if constant is not None and constant.dtype in (ir.DataType.INT64, ir.DataType.INT32):
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


def _compute(part: ir.Graph, feeds: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    import onnxruntime

    from export.onnx.trace import OPSET

    part.opset_imports.setdefault("", OPSET)
    model = ir.to_proto(ir.Model(part, ir_version=10))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: np.ndarray[Any, Any] = session.run(None, feeds)[0]
    return result
