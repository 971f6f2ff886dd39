"""Every kind of artifact to every target: works and is verified, or is refused with the reason. There is no third outcome."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from artifact_kinds import MATRIX, OURS

import export
from export import targets
from export.target import Verification, missing_packages
from runtime.errors import RequestError

TARGETS = {
    "onnx": {},
    "onnx --ort": {"ort": True},
    "tensorrt bundle": {"bundle": True},
    "huggingface": {},
    "gguf": {},
}
# What is refused, and the word that says why. Everything else must be written and verified.
REFUSED = {
    ("w4_g32_asymmetric", "tensorrt bundle"): "zero points",
    ("w4_g128", "tensorrt bundle"): "scales must be positive",
    ("w8a8", "tensorrt bundle"): "scales must be positive",
    ("sparse_w4", "tensorrt bundle"): "scales must be positive",
}
REFUSED |= {
    (kind, target): name
    for kind, name in (("row_codebook", "row_codebook"), ("ternary", "ternary_dictionary"))
    for target in TARGETS
}
REFUSED |= {("nvfp4", target): "block_float" for target in TARGETS if target != "huggingface"}
REFUSED |= {
    ("llm_int8", target): r"above 6 unrounded \(LLM\.int8\), which no ONNX" for target in ("onnx", "onnx --ort")
}
REFUSED |= {("llm_int8", "huggingface"): "keeps outliers of its inputs unrounded"}
REFUSED |= {("llm_int8", "tensorrt bundle"): "scales must be positive"}
REFUSED |= {
    (kind, target): f"input_transform {name}"
    for kind, name in (("turned_w4", "hadamard"), ("turned_w4_groups", "hadamard_groups"), ("atom", "outliers_last"))
    for target in ("gguf", "huggingface")
}
REFUSED |= {("atom", target): "rounds its inputs in groups of 32" for target in ("onnx", "onnx --ort")}
REFUSED |= {("atom", "tensorrt bundle"): "has groups of 32, and blocks are 64 or 128"}
CELLS = [(kind, target) for kind in MATRIX for target in TARGETS]
CELLS += [("turned_w4", target) for target in ("gguf", "huggingface", "onnx --ort")]
CELLS += [("ordered_w4", target) for target in ("onnx", "onnx --ort")]
CELLS += [("atom_g64_positive", "tensorrt bundle")]
CELLS += [("turned_w4_groups", target) for target in ("tensorrt bundle", "huggingface")]
CELLS += [(kind, target) for kind in ("nvfp4", *OURS) for target in TARGETS]
CELLS += [(kind, "tensorrt bundle") for kind in ("w4_g128_positive", "w8a8_positive", "sparse_w4_positive")]


@pytest.mark.sampled(2, 40)
@pytest.mark.parametrize(("kind", "target"), CELLS)
def test_works_and_is_verified_or_is_refused(made: Callable[..., Path], tmp_path: Path, target: str, kind: str) -> None:
    name = target.split()[0]
    missing = missing_packages(targets.get(name).packages)
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    output = tmp_path / "out"
    reason = REFUSED.get((kind, target))
    if reason is not None:
        with pytest.raises(RequestError, match=reason):
            export.export(made(kind), name, output, quiet=True, **TARGETS[target])
        assert list(tmp_path.iterdir()) == []
        return
    result = export.export(made(kind), name, output, quiet=True, **TARGETS[target])
    assert result.verification is not None
    assert result.verification.checked
    assert result.verification.metrics
    if target == "tensorrt bundle":
        _check_bundle(kind, result.verification)
    manifest = json.loads((output / "export.json").read_text())
    assert manifest["artifact"]["sha256"]
    assert manifest["verification"]["loader"] == result.verification.loader
    assert manifest["tools"]["torch"]
    listed = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()} - {"export.json"}
    assert set(manifest["files"]) == listed
    readme = (output / "README.md").read_text()
    assert "```python" in readme
    assert all(conversion.what in readme for conversion in result.conversions)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing half-written beside it


def _check_bundle(kind: str, found: Verification) -> None:
    """Artifacts are bfloat16 here; the bundle is held against the artifact, its inputs unrounded where TensorRT cannot round them."""
    assert "float32 twin" in found.loader
    assert found.metrics["kl"] < 1e-6
    assert found.metrics["same_tokens"] == found.metrics["tokens"] == 128
    assert found.metrics["top1_agreement"] == 1.0
    dropped = kind in ("fp8", "w8a8_positive", "atom_g64_positive")
    assert ("kl_of_change" in found.metrics) == dropped
    if dropped:
        # Inputs that were of 4 bits differ most from what they are unrounded.
        assert 1e-4 < found.metrics["kl_of_change"] < (0.3 if kind == "atom_g64_positive" else 0.1)


def test_a_changed_artifact_is_not_exported(made: Callable[..., Path], tmp_path: Path) -> None:
    damaged = shutil.copytree(made("w4_g128"), tmp_path / "artifact")
    file = next(damaged.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RequestError, match="corrupt"):
        export.export(damaged, "huggingface", tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("reads", "words"),
    [
        (True, "does not hold the artifact's scales of model.layers.1.mlp.down_proj"),
        (False, "does not compute what the artifact does"),  # the numbers alone
    ],
)
def test_an_export_that_computes_something_else_is_not_kept(
    made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool, words: str
) -> None:
    """One scale of one layer doubled on the way: the proof must notice, and nothing may be left."""
    pytest.importorskip("onnxruntime")
    from export.onnx import proof
    from export.onnx_graph import linear
    from runtime.errors import CompressError

    original = linear.to_grid

    def wrong(weight, rules, requantize, where):  # type: ignore[no-untyped-def]
        grid = original(weight, rules, requantize, where)
        if where.endswith("layers.1.mlp.down_proj"):
            grid.scale[0, :8] *= 2
        return grid

    monkeypatch.setattr(linear, "to_grid", wrong)
    if not reads:
        monkeypatch.setattr(proof, "read_back", lambda *arguments: 0)
    with pytest.raises(CompressError, match=words):
        export.export(made("w4_g128"), "onnx", tmp_path / "out", quiet=True)
    assert list(tmp_path.iterdir()) == []
