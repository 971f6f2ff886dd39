#!/usr/bin/env python
"""Decoding beside another process that keeps one core busy: tokens/s of idle and of busy rounds, in turn, in one process.

    python benchmarks/busy_neighbour.py --work DIRECTORY [--rounds 7] [--threads 2] [--output benchmarks/results/busy_neighbour.json]
    python benchmarks/busy_neighbour.py --work DIRECTORY --peers ~/peers/runtime     beside llama.cpp (peers/setup_runtime.sh)

The model is a random Llama with the layers of the 1.1B shape and fewer of them, W4 of groups of 128. The neighbour is a process that
spins on core 0 and takes no memory bandwidth. Prints one JSON object: medians over the rounds, and the median of the ratios of
neighbouring rounds. `exact` and `fast` are ours; `one thread` is ours with one, idle, which is what a scheduler could always give.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from where import commit, cpu_name

HERE = Path(__file__).resolve().parent
SHAPE = {"hidden": 2048, "intermediate": 5632, "heads": 32, "kv_heads": 4, "vocabulary": 4096}
SPIN = "import os; os.sched_setaffinity(0, {0}); print(flush=True)\nwhile True: pass"
STEPS, SETTLE = 64, 1.5  # seconds of decoding before a round: for a while all threads are not used that can be
Steps = Callable[[int], float]  # seconds of so many decode steps


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that spins on core 0, until this is left."""
    process = subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


def rounds(steps: Steps, count: int) -> dict[str, Any]:
    """Tokens/s of `count` idle rounds and as many busy ones, in turn."""

    def speed() -> float:
        end = time.monotonic() + SETTLE
        while time.monotonic() < end:
            steps(STEPS)
        return STEPS / steps(STEPS)

    idle, busy = [], []
    for _ in range(count):
        idle.append(speed())
        with neighbour():
            busy.append(speed())
    ratios = [b / i for b, i in zip(busy, idle, strict=True)]
    return {
        "idle": statistics.median(idle),
        "busy": statistics.median(busy),
        "busy_over_idle": statistics.median(ratios),
        "rounds": {"idle": idle, "busy": busy},
    }


def ours(request: dict[str, Any]) -> Steps:
    """Through the interface that users have."""
    import runtime

    model = runtime.load(request["artifact"], threads=request["threads"], kernels=request["kernels"])
    prompt = list(range(2, 18))

    def steps(count: int) -> float:
        model.generate(prompt, max_new_tokens=count + 1, ignore_eos=True)
        return float(model.stats["decode_seconds"])

    return steps


def llama(request: dict[str, Any]) -> Steps:
    """llama.cpp by its own loop (benchmarks/peers/decode_llama_cpp.py)."""
    sys.path.insert(0, str(HERE / "peers"))
    import decode_llama_cpp as peer

    made = {"model": request["checkpoint"], "path": request["gguf"], "threads": request["threads"], "context": 256}
    if not (Path(request["gguf"]) / peer.FILE).exists():
        peer.prepare(made)
    engine = peer.load(made)

    def steps(count: int) -> float:
        engine.prefill(list(range(2, 18)))
        start = time.perf_counter()
        for token in range(count):
            engine.step(2 + token)
        return time.perf_counter() - start

    return steps


def child(python: str, request: dict[str, Any]) -> dict[str, Any]:
    """An engine in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(request["threads"]), "PYTHONPATH": str(HERE.parent)}
    if request["engine"] == "llama.cpp":
        environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    command = [python, str(HERE / "busy_neighbour.py"), "--child", json.dumps(request)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare(work: Path, layers: int) -> dict[str, str]:
    """The checkpoint and our artifact of it, made once."""
    from make_random_llama import write

    import compress

    checkpoint, artifact = work / f"checkpoint-{layers}", work / f"w4-{layers}"
    if not (checkpoint / "config.json").exists():
        write(checkpoint, layers, **SHAPE)
    if not (artifact / "compress.json").exists():
        recipe = work / "recipe.json"
        stages = [{"quantize": {"method": "rtn", "bits": 4, "group_size": 128, "ignore": []}}]
        recipe.write_text(json.dumps({"name": "busy", "model": str(checkpoint), "stages": stages}))
        compress.apply(str(recipe), output=str(artifact), quiet=True)
    return {"checkpoint": str(checkpoint), "artifact": str(artifact), "gguf": str(work / f"gguf-{layers}")}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where the model is made and kept")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=["exact", "fast", "one thread"], help="of exact, fast, one thread")
    parser.add_argument("--peers", help="environment of benchmarks/peers/setup_runtime.sh")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        request = json.loads(options.child)
        steps = (llama if request["engine"] == "llama.cpp" else ours)(request)
        print(json.dumps(rounds(steps, request["rounds"])))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    paths = prepare(options.work, options.layers)
    common = {**paths, "rounds": options.rounds, "threads": options.threads}
    found: dict[str, Any] = {
        "cpu": cpu_name(), "cores": os.cpu_count(), "commit": commit(), "shape": {"layers": options.layers, **SHAPE},
        "threads": options.threads, "load_before": os.getloadavg()[0], "engines": {},
    }  # fmt: skip
    for name in options.only:
        request = {**common, "engine": name, "kernels": "fast" if name == "fast" else "auto"}
        found["engines"][name] = child(sys.executable, request | ({"threads": 1} if name == "one thread" else {}))
    if options.peers:
        python = str(Path(options.peers) / "bin" / "python")
        found["engines"]["llama.cpp"] = child(python, {**common, "engine": "llama.cpp"})
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
