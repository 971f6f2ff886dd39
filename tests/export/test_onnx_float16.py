"""ONNX in float16: proven on CPUs too, which have no float16 kernels for most of it, and sums of integers that float16 cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import export
import runtime
from runtime.scheme import ActivationScheme, CompressedWeight, Scheme, WeightScheme

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("ort", [False, True])
@pytest.mark.parametrize("kind", ["dense", "w4_g128", "w8a8", "w4_g32_asymmetric"])
def test_float16_is_written_and_proven(made: Callable[..., Path], tmp_path: Path, kind: str, ort: bool) -> None:
    result = export.export(made(kind), "onnx", tmp_path / "out", quiet=True, dtype="float16", ort=ort)
    assert result.verification is not None
    metrics = result.verification.metrics
    assert metrics["kl"] < (2e-2 if kind == "w8a8" else 1e-2)
    assert metrics["same_tokens"] >= 0.8 * metrics["tokens"] == 0.8 * 128  # near ties end the comparison of a row
    graph = onnx.load(str(result.path / "model.onnx"), load_external_data=False).graph
    logits = next(value for value in graph.output if value.name == "logits")
    assert logits.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16

    ids = torch.arange(3, 15)[None]
    wanted = runtime.load(made(kind), device="cpu", dtype="float32").logits(ids)
    found = runtime.load(result.path, device="cpu").logits(ids).float()
    assert float((wanted.softmax(-1) - found.softmax(-1)).abs().max()) < 2e-2


def _optimized(*nodes: Any) -> Any:
    """A graph as the runtime may leave it, over one constant `w`."""
    constant = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT16, [2], [1.0, 2.0])
    return SimpleNamespace(graph=SimpleNamespace(initializer=[constant], node=nodes))


def test_only_the_casts_of_the_runtime_are_passed_over() -> None:
    from export.onnx.check import unfused

    def cast(name: str) -> Any:
        return onnx.helper.make_node("Cast", ["w"], ["wide"], name=name, to=onnx.TensorProto.FLOAT)

    inserted = cast("InsertedPrecisionFreeCast_w")
    assert unfused(_optimized(inserted), half=True) == []
    assert unfused(_optimized(inserted)) == ["InsertedPrecisionFreeCast_w"]
    assert unfused(_optimized(cast("layer/weight")), half=True) == ["layer/weight"]
    late = onnx.helper.make_node("Mul", ["wide", "wide"], ["y"], name="layer/late")
    assert unfused(_optimized(inserted, late), half=True) == ["layer/late"]
    disguised = onnx.helper.make_node("Mul", ["w", "w"], ["y"], name="InsertedPrecisionFreeCast_w")
    assert unfused(_optimized(disguised), half=True) == ["InsertedPrecisionFreeCast_w"]


def _linear(folder: Path, weight: CompressedWeight, dtype: torch.dtype) -> Path:
    """A file `folder`/linear.onnx of one compressed layer, `x [rows, K]` to `y`, as the exporter writes it with --ort."""
    import onnx_ir as ir

    from export.onnx.builder import Builder
    from export.onnx.dialect import dialect
    from export.onnx.linear import write_linear
    from export.onnx.store import DataFile, Store, onnx_type

    kind = ir.TensorType(onnx_type(dtype))
    x = ir.Value(name="x", shape=ir.Shape(["rows", weight.values.shape[1]]), type=kind)
    mark = ir.node("Linear", [x], domain="mark")
    graph = ir.Graph([x], [mark.outputs[0]], nodes=[mark], opset_imports={"": 21}, name="linear")
    mark.outputs[0].name, mark.outputs[0].type, mark.outputs[0].shape = "y", kind, ir.Shape(["rows", None])
    model, data = ir.Model(graph, ir_version=10), DataFile(folder, "linear.data")
    builder = Builder(Store(model, data), mark, "layer")
    source = SimpleNamespace(
        entries={"layer": SimpleNamespace(scheme=weight.scheme)}, weight=lambda _: weight, bias=lambda _: None
    )
    job: Any = SimpleNamespace(source=source, options=SimpleNamespace(requantize=False), losses={})
    builder.replace(mark, write_linear(builder, job, "layer", x, dialect("ort", dtype)))
    data.close()
    ir.save(model, folder / "linear.onnx")
    return folder / "linear.onnx"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_of_integers_beyond_float16_are_right(tmp_path: Path, dtype: torch.dtype) -> None:
    import onnxruntime
    from onnx.reference import ReferenceEvaluator

    generator = torch.Generator().manual_seed(0)
    values = torch.full((3, 1024), 127, dtype=torch.int8)
    values[1] = -127
    values[2] = torch.randint(-127, 128, (1024,), generator=generator)
    scheme = Scheme(WeightScheme(8, "int", True, "channel"), ActivationScheme(8, "int", True, True, "token"))
    scale = torch.tensor([[1e-3], [2e-3], [3e-3]], dtype=torch.bfloat16)
    weight = CompressedWeight(values, scale, None, None, scheme, torch.float32)
    x = torch.full((2, 1024), 20.0)
    x[1] = torch.randint(-20, 21, (1024,), generator=generator)
    assert 200 * torch.finfo(torch.float16).max < 127 * 127 * 1024  # the first column's sums

    path = _linear(tmp_path, weight, dtype)
    wanted = x @ (values.float() * scale.float()).t()
    # ONNX's own evaluator rounds wherever the graph says so; the runtime leaves float16 out between two casts on a CPU.
    engines = (
        ReferenceEvaluator(str(path)),
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]),
    )
    for engine in engines:
        found = engine.run(["y"], {"x": x.to(dtype).numpy()})[0]
        assert found.dtype == (np.float16 if dtype == torch.float16 else np.float32)
        result = torch.from_numpy(found).float()
        assert bool(result.isfinite().all())
        assert float((result - wanted).abs().max()) < 5e-3 * float(wanted.abs().max())
