"""Compressing on the device: the bundled model within its recipe's limits, then GPTQ of two layers of the 8B shape."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from make_random_llama import TOKENIZER_FILES, write

from gpu_sections.bench import Bench

BUNDLED = Path(__file__).resolve().parents[2] / "recipes" / "checkpoints" / "stdlib-4m"
SHAPES: dict[str, dict[str, int]] = {
    "2 layers of 8B": {"layers": 2, "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 32000},
    "tiny": {"layers": 2, "hidden": 128, "intermediate": 256, "heads": 2, "kv_heads": 1, "vocabulary": 4096},
}  # fmt: skip
METHODS = ("rtn", "gptq")
INCREASE = 0.05  # of the perplexity: the limit of recipe llama_w4


def check(bench: Bench) -> None:
    """GPTQ of the bundled model: its perplexity, and what the artifact's own check found."""
    metrics = json.loads((bench.artifact("llama_w4") / "compress.json").read_text(encoding="utf-8"))["metrics"]
    bench.fact(metrics=metrics)
    bench.case("perplexity, increase by GPTQ in 4 bits", metrics["perplexity_increase"], INCREASE)


def timing(bench: Bench) -> None:
    """Seconds of a whole run by phase, calibration, writing and the check of the artifact included; peak memory of the device."""
    import compress

    name = bench.pick("2 layers of 8B", "tiny")
    source = bench.work / f"checkpoint-{name.replace(' ', '-')}"
    if not (source / "config.json").is_file():
        write(source, **SHAPES[name])  # type: ignore[arg-type]
        for file in TOKENIZER_FILES:
            if (BUNDLED / file).exists():
                shutil.copyfile(BUNDLED / file, source / file)
    samples, length = bench.pick((48, 2048), (2, 64))
    calibration = {"data": "bundled", "samples": samples, "sequence_length": length}
    bench.fact(shape=name, **SHAPES[name], calibration=calibration)
    for method in METHODS:
        if not bench.enough(method, bench.pick(30, 1)):
            continue
        recipe: dict[str, Any] = {
            "name": method, "model": str(source), "stages": [{"quantize": {"method": method, "scheme": "W4A16", "group_size": 128}}],
            **({"calibration": calibration} if method == "gptq" else {}),
        }  # fmt: skip
        if not bench.dry:
            torch.cuda.reset_peak_memory_stats()
        row: dict[str, Any] = {"method": method}

        def run(recipe: dict[str, Any] = recipe, row: dict[str, Any] = row) -> float:
            output = bench.work / f"compressed-{recipe['name']}"
            made = compress.apply(recipe, output=output, device=str(bench.device), overwrite=True, quiet=True)
            row["seconds_by_phase"] = made.seconds
            shutil.rmtree(output)
            return sum(made.seconds.values())

        bench.ours(row, "seconds", run)
        if not bench.dry:
            row["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        bench.add(row)
