"""What each method does to the size and the quality of the bundled model: one `compress.apply` a row, JSON, table and picture.

    python benchmarks/methods.py [--only NAME ...] [--work DIR]

Rows that the JSON has already are kept unless named with --only. The picture is drawn by the tool itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from where import cpu_name

import compress
from compress.report.plots import plot_tradeoff

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "methods_bundled.json"
PICTURE = HERE.parent / "docs" / "images" / "tradeoff"
MODEL = HERE.parent / "recipes" / "checkpoints" / "stdlib-4m"


def quantize(method: str, bits: int, group: int | str = 128, **fields: Any) -> dict[str, Any]:
    return {"quantize": {"method": method, "bits": bits, "group_size": group, **fields}}


def prune(method: str, **fields: Any) -> dict[str, Any]:
    return {"prune": {"method": method, **fields}}


# name -> (family of the picture, label, stages)
ROWS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "rtn W8": ("rtn", "8 bits", [{"quantize": {"method": "rtn", "scheme": "W8A16"}}]),
    "rtn W4": ("rtn", "4", [quantize("rtn", 4)]),
    "rtn W3": ("rtn", "3", [quantize("rtn", 3)]),
    "rtn W2 g64": ("rtn", "2", [quantize("rtn", 2, 64)]),
    "awq W4": ("awq", "4", [quantize("awq", 4)]),
    "awq W3": ("awq", "3", [quantize("awq", 3)]),
    "awq W2 g64": ("awq", "2", [quantize("awq", 2, 64)]),
    "gptq W8": ("gptq", "8", [{"quantize": {"method": "gptq", "scheme": "W8A16"}}]),
    "gptq W4": ("gptq", "4", [quantize("gptq", 4)]),
    "gptq W4 channel": ("gptq", "4 channel", [quantize("gptq", 4, "channel")]),
    "gptq W3": ("gptq", "3", [quantize("gptq", 3)]),
    "gptq W2 g64": ("gptq", "2", [quantize("gptq", 2, 64)]),
    "smoothquant W8A8": ("W8A8", "int8", [{"quantize": {"method": "smoothquant", "scheme": "W8A8-INT8"}}]),
    "rtn FP8": ("W8A8", "fp8", [{"quantize": {"method": "rtn", "scheme": "FP8_DYNAMIC"}}]),
    "magnitude 50%": ("pruned", "magnitude 50 %", [prune("magnitude", sparsity=0.5)]),
    "wanda 50%": ("pruned", "wanda 50 %", [prune("wanda", sparsity=0.5)]),
    "sparsegpt 50%": ("pruned", "sparsegpt 50 %", [prune("sparsegpt", sparsity=0.5)]),
    "magnitude 2:4": ("2:4", "magnitude", [prune("magnitude", pattern="2:4")]),
    "wanda 2:4": ("2:4", "wanda", [prune("wanda", pattern="2:4")]),
    "sparsegpt 2:4": ("2:4", "sparsegpt", [prune("sparsegpt", pattern="2:4")]),
    "2:4 + W4 joint": ("2:4 + W4", "joint", [prune("sparsegpt", pattern="2:4"), quantize("gptq", 4)]),
    "2:4 + W4 sequential": (
        "2:4 + W4",
        "sequential",
        [prune("sparsegpt", pattern="2:4"), quantize("gptq", 4, joint=False)],
    ),
    "2:4 + W3 joint": ("2:4 + W3", "joint", [prune("sparsegpt", pattern="2:4"), quantize("gptq", 3)]),
    "2:4 + W3 sequential": (
        "2:4 + W3",
        "sequential",
        [prune("sparsegpt", pattern="2:4"), quantize("gptq", 3, joint=False)],
    ),
    "50% + W4 joint": ("50% + W4", "joint", [prune("sparsegpt", sparsity=0.5), quantize("gptq", 4)]),
    "50% + W4 sequential": (
        "50% + W4",
        "sequential",
        [prune("sparsegpt", sparsity=0.5), quantize("gptq", 4, joint=False)],
    ),
}


def measure(name: str, work: Path) -> dict[str, Any]:
    """Apply one row to the bundled model and return its numbers."""
    family, label, stages = ROWS[name]
    recipe = {
        "name": "row", "model": str(MODEL), "stages": stages,
        "calibration": {"data": "bundled", "samples": 128, "sequence_length": 256},
        "evaluate": {"data": "bundled", "sequence_length": 256},
    }  # fmt: skip
    output = work / "artifact"
    shutil.rmtree(output, ignore_errors=True)
    artifact = compress.apply(recipe, output=output, quiet=True)
    layers = artifact.manifest["layers"]
    elements = sum(layer["shape"][0] * layer["shape"][1] for layer in layers)
    return {
        "name": name,
        "method": family,
        "label": label,
        "stages": stages,
        "perplexity": artifact.metrics["after"]["perplexity"],
        "perplexity_before": artifact.metrics["before"]["perplexity"],
        "kl": artifact.metrics["kl"],
        "top1_agreement": artifact.metrics["top1_agreement"],
        "bytes": artifact.manifest["bytes"]["after"],
        "bytes_before": artifact.manifest["bytes"]["before"],
        "bits_per_weight": 8 * sum(layer["bytes_after"] for layer in layers) / elements,
        "seconds": artifact.seconds["compress"],
        "peak_memory": artifact.peak_memory,
        "cpu": machine()["cpu"],
    }


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__,
        "python": platform.python_version(), "capability": torch.backends.cpu.get_cpu_capability(),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table for docs/results/weights.md."""
    before = rows[0]
    out = [
        "| method | bits a weight | tensors | perplexity | change | KL (nats) | same top token |",
        "|---|---|---|---|---|---|---|",
    ]
    out.append(
        f"| none (bf16) | 16 | {before['bytes_before'] / 1e6:.2f} MB | {before['perplexity_before']:.3f} | | | |"
    )
    for row in rows:
        change = row["perplexity"] / row["perplexity_before"] - 1
        out.append(
            f"| {row['name']} | {row['bits_per_weight']:.2f} | {row['bytes'] / 1e6:.2f} MB | {row['perplexity']:.3f} "
            f"| {change:+.1%} | {row['kl']:.4f} | {row['top1_agreement']:.1%} |"
        )
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(ROWS), help="measure these rows, even when they are there")
    parser.add_argument("--work", type=Path, help="scratch directory (default: a temporary one)")
    arguments = parser.parse_args()
    done: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"rows": []}
    known = {row["name"]: row for row in done["rows"]}
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.only or [n for n in ROWS if n not in known]:
            known[name] = measure(name, arguments.work or Path(scratch))
            print(f"{name}: {known[name]['perplexity']:.4f}", flush=True)
            rows = [known[n] for n in ROWS if n in known]
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            RESULTS.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    rows = [known[n] for n in ROWS if n in known]
    reference = {
        "method": "bf16",
        "label": "bf16",
        "bytes": rows[0]["bytes_before"],
        "perplexity": rows[0]["perplexity_before"],
        "reference": True,
    }
    # The sequential rows lie so close to the joint ones that their labels would mislead; the table has them.
    shown = [row for row in rows if row["perplexity"] < 2.0 * row["perplexity_before"] and row["label"] != "sequential"]
    plot_tradeoff([reference, *shown], PICTURE, title="Bundled model: size against held-out perplexity")
    print(table(rows))


if __name__ == "__main__":
    main()
