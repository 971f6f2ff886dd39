#!/usr/bin/env python
"""Are the solver's defaults good choices? One setting is changed at a time, on text that no published number is measured on.

    python benchmarks/solver_defaults.py [--output FILE]

Calibration uses the first 60 % of the bundled calibration text, perplexity is measured on the rest of it; the held-out text of the
other tables is not touched.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import compress
from compress.core.resources import bundled_text, recipes_directory

RESULTS = Path(__file__).resolve().parent / "results"
GPTQ: dict[str, list[dict[str, Any]]] = {
    "bits 4": [{"bits": 4, "group_size": 128}],
    "bits 3": [{"bits": 3, "group_size": 128}],
    "bits 2": [{"bits": 2, "group_size": 64}],
}
GPTQ_CHANGES: list[dict[str, Any]] = [
    {},
    {"sweeps": 0},
    {"sweeps": 3},
    {"refit_scales": False},
    {"order": "activation"},
    {"order": "natural"},
    {"scales": "minmax"},
    {"scales": "hessian"},
    {"static_groups": True},
    {"damping": 0.05},
]
SPARSE_CHANGES: list[dict[str, Any]] = [
    {},
    {"order": "natural"},
    {"mask_search": "greedy"},
    {"swaps": 0},
    {"swaps": 3},
    {"reconstruction": 0},
    {"reconstruction": 30},
    {"damping": 0.05},
]


def perplexity(stage: dict[str, Any], texts: tuple[Path, Path], work: Path) -> float:
    """Of the bundled model after one stage."""
    recipe = {
        "name": "cell",
        "model": str(recipes_directory() / "checkpoints" / "stdlib-4m"),
        "calibration": {"data": str(texts[0]), "samples": 128, "sequence_length": 256, "seed": 0},
        "stages": [stage],
        "evaluate": {"data": str(texts[1]), "sequence_length": 256, "samples": 64},
    }
    file = work / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    artifact = compress.apply(file, output=work / "out", overwrite=True, quiet=True)
    return float(artifact.metrics["after"]["perplexity"])


def main() -> None:
    """Every change against the defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "solver_defaults.json")
    options = parser.parse_args()
    text = bundled_text("calibration").read_text(encoding="utf-8")
    cut = text.index("\n", int(len(text) * 0.6)) + 1
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        texts = (work / "calibrate.txt", work / "evaluate.txt")
        texts[0].write_text(text[:cut], encoding="utf-8")
        texts[1].write_text(text[cut:], encoding="utf-8")
        for name, (base,) in GPTQ.items():
            for change in GPTQ_CHANGES:
                stage = {"quantize": {"method": "gptq", **base, **change}}
                rows.append({"what": f"gptq {name}", "change": change, "perplexity": perplexity(stage, texts, work)})
                print(rows[-1], flush=True)
        for change in SPARSE_CHANGES:
            stage = {"prune": {"method": "sparsegpt", "pattern": "2:4", **change}}
            rows.append({"what": "sparsegpt 2:4", "change": change, "perplexity": perplexity(stage, texts, work)})
            print(rows[-1], flush=True)
    options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
