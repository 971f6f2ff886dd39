#!/usr/bin/env python
"""Quality, time and memory of `compress` beside llm-compressor, GPTQModel and AutoRound: same checkpoint, calibration tokens, evaluator.

    benchmarks/peers/setup.sh ~/peers                                       the peers, each in its own environment
    python benchmarks/compress_vs_peers.py --peers ~/peers                  all cells on the bundled checkpoint
    python benchmarks/compress_vs_peers.py --peers ~/peers --only 'gptq-*' --tools ours,gptqmodel --force
    python benchmarks/compress_vs_peers.py --peers ~/peers --shape 1.1b     time and memory on a random Llama of 1.1B weights
    python benchmarks/compress_vs_peers.py --peers ~/peers --best [--model recipes/checkpoints/stdlib-qwen3-4m]
                                                                            what each tool offers beyond GPTQ
    python benchmarks/compress_table.py                                     the tables of docs/results/weights.md

Every run is a process of its own; its wall time and peak memory are those of the whole process, imports, loading and saving
included; `load_before` is the load average of the machine at its start (times taken on a busy machine say little). What it
wrote is then turned into a dense bfloat16 checkpoint (not timed) and measured by one evaluator. Cells that are already in the
JSON are skipped, so an interrupted run goes on; `--force` measures them again.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from compress_cells import BEST_CELLS, CELLS, TOOLS, Cell, Variant, best_variants, recipe, variants
from measure import Measured, last_error, measure
from where import commit, cpu_name, memory_gb

HERE = Path(__file__).resolve().parent
BUNDLED = HERE.parent / "recipes" / "checkpoints" / "stdlib-4m"
SAMPLES, LENGTH, SEED = 128, 256, 0
LARGE_CELL, LARGE_SAMPLES = "gptq-w4-g128", 8


class StepError(RuntimeError):
    """A step of a run failed; the text goes into the JSON."""


class Bench:
    """One invocation: where things are, and how a step is run."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.arguments, self.work = arguments, work
        self.model = Path(arguments.model).resolve()
        self.ids = work / "ids.json"
        self.environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "TOKENIZERS_PARALLELISM": "false"}
        self.environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parent)}

    def python(self, tool: str) -> str:
        """The interpreter a tool runs in."""
        return sys.executable if tool == "ours" else str(Path(self.arguments.peers) / tool / "bin" / "python")

    def step(self, command: list[str], log: str, timeout: float, tool: str = "ours") -> Measured:
        """Run and measure one command; StepError unless it succeeds."""
        environment = (
            self.environment if tool == "ours" else {k: v for k, v in self.environment.items() if k != "PYTHONPATH"}
        )
        path = self.work / f"{log}.log"
        result = measure(command, path, environment, timeout, cwd=self.work)
        if result.timed_out:
            raise StepError(f"{log}: stopped after {timeout:g} s")
        if result.returncode != 0:
            raise StepError(f"{log}: exit {result.returncode}: {last_error(path)}")
        return result

    def ours(self, script: str, *options: str) -> str:
        """Run a script of ours to its end and give back the last line it printed."""
        log = Path(script).stem
        self.step([sys.executable, str(HERE / "peers" / script), *options], log, timeout=1800)
        return (self.work / f"{log}.log").read_text().strip().splitlines()[-1]

    def write_ids(self, samples: int) -> None:
        """Calibration rows and held-out windows, once for all tools."""
        options = ["--samples", str(samples), "--length", str(LENGTH), "--seed", str(SEED)]
        self.step(
            [
                sys.executable,
                str(HERE / "peers" / "token_ids.py"),
                "--model",
                str(self.model),
                "--output",
                str(self.ids),
                *options,
            ],
            "token_ids",
            timeout=600,
        )

    def run(self, cell: Cell, variant: Variant, samples: int, evaluate: bool) -> dict[str, Any]:
        """One cell with one tool: compress `repeat` times, evaluate the last output."""
        config = {
            "model": str(self.model),
            "calibration": str(self.ids),
            "output": str(self.work / "output"),
            "dense": str(self.work / "dense"),
            "report": str(self.work / "report.json"),
            "quantize": cell.quantize,
            "prune": cell.prune,
            "settings": variant.settings,
            **({"dtype": "float32"} if self.float32(variant) else {}),
        }
        config_file = self.work / "cell.json"
        config_file.write_text(json.dumps(config))
        command = self.compress_command(cell, variant, config_file, samples)
        runs = []
        load = os.getloadavg()[0]
        for _ in range(self.arguments.repeat):
            self.clean("output", "report.json")
            runs.append(self.step(command, "compress", self.arguments.timeout, variant.tool))
        record: dict[str, Any] = {
            "seconds": statistics.median(run.seconds for run in runs),
            "seconds_all": [run.seconds for run in runs],
            "cpu_seconds": statistics.median(run.cpu_seconds for run in runs),
            "load_before": round(load, 1),
            "threads": self.arguments.threads,
            "cpu": machine(self.arguments.threads)["cpu"],
            **({"dtype": "float32"} if self.float32(variant) else {}),
            "peak_mb": max(run.peak_mb for run in runs),
            "output_bytes": sum(f.stat().st_size for f in (self.work / "output").glob("*.safetensors")),
            "settings": variant.settings,
            **({"asked_pattern": cell.prune["pattern"]} if cell.prune else {}),
        }
        if variant.tool == "ours":
            stages = yaml.safe_load((self.work / "output" / "recipe.yaml").read_text())["stages"]
            record |= {"commit": commit(), "resolved": stages}
        report = self.work / "report.json"
        if report.exists():
            record |= json.loads(report.read_text())
        if evaluate:
            self.clean("dense")
            script = "export_ours.py" if variant.tool == "ours" else f"run_{variant.tool}.py"
            export = [self.python(variant.tool), str(HERE / "peers" / script), "--config", str(config_file)]
            self.step(export + ([] if variant.tool == "ours" else ["--export"]), "export", 600, variant.tool)
            record |= self.evaluate(self.work / "dense", cell)
        return record

    def float32(self, variant: Variant) -> bool:
        """Whether this run was asked to compute in float32 (GPTQModel's AWQ kernels refuse it)."""
        return bool(self.arguments.peer_float32) and variant.tool == "llmcompressor"

    def compress_command(self, cell: Cell, variant: Variant, config_file: Path, samples: int) -> list[str]:
        """The command whose time and memory count."""
        if variant.tool != "ours":
            return [
                self.python(variant.tool),
                str(HERE / "peers" / f"run_{variant.tool}.py"),
                "--config",
                str(config_file),
            ]
        file = self.work / "recipe.yaml"
        asked = recipe(cell, variant.settings, str(self.model), samples, LENGTH, SEED)
        file.write_text(json.dumps(asked))  # JSON is YAML
        start = "import sys; from compress.cli import main; sys.exit(main())"
        return [sys.executable, "-c", start, "apply", str(file), "--output", str(self.work / "output"), "--json"]

    def evaluate(self, model: Path, cell: Cell | None) -> dict[str, Any]:
        """Perplexity, KL divergence from the original and weight facts of a dense checkpoint."""
        options = ["--model", str(model), "--ids", str(self.ids)]
        if cell is not None:
            options += ["--original", str(self.model)]
        if cell is not None and cell.quantize is not None and "group_size" in cell.quantize:
            options += ["--group-size", str(cell.quantize["group_size"])]
        if cell is not None and cell.quantize is not None and "scheme" in cell.quantize:
            options += ["--scheme", cell.quantize["scheme"], "--compressed", str(self.work / "output")]
        result: dict[str, Any] = json.loads(self.ours("evaluate_dense.py", *options))
        return result

    def clean(self, *names: str) -> None:
        """Remove what an earlier run left."""
        for name in names:
            path = self.work / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def machine(threads: int) -> dict[str, Any]:
    """Where the numbers come from."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "compressed-tensors")}
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gb": memory_gb(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions_ours": versions,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", required=True, help="directory that benchmarks/peers/setup.sh filled")
    parser.add_argument("--model", default=str(BUNDLED), help="a checkpoint with its tokenizer")
    parser.add_argument("--shape", choices=("bundled", "1.1b"), default="bundled")
    parser.add_argument(
        "--layers", type=int, default=22, help="blocks of the 1.1b shape; fewer for a shorter run (says so in the JSON)"
    )
    parser.add_argument("--only", action="append", help=f"glob of cell names; may be repeated (1.1b: {LARGE_CELL})")
    parser.add_argument("--tools", default=",".join(TOOLS), help="which tools, or tool:variant, separated by commas")
    parser.add_argument(
        "--best", action="store_true", help="what each tool offers beyond GPTQ (its settings: best_variants)"
    )
    parser.add_argument(
        "--defaults-only", action="store_true", help="leave out the runs with better settings of the peers"
    )
    parser.add_argument(
        "--peer-float32",
        action="store_true",
        help="let llm-compressor compute in float32, where bfloat16 is too slow for a cell of quality; its time is then not compared",
    )
    parser.add_argument("--repeat", type=int, default=1, help="timed runs of each cell; the median is reported")
    parser.add_argument("--force", action="store_true", help="measure again what is in the JSON already")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=1500, help="seconds for one run")
    parser.add_argument("--work", type=Path, help="scratch directory (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/compress_vs_peers_SHAPE.json")
    return parser.parse_args(argv)


def main() -> None:
    """Run what is missing."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way is stopped too
    arguments = parse()
    part = f"_{arguments.layers}_layers" if arguments.shape != "bundled" and arguments.layers != 22 else ""
    name = f"compress_vs_peers_{arguments.shape.replace('.', '_')}{part}"
    if arguments.best:
        name = f"best_quality_{Path(arguments.model).name}"
    result_file = arguments.output or HERE / "results" / f"{name}.json"
    result_file.parent.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = json.loads(result_file.read_text()) if result_file.exists() else {"cells": {}}
    work = arguments.work or Path(tempfile.mkdtemp(prefix="compress_vs_peers_"))
    work.mkdir(parents=True, exist_ok=True)
    large = arguments.shape == "1.1b"
    samples = LARGE_SAMPLES if large else SAMPLES
    if large:
        arguments.model = str(random_llama(work, arguments.model, arguments.layers))
    bench = Bench(arguments, work)
    bench.write_ids(samples)
    ids = json.loads(bench.ids.read_text())
    data["machine"] = machine(arguments.threads)
    data["calibration"] = {"samples": samples, "length": LENGTH, "seed": SEED, "sha256": ids["calibration_sha256"]}
    data["model"] = {
        "name": Path(arguments.model).name,
        "bytes": sum(f.stat().st_size for f in Path(arguments.model).glob("*.safetensors")),
    }
    if not large:
        data["dense"] = bench.evaluate(bench.model, None)
        print(f"dense: perplexity {data['dense']['perplexity']:.4f}", flush=True)
    defaults_only = arguments.defaults_only or large
    chosen = set(arguments.tools.split(","))
    for cell in [cell for cell in CELLS if cell.name in BEST_CELLS] if arguments.best else CELLS:
        patterns = arguments.only or ([LARGE_CELL] if large else None)
        if patterns and not any(fnmatch.fnmatch(cell.name, pattern) for pattern in patterns):
            continue
        for variant in best_variants(cell) if arguments.best else variants(cell):
            if not chosen & {variant.tool, variant.key} or (defaults_only and variant.name != "default"):
                continue
            entry = data["cells"].setdefault(cell.name, {})
            if variant.key in entry and "error" not in entry[variant.key] and not arguments.force:
                continue
            try:
                entry[variant.key] = bench.run(cell, variant, samples, evaluate=not large)
            except StepError as failure:
                entry[variant.key] = {"error": str(failure), "settings": variant.settings}
            print(f"{cell.name:28} {variant.key:24} {summary(entry[variant.key])}", flush=True)
            result_file.write_text(json.dumps(data, indent=1) + "\n")
    result_file.write_text(json.dumps(data, indent=1) + "\n")
    if arguments.work is None:
        shutil.rmtree(work)


def random_llama(work: Path, tokenizer_from: str, layers: int) -> Path:
    """The random checkpoint of the 1.1B shape, made when absent."""
    path = work / ("random-llama-1.1b" if layers == 22 else f"random-llama-1.1b-{layers}-of-22-layers")
    if not (path / "config.json").exists():
        command = [sys.executable, str(HERE / "make_random_llama.py"), str(path), "--tokenizer", tokenizer_from]
        command += ["--layers", str(layers)]
        result = measure(command, work / "make_random_llama.log", os.environ, timeout=1200)
        if result.returncode != 0:
            sys.exit(f"making the random checkpoint failed: {last_error(work / 'make_random_llama.log')}")
    return path


def summary(record: dict[str, Any]) -> str:
    """One line for the terminal."""
    if "error" in record:
        return f"FAILED {record['error'][:160]}"
    quality = f"ppl {record['perplexity']:.4f}  zeros {record['zeros']:.3f}  " if "perplexity" in record else ""
    return f"{quality}{record['seconds']:.1f} s  {record['peak_mb']:.0f} MB"


if __name__ == "__main__":
    main()
