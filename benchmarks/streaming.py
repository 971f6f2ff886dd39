#!/usr/bin/env python
"""Load time and memory of an artifact, and the speed of streaming its blocks against what the disk gives; JSON.

    python benchmarks/streaming.py ARTIFACT --max-memory 600MB [--tokens 24] [--threads 1] [--output FILE]
    python benchmarks/streaming.py --make DIRECTORY       the 1.1B Llama shape, random weights, 4 bits rounded to nearest

Every part is a process of its own:

- load: seconds and resident memory of the first load (weights are laid out and kept), and of later ones, transformers imported before;
- streaming: tokens a second under the bound, in turns with the bandwidth of the same reading method (same file, same ranges, same
  buffers, no computing), so that other work on the machine meets both. `ratio` = tokens/s / (bandwidth / bytes read a token), the
  median over the rounds. `compute_tokens_per_second` is the model without streaming: where it is the lower bound, computing and not
  the disk decides, and `ratio_of_bound` compares with the slower of the two.

Files are read past the page cache of this machine (O_DIRECT; `direct` says whether the file system took it). Behind a virtual disk the
host may still hold them: the bandwidth is then the host's memory, for both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from where import cpu_name

HERE = Path(__file__).resolve().parent


def memory() -> dict[str, int]:
    """Resident bytes now and at the peak."""
    wanted = {"VmRSS": "resident", "VmHWM": "peak", "RssAnon": "private", "RssFile": "mapped"}
    lines = (
        line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(tuple(wanted))
    )
    return {wanted[name.rstrip(":")]: int(count) * 1024 for name, count, *_ in lines}


def warm() -> Any:
    """What a program that uses transformers has imported anyway."""
    from importlib import import_module

    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        getattr(import_module("transformers"), name)
    import_module("transformers.models.llama.modeling_llama")
    import_module("runtime.api.load")
    return import_module("runtime")


def measure_load(path: str, threads: int, verify: bool | None) -> dict[str, Any]:
    """One load, and one token."""
    runtime = warm()
    from runtime.checkpoint.artifact import Artifact
    from runtime.engines.streaming.prepared_file import PreparedFile

    parts: dict[str, float] = {}

    def timed(owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                parts[label] = parts.get(label, 0.0) + time.perf_counter() - start

        setattr(owner, name, call)

    import runtime.api.load as loading
    import runtime.engines.blueprint as blueprints
    import runtime.engines.streaming.load as cached

    timed(Artifact, "verify", "sha256_of_artifact")
    timed(PreparedFile, "verify", "sha256_of_prepared")
    timed(blueprints, "build_skeleton", "skeleton")
    timed(cached, "build", "repack_and_write")
    timed(cached, "choose", "choose_kernels")
    timed(cached, "give_all", "map")
    timed(loading, "load_tokenizer", "tokenizer")
    before, start = memory(), time.perf_counter()
    model = runtime.load(path, threads=threads, verify=verify)
    seconds, loaded = time.perf_counter() - start, memory()
    start = time.perf_counter()
    model.generate([5, 6, 7, 8], max_new_tokens=2, ignore_eos=True)
    first = time.perf_counter() - start
    used = memory()
    return {
        "seconds": seconds, "parts": parts, "first_tokens_seconds": first, "weight_bytes": model.stats["weight_bytes"],
        "before": before, "loaded": loaded, "after_first_tokens": used, "engine": type(model.engine).__name__,
    }  # fmt: skip


def measure_streaming(path: str, threads: int, bound: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second under the bound, and the bandwidth, in turns."""
    runtime = warm()
    from runtime.system.sizes import byte_count

    before = memory()
    model = runtime.load(path, threads=threads, max_memory=bound, verify=False)
    loaded = memory()
    engine = model.engine
    if not hasattr(engine, "ring"):
        return {"error": f"everything fits into {bound}"}
    slots, order = engine.ring.slots, engine.ring.order
    each = sum(slots._blocks[i].size for i in order)
    model.generate([5, 6, 7, 8], max_new_tokens=3, ignore_eos=True)
    found = []
    for _ in range(rounds):
        bandwidth = read_alone(slots, order)
        waited, read = engine.ring.waited, slots.reader.bytes
        model.generate([5, 6, 7, 8], max_new_tokens=tokens + 1, ignore_eos=True)
        seconds = model.stats["decode_seconds"]
        found.append({
            "bandwidth": bandwidth, "tokens_per_second": tokens / seconds, "ratio": tokens / seconds * each / bandwidth,
            "waited_seconds": engine.ring.waited - waited, "decode_seconds": seconds,
            "bytes_read": slots.reader.bytes - read,
        })  # fmt: skip
    peak = memory()
    engine.close()
    whole = runtime.load(path, threads=threads, verify=False)
    whole.generate([5, 6, 7, 8], max_new_tokens=3, ignore_eos=True)
    speeds = []
    for _ in range(rounds):
        whole.generate([5, 6, 7, 8], max_new_tokens=tokens + 1, ignore_eos=True)
        speeds.append(tokens / whole.stats["decode_seconds"])
    compute = statistics.median(speeds)
    ratio_of_bound = [r["tokens_per_second"] / min(r["bandwidth"] / each, compute) for r in found]
    return {
        "engine": type(engine).__name__, "max_memory": byte_count("max_memory", bound), "direct": slots.reader.direct,
        "blocks": len(slots._blocks), "streamed_blocks": len(order), "buffers": slots.count, "bytes_a_token": each,
        "rounds": found, "tokens_per_second": statistics.median(r["tokens_per_second"] for r in found),
        "bandwidth": statistics.median(r["bandwidth"] for r in found),
        "ratio": statistics.median(r["ratio"] for r in found), "compute_tokens_per_second": compute,
        "ratio_of_bound": statistics.median(ratio_of_bound), "before": before, "loaded": loaded, "peak": peak,
        "growth_of_peak": peak["peak"] - before["resident"],
    }  # fmt: skip


