"""Entry points that compress refuses, each with one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TAKEN = {
    "compress.stages": ("quantize", "from compress.recipe.stages import KINDS; list(KINDS)"),
    "compress.draft_methods": ("medusa", "import compress.distill.draft as draft; draft.METHODS"),
    "compress.quantize": ("gptq", "import compress.quantize"),
    "compress.export_targets": ("onnx", "from export import targets; targets.get('onnx')"),
    "compress.kv_scores": ("streaming", "from runtime.kv_cache.policy.registries import SCORES; list(SCORES)"),
}
LAYERS = """
from compress.weights.stage import Prune
class LowRank(Prune):
    name = "lowrank"
STAGE = LowRank()
"""
PARSE = """
from compress.recipe import load
load({"name": "t", "model": "m", "stages": [{"lowrank": {"method": "magnitude", "sparsity": 0.5}}]})
"""


def refusal(package: Path, group: str, entry: str, code: str) -> str:
    """What the RequestError says that `code` raises where a package with this entry point is installed."""
    info = package / "other_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    path = os.pathsep.join([str(package), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    name, _, message = done.stderr.strip().splitlines()[-1].partition(": ")
    assert name in ("runtime.errors.RequestError", "compress.recipe.stages.StageError"), done.stderr
    return message


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("group", TAKEN)
def test_a_name_that_is_taken_is_refused(group: str, tmp_path: Path) -> None:
    name, code = TAKEN[group]
    (tmp_path / "other.py").write_text(f"class THING:\n    name = {name!r}\n")
    message = refusal(tmp_path, group, f"{name} = other:THING", code)
    assert group in message
    assert name in message


def test_a_stage_kind_of_another_package_compresses_no_layers(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(LAYERS)
    message = refusal(tmp_path, "compress.stages", "lowrank = other:STAGE", PARSE)
    assert "stages.0.lowrank" in message
    assert "other" in message
