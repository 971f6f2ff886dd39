#!/usr/bin/env python
"""Checkpoints compressed by their tensors alone: `model_free: true` beside llm-compressor's `model_free_ptq`, and the disk.

    benchmarks/peers/setup.sh ~/peers llmcompressor
    python benchmarks/model_free.py --peers ~/peers

Every run is a process of its own, imports and writing included; ours also hashes every file of the source and what it wrote, and reads
it back. `error` is |W - Q|^2 / |W|^2 over all compressed layers, computed from the files of both. `copy` is a plain copy of the checkpoint
with fsync, its pages in memory as for the others. Rounds alternate; medians and all times are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import measure
from where import commit, cpu_name, memory_gb

HERE = Path(__file__).resolve().parent
OURS = """
import json, sys
import compress
compress.apply(json.loads(sys.argv[1]), output=sys.argv[2], quiet=True)
"""
PEER = """
import sys
from llmcompressor import model_free_ptq
source, output, scheme, workers = sys.argv[1:]
model_free_ptq(source, output, scheme=scheme, ignore=["lm_head", "model.embed_tokens"], max_workers=int(workers), device="cpu")
"""
COPY = """
import os, sys
from pathlib import Path
Path(sys.argv[2]).mkdir()
for file in Path(sys.argv[1]).iterdir():
    with open(Path(sys.argv[2]) / file.name, "wb") as out:
        out.write(file.read_bytes())
        os.fsync(out.fileno())
"""
ERROR = """
import json, sys
from runtime import formats
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.formats.quantization_config import parse
source, made = Checkpoint(sys.argv[1]), Checkpoint(sys.argv[2])
names = [n.removesuffix(".weight") for n in source.names() if n.endswith("proj.weight")]
lost = total = 0.0
for name, entry in parse(made.config["quantization_config"], names).items():
    weight = source.get(f"{name}.weight")
    stored = {n.removeprefix(f"{name}."): made.get(n) for n in made.names() if n.startswith(f"{name}.")}
    found = formats.get(entry.format).unpack(stored, entry.scheme, tuple(weight.shape), weight.dtype).dequantize()
    lost += float((weight.float() - found.float()).square().sum())
    total += float(weight.float().square().sum())
print(json.dumps(lost / total))
"""


def cells(schemes: list[str], source: Path, peers: Path | None) -> dict[str, list[str]]:
    """{"tool scheme": command without the output, which "OUTPUT" stands for}."""
    found = {"copy": [sys.executable, "-c", COPY, str(source), "OUTPUT"]}
    for scheme in schemes:
        for scales in ("mse", "minmax"):
            quantize = {"method": "rtn", "scheme": scheme, "scales": scales}
            recipe = {"name": "row", "model": str(source), "model_free": True, "stages": [{"quantize": quantize}]}
            found[f"ours {scales} {scheme}"] = [sys.executable, "-c", OURS, json.dumps(recipe), "OUTPUT"]
        if peers is not None:
            python = str(peers / "llmcompressor" / "bin" / "python")
            for workers in ("1", "2"):
                found[f"llm-compressor {workers} {scheme}"] = [
                    python,
                    "-c",
                    PEER,
                    str(source),
                    "OUTPUT",
                    scheme,
                    workers,
                ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--schemes", default="W4A16,FP8_DYNAMIC")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "model_free.json")
    arguments = parser.parse_args()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryDirectory(prefix="model-free-") as room:
        work = Path(room)
        source = work / "model"
        command = [sys.executable, str(HERE / "make_random_llama.py"), str(source), "--layers", str(arguments.layers)]
        run(command, work, environment)
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        commands = cells(arguments.schemes.split(","), source, arguments.peers)
        found: dict[str, dict[str, Any]] = {
            name: {"seconds": [], "cpu_seconds": [], "peak_mb": []} for name in commands
        }
        for _ in range(arguments.rounds):
            for name, parts in commands.items():
                output = work / "out"
                shutil.rmtree(output, ignore_errors=True)
                own = (
                    environment
                    if parts[0] == sys.executable
                    else {k: v for k, v in environment.items() if k != "PYTHONPATH"}
                )
                done = run([str(output) if part == "OUTPUT" else part for part in parts], work, own)
                for key in ("seconds", "cpu_seconds", "peak_mb"):
                    found[name][key].append(round(getattr(done, key), 2))
                if name != "copy" and "error" not in found[name]:
                    run([sys.executable, "-c", ERROR, str(source), str(output)], work, environment)
                    found[name]["error"] = float((work / "log").read_text().strip().splitlines()[-1])
                print(name, found[name], flush=True)
    for cell in found.values():
        cell["median_seconds"] = statistics.median(cell["seconds"])
    facts = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": memory_gb(),
        "commit": commit(),
        "bytes": size,
        "layers": arguments.layers,
    }
    arguments.output.write_text(json.dumps({**facts, "cells": found}, indent=1) + "\n")


def run(command: list[str], work: Path, environment: dict[str, str]) -> Any:
    """One process, measured; SystemExit with its output where it fails."""
    done = measure(command, work / "log", environment, timeout=900)
    if done.returncode != 0:
        raise SystemExit((work / "log").read_text()[-2000:])
    return done


if __name__ == "__main__":
    main()
