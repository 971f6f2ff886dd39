#!/usr/bin/env python
"""Ternary dictionary codes beside 2-bit weights: KL divergence to the original on held-out text, bits a weight as stored, products; JSON.

    python benchmarks/ternary.py --output benchmarks/results/ternary.json

"nearest, extremes" has scales as large as the largest weight of a row, and each weight becomes the nearest of zero and these, as in the
paper (which has another one for negative weights). "ternary" has those of this package, made for so many zeros. Bits count scales and
offsets; rows of the bundled models have 256 to 768 weights, and `bits_4096` has the scales and offsets of rows of 4096.

Products: of one and of 8 rows with a matrix of the shape of an expert, in C on one thread. All kinds take turns within a round, each over
copies that are larger than its second cache; the time is the processor's, so that other processes do not count, and ratios are medians over
rounds, with quartiles.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors import safe_open
from where import commit, cpu_name

import compress
from runtime import formats
from runtime.formats.presets import PRESETS
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.representation import Tensors
from runtime.formats.scheme import CompressedWeight, GridScheme, Scheme
from runtime.formats.ternary_dictionary import TernaryDictionary, ternary_scale_dtype
from runtime.kernels import Layer
from runtime.kernels.cpu import library, panels
from runtime.kernels.cpu.expansion import TernaryCpu

MODELS = Path(__file__).resolve().parent.parent / "recipes" / "checkpoints"
TEXT = {"data": "bundled", "sequence_length": 256}
CALIBRATION = {**TEXT, "samples": 128, "seed": 0}
EVALUATION = {**TEXT, "samples": 64, "max_kl": "none", "min_agreement": "none"}
ZEROS = (0.92, 0.885, 0.8, 0.7)
CELLS: dict[str, dict[str, Any]] = {
    "nearest, extremes": {"method": "gptq", "scheme": "EXTREMES"},
    "ternary 0.885, rtn": {"method": "rtn", "scheme": "TERNARY"},
    **{
        f"ternary {zeros}": {"method": "gptq", "scheme": {"representation": "ternary_dictionary", "zeros": zeros}}
        for zeros in ZEROS
    },
    "grid 2 bits g64": {"method": "gptq", "bits": 2, "group_size": 64},
}  # fmt: skip
SHAPE = (768, 2048)
BYTES = 1 << 28  # that the copies of a kind take together


class ExtremeScales(TernaryDictionary):
    """Scales that reach to the largest weight, and rounding to the nearest."""

    dead_zone = 0.5

    def fit(self, weight: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None) -> Tensors:
        return {"scale": weight.abs().amax(1, keepdim=True).to(ternary_scale_dtype(dtype))}


PRESETS["EXTREMES"] = Scheme(ExtremeScales())


def stored(artifact: Path, model: Path) -> dict[str, float]:
    """Bits a weight of the compressed layers, and of ternary ones the zeros and what words alone take."""
    files = {
        folder: [safe_open(file, "pt") for file in sorted(folder.glob("*.safetensors"))] for folder in (artifact, model)
    }
    tensors, original = (
        {name: file.get_tensor(name) for file in each for name in file.keys()}  # noqa: SIM118
        for each in files.values()
    )
    codes = (".weight_codes", ".weight_packed")
    layers = {name.rpartition(".")[0] for name in tensors if name.endswith(codes)}
    weights = sum(original[f"{layer}.weight"].numel() for layer in layers)
    own = {name: t for name, t in tensors.items() if name.rpartition(".")[0] in layers and "weight_" in name}
    size = sum(t.nbytes for name, t in own.items() if not name.endswith("weight_shape"))
    found = {"bits": round(8 * size / weights, 3)}
    words = [layer for layer in layers if f"{layer}.weight_codes" in own]
    if words:
        zeros = 0
        for layer in words:
            parts = {name.rpartition(".")[2]: t for name, t in own.items() if name.startswith(f"{layer}.")}
            shape = tuple(original[f"{layer}.weight"].shape)
            zeros += int((TernaryDictionary().decode(parts, (shape[0], shape[1]))[0] == 0).sum())
        alone = sum(own[f"{layer}.weight_codes"].nbytes for layer in words)
        found |= {"zeros": round(zeros / weights, 4), "bits_4096": round(8 * alone / weights + 48 / 4096, 3)}
    return found


def measured(model: Path, stage: dict[str, Any]) -> dict[str, float]:
    """One recipe on one model."""
    recipe = {
        "name": "cell", "model": str(model), "calibration": CALIBRATION, "evaluate": EVALUATION,
        "stages": [{"quantize": {**stage, "ignore": ["lm_head"]}}],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        metrics = compress.apply(recipe, output=f"{directory}/out", quiet=True).metrics
        found = stored(Path(directory) / "out", model)
    perplexity = {"perplexity": metrics["after"]["perplexity"], "perplexity_before": metrics["before"]["perplexity"]}
    return {"kl": metrics["kl"], **perplexity, **found}


# ---------------------------------------------------------------- products
def multiply(linear: library.Linear, x: torch.Tensor) -> float:
    """Seconds of the processor."""
    native, address = library.load(), ctypes.byref(linear)
    assert native is not None
    y = torch.empty(len(x), linear.rows)
    memory = library.bytes_at(native.linear_memory(address, len(x)))
    start = time.thread_time()
    native.linear_run(address, x.data_ptr(), 0, len(x), y.data_ptr(), 0, memory, 1)
    return time.thread_time() - start


def packed(scheme: Scheme) -> tuple[Layer, Tensors]:
    """A random matrix of the scheme."""
    weight, form = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), scheme.weights
    assert form is not None
    if isinstance(form, GridScheme):
        codes = torch.randint(-8, 8, SHAPE, dtype=torch.int8)
        made = CompressedWeight(
            codes, torch.ones(SHAPE[0], SHAPE[1] // 128).bfloat16(), None, None, scheme, torch.float32
        )
    else:
        parameters = form.fit(weight, torch.bfloat16)
        made = CompressedWeight.of(form.round(weight, parameters), parameters, None, scheme, torch.float32)
    storage = formats.choose(scheme, SHAPE)
    tensors = storage.pack(made)
    entry = ModuleEntry(scheme, storage.name, storage.stored_count(tensors))
    return Layer(entry, SHAPE, torch.float32, torch.device("cpu")), tensors


def copies(tensors: Tensors) -> list[Tensors]:
    """As many as take `BYTES`."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    return [{name: tensor.clone() for name, tensor in tensors.items()} for _ in range(BYTES // size + 1)]


