"""Every kind of artifact as ONNX: works and computes what the artifact does, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from artifact_kinds import BLOCK_FLOATS, MATRIX, OURS, STAGES

import export

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def exported(made: Callable[..., Path], tmp_path: Path, kind: str, **options: object) -> export.run.Exported:
    return export.export(made(kind), "onnx", tmp_path / "out", quiet=True, **options)


BEYOND = [
    kind for kind in STAGES if kind not in (*MATRIX, *BLOCK_FLOATS, *OURS) and not kind.endswith("positive")
]  # test_matrix.py has the others


@pytest.mark.sampled(2, 7)
@pytest.mark.parametrize(
    ("kind", "ort"), [*((kind, False) for kind in BEYOND), ("w8a8_static", True), ("fp8_static", True), ("w4a8", True)]
)
def test_every_kind_is_verified(made: Callable[..., Path], tmp_path: Path, kind: str, ort: bool) -> None:
    result = exported(made, tmp_path, kind, ort=ort)
    assert result.verification is not None
    metrics = result.verification.metrics
    assert metrics["tokens"] == 128
    exact = not any(
        ("quantize" in stage and "8A8" in str(stage)) or "FP8" in str(stage) or "A8" in str(stage)
        for stage in STAGES[kind]
    )
    if exact:
        assert metrics["same_tokens"] == metrics["tokens"]
        assert metrics["kl"] < 1e-6
