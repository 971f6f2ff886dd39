#!/usr/bin/env python
"""Decode speed against KL divergence, 2 to 5 bits: our formats, and what llama.cpp and ik_llama.cpp quantize to with an importance matrix.

    benchmarks/peers/setup_runtime.sh ~/peers base ik
    python benchmarks/speed_against_kl.py --peers ~/peers --work ~/work
    python benchmarks/speed_against_kl.py --render benchmarks/results/speed_against_kl.json       page of the documentation and picture

KL divergence and perplexity are those of two trained models as each engine computes them, activations and cache included, on held-out
windows; all tools get the same calibration tokens, peers as the mean square of every input (their importance matrix). Embedding and
output keep 16 bits. Speed is that of four layers of the 1.1B shape: the types of the small model for its layers, 8 bits for its
embedding and output, and values without meaning. Every cell is a process; a speed is the median over the rounds, each of which goes
through all in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_cpu import HERE, machine
from decode_depths import DepthBench, Model
from importance import mean_squares
from speed_against_kl_report import page, plot
from transformers import AutoModelForCausalLM, AutoTokenizer
from where import commit

import compress
import export
from compress.core.resources import recipes_directory
from compress.data import load, load_evaluation
from compress.recipe.models import CalibrationConfig, EvaluateConfig
from export.gguf import families
from export.source import Source

MODELS = ("stdlib-4m", "stdlib-qwen3-4m")
SAMPLES, LENGTH, SEED, BATCH = 128, 256, 0, 16
SHAPE = "1.1b/4"
LLAMA_CPP = [
    "Q2_K_S", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K_S", "Q5_K_M", "IQ2_XXS",
    "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "IQ4_XS", "IQ4_NL",
]  # fmt: skip
IK = [
    "IQ2_KS", "IQ2_K", "IQ2_KL", "IQ3_KS", "IQ3_K", "IQ3_KL", "IQ4_KSS", "IQ4_KS", "IQ4_K", "IQ5_KS", "IQ5_K", "IQ2_KT", "IQ3_KT",
    "IQ4_KT", "Q6_0",
]  # fmt: skip
PEERS = {"llama.cpp": ("llama_cpp", LLAMA_CPP), "ik_llama.cpp": ("ik_llama", LLAMA_CPP + IK)}
TRELLIS = {"representation": "trellis", "group_size": 128}
#: Quantize stages, all with `quality: best`. `bits` with a decimal point is a budget: 2 to 8 bits, or trellis codes in place of 2 bits.
OURS: dict[str, dict[str, Any]] = {
    **{
        f"W{bits} g{group}": {"bits": bits, "group_size": group}
        for bits, group in ((2, 64), (2, 32), (3, 128), (3, 32))
    },
    **{f"W{bits} g{group}": {"bits": bits, "group_size": group} for bits, group in ((4, 128), (4, 32), (5, 128))},
    **{f"trellis g{group}": {"scheme": TRELLIS | {"group_size": group}} for group in (128, 64)},
    "2.5 bits": {"bits": 2.5, "candidates": [{"scheme": TRELLIS}, 3, 4, 5, 6, 8]},
    **{f"{bits} bits": {"bits": bits} for bits in (2.75, 3.0, 3.25, 3.5, 3.75, 4.5)},
}
DOCS = HERE.parent / "docs"
PAGE, PICTURE = DOCS / "results" / "speed_against_kl.md", DOCS / "images" / "speed_against_kl.svg"
KERNELS = {"exact": "auto", "fast": "fast"}


class Trained:
    """A trained model: what its reference says, and what each tool made of it."""

    def __init__(self, name: str, work: Path, windows: int) -> None:
        self.name, self.folder = name, work / name
        self.checkpoint = recipes_directory() / "checkpoints" / name
        self.reference, self.original = self.folder / "reference", self.folder / "original" / "model.gguf"
        self.importance = self.folder / "importance.npz"
        if not self.importance.exists():
            self.reference.mkdir(parents=True, exist_ok=True)
            self._prepare(windows)

    @torch.no_grad()
    def _prepare(self, windows: int) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32).eval()
        tokenizer, size = AutoTokenizer.from_pretrained(self.checkpoint), model.config.vocab_size
        ids = load_evaluation(EvaluateConfig(sequence_length=LENGTH), tokenizer, size).ids[:windows]
        np.save(self.reference / "ids.npy", ids.numpy())
        expected = [model(rows).logits.log_softmax(-1) for rows in ids.split(BATCH)]
        np.save(self.reference / "log_probabilities.npy", torch.cat(expected).numpy())
        export.export(
            self.checkpoint, "gguf", self.original.parent, quiet=True, verify=False, dense="f32", overwrite=True
        )
        wanted = CalibrationConfig(samples=SAMPLES, sequence_length=LENGTH, seed=SEED)
        calibration = torch.cat([rows for rows, _ in load(wanted, tokenizer, size).batches])
        names = families.names(Source(self.checkpoint))
        means = mean_squares(model, calibration.split(BATCH))
        np.savez(self.importance, **{str(names[parameter]): mean.numpy() for parameter, mean in means.items()})

    def artifact(self, label: str, stage: dict[str, Any]) -> Path:
        """Ours, compressed once."""
        path = self.folder / label.replace(" ", "_")
        if not (path / "config.json").exists():
            recipe = {
                "name": "speed_against_kl", "model": str(self.checkpoint),
                "calibration": {"data": "bundled", "samples": SAMPLES, "sequence_length": LENGTH, "seed": SEED},
                "stages": [{"quantize": {"method": "gptq", "quality": "best", **stage}}],
                "evaluate": {"samples": 4, "max_kl": "none", "min_agreement": "none"},
            }  # fmt: skip
            compress.apply(recipe, output=path, quiet=True, overwrite=True)
        return path


class SpeedBench(DepthBench):
    """Processes of the large shape, and of the trained models in its place."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, Model(SHAPE))
        self.make_checkpoint()
        self.shell = self.work / "llama_cpp" / "q8_0.gguf"
        if not self.shell.exists():
            path = str(self.shell.parent)
            self.ask("llama_cpp", 2, action="prepare", kind="Q8_0", path=path, model=str(self.checkpoint))

    def ask(self, script: str, threads: int, **more: Any) -> dict[str, Any]:
        answer = self.call(script, {"threads": threads, **more})
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def enlarged(self, artifact: Path, label: str) -> Path:
        """An artifact of the large shape whose layers have the schemes of a small one, and 8 bits for the head."""
        path = self.work / label.replace(" ", "_")
        if not (path / "config.json").exists():
            chosen: dict[str, list[str]] = defaultdict(list)
            for name, entry in Source(artifact).entries.items():
                weights = entry.scheme.weights.to_config()
                grid = {"bits": weights.get("num_bits"), "group_size": weights.get("group_size")}
                grid["symmetric"] = weights.get("symmetric", True)
                chosen[json.dumps({"scheme": weights} if "representation" in weights else grid)].append(name)
            stages = [
                {"quantize": {"method": "rtn", "targets": sorted(names), **json.loads(scheme)}}
                for scheme, names in sorted(chosen.items())
            ]
            stages.append({"quantize": {"method": "rtn", "scheme": "W8A16", "targets": ["lm_head"], "ignore": []}})
            recipe = {"name": "speed_against_kl", "model": str(self.checkpoint), "stages": stages}
            compress.apply(recipe, output=path, quiet=True, overwrite=True)
        return path

    def speed(self, script: str, threads: int, path: Path, **more: Any) -> dict[str, Any]:
        """Decoding behind a short prompt, and a prompt of 512, tokens/s."""
        found = self.ask(
            script, threads, action="depths", path=str(path), model=str(self.checkpoint), depths=[0], prefills=[512],
            context=1024, new_tokens=self.arguments.new_tokens, seconds=60, **more,
        )  # fmt: skip
        return {"decode": found["decode"]["0"], "prefill": found["prefill"]["512"]}


