#!/usr/bin/env python
"""Decode behind 0, 4k and 16k tokens and prompts of 512 and 8k on CPU: ours, with a plain and an int4 cache, beside its peers.

    benchmarks/peers/setup_runtime.sh ~/peers                              the peers, each in an environment of its own
    python benchmarks/decode_depths.py --peers ~/peers --work ~/work --prepare      checkpoints, artifacts, converted models
    python benchmarks/decode_depths.py --peers ~/peers --work ~/work --minutes 15   rounds until the time is over
    python benchmarks/decode_depths.py --render benchmarks/results/decode_depths.json       table and picture again

A model is SHAPE, SHAPE/LAYERS or SHAPE/LAYERS@DEEPEST: fewer layers of the same shape, with the vocabulary cut in proportion, have a
step that costs the same share in weights, cache and head; so deep caches are filled in seconds. Random weights: speed only. One
process measures one engine, model and number of threads; rounds go through all in turn (A B C A B C). A cell is the median over the
rounds, a ratio the median of the ratios within each round. Cells that a process has no time for are left out with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from decode_cpu import HERE, Bench, machine
from decode_depths_report import plot, table
from decode_engines import DEEP_ENGINES, OURS, SHAPES, Engine
from decode_report import finish
from where import commit

POSITIONS = 32768
DEFAULT_MODELS = "1.1b/2,3b/1,moe/2"


class Model:
    """What is measured: a shape, how many of its layers, and the deepest cell."""

    def __init__(self, text: str) -> None:
        body, _, deepest = text.partition("@")
        name, _, layers = body.partition("/")
        self.name, self.deepest = body, int(deepest) if deepest else POSITIONS
        self.shape: dict[str, int] = dict(SHAPES[name])
        if layers:
            share = int(layers) / self.shape["layers"]
            rounded = round(self.shape["vocabulary"] * share / 128) * 128
            self.shape |= {"layers": int(layers), "vocabulary": max(512, rounded)}

    def lengths(self, wanted: list[int]) -> list[int]:
        """Those not too deep; the shortest prompt always is."""
        return [each for each in wanted if each <= max(self.deepest, 512)]


class DepthBench(Bench):
    """The processes of one model."""

    def __init__(self, arguments: argparse.Namespace, model: Model) -> None:
        self.arguments, self.model, self.shape = arguments, model, model.shape
        self.work = (arguments.work / model.name.replace("/", "-")).resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.checkpoint = self.work / "checkpoint"
        self.under = shlex.split(arguments.under)

    def make_checkpoint(self) -> None:
        if (self.checkpoint / "tokenizer.json").exists():
            return
        numbers = [str(part) for key, value in self.shape.items() for part in (f"--{key}", value)]
        command = [self.arguments.ours_python, str(HERE / "make_random_llama.py"), str(self.checkpoint), *numbers]
        subprocess.run([*command, "--positions", str(POSITIONS)], check=True)
        write_tokenizer(self.checkpoint, self.shape["vocabulary"])

    def request(self, engine: Engine, threads: int, **more: Any) -> dict[str, Any]:
        a = self.arguments
        depths, prefills = self.model.lengths(a.depths), self.model.lengths(a.prefills)
        if "kv_cache" in engine.options:  # the cache matters little to a prompt
            prefills = [each for each in prefills if each in depths]
        room = max(*depths, *prefills, 512) + len(depths) * (a.new_tokens + 4)
        return {
            "action": "depths", "model": str(self.checkpoint), "path": str(self.input_of(engine)), "threads": threads,
            "context": -(-room // 256) * 256, "depths": depths, "prefills": prefills, "new_tokens": a.new_tokens,
            "seconds": a.process_seconds, **engine.options, **more,
        }  # fmt: skip


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """A word for every token ("t17"), for engines that only take text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, **{f"t{number}": number for number in range(2, vocabulary)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.ByteLevel()  # mistral.rs wants one that it knows
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="<s>")
    fast.save_pretrained(directory)


