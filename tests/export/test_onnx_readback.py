"""Weights in a written ONNX file are the artifact's, bit for bit, and a file with one that is not is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import export
from export.onnx.proof import modules_of, read_back
from export.onnx_graph.dialect import OnnxOptions
from export.source import Source
from export.target import Job
from runtime.errors import CompressError
from runtime.system.progress import ProgressReporter

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

KINDS = ["w4_g128", "w4_g32_asymmetric", "w8a8", "w8a8_static", "fp8", "w3_g64", "w4_channel", "w8_channel"]


@pytest.fixture(scope="session")
def written(made: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`written("w8a8", ort=True)`: an unproven export. Shared: copy it before you change it."""
    done: dict[str, Path] = {}

    def write(kind: str, **options: Any) -> Path:
        key = repr((kind, options))
        if key not in done:
            place = tmp_path_factory.mktemp(kind) / "out"
            done[key] = export.export(made(kind), "onnx", place, quiet=True, verify=False, **options).path
        return done[key]

    return write


def job_of(artifact: Path, folder: Path, **options: Any) -> Job:
    return Job(
        Source(artifact), OnnxOptions(**options), folder, ProgressReporter(quiet=True), facts={"kind": "decoder"}
    )


@pytest.mark.sampled(2, 10)
@pytest.mark.parametrize("options", [{}, {"ort": True}, {"ort": True, "dtype": "float16"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_the_artifact_s(
    made: Callable[..., Path], written: Callable[..., Path], kind: str, options: dict[str, Any]
) -> None:
    assert read_back(job_of(made(kind), written(kind, **options), **options), ["model.onnx"]) == 14


def change(folder: Path, name: str, by: Callable[[Any], Any]) -> None:
    """Replace one constant of `folder`/model.onnx, which is kept in the graph from then on; in the graph for kernels="fast" too."""
    for file in ("model.onnx", "model_fast.onnx"):
        if not (folder / file).is_file():
            continue
        model = onnx.load(str(folder / file), load_external_data=False)
        value = next(v for v in model.graph.initializer if v.name == name)
        copy = onnx.TensorProto()
        copy.CopyFrom(value)
        if onnx.external_data_helper.uses_external_data(copy):
            onnx.external_data_helper.load_external_data_for_tensor(copy, str(folder))
        value.CopyFrom(onnx.numpy_helper.from_array(by(onnx.numpy_helper.to_array(copy).copy()), name))
        onnx.save(model, str(folder / file))


def one(index: tuple[int, ...], by: float) -> Callable[[Any], Any]:
    def changed(values: Any) -> Any:
        values[index] = np.asarray(values[index] * by).astype(values.dtype)
        return values

    return changed


def flipped(values: Any) -> Any:
    values.reshape(-1)[5] ^= 1
    return values


BLOCK = "model.layers.1.self_attn.q_proj"
CASES = [
    ("w8a8", {}, f"{BLOCK}.weight_scale", one((3,), 1.1), "scales", BLOCK),
    ("w8a8", {"ort": True}, f"{BLOCK}.weight_scale", one((3,), 1.01), "scales", BLOCK),
    ("w8a8", {}, f"{BLOCK}.weight_codes", flipped, "codes", BLOCK),
    ("w8a8_static", {}, f"{BLOCK}.weight_scale", one((3,), 1.1), "scales", BLOCK),
    # queries are 128 columns, keys and values 64 each
    ("w4_g128", {"ort": True}, f"{BLOCK}+k_proj+v_proj.weight_scale", one((140, 0), 1.1), "scales", "model.layers.1.self_attn.k_proj"),
    ("w4_g128", {"ort": True}, f"{BLOCK}+k_proj+v_proj.weight_scale", one((200, 0), 1.1), "scales", "model.layers.1.self_attn.v_proj"),
    ("w4_g128", {"ort": True}, f"{BLOCK}+k_proj+v_proj.weight_codes", flipped, "codes", BLOCK),
    ("w4_g32_asymmetric", {"ort": True}, f"{BLOCK}+k_proj+v_proj.weight_zero_point", flipped, "zero points", BLOCK),
    ("w4_g32_asymmetric", {}, f"{BLOCK}.weight_scale", one((0, 0), 1.1), "scales", BLOCK),
    ("fp8", {}, f"{BLOCK}.weight_scale", one((3,), 1.1), "scales", BLOCK),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "name", "by", "what", "module"), CASES)
def test_one_changed_constant_is_refused(
    made: Callable[..., Path], written: Callable[..., Path], tmp_path: Path,
    kind: str, options: dict[str, Any], name: str, by: Callable[[Any], Any], what: str, module: str,
) -> None:  # fmt: skip
    folder = tmp_path / "out"
    shutil.copytree(written(kind, **options), folder)
    change(folder, name, by)
    with pytest.raises(CompressError, match=f"{what} of {module}$"):
        read_back(job_of(made(kind), folder, **options), ["model.onnx"])


def test_the_graph_for_fast_kernels_has_the_same_weights(
    made: Callable[..., Path], written: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(written("w4_g128", ort=True), folder)
    fast = (folder / "model_fast.onnx").read_bytes()
    change(folder, f"{BLOCK}+k_proj+v_proj.weight_scale", one((140, 0), 1.1))
    shutil.copyfile(written("w4_g128", ort=True) / "model.onnx", folder / "model.onnx")
    assert fast != (folder / "model_fast.onnx").read_bytes()
    with pytest.raises(CompressError, match=r"model_fast\.onnx.*model\.onnx"):
        read_back(job_of(made("w4_g128"), folder, ort=True), ["model.onnx"])


def test_a_layer_without_codes_is_refused(
    made: Callable[..., Path], written: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(written("w8a8"), folder)
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    next(v for v in model.graph.initializer if v.name == f"{BLOCK}.weight_codes").name = "packed"
    onnx.save(model, str(folder / "model.onnx"))
    with pytest.raises(CompressError, match=BLOCK):
        read_back(job_of(made("w8a8"), folder), ["model.onnx"])


def test_the_proof_reads_weights_back(
    made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale that the numbers of W8A8 would let pass."""
    from export.onnx import target

    original = target.write_config

    def and_spoil(source: Source, folder: Path) -> None:
        original(source, folder)
        change(folder, f"{BLOCK}.weight_scale", one((3,), 1.05))

    monkeypatch.setattr(target, "write_config", and_spoil)
    with pytest.raises(CompressError, match=f"scales of {BLOCK}$"):
        export.export(made("w8a8"), "onnx", tmp_path / "out", quiet=True)


def test_names_of_layers_side_by_side() -> None:
    assert modules_of("model.layers.0.mlp.gate_proj+up_proj") == [
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
    ]
    assert modules_of("lm_head") == ["lm_head"]
    assert modules_of("a+b") == ["a", "b"]
