"""Changes that an artifact's layers undergo on the way into a graph: exact ones, and those that round weights anew."""

from __future__ import annotations

import torch

from export.onnx.dialect import Dialect, layer_rules, multiplies_integers
from export.onnx.grid import TENSORRT, conversion, grid_bytes, rounded_anew, why_not
from export.source import Source
from export.target import Conversion
from runtime.formats.scheme import Scheme


def conversions(source: Source, spoken: Dialect) -> list[Conversion]:
    """What the graph says in other words than the artifact."""
    found: dict[tuple[str, bool], list[str]] = {}
    grown: dict[tuple[str, bool], int] = {}
    counted: set[str] = set()

    def say(what: str, module: str, exact: bool = True) -> None:
        found.setdefault((what, exact), []).append(module)
        if module in source.entries and module not in counted:  # of several reasons the first has the bytes
            counted.add(module)
            grown[what, exact] = grown.get((what, exact), 0) + growth(source, module, spoken)

    for name, entry in source.entries.items():
        scheme, shape = entry.scheme, source.shapes[name]
        width = str(source.dtype).removeprefix("torch.")
        if name in source.embeddings:
            say(f"a compressed embedding is stored in {width}", name)
            continue
        if scheme.grid is None:
            say(f"{scheme.sparsity} zeros are stored like other values ({width})", name)
            continue
        rules = layer_rules(scheme, spoken)
        rounded = rounded_anew(scheme.grid, shape, rules)
        if rounded is not None:
            say(rounded, name, False)
        else:
            changed = conversion(scheme.grid, shape, rules)
            if changed is not None:
                say(changed, name)
        if scheme.sparsity is not None:
            say(f"{scheme.sparsity} zeros are stored like other codes", name)
        if scheme.grid.type == "float" and spoken.name != "tensorrt":
            say("fp8 weights stay fp8 in the file and are held as floats when the session has started", name)
        if spoken.name == "onnx" and has_static_int8(scheme):
            say(
                "int8 inputs as Q/DQ: on x86 CPUs without VNNI ONNX Runtime saturates their sums unless "
                "session.x64quantprecision is 1, which runtime.load sets (--ort needs no option)",
                name,
            )
        if not spoken.own_operators and spoken.name == "onnx" and why_not(scheme.grid, shape, TENSORRT) is not None:
            say("blocks or zero points that ONNX Runtime reads and TensorRT does not", name)
    if spoken.dtype == torch.float16 and source.dtype != torch.float16:
        say(
            f"dense weights and scales are rounded from {str(source.dtype).removeprefix('torch.')} to float16",
            "all dense tensors",
            False,
        )
    return [
        Conversion(what, tuple(modules), exact, grown.get((what, exact))) for (what, exact), modules in found.items()
    ]


def growth(source: Source, module: str, spoken: Dialect) -> int:
    """Bytes that a compressed module takes more in the graph than in the artifact."""
    scheme, shape = source.entries[module].scheme, source.shapes[module]
    weights = scheme.grid
    if weights is None or module in source.embeddings:
        stored = shape[0] * shape[1] * source.dtype.itemsize
    else:
        # Products of integers are scaled in float32; where they are said with Q/DQ 16 bits may do, a byte or two a column less.
        width = 4 if multiplies_integers(scheme) else source.dtype.itemsize
        stored = grid_bytes(weights, shape, layer_rules(scheme, spoken), width)
    return stored - source.module_bytes(module)


def has_static_int8(scheme: Scheme) -> bool:
    """Inputs are rounded to int8 with a calibrated scale, which the standard dialect says with Q/DQ."""
    acts = scheme.activations
    return acts is not None and acts.type == "int" and not acts.dynamic