def parse() -> argparse.Namespace:
    """Command line."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="the environments that benchmarks/peers/setup_runtime.sh made")
    parser.add_argument("--ours-python", default=sys.executable, help="the interpreter that ours runs in")
    parser.add_argument("--models", default=DEFAULT_MODELS, help=f"separated by commas; shapes: {', '.join(SHAPES)}")
    parser.add_argument("--engines", default=",".join(DEEP_ENGINES), help="separated by commas")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--depths", type=numbers, default=[0, 4096, 16384])
    parser.add_argument("--prefills", type=numbers, default=[512, 8192])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9, help="no process is started after that")
    parser.add_argument("--process-seconds", type=float, default=75, help="about how long one process may take")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a process is ended")
    parser.add_argument("--under", default="", help='a command that every measurement is started by: "taskset -c 0,1"')
    parser.add_argument("--prepare", action="store_true", help="only make what the engines read")
    parser.add_argument("--work", type=Path, help="keeps checkpoints and converted models")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "decode_depths.json")
    parser.add_argument("--more", action="store_true", help="go on with the rounds that the output holds")
    parser.add_argument("--render", type=Path, help="only print the table of this JSON and draw its picture")
    arguments = parser.parse_args()
    if arguments.render is None and (arguments.peers is None or arguments.work is None):
        parser.error("--peers and --work are needed")
    unknown = set(arguments.engines.split(",")) - set(DEEP_ENGINES)
    if unknown:
        parser.error(f"unknown engines {', '.join(sorted(unknown))}; known: {', '.join(DEEP_ENGINES)}")
    return arguments


def prepare(benches: list[DepthBench], names: list[str]) -> dict[tuple[str, str], str]:
    """Make all inputs; {(model, engine): why there is none}."""
    failed = {}
    for bench in benches:
        bench.make_checkpoint()
        for name in names:
            made = bench.prepare(DEEP_ENGINES[name])
            if "error" in made:
                failed[bench.model.name, name] = f"not prepared: {made['error']}"
            print(f"prepared {bench.model.name:8} {name:20} {made.get('error', 'ok')}", flush=True)
    return failed


def main() -> None:
    """Prepare, go through the rounds, print and draw."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments = parse()
    if arguments.render:
        finish(json.loads(arguments.render.read_text()), arguments.render, table, plot)
        return
    begin = time.perf_counter()
    names = [name for name in DEEP_ENGINES if name in arguments.engines.split(",")]
    benches = [DepthBench(arguments, Model(text)) for text in arguments.models.split(",")]
    failed = prepare(benches, names)
    if arguments.prepare:
        return
    settings = ("depths", "prefills", "new_tokens", "process_seconds", "threads")
    data: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(),
        "settings": {name: getattr(arguments, name) for name in settings},
        "models": {bench.model.name: bench.shape for bench in benches},
        "versions": {},
        "runs": [],
    }
    if arguments.more and arguments.output.exists():
        data = continued(json.loads(arguments.output.read_text()), data)
    done = {(run["round"], run["model"], run["threads"], run["engine"]) for run in data["runs"]}
    for number in range(1, arguments.rounds + 1):
        for bench in benches:
            for threads in arguments.threads:
                for name in (n for n in names if (number, bench.model.name, threads, n) not in done):
                    if time.perf_counter() - begin > arguments.minutes * 60:
                        print("the time is over", flush=True)
                        finish(data, arguments.output, table, plot)
                        return
                    key = bench.model.name, name
                    answer = run(bench, DEEP_ENGINES[name], threads) if key not in failed else {"error": failed[key]}
                    if "error" in answer:  # not tried again in the next round
                        failed[key] = answer["error"]
                    record(data, answer | {"model": key[0], "engine": name, "threads": threads, "round": number})
                    arguments.output.write_text(json.dumps(data, indent=1) + "\n")
    finish(data, arguments.output, table, plot)


def run(bench: DepthBench, engine: Engine, threads: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    return {"load_before": round(load, 1), **bench.call(engine.script, bench.request(engine, threads))}


def record(data: dict[str, Any], answer: dict[str, Any]) -> None:
    """One process is done."""
    name = answer["engine"]
    mine = answer.pop("versions", {})
    if mine and data["versions"].setdefault("ours" if name in OURS else name, mine) != mine:
        sys.exit(f"{name} has other versions than in the runs before: {mine}")
    data["runs"].append({**answer, "commit": commit()} if name in OURS else answer)
    cells = ", ".join(f"{kind} {k} {v:.1f}" for kind in ("prefill", "decode") for k, v in answer.get(kind, {}).items())
    said = f"FAILED {answer['error'][:200]}" if "error" in answer else f"{cells} {answer['left_out'] or ''}"
    took = answer.get("process_seconds", 0)
    print(f"{answer['round']} {answer['model']:8} {answer['threads']} {name:18} {took:5.1f} s  {said}", flush=True)


def continued(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The earlier data, if rounds of now may be added to it."""
    if before["machine"] != now["machine"] or before["settings"]["new_tokens"] != now["settings"]["new_tokens"]:
        sys.exit("--more: the rounds there are of another machine or other settings")
    commits = dict.fromkeys([*before["commit"].split(", "), now["commit"]])
    return {**before, "models": before["models"] | now["models"], "commit": ", ".join(commits)}


if __name__ == "__main__":
    main()
