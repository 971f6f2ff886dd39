#!/usr/bin/env python
"""Decode, prefill, memory and load time on CPU: ours beside llama.cpp, ONNX Runtime, OpenVINO, torch int4 and transformers.

    benchmarks/peers/setup_runtime.sh ~/peers/runtime                         the peers, in an environment of their own
    python benchmarks/decode_cpu.py --peers ~/peers/runtime --shape 1.1b      three rounds at 1 and 2 threads, and the products
    python benchmarks/decode_cpu.py --peers ~/peers/runtime --shape tiny --check      a smoke test; logits are compared
    python benchmarks/decode_cpu.py --render benchmarks/results/decode_cpu_1_1b.json  table and picture again

Random weights: speed only. Every measurement is a process of its own; the rounds go through the engines in turn (A B C A B C),
so that what the machine does besides meets them all. Medians over the rounds; a ratio is the median of the ratios within each
round. What cannot run is in the JSON and the table with its reason. Times of a busy machine say little: `load_before` is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode_engines import ARTIFACTS, COLUMNS, ENGINES, GROUP, HOMES, OURS, PRODUCTS, ROWS, SHAPES, Engine
from decode_report import finish, refresh
from where import commit, cpu_facts, cpu_name, memory_gb

HERE = Path(__file__).resolve().parent
CHECK_COSINE = 0.99


class Bench:
    """One invocation: where things are, and how a process is run.

    Attributes:
        under: a command that every process is started by (`taskset -c 0,1`); empty: none.
    """

    under: Sequence[str] = ()

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.arguments, self.work = arguments, work
        self.shape = SHAPES[arguments.shape]
        self.checkpoint = work / "checkpoint"
        draw = random.Random(0)
        self.prompt = [draw.randrange(self.shape["vocabulary"]) for _ in range(arguments.prompt_tokens)]
        self.long = [draw.randrange(self.shape["vocabulary"]) for _ in range(arguments.prefill_tokens)]

    def python(self, script: str) -> str:
        peers = Path(self.arguments.peers) / HOMES.get(script, "")
        return self.arguments.ours_python if script == "ours" else str(peers / "bin" / "python")

    def environment(self, threads: int) -> dict[str, str]:
        ours = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}
        ours |= {"TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"), "PYTHONPATH": str(HERE.parent)}
        ours["COMPRESS_CACHE"] = str(
            self.work / "cache"
        )  # prepared weights and tuning of this benchmark, not the user's
        return {**os.environ, **ours}

    def call(self, script: str, request: dict[str, Any]) -> dict[str, Any]:
        """One process; its last line is the answer, a failure an answer with `error`."""
        command = [*self.under, self.python(script), str(HERE / "peers" / f"decode_{script}.py"), json.dumps(request)]
        log = self.work / "stderr.log"
        begin = time.perf_counter()
        with log.open("wb") as errors:
            try:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, text=True,
                    env=self.environment(request.get("threads", os.cpu_count() or 1)), timeout=self.arguments.timeout,
                    cwd=self.work,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as failure:
                return {"error": f"{type(failure).__name__}: {str(failure)[-200:]}"}
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        try:
            answer: dict[str, Any] = json.loads(lines[-1])
        except (IndexError, ValueError):
            said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            return {"error": f"exit {done.returncode}: {' | '.join(said[-2:])[-400:]}"}
        return {**answer, "process_seconds": round(time.perf_counter() - begin, 2)}

    # ---------------------------------------------------------------- preparation
    def make_checkpoint(self) -> None:
        if (self.checkpoint / "config.json").exists():
            return
        numbers = [str(part) for key, value in self.shape.items() for part in (f"--{key}", value)]
        script = str(HERE / "make_random_llama.py")
        subprocess.run([self.arguments.ours_python, script, str(self.checkpoint), *numbers], check=True)

    def input_of(self, engine: Engine) -> Path:
        if engine.reads == "checkpoint":
            return self.checkpoint
        return self.work / (engine.script if engine.reads == "own" else engine.reads.replace(":", "_"))

    def prepare(self, engine: Engine) -> dict[str, Any]:
        """Make what the engine reads, once for the work directory; returns its bytes, or an error."""
        path = self.input_of(engine)
        done = self.work / f"{path.name}.prepared.json"
        if done.exists():
            found: dict[str, Any] = json.loads(done.read_text())
            return found
        if engine.reads == "checkpoint":
            answer: dict[str, Any] = {}
        elif engine.reads not in ARTIFACTS:
            script = engine.script if engine.reads == "own" else engine.reads
            answer = self.call(script, self.request(engine, 1, action="prepare"))
        else:
            answer = self.apply(engine.reads, path)
        if "error" not in answer:
            answer |= {"bytes": sum(file.stat().st_size for file in path.iterdir() if file.is_file())}
            done.write_text(json.dumps(answer))
        return answer

    def apply(self, name: str, path: Path) -> dict[str, Any]:
        """Our artifact, by the command that users have."""
        recipe = self.work / "recipe.yaml"
        recipe.write_text(json.dumps({"name": "decode", "model": str(self.checkpoint), "stages": ARTIFACTS[name]}))
        command = [self.arguments.ours_python, "-m", "compress.cli", "apply", str(recipe), "--output", str(path)]
        done = subprocess.run(
            [*command, "--overwrite", "--quiet"],
            capture_output=True,
            text=True,
            env=self.environment(os.cpu_count() or 1),
        )
        return {"error": done.stderr.strip()[-400:]} if done.returncode else {}

    def request(self, engine: Engine, threads: int, **more: Any) -> dict[str, Any]:
        a = self.arguments
        room = max(a.prefill_tokens, a.prompt_tokens + a.new_tokens + 8)
        return {
            "action": "measure", "model": str(self.checkpoint), "path": str(self.input_of(engine)), "threads": threads,
            "context": -(-room // 256) * 256, "prompt": self.prompt, "long_prompt": self.long,
            "new_tokens": a.new_tokens, "repeat": a.repeat, **engine.options, **more,
        }  # fmt: skip

    def product(self, name: str, threads: int) -> dict[str, Any]:
        """Request of one matrix-vector measurement: as many copies as make four times the cache."""
        copies = -(-4 * last_level_cache() // (ROWS * COLUMNS // 2)) + 1
        options = ENGINES[name].options if name in ENGINES else {}
        path = str(self.work / "products" / name.replace(":", "_"))
        return {
            "action": "matvec", "rows": ROWS, "columns": COLUMNS, "group": GROUP, "copies": copies, "path": path,
            "threads": threads, "seconds": self.arguments.product_seconds, **options,
        }  # fmt: skip

    # ---------------------------------------------------------------- the comparison of logits
    def check(self, names: list[str]) -> dict[str, Any]:
        """{engine: smallest cosine of its logits with those of the dense model that has its weights, or the error}."""
        found: dict[str, Any] = {}
        truth: dict[str, dict[str, Any]] = {}
        for name in names:
            engine = ENGINES[name]
            key = engine.reads if name in OURS else engine.grid
            if key not in truth:
                truth[key] = self.truth(engine, key)
            answer = {"error": f"reference: {truth[key]['error']}"} if "error" in truth[key] else {}
            answer = answer or self.call(engine.script, self.request(engine, 1, logits=self.logits(name)))
            if "error" not in answer:
                answer = self.call("check", {"action": "compare", "files": [self.logits(name), truth[key]["logits"]]})
            found[name] = {k: v for k, v in answer.items() if k in ("error", "cosine")}
            print(f"check {name:24} {found[name]}", flush=True)
        return found

    def truth(self, engine: Engine, key: str) -> dict[str, Any]:
        """Logits to compare with: our own reference kernel for our artifacts, float32 transformers for the peers."""
        options: dict[str, Any] = {"logits": self.logits(f"truth-{key}")}
        if engine.script == "ours":
            return self.call("ours", self.request(engine, 1, **{**options, "kernels": "reference"}))
        dense = self.checkpoint if key == "dense" else self.work / f"dense_{key}"
        if key != "dense":
            made = self.call(
                "check", {"action": "prepare", "model": str(self.checkpoint), "path": str(dense), "grid": key}
            )
            if "error" in made:
                return made
        options |= {"model": str(dense), "dtype": "float32", "compile": False}
        return self.call("transformers", self.request(ENGINES["transformers"], 1, **options))

    def logits(self, name: str) -> str:
        return str(self.work / f"logits-{name.replace(':', '_')}.npy")


def last_level_cache() -> int:
    """Bytes of the largest cache; 32 MB where the system does not say."""
    sizes = [32 << 20]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes)


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    info = cpu_facts()
    flags = set(info.get("flags", info.get("Features", "")).split())
    telling = ("avx", "amx", "fma", "f16c", "asimd", "sve", "i8mm", "bf16")
    return {
        "cpu": cpu_name(), "family": info.get("cpu family"), "model": info.get("model"),
        "flags": sorted(flag for flag in flags if flag.startswith(telling)), "cores": os.cpu_count(),
        "last_level_cache": last_level_cache(), "memory_gb": memory_gb(),
        "system": f"{platform.system()} {platform.machine()}", "python": platform.python_version(),
    }  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="the environment that benchmarks/peers/setup_runtime.sh made")
    parser.add_argument("--ours-python", default=sys.executable, help="the interpreter that ours runs in")
    parser.add_argument("--shape", choices=list(SHAPES), default="1.1b")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"separated by commas, of {', '.join(ENGINES)}")
    parser.add_argument("--threads", default="1,2", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=1, help="prefills and decodes within one process")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--product-seconds", type=float, default=2.0, help="how long a product is timed")
    parser.add_argument("--skip", choices=("models", "products"), action="append", default=[])
    parser.add_argument("--check", action="store_true", help="compare logits first (meant for small shapes)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one process")
    parser.add_argument(
        "--work", type=Path, help="keeps checkpoints and converted models (default: a temporary directory)"
    )
    parser.add_argument(
        "--output", type=Path, help="default benchmarks/results/decode_cpu_SHAPE.json; the picture lies beside it"
    )
    parser.add_argument(
        "--more", action="store_true", help="add rounds to what the output holds, of the same machine and settings"
    )
    parser.add_argument("--render", type=Path, help="only print the table of this JSON and draw its picture")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.engines.split(",")) - set(ENGINES)
    if unknown:
        parser.error(f"unknown engines {', '.join(sorted(unknown))}; known: {', '.join(ENGINES)}")
    if arguments.peers is None and arguments.render is None:
        parser.error("--peers is needed")
    return arguments


def main() -> None:
    """Prepare, go through the rounds, print and draw."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments = parse()
    if arguments.render:
        data = json.loads(arguments.render.read_text())
        refresh(data)
        finish(data, arguments.render)
        return
    output = arguments.output or HERE / "results" / f"decode_cpu_{arguments.shape.replace('.', '_')}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    base = arguments.work or Path(tempfile.mkdtemp(prefix="decode_cpu_"))
    work = (base / arguments.shape).resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        run(Bench(arguments, work), arguments, output)
    finally:
        if arguments.work is None:
            shutil.rmtree(base)