def products(rounds: int) -> dict[str, Any]:
    """Ratios of times, by kinds and rows."""
    kernel = TernaryCpu()
    kinds: dict[str, Any] = {}
    for zeros in ZEROS:
        layer, tensors = packed(Scheme(TernaryDictionary(zeros)))
        kinds[f"ternary {zeros}"] = copies(tensors), lambda own, layer=layer: kernel.linear(own, layer, None)
    layer, tensors = packed(Scheme(GridScheme(4, "int", True, "group", 128)))

    def four(own: Tensors, layer: Layer = layer) -> library.Linear:
        linear = panels.W4.linear(own, layer, None)
        linear.digits = 2
        return linear

    def dense(own: Tensors) -> library.Linear:
        linear = library.Linear(weight_type=library.TYPES[torch.bfloat16], weight=own["weight"].data_ptr())
        linear.rows, linear.columns = SHAPE
        return linear

    kinds["w4"] = copies(panels.W4.pack(tensors, layer)), four
    kinds["bf16"] = copies({"weight": torch.randn(SHAPE).bfloat16()}), dense
    found: dict[str, Any] = {"shape": list(SHAPE), "rounds": rounds}
    for rows in (1, 8):
        x, times = torch.randn(rows, SHAPE[1]), {name: list[float]() for name in kinds}
        for turn in range(rounds):
            for name, (every, linear) in kinds.items():
                times[name].append(multiply(linear(every[turn % len(every)]), x))
        cell: dict[str, Any] = {"microseconds": {n: round(1e6 * statistics.median(t), 1) for n, t in times.items()}}
        for base in ("w4", "bf16"):
            for name in kinds:
                ratios = [a / b for a, b in zip(times[name], times[base], strict=True)]
                if name.startswith("ternary"):
                    quartiles = [round(each, 3) for each in statistics.quantiles(ratios, n=4)]
                    cell[f"{name} / {base}"] = quartiles
        found[f"{rows} rows"] = cell
    return found


def main() -> None:
    """Every cell that is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["stdlib-4m", "stdlib-qwen3-4m"])
    parser.add_argument("--rounds", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"cells": {}}
    where = {
        "commit": commit(), "cpu": cpu_name(), "python": platform.python_version(), "torch": torch.__version__, "threads": 1,
    }  # fmt: skip
    found |= {"calibration": CALIBRATION, "evaluation": EVALUATION}
    cells: dict[str, Any] = {
        f"{model}, {name}": (measured, MODELS / model, stage)
        for model in arguments.models
        for name, stage in CELLS.items()
    }
    for name, (measure, *rest) in {**cells, "products": (products, arguments.rounds)}.items():
        if name not in found["cells"]:
            load = round(os.getloadavg()[0], 2)
            found["cells"][name] = measure(*rest) | where | {"load": load}
            arguments.output.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name}: {found['cells'][name]}", flush=True)


if __name__ == "__main__":
    main()
