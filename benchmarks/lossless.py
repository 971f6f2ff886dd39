#!/usr/bin/env python
"""DFloat11 beside dense bfloat16: bytes, time of products, and decoding under a limit of memory; JSON.

    python benchmarks/lossless.py --output benchmarks/results/lossless.json
    python benchmarks/lossless.py --models DIRECTORY --limits 300MB,400MB ... --output ...

- bits: a weight of the bundled checkpoint, and of normally distributed matrices, by width of the codes; the entropy of exponents.
- products: of one, 8 and 64 rows, by the C library. DFloat11 and the dense weight take turns within a round, over more copies than four
  last-level caches hold, so that other load on the machine is in both sides of a ratio.
- streaming, with `--models`: a random Llama, dense and as DF11, decodes under each limit, in processes of their own that take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from decode_cpu import last_level_cache
from where import commit, cpu_name

from runtime import formats
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.formats.dfloat11 import DFloat11
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import CompressedWeight, Scheme
from runtime.kernels.base import Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.expansion import DFloat11Cpu
from runtime.system import instruction_sets

HERE = Path(__file__).resolve().parent
BUNDLED = HERE.parent / "recipes" / "checkpoints" / "stdlib-4m"
SHAPES = ((11008, 4096), (5632, 2048), (2048, 5632), (2048, 2048))
MODEL = {"layers": 16, "hidden": 1024, "intermediate": 2816, "heads": 16, "kv-heads": 4, "vocabulary": 8192}


def stored(weight: torch.Tensor, form: DFloat11) -> dict[str, torch.Tensor]:
    """The tensors on disk."""
    parameters = form.fit(weight, torch.bfloat16)
    codes = form.round(weight, parameters)
    return formats.get("dfloat11").pack(CompressedWeight.of(codes, parameters, None, Scheme(form), torch.bfloat16))


def bits(weight: torch.Tensor) -> dict[str, float]:
    """Bits a weight, by width of the codes, and entropy of the exponents."""
    exponents = weight.view(torch.int16).int() >> 7 & 0xFF
    share = torch.bincount(exponents.flatten(), minlength=256).double() / weight.numel()
    share = share[share > 0]
    found = {"exponent_entropy": float(-(share * share.log2()).sum())}
    for width in (2, 3, 4):
        size = sum(tensor.nbytes for tensor in stored(weight, DFloat11(width)).values())
        found[f"bits_{width}"] = 8 * size / weight.numel()
    return found | {"chosen": DFloat11().for_weight(weight).code_bits}


def bits_of_all() -> dict[str, Any]:
    """Of the bundled checkpoint's layers, and of random matrices."""
    found: dict[str, Any] = {}
    checkpoint = Checkpoint(BUNDLED)
    for name in checkpoint.names():
        if name.endswith("_proj.weight") and ".0." in name:
            weight = checkpoint.get(name)
            found[name] = {"shape": list(weight.shape), **bits(weight)}
    for scale in (0.02, 0.025, 0.03):
        weight = (torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0)) * scale).bfloat16()
        found[f"normal, deviation {scale}"] = {"shape": [2048, 2048], **bits(weight)}
    return found


def multiply(linear: library.Linear, x: torch.Tensor, y: torch.Tensor, threads: int) -> float:
    """Seconds of a product; on one thread its processor time, so that other processes do not count."""
    native, address = library.load(), ctypes.byref(linear)
    assert native is not None
    memory = library.bytes_at(native.linear_memory(address, len(x)))
    clock = time.thread_time if threads == 1 else time.perf_counter
    kind, start = library.TYPES[x.dtype], clock()
    native.linear_run(address, x.data_ptr(), kind, len(x), y.data_ptr(), kind, memory, threads)
    return clock() - start


