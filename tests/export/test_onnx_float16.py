"""ONNX in float16: proven on CPUs too, which have no float16 kernels for most of it, and sums of integers that float16 cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from onnx_layer import write_layer

import export
import runtime
from export.onnx_graph.dialect import dialect
from runtime.formats.scheme import ActivationScheme, CompressedWeight, GridScheme, Scheme

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.mark.sampled(2, 3)
@pytest.mark.parametrize("ort", [False, True])
@pytest.mark.parametrize("kind", ["dense", "w4_g128", "w8a8", "w4_g32_asymmetric"])
def test_float16_is_written_and_proven(made: Callable[..., Path], tmp_path: Path, kind: str, ort: bool) -> None:
    result = export.export(made(kind), "onnx", tmp_path / "out", quiet=True, dtype="float16", ort=ort)
    assert result.verification is not None
    metrics = result.verification.metrics
    assert metrics["kl"] < (5e-3 if kind == "w8a8" else 1e-3)
    assert metrics["top1_agreement"] >= 0.9
    assert metrics["tokens"] == 128
    if kind != "w8a8":  # whose rows end as soon as an input becomes another code
        assert metrics["same_tokens"] >= 0.8 * 128  # near ties end the comparison of a row
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
    from export.onnx.proof import unfused

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_of_integers_beyond_float16_are_right(tmp_path: Path, dtype: torch.dtype) -> None:
    import onnxruntime
    from onnx.reference import ReferenceEvaluator

    generator = torch.Generator().manual_seed(0)
    values = torch.full((3, 1024), 127, dtype=torch.int8)
    values[1] = -127
    values[2] = torch.randint(-127, 128, (1024,), generator=generator)
    scheme = Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme(8, "int", True, True, "token"))
    scale = torch.tensor([[1e-3], [2e-3], [3e-3]], dtype=torch.bfloat16)
    weight = CompressedWeight(values, scale, None, None, scheme, torch.float32)
    x = torch.full((2, 1024), 20.0)
    x[1] = torch.randint(-20, 21, (1024,), generator=generator)
    assert 200 * torch.finfo(torch.float16).max < 127 * 127 * 1024  # the first column's sums

    path = write_layer(tmp_path, weight, dialect("ort", dtype))
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
