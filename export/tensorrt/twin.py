"""The float32 twin of a bundle's ONNX file: the same nodes and the same constants, every 16-bit float widened.

ONNX Runtime has no bfloat16 kernels on CPUs. A 16-bit number is a float32 number too, so that the twin holds exactly the weights
that TensorRT will be given, and what it computes shows whether graph and constants are the artifact's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.tensorrt.bundle import DATA, ONNX

if TYPE_CHECKING:
    import onnx_ir

#: Attributes that hold an ONNX type as a number.
_TYPES = ("to", "dtype", "output_dtype", "softmax_precision", "stash_type", "precision")


def write_twin(path: Path, folder: Path) -> Path:
    """Write the float32 twin of `path` into `folder`, constant after constant; returns its path."""
    import onnx_ir as ir

    narrow = {ir.DataType.BFLOAT16, ir.DataType.FLOAT16}
    model = ir.load(path)
    for value in _values(model):
        if value.dtype in narrow:
            value.type = ir.TensorType(ir.DataType.FLOAT)
        if value.const_value is not None and value.const_value.dtype in narrow:
            value.const_value = _widened(value.const_value)
    for graph in model.graphs():
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if name in _TYPES and attribute.type == ir.AttributeType.INT and attribute.as_int() in narrow:
                    node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
                elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in narrow:
                    node.attributes[name] = ir.AttrTensor(name, _widened(attribute.as_tensor(), eager=True))
    ir.save(model, folder / ONNX, external_data=DATA)
    return folder / ONNX


def _values(model: onnx_ir.Model) -> Iterator[Any]:
    """Every value of every graph."""
    for graph in model.graphs():
        yield from graph.inputs
        yield from graph.initializers.values()
        for node in graph:
            yield from node.outputs


def _widened(tensor: Any, eager: bool = False) -> Any:
    """The same numbers in float32; made when they are written, so that one at a time is in memory."""
    import onnx_ir as ir

    if eager:
        return _float32(tensor)
    return ir.LazyTensor(partial(_float32, tensor), ir.DataType.FLOAT, ir.Shape(tensor.shape), name=tensor.name)


def _float32(tensor: Any) -> Any:
    import numpy as np
    import onnx_ir as ir

    return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)
