"""Builder of the nodes that take the place of a mark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from export.onnx_graph.store import Store, in_dtype, onnx_type

if TYPE_CHECKING:
    import onnx_ir


def fixed(dimension: Any) -> int:
    """A dimension that is a number; torch's exporter writes some of them as symbols ("64")."""
    return int(dimension if isinstance(dimension, int) else dimension.value)


class Builder:
    """Inserts nodes before `before`; small constants are shared by all builders of a `Store`."""

    def __init__(self, store: Store, before: onnx_ir.Node, name: str) -> None:
        self.store, self._before, self._name = store, before, name

    def op(
        self,
        kind: str,
        inputs: Sequence[onnx_ir.Value | None],
        part: str = "",
        domain: str = "",
        outputs: int = 1,
        like: onnx_ir.Value | None = None,
        **attributes: Any,
    ) -> Any:
        """A node called `{name}/{part or kind}`; returns its output, or a tuple of them. `like`: takes that value's shape and type."""
        import onnx_ir as ir

        node = ir.node(kind, list(inputs), attributes=attributes, domain=domain, num_outputs=outputs)
        node.name = self.store.unique(f"{self._name}/{part or kind}")
        for index, output in enumerate(node.outputs):
            output.name = node.name if outputs == 1 else f"{node.name}.{index}"
        if like is not None:
            node.outputs[0].shape, node.outputs[0].type = like.shape, like.type
        self._before.graph.insert_before(self._before, node)  # type: ignore[union-attr]
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    def constant(self, values: Any, dtype: torch.dtype = torch.int64) -> onnx_ir.Value:
        """A small constant, equal ones shared."""
        tensor = torch.tensor(values, dtype=dtype)
        return self.shared(f"constant.{str(dtype).removeprefix('torch.')}.{values}", tensor)

    def shared(self, name: str, tensor: torch.Tensor) -> onnx_ir.Value:
        """The initializer of that name, added when it is not there."""
        found = self.store.graph.initializers.get(name)
        return self.store.add(name, tensor) if found is None else found

    def stored(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> onnx_ir.Value:
        """An initializer of that name in `dtype`; RequestError where a value does not fit."""
        return self.store.add(name, in_dtype(values, dtype, name))

    def cast(self, value: onnx_ir.Value, dtype: torch.dtype, part: str = "Cast") -> onnx_ir.Value:
        """`value` in `dtype`."""
        return self.op("Cast", [value], part, to=int(onnx_type(dtype)))

    def replace(self, mark: onnx_ir.Node, value: onnx_ir.Value) -> None:
        """Everything that read the mark's output reads `value`."""
        old = mark.outputs[0]
        if value.shape is None:
            value.shape = old.shape
        if value.type is None:
            value.type = old.type
        name, is_output = old.name, old.is_graph_output()
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        if is_output:
            old.name = f"{name}.mark"
            value.name = name
        mark.graph.remove(mark, safe=True)  # type: ignore[union-attr]
