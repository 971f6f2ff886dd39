"""KL divergence and agreement by bits and zeros, on text that a model reads and on text that it does not: the ground of the default limits.

    python benchmarks/limits.py [--model DIR --text FILE]

The bundled models are measured on the bundled text, which recall-1m does not read; with --model another one, on the bundled and on its own
text. Rows are kept in results/limits.json, those of a model anew.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from where import commit, cpu_name

import compress
from compress.run.run import LimitError

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "limits.json"
CHECKPOINTS = HERE.parent / "recipes" / "checkpoints"
HALF = {"prune": {"method": "sparsegpt", "sparsity": 0.5}}
STAGES: dict[str, list[dict[str, Any]]] = {
    **{f"W{bits} g64": [{"quantize": {"method": "gptq", "bits": bits, "group_size": 64}}] for bits in (8, 4, 3, 2)},
    "fp8": [{"quantize": {"method": "rtn", "scheme": "FP8"}}],
    "50%": [HALF],
    "2:4 + W4 g64": [
        {"prune": {"method": "sparsegpt", "pattern": "2:4"}},
        {"quantize": {"method": "gptq", "bits": 4, "group_size": 64}},
    ],
}


def measure(name: str, model: Path, text: Path | None, output: Path) -> dict[str, Any]:
    """A row: what was measured, the limits, and the names of those that are exceeded."""
    data = {"data": "bundled" if text is None else str(text), "samples": 128, "sequence_length": 256}
    recipe = {
        "name": "row", "model": str(model), "stages": STAGES[name], "calibration": data,
        "evaluate": {"samples": 128, "sequence_length": 256},
    }  # fmt: skip
    try:
        made = compress.apply(recipe, output=output, overwrite=True, quiet=True)
    except LimitError as error:
        made = error.result
    metrics = made.metrics
    return {
        "model": model.name, "text": metrics["text"], "stages": name, "kl": metrics["kl"], "agreement": metrics["top1_agreement"],
        "perplexity_increase": metrics["perplexity_increase"], "warnings": made.manifest.get("warnings", []),
        "limits": {limit["name"]: limit["limit"] for limit in metrics["limits"]},
        "exceeded": [limit["name"] for limit in metrics["limits"] if not limit["ok"]],
    }  # fmt: skip


def main() -> None:
    """Measure, print and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    given = parser.parse_args()
    pairs: list[tuple[Path, Path | None]] = [(CHECKPOINTS / name, None) for name in ("stdlib-4m", "recall-1m")]
    if given.model is not None:
        pairs = [(given.model, None), (given.model, given.text)]
    names = {model.name for model, _ in pairs}
    rows = (
        [row for row in json.loads(RESULTS.read_text())["rows"] if row["model"] not in names]
        if RESULTS.is_file()
        else []
    )
    with tempfile.TemporaryDirectory() as work:
        for model, text in pairs:
            for name in STAGES:
                row = measure(name, model, text, Path(work) / "artifact")
                rows.append(row)
                print(
                    f"{row['model']:<12} {name:<13} KL {row['kl']:.4f}, agreement {row['agreement']:.1%}, perplexity "
                    f"{row['perplexity_increase']:+.1%}; limits {row['limits']}; exceeded {row['exceeded'] or 'none'}; {row['text']}",
                    flush=True,
                )
                RESULTS.write_text(json.dumps({"cpu": cpu_name(), "commit": commit(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
