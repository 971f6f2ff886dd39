#!/usr/bin/env python
"""Row codebooks beside integer grids of about as many bits: KL divergence to the original on held-out text, bits a weight as stored; JSON.

    python benchmarks/row_codebooks.py --model stdlib-4m --output benchmarks/results/row_codebooks_stdlib-4m.json

"squeezellm" is the paper's method: levels by k-means weighed by the mean squares of the inputs, every weight to its nearest level. "gptq"
has the same levels, the column loop, and levels refitted to the codes. Bits count levels, scales and outliers; rows of the bundled models
have 256 to 768 weights, so that levels take up more than in large ones: `bits_4096` is what the same scheme takes with 4096. Cells that the
file has are left alone; each says the commit, the CPU and the load (jobs of the last minute, as it begins) it was measured with.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from pydantic import Field
from safetensors import safe_open
from where import commit, cpu_name

import compress
from compress.core.method import Method
from compress.quantize import METHODS
from compress.quantize.config import QuantizeConfig
from runtime import formats
from runtime.formats.grid import GridScheme
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import Scheme

MODELS = Path(__file__).resolve().parent.parent / "recipes" / "checkpoints"
TEXT = {"data": "bundled", "sequence_length": 256}
CALIBRATION = {**TEXT, "samples": 128, "seed": 0}
EVALUATION = {**TEXT, "samples": 64, "max_kl": "none", "min_agreement": "none"}
OUTLIERS = 0.0045
LARGE = (4096, 4096)


class SqueezeLLMConfig(QuantizeConfig):
    """Nearest levels, weighed by the inputs, for this benchmark."""

    method: Literal["squeezellm"] = Field("squeezellm", description="Name of the method.")


METHODS["squeezellm"] = Method("squeezellm", SqueezeLLMConfig, "", "", frozenset({"ranges"}))


def cells(bits: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Way, and fields of the stage `quantize`, of each cell of so many bits."""
    codebook = {"representation": "row_codebook", "bits": bits}
    apart, groups = {**codebook, "outliers": OUTLIERS}, {**codebook, "group_size": 128}
    fine = 32 if bits == 4 else 64
    return {
        f"grid {bits} bits g128": ("gptq", {"method": "gptq", "bits": bits, "group_size": 128}),
        f"grid {bits} bits g{fine}": ("gptq", {"method": "gptq", "bits": bits, "group_size": fine}),
        f"codebook {bits} bits, squeezellm": ("squeezellm", {"method": "squeezellm", "scheme": codebook}),
        f"codebook {bits} bits, squeezellm, outliers": ("squeezellm", {"method": "squeezellm", "scheme": apart}),
        f"codebook {bits} bits": ("gptq", {"method": "gptq", "scheme": codebook}),
        f"codebook {bits} bits, outliers": ("gptq", {"method": "gptq", "scheme": apart}),
        f"codebook {bits} bits g128": ("gptq", {"method": "gptq", "scheme": groups}),
        f"grid {bits} bits g{fine}, best": (
            "best", {"method": "gptq", "bits": bits, "group_size": fine, "quality": "best"},
        ),
        f"codebook {bits} bits, best": ("best", {"method": "gptq", "scheme": codebook, "quality": "best"}),
    }  # fmt: skip


def stored_bits(artifact: Path, model: Path) -> float:
    """Bits a weight of the compressed layers, everything counted."""
    files = [safe_open(file, "pt") for folder in (artifact, model) for file in sorted(folder.glob("*.safetensors"))]
    tensors = {folder: {} for folder in (artifact, model)}
    for file, folder in zip(
        files, [p.parent for f in (artifact, model) for p in sorted(f.glob("*.safetensors"))], strict=True
    ):
        tensors[folder] |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    layers = [name.removesuffix("weight_packed") for name in tensors[artifact] if name.endswith(".weight_packed")]
    size = sum(
        t.nbytes
        for layer in layers
        for name, t in tensors[artifact].items()
        if name.startswith(layer) and not name.endswith(("bias", "weight_shape"))
    )
    return 8 * size / sum(tensors[model][f"{layer}weight"].numel() for layer in layers)


