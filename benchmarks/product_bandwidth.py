#!/usr/bin/env python
"""Matrix-vector products of the C kernels against plain reading of the very same buffers, in turn, in one process.

    python benchmarks/product_bandwidth.py --output benchmarks/results/product_bandwidth.json

`decode_cpu.py` compares products with the best reading of a large buffer in another process, calls from Python included; what
pages a process got and what neighbours did meanwhile is in its numbers. Here each round reads the buffers and multiplies with
them, so a ratio has neither. Random weights in the layout of linear.h, more of them than four last-level caches.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode_cpu import last_level_cache
from where import commit, cpu_name

from runtime.kernels.cpu import library
from runtime.kernels.cpu.library import openmp
from runtime.system import native

SHAPES = ((11008, 4096), (2048, 5632), (8192, 2048))
GROUP = 128
WEIGHT_BYTES = {"w4": 0.5, "w8": 1.0}  # a weight
READER = r"""
#include <stdint.h>
#include "POOL"
typedef struct { const uint64_t *from; int64_t words; uint64_t sums[64]; } Reading;
static void part(void *p, const Team *team) {
    Reading *r = p;
    int64_t start, end;
    uint64_t sums[32] = {0}, total = 0;
    team_part(team, r->words, 32, &start, &end);
    for (int64_t i = start; i + 32 <= end; i += 32) {
        for (int line = 0; line < 4; line++) __builtin_prefetch(r->from + i + 1024 + 8 * line); /* 8 KiB ahead */
        for (int j = 0; j < 32; j++) sums[j] += r->from[i + j];
    }
    for (int j = 0; j < 32; j++) total += sums[j];
    r->sums[team->index % 64] = total;
}
uint64_t read_all(const void *from, int64_t bytes, int threads) {
    Reading r = {from, bytes / 8, {0}};
    uint64_t total = 0;
    parallel(part, &r, threads);
    for (int i = 0; i < 64; i++) total += r.sums[i];
    return total;
}
"""


def reader() -> Any:
    """The C function that reads, on the threads that the kernels run on."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "read.c"
        source.write_text(READER.replace("POOL", str(library.SOURCE.parent / "pool.h")))
        found = native.library(source)
    pool = openmp()
    if found is None or pool is None:
        raise SystemExit("a C compiler and torch's OpenMP library are needed")
    found.set_pool(*pool)
    found.read_all.restype = ctypes.c_uint64
    found.read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    return found.read_all


def measure(kind: str, shape: tuple[int, int], threads: int, rounds: int, read: Any) -> dict[str, Any]:
    """GB/s of reading and of products with one and two digits, and the ratios within the rounds."""
    kernels = library.load()
    assert kernels is not None
    rows, columns = shape
    size = int(rows * columns * WEIGHT_BYTES[kind])
    copies = -(-4 * last_level_cache() // size) + 1
    weights = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(copies)]
    scales = torch.rand(rows * columns // GROUP).bfloat16()
    x, y = torch.randn(columns).bfloat16(), torch.empty(rows).bfloat16()
    layers = []
    for weight in weights:
        layer = library.Linear()
        layer.kind, layer.scale_type = library.KINDS[kind], library.TYPES[torch.bfloat16]
        layer.group, layer.share, layer.rows, layer.columns, layer.groups = GROUP, 1, rows, columns, columns // GROUP
        layer.weight, layer.scale = weight.data_ptr(), scales.data_ptr()
        layers.append(layer)
    memory = torch.empty(kernels.linear_memory(ctypes.byref(layers[0]), 1, 2), dtype=torch.uint8)

    def product(digits: int) -> Callable[[int], None]:
        given = x.data_ptr(), 1, 1, y.data_ptr(), 1, digits, memory.data_ptr(), threads
        return lambda i: kernels.linear_run(ctypes.byref(layers[i]), *given)

    calls: dict[str, Callable[[int], Any]] = {
        "read": lambda i: read(weights[i].data_ptr(), size, threads), "fast": product(1), "exact": product(2),
    }  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            for i in range(copies):
                call(i)
            if turn:  # the first is for the pages
                found[name].append(copies * size / (time.perf_counter() - start) / 1e9)
    ratio = {
        name: statistics.median(a / b for a, b in zip(found[name], found["read"], strict=True))
        for name in ("fast", "exact")
    }
    return {
        "kind": kind, "shape": shape, "threads": threads, "of_reading": {k: round(v, 3) for k, v in ratio.items()},
        "gb_per_second": {name: round(statistics.median(values), 2) for name, values in found.items()},
        "best_gb_per_second": {name: round(max(values), 2) for name, values in found.items()},
    }  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", default="1,2", help="separated by commas")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    read, results = reader(), []
    for kind in WEIGHT_BYTES:
        for shape in SHAPES:
            for threads in (int(t) for t in arguments.threads.split(",")):
                result = measure(kind, shape, threads, arguments.rounds, read)
                results.append(result)
                speeds = "  ".join(f"{name} {value:.1f}" for name, value in result["gb_per_second"].items())
                shares = "  ".join(f"{name} {value:.0%}" for name, value in result["of_reading"].items())
                print(
                    f"{kind} {shape[0]}x{shape[1]}, {threads} threads: GB/s {speeds}; of reading {shares}", flush=True
                )
    kernels = library.load()
    assert kernels is not None
    data = {
        "cpu": cpu_name(), "cores": os.cpu_count(), "instruction_set": kernels.isa_name().decode(), "commit": commit(),
        "rounds": arguments.rounds, "load_average": os.getloadavg()[0], "results": results,
    }  # fmt: skip
    if arguments.output:
        arguments.output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
