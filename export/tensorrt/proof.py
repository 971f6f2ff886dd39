"""Proof of a bundle or an engine: logits and tokens beside those of the artifact, or of the artifact with the same change made.

A bundle's graph runs in ONNX Runtime, in float32 where that has no kernels for its type; an engine runs on the GPU itself.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from export.onnx_graph.change import Expected, expect
from export.onnx_graph.grid import TENSORRT
from export.source import Source
from export.target import Job, Verification, missing_packages, needs
from export.tensorrt.bundle import DATA, ONNX, Build
from export.tensorrt.support import dropped_activations
from export.verify import compare_logits, compare_tokens, generate
from runtime.api.model import Model
from runtime.engines.onnx.engine import OnnxEngine
from runtime.errors import ArtifactError, CompressError, RequestError, first_line

#: Mean KL and distance of two logits that arithmetic may swap, by `DataType` member and whether inputs are rounded to int8 or fp8.
#: float32: only the order of sums differs. 16 bits: every activation is rounded. Rounded inputs: a sum in another order may put one
#: of them on the neighbouring code.
LIMITS = {
    ("FLOAT", False): (1e-5, 0.02), ("FLOAT", True): (5e-3, 0.5),
    ("HALF", False): (0.01, 0.1), ("HALF", True): (0.02, 0.5),
    ("BF16", False): (0.05, 0.5), ("BF16", True): (0.1, 1.0),
}  # fmt: skip
#: Attributes that hold an ONNX type as a number.
_TYPES = ("to", "dtype", "output_dtype", "softmax_precision", "stash_type", "precision")
#: torch name -> TensorRT's `DataType` member, and back.
TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}
_NAMES = {member: name for name, member in TYPES.items()}


def expected_probe(job: Job) -> Expected:
    """What the export must say: the artifact's logits and tokens, changed as the writer changed its layers."""
    return expect(job, TENSORRT, dropped_activations(job.source))


def rounds_inputs(source: Source) -> bool:
    """A layer's inputs are rounded to int8 or fp8 with a calibrated scale."""
    schemes = [entry.scheme for name, entry in source.entries.items() if name not in source.embeddings]
    return any(s.activations is not None and not s.activations.dynamic for s in schemes)


def widens(source: Source, dtype: str) -> bool:
    """Every float of the artifact is one of `dtype` (a `DataType` member) too, so that constants hold the artifact's own numbers."""
    compute, checkpoint = getattr(torch, _NAMES[dtype]), source.artifact.checkpoint
    stored = {checkpoint.dtype(name) for name in source.dense_names()} | {source.dtype}
    return all(torch.promote_types(kind, compute) == compute for kind in stored if kind.is_floating_point)


def compare(expected: Expected, engine: Any, export: Any, limits: tuple[float, float]) -> dict[str, Any]:
    """Logits and tokens of an engine beside the expected ones, and what the change costs, if there is one.

    Raises:
        CompressError: it does not compute what the artifact, changed alike, computes.
    """
    model = Model(engine, None, export, frozenset())

    metrics = compare_logits(expected.probe, model.logits, limits[0])
    return metrics | compare_tokens(expected.probe, partial(generate, model), limits[1]) | expected.change


def prove_bundle(source: Source, folder: Path, expected: Expected, build: Build) -> Verification:
    """The bundle's graph in ONNX Runtime; without metrics, and with a note, where that lacks a kernel.

    Raises:
        RequestError: ONNX Runtime is not installed.
        CompressError: ONNX Runtime refuses the graph, or the numbers are not the expected ones.
    """
    packages = missing_packages(["onnxruntime"])
    if packages:
        raise RequestError(f"the proof of a bundle {needs(packages, 'onnx')}, or leave the proof out with --no-verify")
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    kind, missing = _NAMES[build.dtype], "it has no bfloat16 kernels on CPUs"
    try:
        if kind != "bfloat16":
            try:
                return _run(folder, kind, expected, LIMITS[build.dtype, build.rounds_inputs])
            except NoKernel as error:
                if kind == "float32":
                    raise
                missing = first_line(error)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.twin") as beside:
            write_twin(folder / ONNX, Path(beside))
            # computed in float32, but the constants themselves may have been rounded to fewer bits
            exact = "FLOAT" if widens(source, build.dtype) else build.dtype
            proof = _run(Path(beside), "float32", expected, LIMITS[exact, build.rounds_inputs])
    except NoKernel as error:
        return Verification(
            "", "", {}, [f"tokens were not compared: ONNX Runtime has no kernel here ({first_line(error)})"]
        )
    proof.loader += " (the float32 twin of the graph)"
    proof.notes.append(f"ONNX Runtime ran the graph and its {kind} constants in float32, not in {kind}: {missing}")
    return proof


def _run(folder: Path, dtype: str, expected: Expected, limits: tuple[float, float]) -> Verification:
    """The graph in `folder` in ONNX Runtime; its own NotImplemented where that lacks a kernel."""
    import onnx
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    properties = onnx.load(str(folder / ONNX), load_external_data=False).metadata_props
    facts = json.loads(next(p.value for p in properties if p.key == "compress.model"))
    # The graph as it is written: fused, 4-bit products would round their inputs to int8, and fp8 ones are refused.
    facts |= {"dtype": dtype, "session": {"session.disable_quant_qdq": "1"}}
    export: Any = SimpleNamespace(path=folder, facts=facts)
    try:
        metrics = compare(expected, OnnxEngine(export, torch.device("cpu"), "auto", None), export, limits)
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, NoKernel):
            raise cause from None
        if isinstance(error, CompressError) and not isinstance(error, ArtifactError):
            raise
        raise CompressError(f"ONNX Runtime refuses {ONNX}: {first_line(cause)}") from error
    return Verification(f"ONNX Runtime {onnxruntime.__version__}", "", metrics)


def write_twin(path: Path, folder: Path) -> Path:
    """Write the float32 twin of the ONNX file `path` into `folder`, constant after constant; returns its path.

    The same nodes and constants, every 16-bit float widened: ONNX Runtime has no bfloat16 kernels on CPUs. A 16-bit number is a
    float32 number too, so the twin holds exactly the weights that TensorRT will be given, and what it computes shows whether graph
    and constants are the artifact's.
    """
    import onnx_ir as ir

    from export.tensorrt.rules import values

    narrow = {ir.DataType.BFLOAT16, ir.DataType.FLOAT16}
    model = ir.load(path)
    for value in values(model):
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


def _widened(tensor: Any, eager: bool = False) -> Any:
    """The same numbers in float32; made when they are written, so that one at a time is in memory."""
    import onnx_ir as ir

    def make() -> Any:
        return ir.Tensor(tensor.numpy().astype("float32"), name=tensor.name)

    return make() if eager else ir.LazyTensor(make, ir.DataType.FLOAT, ir.Shape(tensor.shape), name=tensor.name)
