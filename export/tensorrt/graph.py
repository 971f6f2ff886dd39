"""View of an ONNX file for the rules: nodes of all graphs, types and shapes where they can be inferred, constants when asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Tensor:
    """Type (ONNX's name of it) and shape (None where a dimension is free) of a value."""

    dtype: str
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Node:
    """One node. `inside`: operators of the nodes whose subgraphs it lies in, outermost first."""

    proto: onnx.NodeProto
    inside: tuple[str, ...]

    @property
    def kind(self) -> str:
        return str(self.proto.op_type)

    @property
    def name(self) -> str:
        return str(self.proto.name or (self.proto.output[0] if self.proto.output else self.proto.op_type))

    def input(self, index: int) -> str | None:
        """Name of an input; None where it is left out."""
        return str(self.proto.input[index]) or None if index < len(self.proto.input) else None

    @property
    def attributes(self) -> dict[str, Any]:
        import onnx

        return {a.name: onnx.helper.get_attribute_value(a) for a in self.proto.attribute}


class Graph:
    """A model; external data is read only where a rule asks for it."""

    def __init__(self, path: Path) -> None:
        import onnx

        self.path = path
        self.model = onnx.load(str(path), load_external_data=False)
        self._initializers = {i.name: i for i in self.model.graph.initializer}
        self._types: dict[str, Tensor] = {}
        try:
            graph = onnx.shape_inference.infer_shapes(self.model, data_prop=True).graph
        except Exception:  # types that cannot be inferred are unknown; ONNX's checker says what is wrong with the graph
            graph = self.model.graph
        for value in [*graph.value_info, *graph.input, *graph.output]:
            self._types[value.name] = _tensor(value.type.tensor_type)
        for name, initializer in self._initializers.items():
            self._types[name] = Tensor(_name(initializer.data_type), tuple(initializer.dims))

    @property
    def opset(self) -> int | None:
        """Of the default domain."""
        return next((int(o.version) for o in self.model.opset_import if o.domain in ("", "ai.onnx")), None)

    @cached_property
    def nodes(self) -> list[Node]:
        return list(_walk(self.model.graph, ()))

    def of(self, *kinds: str) -> list[Node]:
        """Nodes of these operators, subgraphs included."""
        return [node for node in self.nodes if node.kind in kinds]

    def type(self, name: str | None) -> Tensor | None:
        """What is known of a value."""
        return self._types.get(name) if name is not None else None

    def values(self) -> dict[str, Tensor]:
        """All values whose type is known."""
        return self._types

    def is_constant(self, name: str | None) -> bool:
        return name in self._initializers or name in self._made_by_constants

    def constant(self, name: str | None) -> np.ndarray[Any, Any] | None:
        """Value of an initializer or a Constant node (16-bit floats as float32); None where it is computed."""
        import onnx

        tensor = self._initializers.get(name or "") or self._made_by_constants.get(name or "")
        if tensor is None:
            return None
        values = onnx.numpy_helper.to_array(tensor, str(self.path.parent))
        return values.astype(np.float32) if values.dtype.kind not in "iub" else values

    @cached_property
    def _made_by_constants(self) -> dict[str, Any]:
        return {
            str(node.proto.output[0]): node.attributes["value"]
            for node in self.of("Constant")
            if "value" in node.attributes
        }


def _walk(graph: Any, inside: tuple[str, ...]) -> Iterator[Node]:
    for proto in graph.node:
        yield Node(proto, inside)
        for attribute in proto.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                yield from _walk(inner, (*inside, str(proto.op_type)))


def _tensor(proto: Any) -> Tensor:
    shape = None
    if proto.HasField("shape"):
        shape = tuple(int(d.dim_value) if d.HasField("dim_value") else None for d in proto.shape.dim)
    return Tensor(_name(proto.elem_type), shape)


def _name(number: int) -> str:
    import onnx

    return str(onnx.TensorProto.DataType.Name(number))
