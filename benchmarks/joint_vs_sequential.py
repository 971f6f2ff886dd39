#!/usr/bin/env python
"""Joint against sequential 2:4 pruning and quantization, over several draws of the calibration text.

    python benchmarks/joint_vs_sequential.py [--seeds 1 2 3]

One draw is not enough: perplexity of the bundled model moves by about 0.3 % with the order of float32 sums alone. Perplexity is
taken on the first 128 held-out windows, so it differs from that of the methods table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import compress
from compress.core.resources import recipes_directory

RESULT = Path(__file__).resolve().parent / "results" / "joint_vs_sequential.json"


def measure(bits: int, seed: int, joint: bool, work: Path) -> dict[str, Any]:
    """One run: perplexity, KL, mean relative output error of the layers."""
    recipe = {
        "name": "row",
        "model": str(recipes_directory() / "checkpoints" / "stdlib-4m"),
        "calibration": {"data": "bundled", "samples": 128, "sequence_length": 256, "seed": seed},
        "stages": [
            {"prune": {"method": "sparsegpt", "pattern": "2:4"}},
            {"quantize": {"method": "gptq", "bits": bits, "group_size": 128, "joint": joint}},
        ],
        "evaluate": {"data": "bundled", "sequence_length": 256, "samples": 128},
    }
    artifact = compress.apply(recipe, output=work / "out", overwrite=True, quiet=True)
    errors = [layer["error"] for layer in artifact.manifest["layers"]]
    return {
        "bits": bits,
        "seed": seed,
        "joint": joint,
        "perplexity": round(artifact.metrics["after"]["perplexity"], 4),
        "kl": round(artifact.metrics["kl"], 5),
        "error": round(sum(errors) / len(errors), 6),
    }


def main() -> None:
    """All runs, and the table of docs/results/weights.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--table", action="store_true", help="only print the table of what was measured")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(RESULT.read_text()) if options.table else []
    if not options.table:
        with tempfile.TemporaryDirectory() as scratch:
            for bits in (4, 3):
                for seed in options.seeds:
                    rows += [measure(bits, seed, joint, Path(scratch)) for joint in (True, False)]
                    RESULT.write_text(json.dumps(rows, indent=1) + "\n")
    print("| recipe | calibration draw | joint | sequential |\n|---|---|---|---|")
    for bits in (4, 3):
        for seed in sorted({row["seed"] for row in rows}):
            pair = {r["joint"]: r for r in rows if (r["bits"], r["seed"]) == (bits, seed)}
            text = [f"{pair[joint]['perplexity']:.3f} (KL {pair[joint]['kl']:.4f})" for joint in (True, False)]
            print(f"| 2:4 + W{bits} | {seed} | {text[0]} | {text[1]} |")


if __name__ == "__main__":
    main()