def products(shape: tuple[int, int], threads: int, rounds: int) -> list[dict[str, Any]]:
    """Time of products of one weight, coded and dense."""
    kernel, cpu = DFloat11Cpu(), torch.device("cpu")
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    form = DFloat11().for_weight(weight)
    one = stored(weight, form)
    size = {"df11": sum(tensor.nbytes for tensor in one.values()), "bf16": weight.nbytes}
    layer = Layer(ModuleEntry(Scheme(form), "dfloat11", one["weight_escapes"].numel()), shape, torch.float32, cpu)
    copies = -(-4 * last_level_cache() // size["df11"]) + 1
    coded = [{name: tensor.clone() for name, tensor in one.items()} for _ in range(copies)]
    dense = [weight.clone() for _ in range(copies)]
    found = []
    for rows in (1, 8, 64):
        x = torch.randn(rows, shape[1])
        ours, theirs = torch.empty(rows, shape[0]), torch.empty(rows, shape[0])
        times: dict[str, list[float]] = {"df11": [], "bf16": []}
        for turn in range(rounds if rows == 1 else max(3, rounds // rows)):
            at = turn % copies
            plain = library.Linear(kind=0, weight_type=library.TYPES[torch.bfloat16], weight=dense[at].data_ptr())
            plain.rows, plain.columns = shape
            times["df11"].append(multiply(kernel.linear(coded[at], layer, None), x, ours, threads))
            times["bf16"].append(multiply(plain, x, theirs, threads))
        assert torch.equal(ours, theirs)
        ratios = [a / b for a, b in zip(times["df11"], times["bf16"], strict=True)]
        found.append({
            "shape": list(shape), "rows": rows, "threads": threads, "bytes": size,
            "milliseconds": {name: 1e3 * statistics.median(each) for name, each in times.items()},
            "ratio": statistics.median(ratios), "quartiles": statistics.quantiles(ratios, n=4),
        })  # fmt: skip
        print(found[-1], file=sys.stderr, flush=True)
    return found


# ---------------------------------------------------------------- under a limit of memory
def make(directory: Path) -> None:
    """The checkpoint and its artifact."""
    sizes = [text for name, value in MODEL.items() for text in (f"--{name}", str(value))]
    subprocess.run([sys.executable, str(HERE / "make_random_llama.py"), str(directory / "bf16"), *sizes], check=True)
    quantize = {"method": "rtn", "scheme": "DF11", "targets": ["Linear"], "ignore": []}
    recipe = directory / "recipe.json"
    recipe.write_text(json.dumps({"name": "x", "model": str(directory / "bf16"), "stages": [{"quantize": quantize}]}))
    command = [
        sys.executable,
        "-m",
        "compress.cli",
        "apply",
        str(recipe),
        "--output",
        str(directory / "df11"),
        "--quiet",
    ]
    subprocess.run(command, check=True)


def decode(path: str, limit: str, threads: int, tokens: int) -> dict[str, Any]:
    """Tokens a second, and how many blocks were streamed."""
    import runtime

    model = runtime.load(path, threads=threads, max_memory=limit, verify=False)
    ring = getattr(model.engine, "ring", None)
    model.generate([5, 6, 7, 8], max_new_tokens=3, ignore_eos=True)
    speeds = []
    for _ in range(3):
        model.generate([5, 6, 7, 8], max_new_tokens=tokens + 1, ignore_eos=True)
        speeds.append(tokens / model.stats["decode_seconds"])
    found = {"tokens_per_second": statistics.median(speeds), "engine": type(model.engine).__name__}
    return found | {"streamed_blocks": 0 if ring is None else len(ring.order), "blocks": MODEL["layers"]}


def streaming(directory: Path, limits: list[str], threads: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Both models under each limit, in turns."""
    found = []
    for limit in limits:
        cells: dict[str, list[dict[str, Any]]] = {"bf16": [], "df11": []}
        for _ in range(rounds):
            for name, each in cells.items():
                command = [sys.executable, __file__, "--decode", str(directory / name), "--limits", limit]
                command += ["--threads", str(threads), "--tokens", str(tokens)]
                done = subprocess.run(command, capture_output=True, text=True)
                last = done.stderr.strip().splitlines()[-1:] if done.returncode else []
                each.append({"error": last[0][-300:]} if last else json.loads(done.stdout.strip().splitlines()[-1]))
        speeds = {n: [c["tokens_per_second"] for c in each if "error" not in c] for n, each in cells.items()}
        found.append({
            "max_memory": limit, **{name: each[0] for name, each in cells.items()},
            "tokens_per_second": {name: statistics.median(each) if each else None for name, each in speeds.items()},
        })  # fmt: skip
        print(found[-1], file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="directory of the models for streaming; made where there are none")
    parser.add_argument("--limits", default="", help="such as 300MB,400MB")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60, help="of products of one row")
    parser.add_argument("--turns", type=int, default=3, help="of processes under a limit")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--decode", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.decode:
        print(json.dumps(decode(arguments.decode, arguments.limits, arguments.threads, arguments.tokens)))
        return
    torch.set_num_threads(arguments.threads)
    kept = json.loads(arguments.output.read_text()) if arguments.output and arguments.output.is_file() else {}
    result: dict[str, Any] = kept | {
        "machine": {
            "cpu": cpu_name(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}",
            "load_before": os.getloadavg()[0],
        },
        "instruction_set": instruction_sets.chosen(), "commit": commit(), "threads": arguments.threads,
        "rounds": arguments.rounds, "turns": arguments.turns,
    }  # fmt: skip
    if arguments.models:
        if not (arguments.models / "df11").is_dir():
            arguments.models.mkdir(parents=True, exist_ok=True)
            make(arguments.models)
        limits = arguments.limits.split(",")
        result["model"] = MODEL
        result["streaming"] = streaming(arguments.models, limits, arguments.threads, arguments.tokens, arguments.turns)
    else:
        result["bits"] = bits_of_all()
        result["products"] = [each for shape in SHAPES for each in products(shape, arguments.threads, arguments.rounds)]
    text = json.dumps(result, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
