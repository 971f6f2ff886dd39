"""Checks of an ONNX file apart from its numbers: it is valid, and the runtime fuses it as it is meant to.

A weight that is not fused into its product is dequantized at every call, fifty times slower and without an error; so the graph
that ONNX Runtime has optimized is looked at, not only its result.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from runtime.errors import CompressError, first_line

# What ONNX Runtime calls the casts it puts around nodes for which its CPU provider has no float16 kernel.
INSERTED = ("InsertedPrecisionFreeCast_", "InsertedCast_")
# Products that read compressed weights as they are.
FUSED = (
    "MatMulNBits", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm", "MatMulBnb4",
)  # fmt: skip


def check_file(path: Path) -> None:
    """ONNX's own checker with full shape inference. CompressError when it objects: that is a bug of ours."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    foreign = [node for node in model.graph.node if node.op_type == "SimplifiedLayerNormalization"]
    for node in foreign:  # ONNX Runtime's own, which it nevertheless keeps in ONNX's domain
        node.domain = "com.microsoft"
    checked = path.with_name(f".{path.name}.checked") if foreign else path
    try:
        if foreign:
            onnx.save(model, str(checked))
        onnx.checker.check_model(str(checked), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise CompressError(f"{path.name} is no valid ONNX: {first_line(error)}") from error
    finally:
        if foreign:
            checked.unlink(missing_ok=True)


def optimized(path: Path, entries: dict[str, str] | None = None) -> Any:
    """The graph that ONNX Runtime runs on a CPU, as an onnx `ModelProto` without its weights; `entries` as in `check_fused`."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    accuracy = {"session.qdq_matmulnbits_accuracy_level": "1"}
    for name, value in (accuracy | (entries or {})).items():
        options.add_session_config_entry(name, value)
    # Extended, not all: layouts of one machine's vector units would hide what is looked for.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.data")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath, load_external_data=False)


def unfused(model: Any, half: bool = False) -> list[str]:
    """Nodes of an optimized graph that would compute the same thing from constants at every call.

    Args:
        half: a float16 graph. CPUs have no float16 kernels for most of its nodes, and the runtime widens their constants at every
            call; the file does not have those casts, and they are not made where the graph is meant to run. What is
            computed from what they widen still counts.
    """
    constants = {value.name for value in model.graph.initializer}
    found = []
    for node in model.graph.node:
        inputs = [name for name in node.input if name]
        again = bool(inputs) and all(name in constants for name in inputs)
        if node.op_type == "DequantizeLinear":
            again = bool(inputs) and inputs[0] in constants
        own = half and node.op_type == "Cast" and node.name.startswith(INSERTED)
        if again and not own and node.op_type not in ("Identity", "Shape", "ConstantOfShape"):
            found.append(node.name or node.output[0])
        if all(name in constants for name in inputs):
            constants.update(node.output)
    return found


def check_fused(
    path: Path, compressed: int, entries: dict[str, str] | None = None, half: bool = False
) -> dict[str, int]:
    """{operator: how often} of the products that read compressed weights, in ONNX Runtime's optimized graph.

    Args:
        compressed: how many there must be.
        entries: settings of the session that the export asks for.
        half: the graph is in float16, see `unfused`.

    Raises:
        CompressError: one was not fused, or something is computed from constants at every call.
    """
    model = optimized(path, entries=entries)
    late = unfused(model, half)
    if late:
        raise CompressError(f"{path.name}: ONNX Runtime would compute {late[0]} from constants at every call")
    counts = Counter(node.op_type for node in model.graph.node if node.op_type in FUSED)
    if sum(counts.values()) != compressed:
        raise CompressError(f"{path.name}: ONNX Runtime fused {sum(counts.values())} of {compressed} compressed layers")
    return dict(counts)
