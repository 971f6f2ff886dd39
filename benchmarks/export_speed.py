"""Decode and prefill of the ONNX exports in ONNX Runtime, beside our runtime and beside ONNX Runtime's own way to int4.

python benchmarks/export_speed.py [--shape bundled|1.1b] [--rounds 2] [--output benchmarks/results/export_speed_SHAPE.json]

Every engine runs in a process of its own, in turn, so that what else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from decode_engines import QUANTIZE, SHAPES
from where import cpu_name

import compress
import export
from compress.core.resources import recipes_directory
from compress.evaluate.speed import SpeedRequest, run_isolated

HERE = Path(__file__).parent
# name: (what is loaded, keywords of runtime.load)
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "ours, exact": ("artifact", {"kernels": "auto"}),
    "ours, fast": ("artifact", {"kernels": "fast"}),
    "onnx, exact": ("onnx", {"kernels": "auto"}),
    "onnx, fast": ("onnx", {"kernels": "fast"}),
    "onnx --ort, exact": ("ort", {"kernels": "auto"}),
    "onnx --ort, fast": ("ort", {"kernels": "fast"}),
}
PEER = "ONNX Runtime's own route, int8 activations"


def prepare(work: Path, shape: str) -> dict[str, Path]:
    """Checkpoint, artifact, exports and the peer's file; what is there already is kept."""
    model = recipes_directory() / "checkpoints" / "stdlib-4m"
    if shape != "bundled":
        model = work / "checkpoint"
        if not (model / "config.json").is_file():
            flags = [part for name, value in SHAPES[shape].items() for part in (f"--{name}", str(value))]
            subprocess.run([sys.executable, str(HERE / "make_random_llama.py"), str(model), *flags], check=True)
    paths = {
        "checkpoint": model,
        "artifact": work / "w4",
        "onnx": work / "onnx",
        "ort": work / "ort",
        "peer": work / "peer",
    }
    if not (paths["artifact"] / "compress.json").is_file():
        recipe = {"name": "w4", "model": str(model), "stages": [QUANTIZE]}
        compress.apply(recipe, output=paths["artifact"], overwrite=True)
    for name in ("onnx", "ort"):
        if not (paths[name] / "export.json").is_file():
            export.export(paths["artifact"], "onnx", paths[name], ort=name == "ort", overwrite=True)
    if not (paths["peer"] / "model.onnx").is_file():
        script = [sys.executable, str(HERE / "peers" / "ort_int4_route.py"), "prepare", str(model), str(paths["peer"])]
        subprocess.run(script, check=True)
    return paths


def measure(paths: dict[str, Path], threads: int, prompt: int, new: int, name: str) -> dict[str, float]:
    """One engine once: prefill and decode in tokens a second."""
    if name == PEER:
        numbers = [str(value) for value in (threads, prompt, new, 1)]
        command = [sys.executable, str(HERE / "peers" / "ort_int4_route.py"), "run", str(paths["peer"]), *numbers]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    else:
        what, options = ENGINES[name]
        found = run_isolated(
            SpeedRequest(str(paths[what]), "runtime", prompt, new, 1, 1, options={**options, "threads": threads})
        )
    return {key: found[key] for key in ("prefill_tokens_per_second", "decode_tokens_per_second", "load_seconds")}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["bundled", *SHAPES], default="bundled")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--work", type=Path, default=Path("/tmp/export_speed"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    work = options.work / options.shape
    work.mkdir(parents=True, exist_ok=True)
    paths = prepare(work, options.shape)
    rows: dict[str, list[dict[str, float]]] = {}
    for number in range(options.rounds):
        for threads in options.threads:
            for name in (*ENGINES, PEER):
                found = measure(paths, threads, options.prompt_tokens, options.new_tokens, name)
                rows.setdefault(f"{name} | {threads}", []).append(found)
                print(
                    f"round {number + 1}, {threads} threads, {name}: {json.dumps(found)}", file=sys.stderr, flush=True
                )
    table = [summary(key, values) for key, values in rows.items()]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
    ).stdout.strip()
    result = {
        "shape": options.shape, "prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens, "rounds": options.rounds,
        "cpu": cpu_name(), "python": platform.python_version(), "commit": commit, "rows": table,
        "file_bytes": {name: bytes_of(paths[name]) for name in ("artifact", "onnx", "ort", "peer")},
    }  # fmt: skip
    output = options.output or HERE / "results" / f"export_speed_{options.shape.replace('.', '_')}.json"
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for row in table:
        print(f"{row['engine']:45} {row['threads']}  decode {row['decode']:8.1f}  prefill {row['prefill']:8.1f}")


def bytes_of(folder: Path) -> int:
    """Of all files that hold weights or graphs."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.suffix in (".safetensors", ".onnx", ".data"))


def summary(key: str, values: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the rounds, and every round."""
    engine, _, threads = key.partition(" | ")
    return {
        "engine": engine,
        "threads": int(threads),
        "decode": statistics.median(v["decode_tokens_per_second"] for v in values),
        "prefill": statistics.median(v["prefill_tokens_per_second"] for v in values),
        "load_seconds": statistics.median(v["load_seconds"] for v in values),
        "rounds": values,
    }


if __name__ == "__main__":
    main()
