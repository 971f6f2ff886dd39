"""Changes that an artifact's layers undergo on the way into a graph: exact ones, and those that round weights anew."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from export.onnx_graph.dialect import Dialect, layer_rules, multiplies_integers
from export.onnx_graph.grid import TENSORRT, fit, grid_bytes, why_not
from export.source import Source, dtype_name
from export.target import Conversion
from runtime.formats.scheme import Scheme


def changes(source: Source, spoken: Dialect) -> Iterator[Conversion]:
    """What the graph says in other words than the artifact, layer by layer."""
    for name in source.entries:
        size: int | None = growth(source, name, spoken)
        for what, exact in _changes_of(source, name, spoken):
            yield Conversion(what, (name,), exact, size)
            size = None  # of several reasons the first has the bytes
    if spoken.dtype == torch.float16 and source.dtype != torch.float16:
        what = f"dense weights and scales are rounded from {dtype_name(source.dtype)} to float16"
        yield Conversion(what, ("all dense tensors",), False)


def _changes_of(source: Source, name: str, spoken: Dialect) -> Iterator[tuple[str, bool]]:
    """(what, exact) of one layer."""
    scheme, shape, width = source.entries[name].scheme, source.shapes[name], dtype_name(source.dtype)
    if name in source.embeddings:
        yield f"a compressed embedding is stored in {width}", True
        return
    if scheme.grid is None:
        yield f"{scheme.sparsity} zeros are stored like other values ({width})", True
        return
    said = fit(scheme.grid, shape, layer_rules(scheme, spoken), name)
    if said.what is not None:
        yield said.what, said.exact
    if scheme.sparsity is not None:
        yield f"{scheme.sparsity} zeros are stored like other codes", True
    if scheme.grid.type == "float" and spoken.name != "tensorrt":
        yield "fp8 weights stay fp8 in the file and are held as floats when the session has started", True
    if spoken.name == "onnx" and has_static_int8(scheme):
        yield (
            (
                "int8 inputs as Q/DQ: on x86 CPUs without VNNI ONNX Runtime saturates their sums unless "
                "session.x64quantprecision is 1, which runtime.load sets (--ort needs no option)"
            ),
            True,
        )
    if spoken.name == "onnx" and why_not(scheme.grid, shape, TENSORRT) is not None:
        yield "blocks or zero points that ONNX Runtime reads and TensorRT does not", True


def growth(source: Source, module: str, spoken: Dialect) -> int:
    """Bytes that a compressed module takes more in the graph than in the artifact."""
    scheme, shape = source.entries[module].scheme, source.shapes[module]
    if scheme.grid is None or module in source.embeddings:
        stored = shape[0] * shape[1] * source.dtype.itemsize
    else:
        # Products of integers are scaled in float32; where they are said with Q/DQ 16 bits may do, a byte or two a column less.
        width = 4 if multiplies_integers(scheme) else source.dtype.itemsize
        stored = grid_bytes(scheme.grid, shape, layer_rules(scheme, spoken), width)
        specs = {} if scheme.transform is None else scheme.transform.tensors(shape[1])
        stored += sum(math.prod(spec.shape) for spec in specs.values()) * spoken.dtype.itemsize
    return stored - source.module_bytes(module)


def has_static_int8(scheme: Scheme) -> bool:
    """Inputs are rounded to int8 with a calibrated scale, which the standard dialect says with Q/DQ."""
    acts = scheme.activations
    return acts is not None and acts.type == "int" and not acts.dynamic
