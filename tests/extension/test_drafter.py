"""A drafter with trained weights that another package brings: trained by a recipe, built from its directory, and exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

GENERATE = """
import json, sys
import runtime
drafting, plain = runtime.load(sys.argv[1], device="cpu"), runtime.load(sys.argv[1], device="cpu", drafter=False)
prompts = [[1, 2, 3], [7, 9, 11, 13, 15], [200, 5]]
tokens = [model.generate(prompts, max_new_tokens=24, ignore_eos=True) for model in (drafting, plain)]
print(json.dumps({"same": tokens[0] == tokens[1], "stats": str(drafting.stats), "steps": [m.stats["steps"] for m in (drafting, plain)]}))
"""


@pytest.mark.slow
def test_a_drafter_with_weights_of_another_package(
    extension: Any, tiny_llama: Callable[..., Path], tiny_text: Path, tmp_path: Path
) -> None:
    recipe = {
        "name": "bigram", "model": str(tiny_llama()),
        "calibration": {"data": str(tiny_text), "samples": 8, "sequence_length": 32},
        "stages": [
            {"quantize": {"method": "rtn", "bits": 8, "group_size": 32}},
            {"draft": {
                "method": "bigram", "rank": 16, "data": "teacher", "samples": 32, "sequence_length": 32, "steps": 60, "batch_size": 8,
                "evaluate_every": 30, "learning_rate": 0.03,
            }},
        ],
    }  # fmt: skip
    file, out = tmp_path / "bigram.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(recipe))
    extension.compress("apply", file, "--output", out, "--device", "cpu")
    draft = json.loads((out / "compress.json").read_text())["draft"]
    assert (draft["method"], draft["drafter"]) == ("bigram", {"model": "draft"})
    assert draft["facts"]["training"]["steps"] == 60
    trained, untrained = (draft["facts"][when]["held_out"]["text"] for when in ("after", "before"))
    for sampling in ("greedy", "sampling"):
        assert trained[sampling]["acceptance"] > untrained[sampling]["acceptance"]
    assert {file.name for file in (out / "draft").iterdir()} == {"draft.json", "bigram.safetensors"}
    found = json.loads(extension.python(GENERATE, out).stdout.splitlines()[-1])
    assert found["same"], "greedy tokens are those of plain decoding"
    assert "bigram" in found["stats"]
    assert "bigram" in extension.compress("methods", "show", "bigram").stdout
