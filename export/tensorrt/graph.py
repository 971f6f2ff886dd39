"""View of an ONNX file for the rules: types and shapes where they can be inferred, constants read when a rule asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common


class Graph:
    """A model; nodes of all subgraphs are among its own."""

    def __init__(self, path: Path) -> None:
        self.model = ir.load(path)
        # It leaves unknown what it cannot infer; ONNX's checker says what is wrong with a graph.
        common.ShapeInferencePass(check_type=False, strict_mode=False)(self.model)
        self.nodes = list(self.model.graph.all_nodes())

    @property
    def opset(self) -> int | None:
        """Of the default domain."""
        return self.model.opset_imports.get("")

    def of(self, *kinds: str) -> list[ir.Node]:
        """Nodes of these operators."""
        return [node for node in self.nodes if node.op_type in kinds]

    def values(self) -> Iterator[ir.Value]:
        """All values of all graphs."""
        for graph in self.model.graphs():
            yield from graph.inputs
            yield from graph.initializers.values()
        for node in self.nodes:
            yield from node.outputs


def given(node: ir.Node, index: int) -> ir.Value | None:
    """An input; None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def kind(value: ir.Value | None) -> str | None:
    """ONNX's name of a value's type, where that is known."""
    return None if value is None or value.dtype is None else value.dtype.name


def shape(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """A value's shape, where that is known; None for free dimensions."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is an initializer or a Constant node's."""
    return value is not None and ir.convenience.get_const_tensor(value) is not None


def constant(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """Value of an initializer or a Constant node (floats as float32); None where it is computed."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None:
        return None
    values = tensor.numpy()
    return values.astype(np.float32) if values.dtype.kind not in "iub" else values


def attribute(node: ir.Node, name: str, otherwise: Any = None) -> Any:
    """Value of an attribute."""
    return node.attributes[name].value if name in node.attributes else otherwise
