#!/usr/bin/env python
"""The stage `rotate` and input transforms beside the same recipe without them: KL divergence to the original on held-out text; JSON.

    python benchmarks/rotations.py --ways plain hadamard orthogonal --output benchmarks/results/rotations.json
    python benchmarks/rotations.py --cells "W4A4 g128" "W3A16 g128" NVFP4 MXFP4 --ways plain hadamard inputs both groups flatquant \
        --output benchmarks/results/input_transforms.json
    python benchmarks/rotations.py --cells "W4A4 g128" --ways spinquant "hadamard and inside" "spinquant and inside" \
        "spinquant and flatquant inside" --output benchmarks/results/input_transforms.json

Two bundled models, as they are and in their principal axes: rotated so that the dimensions of the hidden state are the eigenvectors of its
second moments. That is the same function with the outliers that large models have by themselves: few dimensions hold most of the energy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from pydantic import Field
from transformers import AutoModelForCausalLM, AutoTokenizer
from where import commit, cpu_name

import compress
from compress.rotate import METHODS
from compress.rotate.method import RotateConfig, RotateMethod

MODELS = Path(__file__).resolve().parent.parent / "recipes" / "checkpoints"
TEXT = {"data": "bundled", "sequence_length": 256}
CALIBRATION = {**TEXT, "samples": 128, "seed": 0}
EVALUATION = {**TEXT, "samples": 64, "max_kl": "none", "min_agreement": "none"}
CELLS: dict[str, dict[str, Any]] = {
    "rotated alone": {},
    "W4A4 g128": {"quantize": {"method": "gptq", "scheme": "W4A4"}},
    "W4A4 g32": {"quantize": {"method": "gptq", "scheme": "W4A4", "group_size": 32}},
    "Atom g32": {"quantize": {"method": "gptq", "scheme": "Atom", "group_size": 32, "int8_channels": 32}},
    "W4A16 g128": {"quantize": {"method": "gptq", "bits": 4}},
    "W3A16 g128": {"quantize": {"method": "gptq", "bits": 3}},
    "W2A16 g64": {"quantize": {"method": "gptq", "bits": 2, "group_size": 64}},
    "NVFP4": {"quantize": {"method": "gptq", "scheme": "NVFP4"}},
    "MXFP4": {"quantize": {"method": "gptq", "scheme": "MXFP4"}},
    "values int2": {"kv_cache": {"keys": "plain", "values": "int2"}},
}
#: What stages `rotate` do not reach.
INSIDE = "re:.*(o_proj|down_proj)"
#: The method of a stage `rotate`, or none; the `input_transform` of what quantizes, or none; and of which layers.
WAYS: dict[str, tuple[str | None, str | None, str]] = {
    "plain": (None, None, "Linear"), "hadamard": ("hadamard", None, "Linear"), "orthogonal": ("orthogonal", None, "Linear"),
    "inputs": (None, "hadamard", "Linear"), "both": ("hadamard", "hadamard", "Linear"), "groups": (None, "hadamard_groups", "Linear"),
    "flatquant": (None, "flatquant", "Linear"), "spinquant": ("spinquant", None, "Linear"),
    "hadamard and inside": ("hadamard", "hadamard", INSIDE), "spinquant and inside": ("spinquant", "hadamard", INSIDE),
    "spinquant and flatquant inside": ("spinquant", "flatquant", INSIDE),
}  # fmt: skip


def principal_axes(model: Path) -> torch.Tensor:
    """Eigenvectors of the second moments of what enters the blocks, each token's root mean square one: float64 `[hidden, hidden]`."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    text = Path(__file__).read_text() + Path(os.__file__).read_text()
    ids = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids[0]
    rows = ids[: len(ids) // 256 * 256].view(-1, 256)
    with torch.inference_mode():
        states = network(rows, output_hidden_states=True).hidden_states[:-1]
    tokens = torch.cat([state.flatten(0, 1) for state in states]).double()
    tokens /= tokens.square().mean(1, keepdim=True).sqrt()
    return torch.linalg.eigh(tokens.T @ tokens)[1]


class PrincipalConfig(RotateConfig):
    """Principal axes of the hidden state, for this benchmark."""

    method: Literal["principal"] = Field("principal", description="Name of the method.")


def in_principal_axes(model: Path, output: Path) -> Path:
    """A checkpoint of the same function."""
    matrix = principal_axes(model)
    METHODS["principal"] = RotateMethod(PrincipalConfig, lambda _size, _generator: matrix, "", "")
    stage = {"rotate": {"method": "principal", "values": False}}
    return compress.apply({"name": "axes", "model": str(model), "stages": [stage]}, output=output, quiet=True).path


def measured(model: Path, way: str, cell: dict[str, Any]) -> dict[str, Any]:
    """KL divergence of the artifact to its model."""
    rotation, transform, targets = WAYS[way]
    stages = [] if rotation is None else [{"rotate": {"method": rotation}}]
    stages += [cell] if cell else []
    if transform is not None:
        stages.append({"quantize": {**cell["quantize"], "input_transform": transform, "targets": [targets]}})
    recipe = {"name": "cell", "model": str(model), "calibration": CALIBRATION, "stages": stages, "evaluate": EVALUATION}
    with tempfile.TemporaryDirectory() as directory:
        metrics = compress.apply(recipe, output=f"{directory}/out", quiet=True).metrics
    cached = metrics.get("kv_cache")
    return {
        "kl": cached["kl"] if cached else metrics["kl"],
        "perplexity": metrics["after"]["perplexity"], "perplexity_before": metrics["before"]["perplexity"], 
        "cpu": cpu_name(), "commit": commit(),
    }  # fmt: skip


def _means_something(cell: dict[str, Any], way: str) -> bool:
    """Whether there is something to transform, and something to do at all."""
    return "quantize" in cell if WAYS[way][1] is not None else bool(cell) or way != "plain"


def main() -> None:
    """Every cell that is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["stdlib-4m", "stdlib-qwen3-4m"])
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"cells": {}}
    found |= {
        "machine": {
        "cpu": cpu_name(), "commit": commit(), "python": platform.python_version(), "torch": torch.__version__, "threads": 1},
        "commit": commit(), "calibration": CALIBRATION, "evaluation": EVALUATION,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        for name in arguments.models:
            for axes in ("as trained", "principal axes"):
                own = found["cells"].setdefault(f"{name}, {axes}", {})
                missing = [
                    (cell, way) for cell in arguments.cells for way in arguments.ways if way not in own.get(cell, {})
                ]
                missing = [(cell, way) for cell, way in missing if _means_something(CELLS[cell], way)]
                if not missing:
                    continue
                model = MODELS / name
                if axes == "principal axes":
                    model = in_principal_axes(model, Path(directory) / name)
                for cell, way in missing:
                    own.setdefault(cell, {})[way] = measured(model, way, CELLS[cell])
                    arguments.output.write_text(json.dumps(found, indent=1) + "\n")
                    print(f"{name}, {axes}: {cell}, {way}: {own[cell][way]}", flush=True)


if __name__ == "__main__":
    main()
