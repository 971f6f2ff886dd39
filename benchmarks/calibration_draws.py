#!/usr/bin/env python
"""Ways to compress the bundled model, over several draws of the calibration text.

    python benchmarks/calibration_draws.py joint_vs_sequential|objectives|budget [--seeds 1 2 3] [--table]

One draw is not enough: perplexity of the bundled model moves by about 0.3 % with the order of float32 sums alone. Perplexity is
taken on the first 128 held-out windows, so it differs from that of the methods table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from where import commit, cpu_name

import compress
from compress.core.resources import recipes_directory

RESULTS = Path(__file__).resolve().parent / "results"


def gptq(bits: float, group: int = 128, **fields: Any) -> dict[str, Any]:
    return {"quantize": {"method": "gptq", "bits": bits, "group_size": group, **fields}}


SPARSE: dict[str, Any] = {"prune": {"method": "sparsegpt", "pattern": "2:4"}}
#: {comparison: {recipe: {way: stages}}}
COMPARISONS: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {
    "joint_vs_sequential": {
        f"2:4 + W{bits}": {
            way: [SPARSE, gptq(bits, joint=way == "joint")] for way in ("joint", "sequential")
        } for bits in (4, 3)
    },
    "objectives": {
        name: {
            "layer": [*before, gptq(bits, group)],
            "propagated": [*before, gptq(bits, group, objective="propagated")],
            "best": [*before, gptq(bits, group, quality="best")],
        }
        for name, before, bits, group in (
            ("W4", [], 4, 128), ("W3", [], 3, 128), ("W2 g64", [], 2, 64), ("2:4 + W4", [SPARSE], 4, 128),
        )
    },
    "budget": {  # of as many bits as are stored with equal ones in smaller groups
        f"{budget} bits (equal: W{bits} g{group})": {"equal": [gptq(bits, group)], "budget": [gptq(budget)]}
        for budget, bits, group in ((2.5, 2, 32), (3.0, 2, 16), (3.5, 3, 32), (4.5, 4, 32))
    },
}  # fmt: skip


def measure(stages: list[dict[str, Any]], seed: int, work: Path) -> dict[str, Any]:
    """One run: perplexity, KL, mean relative output error of the layers, stored bits per weight, the KL that a budget foresees, and seconds
    of processor time (evaluation too)."""
    start = time.process_time()
    recipe = {
        "name": "row",
        "model": str(recipes_directory() / "checkpoints" / "stdlib-4m"),
        "calibration": {"data": "bundled", "samples": 128, "sequence_length": 256, "seed": seed},
        "stages": stages,
        "evaluate": {"data": "bundled", "sequence_length": 256, "samples": 128},
    }
    artifact = compress.apply(recipe, output=work / "out", overwrite=True, quiet=True)
    layers, budget = artifact.manifest["layers"], artifact.manifest.get("budget")
    errors = [layer["error"] for layer in layers]
    weights = sum(layer["shape"][0] * layer["shape"][1] for layer in layers)
    return {
        "perplexity": round(artifact.metrics["after"]["perplexity"], 4),
        "kl": round(artifact.metrics["kl"], 5),
        "error": round(sum(errors) / len(errors), 6),
        "cpu_seconds": round(time.process_time() - start, 1),
        "bits": round(8 * sum(layer["bytes_after"] for layer in layers) / weights, 4),
        **({} if budget is None else {"predicted_kl": round(budget["kl"], 5)}),
    }


def main() -> None:
    """All runs of a comparison, and the table of docs/results/weights.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=sorted(COMPARISONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--table", action="store_true", help="only print the table of what was measured")
    options = parser.parse_args()
    result = RESULTS / f"{options.comparison}.json"
    rows: list[dict[str, Any]] = json.loads(result.read_text()) if options.table else []
    recipes = COMPARISONS[options.comparison]
    if not options.table:
        where = {"cpu": cpu_name(), "commit": commit()}
        with tempfile.TemporaryDirectory() as scratch:
            for recipe, ways in recipes.items():
                for seed in options.seeds:
                    for way, stages in ways.items():
                        cell = {"recipe": recipe, "seed": seed, "way": way}
                        rows.append(cell | measure(stages, seed, Path(scratch)) | where)
                    result.write_text(json.dumps(rows, indent=1) + "\n")
    names = list(next(iter(recipes.values())))
    print(f"| recipe | calibration draw | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for recipe, seed in dict.fromkeys((row["recipe"], row["seed"]) for row in rows):
        found = {r["way"]: r for r in rows if (r["recipe"], r["seed"]) == (recipe, seed)}
        text = (f"{found[way]['perplexity']:.3f} (KL {found[way]['kl']:.4f})" for way in names)
        print(f"| {recipe} | {seed} | {' | '.join(text)} |")


if __name__ == "__main__":
    main()