def run(bench: Bench, arguments: argparse.Namespace, output: Path) -> None:
    names = [name for name in ENGINES if name in arguments.engines.split(",")]
    threads = [int(t) for t in arguments.threads.split(",")]
    settings = ("repeat", "prompt_tokens", "new_tokens", "prefill_tokens", "product_seconds")
    data: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(),
        "shape_name": f"Llama {arguments.shape}",
        "shape": bench.shape,
        "settings": {name: getattr(arguments, name) for name in settings} | {"threads": threads},
        "versions": {},
        "inputs": {},
        "runs": [],
        "products": [],
    }
    done = 0
    if arguments.more:
        if not output.exists():
            sys.exit(f"--more: there is no {output} to add rounds to")
        data = continued(json.loads(output.read_text()), data)
        done = max((run["round"] for run in data["runs"] + data["products"]), default=0)
    failed: dict[tuple[str, str], str] = {}
    own = commit()

    def record(kind: str, name: str, count: int, number: int, call: Any) -> None:
        load = os.getloadavg()[0]
        answer = {"error": failed[kind, name]} if (kind, name) in failed else call()
        if "error" in answer:  # a failure is not tried again in every round
            failed[kind, name] = answer["error"]
        mine = answer.pop("versions", {})
        if mine and data["versions"].setdefault("ours" if name in OURS else name, mine) != mine:
            sys.exit(f"{name} has other versions than in the rounds before: {mine}")
        data[kind].append(
            {"engine": name, "threads": count, "round": number, "load_before": round(load, 1), "commit": own, **answer}
        )
        refresh(data)
        output.write_text(json.dumps(data, indent=1) + "\n")
        print(f"round {number}, {count} threads: {name:22} {line(answer)}", flush=True)

    if "models" not in arguments.skip:
        bench.make_checkpoint()
        for name in names:
            made = data["inputs"][name] = {
                k: v for k, v in bench.prepare(ENGINES[name]).items() if k in ("bytes", "error")
            }
            print(f"prepared {name:22} {made}", flush=True)
            if "error" in made:
                failed["runs", name] = f"not prepared: {made['error']}"
        if arguments.check:
            data["check"] = bench.check([name for name in names if ("runs", name) not in failed])
    for number in range(done + 1, done + arguments.rounds + 1):
        for count in threads:
            if "products" not in arguments.skip:
                for name in (n for n in PRODUCTS if n == "bandwidth" or n in names):
                    script = name if name == "bandwidth" else ENGINES[name].script
                    request = bench.product(name, count)
                    record("products", name, count, number, lambda s=script, r=request: bench.call(s, r))
            if "models" not in arguments.skip:
                for name in names:
                    request = bench.request(ENGINES[name], count)
                    script = ENGINES[name].script
                    record("runs", name, count, number, lambda s=script, r=request: bench.call(s, r))
    finish(data, output)
    wrong = {n: c for n, c in data.get("check", {}).items() if c.get("cosine", 1.0) < CHECK_COSINE}
    if wrong:
        sys.exit(f"logits are not those of the model: {wrong}")


def continued(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The earlier data, if rounds of now may be added to it."""
    differs = [key for key in ("machine", "shape") if before[key] != now[key]]
    differs += [key for key, value in now["settings"].items() if before["settings"].get(key) != value]
    if differs:
        sys.exit(f"--more: the rounds there are of another {', '.join(differs)}")
    commits = dict.fromkeys([*before["commit"].split(", "), now["commit"]])
    return {**before, "commit": ", ".join(commits)}


def line(answer: dict[str, Any]) -> str:
    """One line for the terminal."""
    if "error" in answer:
        return f"FAILED {answer['error'][:160]}"
    if "gb_per_second" in answer:
        return f"{answer['seconds'] * 1e6:.0f} us  {answer['gb_per_second']:.1f} GB/s"
    return (
        f"decode {answer['decode_tokens_per_second']:.2f}  prefill {answer['prefill_tokens_per_second']:.1f} tokens/s  "
        f"load {answer['load_seconds']:.2f} s  peak {answer['peak_bytes'] / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