def large_bits(stage: dict[str, Any]) -> float:
    """Bits a weight of a matrix of 4096 columns."""
    fields = stage.get("scheme")
    scheme = Scheme(
        GridScheme(stage["bits"], "int", True, "group", stage["group_size"])
        if fields is None
        else RowCodebook(**{name: value for name, value in fields.items() if name != "representation"})
    )
    specs = formats.choose(scheme, LARGE).tensors(scheme, LARGE, torch.bfloat16, None)
    return 8 * sum(spec.bytes for name, spec in specs.items() if name != "weight_shape") / (LARGE[0] * LARGE[1])


def measured(model: Path, stage: dict[str, Any]) -> dict[str, float]:
    """One recipe on one model."""
    recipe = {
        "name": "cell", "model": str(model), "calibration": CALIBRATION, "evaluate": EVALUATION,
        "stages": [{"quantize": {**stage, "ignore": ["lm_head"]}}],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        metrics = compress.apply(recipe, output=f"{directory}/out", quiet=True).metrics
        spent = time.perf_counter() - start
        bits = stored_bits(Path(directory) / "out", model)
    return {
        "kl": metrics["kl"], "perplexity": metrics["after"]["perplexity"], "perplexity_before": metrics["before"]["perplexity"],
        "bits": round(bits, 3), "bits_4096": round(large_bits(stage), 3), "seconds": round(spent, 1),
    }  # fmt: skip


def rounded_levels(model: Path) -> dict[str, float]:
    """Squared error with levels of 8 bits, over that with real ones: Lloyd's iteration from there, which only gains."""
    found = {}
    weights = [
        safe_open(file, "pt").get_tensor(name).float()
        for file in sorted(model.glob("*.safetensors"))
        for name in safe_open(file, "pt").keys()  # noqa: SIM118
        if "_proj" in name
    ]
    for bits in (4, 3, 2):
        form, lost = RowCodebook(bits), [0.0, 0.0]
        for weight in weights:
            parameters = form.fit(weight, torch.float32)
            levels = parameters["levels"].float() * parameters["scale"]
            for turn in range(100):
                codes = torch.searchsorted((levels[:, 1:] + levels[:, :-1]) / 2, weight)
                if turn in (0, 99):
                    lost[turn > 0] += float((levels.gather(1, codes) - weight).square().sum())
                count = torch.zeros_like(levels).scatter_add_(1, codes, torch.ones_like(weight))
                sums = torch.zeros_like(levels).scatter_add_(1, codes, weight)
                levels = torch.where(count > 0, sums / count.clamp(min=1), levels).sort(dim=1).values
        found[f"{bits} bits"] = round(lost[0] / lost[1], 5)
    return found


def main() -> None:
    """Every cell of these ways that is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", default="stdlib-4m")
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3, 2])
    parser.add_argument("--ways", nargs="+", default=["gptq", "squeezellm"], choices=["gptq", "squeezellm", "best"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"cells": {}}
    found |= {"model": arguments.model, "calibration": CALIBRATION, "evaluation": EVALUATION}
    where = {
        "commit": commit(), "cpu": cpu_name(), "python": platform.python_version(), "torch": torch.__version__, "threads": 1,
    }  # fmt: skip
    if "error_of_int8_levels" not in found:
        found["error_of_int8_levels"] = where | rounded_levels(MODELS / arguments.model)
    for bits in arguments.bits:
        for name, (way, stage) in cells(bits).items():
            if way in arguments.ways and name not in found["cells"]:
                load = round(os.getloadavg()[0], 2)
                found["cells"][name] = measured(MODELS / arguments.model, stage) | where | {"load": load}
                arguments.output.write_text(json.dumps(found, indent=1) + "\n")
                print(f"{arguments.model}, {name}: {found['cells'][name]}", flush=True)


if __name__ == "__main__":
    main()