def main() -> None:
    """Quality first, then rounds of speed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments = parse()
    if arguments.render:
        data = json.loads(arguments.render.read_text())
        PAGE.write_text(page(data))
        plot(data, PICTURE)
        return
    arguments.work.mkdir(parents=True, exist_ok=True)
    models = [Trained(name, arguments.work, arguments.windows) for name in MODELS]
    bench, data = SpeedBench(arguments), start(arguments)
    wanted = set(filter(None, arguments.only.split(",")))

    def chosen(name: str) -> bool:
        engine, _, label = name.partition(" ")
        return not wanted or bool(wanted & {engine, label})

    makers = {f"ours {label}": partial(ours, bench, models, label, stage) for label, stage in OURS.items()}
    for engine, (script, types) in PEERS.items():
        makers |= {f"{engine} {kind}": partial(peer, bench, models, script, kind) for kind in types}
    for name, make in makers.items():
        if chosen(name):
            attempt(data, arguments.output, name, make)
    begin = time.perf_counter()
    for number in range(arguments.rounds):
        for name, point in data["points"].items():
            if "error" in point or not chosen(name):
                continue
            for threads, (cell, request) in product(arguments.threads, point["requests"].items()):
                rounds = point["speed"].setdefault(str(threads), {}).setdefault(cell, [])
                if len(rounds) > number or time.perf_counter() - begin > 60 * arguments.minutes:
                    continue
                load = round(os.getloadavg()[0], 1)
                try:
                    found = bench.speed(threads=threads, **request)
                except RuntimeError as failure:  # no other point is worse for it
                    print(f"{name} {cell} {threads}: {failure}", flush=True)
                    continue
                rounds.append({**found, "load_before": load, "commit": commit()})
                print(f"{number + 1} {name} {cell} {threads}: {found}", flush=True)
            arguments.output.write_text(json.dumps(data, indent=1) + "\n")


def ours(bench: SpeedBench, models: list[Trained], label: str, stage: dict[str, Any]) -> dict[str, Any]:
    """Quality of one of ours with each kind of kernels; the large artifact has the schemes that the first model got."""
    quality: dict[str, Any] = {}
    for model in models:
        path = model.artifact(label, stage)
        quality[model.name] = {"bits": bits_of(path)}
        for name, kernels in KERNELS.items():
            found = bench.ask(
                "ours", 2, action="quality", path=str(path), reference=str(model.reference), kernels=kernels
            )
            quality[model.name][name] = {key: found[key] for key in ("kl", "perplexity")}
    large = bench.enlarged(models[0].artifact(label, stage), label)
    requests = {name: {"script": "ours", "path": str(large), "kernels": kernels} for name, kernels in KERNELS.items()}
    return {"quality": quality, "requests": requests, "speed": {}, "commit": commit()}


def peer(bench: SpeedBench, models: list[Trained], script: str, kind: str) -> dict[str, Any]:
    """Quality of a type of a peer, and its large file."""
    quality: dict[str, Any] = {}
    for model in reversed(models):
        file = model.folder / f"{script}-{kind}.gguf"
        bench.ask(
            script, 2, action="quantize", type=kind, original=str(model.original), output=str(file), importance=str(model.importance)
        )  # fmt: skip
        found = bench.ask(
            script, 2, action="quality", path=str(model.folder), file=file.name, model=str(model.checkpoint), context=LENGTH,
            reference=str(model.reference),
        )  # fmt: skip
        quality[model.name] = {"peer": {key: found[key] for key in ("kl", "perplexity")}}
    large = bench.work / file.name
    made = bench.ask(script, 1, action="enlarge", small=str(file), large=str(bench.shell), output=str(large))
    for each in quality.values():
        each["bits"] = made["bits"]
    requests = {"peer": {"script": script, "path": str(large.parent), "file": large.name}}
    return {"quality": quality, "requests": requests, "speed": {}, "types": made["types"]}


def bits_of(artifact: Path) -> float:
    """Bits a weight of the compressed layers, scales included."""
    source = Source(artifact)
    stored = sum(source.module_bytes(name) for name in source.entries)
    return 8 * stored / sum(math.prod(source.shapes[name]) for name in source.entries)


def attempt(data: dict[str, Any], output: Path, name: str, make: Callable[[], dict[str, Any]]) -> None:
    """Add a point unless it is there; a failure is noted."""
    if "error" not in data["points"].get(name, {"error": ""}):
        return
    try:
        data["points"][name] = make()
    except Exception as failure:  # one tool's failure must not end the others' run
        traceback.print_exc()
        data["points"][name] = {"error": f"{type(failure).__name__}: {str(failure)[:300]}"}
    point = data["points"][name]
    print(name, point.get("error") or json.dumps(point["quality"]), flush=True)
    output.write_text(json.dumps(data, indent=1) + "\n")


def start(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the output holds, or the head of a new one."""
    if arguments.output.exists():
        found: dict[str, Any] = json.loads(arguments.output.read_text())
        return found
    settings = {
        "windows": arguments.windows,
        "window_tokens": LENGTH,
        "samples": SAMPLES,
        "new_tokens": arguments.new_tokens,
    }
    return {
        "machine": machine(),
        "commit": commit(),
        "shape": SHAPE,
        "models": MODELS,
        "settings": settings,
        "points": {},
    }


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="the environments that benchmarks/peers/setup_runtime.sh made")
    parser.add_argument("--work", type=Path, help="keeps what each tool made")
    parser.add_argument(
        "--only", default="", help="engines (ours, llama.cpp, ik_llama.cpp), our points or types, separated by commas"
    )
    parser.add_argument("--threads", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    parser.add_argument("--windows", type=int, default=64, help="of the held-out text, from its beginning")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9, help="no speed is measured after that")
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which a process is ended")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "speed_against_kl.json")
    parser.add_argument(
        "--render", type=Path, help="only write the page of the documentation from this JSON, and draw its picture"
    )
    arguments = parser.parse_args()
    arguments.ours_python, arguments.under = sys.executable, ""
    if arguments.render is None and (arguments.peers is None or arguments.work is None):
        parser.error("--peers and --work are needed")
    return arguments


if __name__ == "__main__":
    main()
