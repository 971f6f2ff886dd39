"""An export target of another package, in one file: listed, written, read back, and refused like one of ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import runtime


@pytest.mark.slow
def test_it_is_listed_and_says_its_options(extension, tiny_artifact: Path) -> None:
    listed = json.loads(extension.compress("export", tiny_artifact, "--list", "--json").stdout)["targets"]
    assert listed["npz"] == {"fits": True, "reason": None, "options": ["dtype", "requantize"]}
    assert list(listed)[:2] == ["huggingface", "onnx"], "ours come first"


def test_it_writes_what_the_artifact_holds(extension, tiny_artifact: Path, tmp_path: Path) -> None:
    given = ["export", tiny_artifact, "--target", "npz", "--output", tmp_path / "out", "--json"]
    said = json.loads(extension.compress(*given).stdout)
    assert said["verification"]["checked"] == "every array, read back"
    assert said["conversions"][0]["what"] == "weights become arrays of float32"
    assert 'np.load("out/weights.npz")' in (tmp_path / "out" / "README.md").read_text()
    manifest = json.loads((tmp_path / "out" / "export.json").read_text())
    assert manifest["npz"]["arrays"] == manifest["verification"]["metrics"]["arrays"]
    model = runtime.load(tiny_artifact, device="cpu", kernels="reference").engine.module
    name = "model.layers.0.mlp.down_proj"
    with np.load(tmp_path / "out" / "weights.npz") as arrays:
        weight = model.get_submodule(name).compressed_weight().dequantize()
        assert np.array_equal(arrays[name], weight.float().numpy())


@pytest.mark.slow
def test_wrong_requests_are_refused(extension, tiny_artifact: Path, tmp_path: Path) -> None:
    given = ["export", tiny_artifact, "--output", tmp_path / "out", "--quiet"]
    wrong = extension.compress(*given, "--target", "npz", "--set", "dtype=int8", check=False)
    assert wrong.returncode == 2
    assert "option dtype of target npz" in " ".join(wrong.stderr.split())
    near = extension.compress(*given, "--target", "np", check=False)
    assert near.returncode == 2
    assert "did you mean npz?" in " ".join(near.stderr.split())
    assert not (tmp_path / "out").exists()
