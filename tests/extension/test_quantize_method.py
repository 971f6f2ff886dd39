"""Quantization method of another package, which finds the codes itself: listed, checked, applied and measured like our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

#: The largest running sum of rounding errors along a row, against the step of its grid.
SUMS = """
import json, sys
from export.source import Source
made, model, layer = sys.argv[1:]
ours = Source(made).weight(layer)
plain = Source(model).dense(f"{layer}.weight").float()
step = ours.scale.float().abs().repeat_interleave(32, 1)
print(json.dumps(float(((plain - ours.dequantize().float()).cumsum(1).abs() / step).max())))
"""
LAYER = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def artifact(extension, tiny_llama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("diffusion")
    stage = {"method": "diffusion", "bits": 4, "group_size": 32, "targets": ["*.o_proj"]}
    (home / "recipe.yaml").write_text(
        yaml.safe_dump({"name": "diffusion", "model": str(tiny_llama()), "stages": [{"quantize": stage}]})
    )
    extension.compress("apply", home / "recipe.yaml", "-o", home / "out", "--quiet")
    return home / "out"


def test_it_is_listed_with_its_fields(extension) -> None:
    shown = json.loads(extension.compress("methods", "show", "diffusion", "--json").stdout)
    assert shown["stage"] == "quantize"
    assert {"carry", "bits", "group_size"} <= {field["name"] for field in shown["fields"]}


def test_the_errors_of_a_row_cancel(extension, artifact: Path, tiny_llama) -> None:
    found = json.loads(extension.python(SUMS, artifact, tiny_llama(), LAYER).stdout.splitlines()[-1])
    assert found < 2, "rounding carries at most half a step on, but where the grid clips"


def test_the_artifact_says_who_made_it_and_needs_no_package_to_run(artifact: Path) -> None:
    import runtime

    record = json.loads((artifact / "compress.json").read_text())
    assert {layer["method"] for layer in record["layers"]} == {"diffusion int4 g32"}
    assert {layer["format"] for layer in record["layers"]} == {"pack-quantized"}
    assert runtime.load(artifact).generate("line 3: ", max_new_tokens=3)
