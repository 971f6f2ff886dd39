#!/usr/bin/env python
"""What calibrating a cache policy costs: the gates of DuoAttention, the channels of Double Sparsity, the outlier tokens of PrefixQuant.

    python benchmarks/kv_calibration.py [--threads 2]

On both bundled checkpoints, with the text and the settings that `compress apply` uses where a recipe says nothing else: 128 rows of 256
tokens of the bundled calibration text. One policy at a time, so that none shares another's pass. A step is one of training for gates,
and one forward pass of several rows for the others.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from where import commit, cpu_name

from compress import data as calibration
from compress.core.resources import recipes_directory
from compress.kv_cache.calibrate import CalibrationOptions, calibrate
from compress.kv_cache.gates import GateOptions
from compress.recipe.models import CalibrationConfig
from runtime.kv_cache.policy.policy import Policy

RESULT = Path(__file__).resolve().parent / "results" / "kv_calibration.json"
CHECKPOINTS = ("stdlib-4m", "recall-1m")


def main() -> None:
    """Measure, print a line each, and keep what was found."""
    arguments = options()
    torch.set_num_threads(arguments.threads)
    config = CalibrationConfig() if arguments.samples is None else CalibrationConfig(samples=arguments.samples)
    result: dict[str, Any] = {
        "machine": cpu_name(), "cores": os.cpu_count(), "threads": arguments.threads, "torch": torch.__version__, "commit": commit(),
        "calibration": {"samples": config.samples, "sequence_length": config.sequence_length, "seed": config.seed}, "rows": [],
    }  # fmt: skip
    print(
        f"{result['machine']}, {result['cores']} cores, {arguments.threads} threads, {config.samples} rows of calibration text"
    )
    for checkpoint in CHECKPOINTS:
        rows = text(recipes_directory() / "checkpoints" / checkpoint, config)
        for method in ("duoattention", "doublesparsity", "prefixquant"):
            (need,) = Policy.parse(method).needs
            row = measure(checkpoint, need, method, rows, arguments.gate_steps)
            result["rows"].append(row)
            print(
                f"{checkpoint:10} {method:15} {row['seconds']:8.2f} s, {row['total_seconds']:8.2f} s with loading, {row['steps']} steps"
            )
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def options() -> argparse.Namespace:
    """Of the command line; the two that make it small are for trying it out, and their results are not comparable."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, help="rows of text (default: as a recipe)")
    parser.add_argument("--gate-steps", type=int, help="steps of training at most (default: as `compress apply`)")
    return parser.parse_args()


def text(checkpoint: Path, config: CalibrationConfig) -> torch.Tensor:
    """The rows that a recipe's calibration section draws, int64 `[samples, sequence_length]`."""
    from transformers import AutoConfig, AutoTokenizer

    vocabulary = AutoConfig.from_pretrained(checkpoint).vocab_size
    data = calibration.load(config, AutoTokenizer.from_pretrained(checkpoint), vocabulary)
    return torch.cat([ids for ids, _ in data.batches])


def measure(checkpoint: str, need: str, method: str, rows: torch.Tensor, gate_steps: int | None) -> dict[str, Any]:
    """One calibration: seconds of its own, and with the loading of the model."""
    options = CalibrationOptions(None if gate_steps is None else GateOptions(steps=gate_steps))
    passes = Passes()
    began = time.perf_counter()
    found = calibrate(
        recipes_directory() / "checkpoints" / checkpoint,
        Policy.parse(method),
        rows,
        passes,
        options=options,
    )
    total = time.perf_counter() - began
    facts = found["facts"][need]
    return {
        "checkpoint": checkpoint, "method": method, "finds": need, "seconds": found["seconds"][need], "total_seconds": round(total, 2),
        "steps": facts["steps"] if need == "gates" else passes.count, "row_tokens": facts["length"] if need == "gates" else rows.shape[1],
        "recall": facts.get("recall"),
    }  # fmt: skip


class Passes:
    """Counts what calibration tells of its progress."""

    def __init__(self) -> None:
        self.count = 0

    def phase(self, title: str, total: int) -> None:
        """`total` steps begin."""

    def step(self, note: str) -> None:
        """One of them is done."""
        self.count += 1


if __name__ == "__main__":
    main()
