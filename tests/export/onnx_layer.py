"""One compressed layer as an ONNX file of its own, as the exporter writes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from export.onnx_graph.dialect import Dialect
    from runtime.formats.scheme import CompressedWeight


def write_layer(folder: Path, weight: CompressedWeight, spoken: Dialect) -> Path:
    """`folder`/layer.onnx: `x [rows, K]` to `y [rows, N]`, both in the dialect's dtype; the layer is called `layer`.

    A static grid of the input has scale 0.05 and, where it is not symmetric, zero point 3.
    """
    import onnx_ir as ir

    from export.onnx_graph.builder import Builder
    from export.onnx_graph.linear import write_linear
    from export.onnx_graph.matmul_nbits import unmark
    from export.onnx_graph.store import DataFile, Store, onnx_type

    kind = ir.TensorType(onnx_type(spoken.dtype))
    x = ir.Value(name="x", shape=ir.Shape(["rows", weight.values.shape[1]]), type=kind)
    mark = ir.node("Linear", [x], domain="mark")
    imports = {"": spoken.opset, "com.microsoft": 1}
    graph = ir.Graph([x], [mark.outputs[0]], nodes=[mark], opset_imports=imports, name="layer")
    mark.outputs[0].name, mark.outputs[0].type, mark.outputs[0].shape = "y", kind, ir.Shape(["rows", None])
    model, data = ir.Model(graph, ir_version=10), DataFile(folder, "layer.data")
    acts = weight.scheme.activations
    source = SimpleNamespace(
        entries={"layer": SimpleNamespace(scheme=weight.scheme)},
        weight=lambda _: weight,
        bias=lambda _: None,
        input_scale=lambda _: torch.tensor([0.05]),
        input_zero_point=lambda _: None if acts is None or acts.symmetric else torch.tensor([3], dtype=torch.int8),
    )
    job: Any = SimpleNamespace(source=source, options=SimpleNamespace(requantize=False), losses={})
    builder = Builder(Store(model, data), mark, "layer")
    builder.replace(mark, write_linear(builder, job, "layer", x, spoken))
    unmark(model)
    data.close()
    ir.save(model, folder / "layer.onnx")
    return folder / "layer.onnx"