def read_alone(slots: Any, order: tuple[int, ...], passes: int = 3) -> float:
    """Bytes a second of reading the same blocks into buffers like theirs, with nothing else to do."""
    from runtime.engines.streaming.ring import RangeReader, aligned

    reader = RangeReader(slots.reader.path)
    memory = aligned(max(slots._blocks[i].size for i in order))
    for turn in range(passes + 1):
        if turn == 1:  # the first touches the memory
            reader.bytes, reader.seconds = 0, 0.0
        for i in order:
            reader.read(memory, slots._blocks[i].begin, slots._blocks[i].size)
    reader.close()
    return reader.bytes / reader.seconds


def make(directory: Path) -> None:
    """Checkpoint and artifact of the 1.1B shape."""
    checkpoint, recipe = directory / "checkpoint", directory / "recipe.json"
    subprocess.run([sys.executable, str(HERE / "make_random_llama.py"), str(checkpoint)], check=True)
    quantize = {"method": "rtn", "scheme": "W4A16", "group_size": 128, "ignore": []}
    recipe.write_text(json.dumps({"name": "streaming", "model": str(checkpoint), "stages": [{"quantize": quantize}]}))
    command = [
        sys.executable,
        "-m",
        "compress.cli",
        "apply",
        str(recipe),
        "--output",
        str(directory / "artifact"),
        "--quiet",
    ]
    subprocess.run(command, check=True)


def part(arguments: argparse.Namespace, *options: str) -> dict[str, Any]:
    """One process of this script; its last line."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        str(arguments.artifact),
        "--threads",
        str(arguments.threads),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(arguments.threads)}
    environment["PYTHONPATH"] = str(HERE.parent)
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"error": done.stderr.strip()[-400:]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument("--make", type=Path)
    parser.add_argument("--max-memory", default="600MB")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--part", choices=("load", "load-unverified", "streaming"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.make)
        return
    if arguments.artifact is None:
        parser.error("an artifact is needed")
    path, threads = str(arguments.artifact), arguments.threads
    if arguments.part == "streaming":
        print(json.dumps(measure_streaming(path, threads, arguments.max_memory, arguments.tokens, arguments.rounds)))
        return
    if arguments.part:
        print(json.dumps(measure_load(path, threads, None if arguments.part == "load" else False)))
        return
    result: dict[str, Any] = {
        "machine": {
            "cpu": cpu_name(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}",
            "load_before": os.getloadavg()[0],
        },
        "threads": threads,
        "loads": [part(arguments, "--part", kind) for kind in ("load", "load", "load", "load-unverified", "load-unverified")],
        "streaming": part(
            arguments, "--part", "streaming", "--max-memory", arguments.max_memory, "--tokens", str(arguments.tokens),
            "--rounds", str(arguments.rounds),
        ),
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
