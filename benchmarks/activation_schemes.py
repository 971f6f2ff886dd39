#!/usr/bin/env python
"""Decode and prefill on a CPU by scheme: weights alone, activations too, and llama.cpp's Q8_0 and Q4_0 (int8 activations in groups of 32).

    python benchmarks/activation_schemes.py --peers ~/peers/runtime [--shape 1.1b] [--rounds 3] [--output FILE]

Random weights rounded to nearest, head included: speed only. Every measurement is a process of its own, and the rounds go through all of
them in turn. Medians; ratios are medians of those within the rounds. `before` is what computed a scheme without C kernels that round
activations: the kernel is asked for by its name, and the model runs in transformers' modules.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import decode_engines
from decode_cpu import Bench, machine
from decode_engines import SHAPES, Engine
from where import commit

HERE = Path(__file__).resolve().parent
WEIGHTS = ("W8A16", "W4A16")
ACTIVATIONS = ("W8A8-INT8", "LLM.int8", "W4A8", "W4A4", "W4AFP8", "FP8_DYNAMIC", "MXFP8", "MXFP4")
TURNED = "W4A4, transformed inputs"
#: {scheme: its kernel before}; one stands for all that were dequantized at every call.
BEFORE = {"W8A8-INT8": "w8a8-cpu", "FP8_DYNAMIC": "reference"}
BESIDE = {
    "W8A8-INT8": ("W8A16", "llama.cpp Q8_0"), "LLM.int8": ("W8A8-INT8",), "W4A8": ("W4A16", "llama.cpp Q4_0"), TURNED: ("W4A4",),
}  # fmt: skip
SPEEDS = ("decode_tokens_per_second", "prefill_tokens_per_second")


def engines() -> dict[str, Engine]:
    """Rows, and what they read: registered with the other benchmarks' artifacts."""
    settings = {each: {"scheme": each} for each in (*WEIGHTS, *ACTIVATIONS)}
    settings[TURNED] = {"scheme": "W4A4", "input_transform": "hadamard"}
    for name, own in settings.items():
        decode_engines.ARTIFACTS[name] = [{"quantize": {"method": "rtn", "scales": "minmax", "ignore": [], **own}}]
    found = {each: Engine(each, "ours", each, {"kernels": "auto"}) for each in settings}
    found |= {f"{each} before": Engine(each, "ours", each, {"kernels": kernel}) for each, kernel in BEFORE.items()}
    for kind in ("Q8_0", "Q4_0"):
        found[f"llama.cpp {kind}"] = Engine(
            f"llama.cpp {kind}", "llama_cpp", f"llama_{kind}", {"kind": kind, "file": f"{kind.lower()}.gguf"}
        )
    return found


class Schemes(Bench):
    """Also of GGUF files of several kinds."""

    def prepare(self, engine: Engine) -> dict[str, Any]:
        if engine.script == "ours":
            return super().prepare(engine)
        path = self.input_of(engine)
        if (path / engine.options["file"]).exists():
            return {"bytes": (path / engine.options["file"]).stat().st_size}
        answer = self.call(engine.script, self.request(engine, 1, action="prepare"))
        return answer if "error" in answer else {"bytes": (path / engine.options["file"]).stat().st_size}


def summarize(runs: list[dict[str, Any]], threads: int) -> dict[str, Any]:
    """Medians, and ratios of what stands beside each other."""
    speeds: dict[str, dict[str, dict[int, float]]] = {value: {} for value in SPEEDS}
    for run in runs:
        for value in SPEEDS:
            if run["threads"] == threads and value in run:
                speeds[value].setdefault(run["engine"], {})[run["round"]] = run[value]
    found: dict[str, Any] = {
        value: {name: round(statistics.median(x.values()), 2) for name, x in speeds[value].items()} for value in SPEEDS
    }
    pairs = [(name, other) for name, others in BESIDE.items() for other in others] + [
        (name, f"{name} before") for name in BEFORE
    ]
    for value in SPEEDS:
        for name, other in pairs:
            one, two = speeds[value].get(name, {}), speeds[value].get(other, {})
            both = [one[number] / two[number] for number in one if number in two]
            if both:
                found.setdefault(f"{value}_ratios", {})[f"{name} / {other}"] = round(statistics.median(both), 2)
    return found


def parse() -> argparse.Namespace:
    """Command line; what `Bench` reads beside it is fixed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", help="the environment that benchmarks/peers/setup_runtime.sh made; without it llama.cpp is left out"
    )
    parser.add_argument("--ours-python", default=sys.executable, help="the interpreter that ours runs in")
    parser.add_argument("--shape", choices=list(SHAPES), default="1.1b")
    parser.add_argument("--threads", default="1,2", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows, separated by semicolons")
    parser.add_argument("--work", type=Path, help="keeps checkpoints and artifacts (default: a temporary directory)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "activation_schemes.json")
    arguments = parser.parse_args()
    fixed = {"prompt_tokens": 64, "prefill_tokens": 256, "new_tokens": 24, "repeat": 1, "timeout": 900.0}
    for name, value in fixed.items():
        setattr(arguments, name, value)
    return arguments


def main() -> None:
    """Prepare, measure in rounds, write."""
    arguments = parse()
    rows = {name: each for name, each in engines().items() if each.script == "ours" or arguments.peers}
    if arguments.only:
        rows = {name: rows[name] for name in arguments.only.split(";")}
    arguments.peers = arguments.peers or ""
    with tempfile.TemporaryDirectory() as scratch:
        work = ((arguments.work or Path(scratch)) / arguments.shape).resolve()
        work.mkdir(parents=True, exist_ok=True)
        bench = Schemes(arguments, work)
        bench.make_checkpoint()
        failed, runs = {}, []
        for name, engine in rows.items():
            made = bench.prepare(engine)
            print(f"prepared {name:24} {made}", flush=True)
            if "error" in made:
                failed[name] = made["error"]
        threads = [int(each) for each in arguments.threads.split(",")]
        for number in range(1, arguments.rounds + 1):
            for count in threads:
                for name, engine in rows.items():
                    if name in failed:
                        continue
                    load = round(os.getloadavg()[0], 1)
                    answer = bench.call(engine.script, bench.request(engine, count))
                    answer = {key: answer[key] for key in (*SPEEDS, "load_seconds", "error") if key in answer}
                    if "error" in answer:
                        failed[name] = answer["error"]
                    runs.append({"engine": name, "threads": count, "round": number, "load_before": load, **answer})
                    print(runs[-1], flush=True)
                    settings = {"prompt_tokens": 64, "prefill_tokens": 256, "new_tokens": 24, "rounds": number}
                    data = {
                        "machine": machine(), "commit": commit(), "shape": bench.shape, "settings": settings,
                        "summary": {str(each): summarize(runs, each) for each in threads}, "failed": failed, "runs": runs,
                    }  # fmt: skip
                    arguments.output.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(data["summary"], indent=1))


if __name__ == "__main__":
    main()
