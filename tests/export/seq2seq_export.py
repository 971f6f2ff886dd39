"""What every encoder-decoder must do as ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from random_models import UNLIMITED

import compress
import export
import runtime


def compressed(model: Path, text: Path, group_size: int) -> Path:
    """The artifact of `model` in W4, beside it."""
    recipe = {
        "name": model.name, "model": str(model),
        "stages": [{"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": group_size}}],
        "calibration": {"data": str(text), "samples": 4, "sequence_length": 32},
        "evaluate": {**UNLIMITED, "data": str(text), "sequence_length": 32, "samples": 2, "max_perplexity_increase": "100000%"},
    }  # fmt: skip
    return compress.apply(recipe, output=model.with_name(f"{model.name}-w4"), quiet=True).path


def check_writes_what_the_artifact_writes(artifact: Path, output: Path, ort: bool, **options: Any) -> None:
    """Export, and compare what the proof found and what both write after three sources of different lengths."""
    result = export.export(artifact, "onnx", output, ort=ort, quiet=True)
    assert result.verification is not None
    metrics = result.verification.metrics
    assert metrics["same_tokens"] == metrics["tokens"] == 128
    assert metrics["fused"].endswith("MatMulNBits")
    model, own = runtime.load(output), runtime.load(artifact, dtype="float32")
    sources = ["translate this", "and", "that, which is longer than the others"]
    assert model.generate(sources, **options) == own.generate(sources, **options)
