#!/usr/bin/env python
"""Products of the C kernels: one row against plain reading of the very same buffers, in turn, in one process.

    python benchmarks/product_bandwidth.py --output benchmarks/results/product_bandwidth.json

`decode_cpu.py` compares products with the best reading of a large buffer in another process, calls from Python included; what
pages a process got and what neighbours did meanwhile is in its numbers. Here a buffer is read, then others multiplied with, a
millisecond apart, so a ratio has neither. Random weights and scales in the layout of linear.h, more of them than four last-level
caches; scales are bytes too, also those of the groups of zeros that "blocks" leave out. With `--output`, cells that the file has and
this run does not measure stay.

With `--rows 512` products of so many rows are timed instead, which are arithmetic, beside torch's with a dense weight of the same
shape in float32 and in bfloat16 (activations too).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from decode_cpu import last_level_cache
from where import commit, cpu_name

from runtime.formats import k_quant
from runtime.kernels.cpu import library
from runtime.kernels.cpu.library import openmp
from runtime.kernels.cpu.panels import PANEL
from runtime.kernels.cpu.zero_groups import runs_of, stored_groups
from runtime.system import instruction_sets, native

SHAPES = ((11008, 4096), (5632, 2048), (2048, 2048), (2048, 5632))
GROUP = 128
DENSE = {
    "bf16": (library.TYPES[torch.bfloat16], 2),
    "fp8": (library.FLOAT8, 1),
    "mxfp8": (library.MX8, 33 / 32),
    "f32": (library.TYPES[torch.float32], 4),
}
#: Block-sparse: so many of a hundred groups of 32 rows, spread at random, are zeros.
BLOCKS = {"w4 blocks 10": 10, "w4 blocks 50": 50}
#: Block floats of 4 bits: dtype of the scales, and columns that share one.
FLOATS = {"mxfp4": (torch.uint8, 32), "nvfp4": (torch.float8_e4m3fn, 16)}
#: Row codebooks, one scale a row: fraction of the weights that are stored singly.
CODEBOOKS = {**dict.fromkeys(("codebook2", "codebook3", "codebook4"), 0.0), "codebook4 0.45%": 0.0045}
#: k-quants of GGUF.
BLOCK_TYPES = {kind.lower(): kind for kind in k_quant.KINDS}
KINDS = ("w2", "w3", "w4", *FLOATS, *BLOCKS, "w5", "w6", "w8", *BLOCK_TYPES, "trellis", *CODEBOOKS, "s24", *DENSE)
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
        for (int line = 0; line < 4; line++) __builtin_prefetch(r->from + i + 1024 + 8 * line, 0, 2); /* 8 KiB ahead, as products do */
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


class Weight:
    """A random weight of a kind: its bytes, scales behind them, and what C is given."""

    def __init__(self, kind: str, rows: int, columns: int) -> None:
        self.linear = linear = library.Linear(rows=rows, columns=columns, factor=1.0)
        dtype, group = FLOATS.get(kind, (torch.float32 if kind in DENSE else torch.bfloat16, GROUP))
        facts = k_quant.KINDS.get(BLOCK_TYPES.get(kind, ""))
        share, sets = 1, columns // group
        if facts is not None:
            dtype, group = torch.float16, min(GROUP, facts.block)
            share, sets = facts.block // group, columns // facts.block * (1 + facts.minimum)
        if kind in CODEBOOKS:
            share, sets = columns // group, 1
            linear.singles = round(CODEBOOKS[kind] * columns)
        if kind in DENSE:
            linear.kind, (linear.weight_type, size) = library.KINDS["dense"], DENSE[kind]
            codes, scales, runs = int(rows * columns * size), 4 * rows, {}
        else:
            linear.kind = library.KINDS["e2m1" if kind in FLOATS else BLOCK_TYPES.get(kind, kind.split()[0])]
            linear.scale_type = library.SCALES[dtype]
            linear.group, linear.share, linear.groups = group, share, columns // group
            scales = dtype.itemsize * rows * sets
            runs = runs_of(torch.rand(rows // PANEL, linear.groups) >= BLOCKS.get(kind, 0) / 100)
            if kind in BLOCKS:
                linear.runs, linear.first_run = (runs[name].data_ptr() for name in ("runs", "first_run"))
            codes = stored_groups(linear) * PANEL * library.group_bytes(linear.kind, group)
        bits = int(kind[8]) if kind in CODEBOOKS else 0
        table, apart = rows << bits if bits else 0, 6 * rows * linear.singles
        self.bytes = codes + scales + table + apart
        sums = torch.zeros(rows * (columns // GROUP), dtype=torch.int16)
        self._keep = (torch.randint(0, 120, (self.bytes + 64,), dtype=torch.uint8), sums, runs)
        linear.weight, linear.sums = self._keep[0].data_ptr(), sums.data_ptr()
        if kind == "mxfp8":
            self._keep[0][:codes].view(-1, 33)[:, 0] = torch.randint(126, 129, (codes // 33,), dtype=torch.uint8)
        if "fp8" in kind or kind not in DENSE:
            linear.scale = linear.weight + codes
            linear.table = linear.scale + scales
            if linear.singles:
                places = torch.randint(0, columns, (rows * linear.singles,), dtype=torch.int32)
                self._keep[0][codes + scales + table :].view(torch.uint8)[: 4 * len(places)].copy_(
                    places.view(torch.uint8)
                )
                linear.single_columns, linear.single_values = (
                    linear.table + table,
                    linear.table + table + 4 * len(places),
                )
            if facts is not None and facts.minimum:
                linear.least = linear.scale + scales // 2
            # Around 1: most random bytes are so small that results are subnormal, over which some CPUs take a hundred times as long.
            around = torch.rand(scales // dtype.itemsize) + 0.5
            around = around + 126 if dtype == torch.uint8 else around  # exponents
            self._keep[0][codes : codes + scales].view(dtype).copy_(around)


def measure(kind: str, shape: tuple[int, int], threads: int, rounds: int, read: Any, isa: str) -> dict[str, Any]:
    """GB/s of reading and of products, with one and two digits if the weight is of integers, and the ratios within the rounds."""
    kernels = library.load(isa)
    assert kernels is not None
    rows, columns = shape
    first = Weight(kind, rows, columns)
    copies = -(-4 * last_level_cache() // first.bytes) + 1
    weights = [first, *(Weight(kind, rows, columns) for _ in range(copies - 1))]
    dtype = library.TYPES[torch.float32]
    x, y = torch.randn(columns), torch.empty(rows)
    first.linear.digits = 2  # the most
    memory = torch.empty(kernels.linear_memory(ctypes.byref(first.linear), 1), dtype=torch.uint8)
    digits = {"product": 1} if kind in DENSE else {"fast": 1, "exact": 2}
    found: dict[str, list[float]] = {name: [] for name in ("read", *digits)}
    for turn in range(rounds + 1):
        spent = dict.fromkeys(found, 0.0)
        for i in range(copies):
            for place, name in enumerate(found):
                weight = weights[(i + place * copies // 3) % copies]
                start = time.perf_counter()
                if name == "read":
                    read(weight.linear.weight, weight.bytes, threads)
                else:
                    weight.linear.digits = digits[name]
                    kernels.linear_run(
                        ctypes.byref(weight.linear),
                        x.data_ptr(),
                        dtype,
                        1,
                        y.data_ptr(),
                        dtype,
                        memory.data_ptr(),
                        threads,
                    )
                spent[name] += time.perf_counter() - start
        if turn:  # the first is for the pages
            for name, seconds in spent.items():
                found[name].append(copies * first.bytes / seconds / 1e9)
    ratio = {name: statistics.median(a / b for a, b in zip(found[name], found["read"], strict=True)) for name in digits}
    return {
        "kind": kind, "shape": shape, "threads": threads, "instruction_set": isa,
        "of_reading": {k: round(v, 3) for k, v in ratio.items()},
        "gb_per_second": {name: round(statistics.median(values), 2) for name, values in found.items()},
        "best_gb_per_second": {name: round(max(values), 2) for name, values in found.items()},
        "weights_per_ns": {name: round(rows * columns / first.bytes * statistics.median(found[name]), 1) for name in digits},
    }  # fmt: skip


def measure_rows(kind: str, shape: tuple[int, int], rows: int, threads: int, rounds: int, isa: str) -> dict[str, Any]:
    """GFLOP/s of products with so many rows, ours and torch's in turn: the best of the rounds."""
    kernels, weight = library.load(isa), Weight(kind, *shape)
    assert kernels is not None
    x, y, dtype = torch.randn(rows, shape[1]), torch.empty(rows, shape[0]), library.TYPES[torch.float32]
    dense = {
        f"torch {str(d).removeprefix('torch.')}": torch.randn(shape).to(d) for d in (torch.float32, torch.bfloat16)
    }
    inputs = {name: x.to(each.dtype) for name, each in dense.items()}
    digits = {"product": 0} if kind in DENSE else {"fast": 1, "exact": 2}
    linear, before = ctypes.byref(weight.linear), torch.get_num_threads()
    weight.linear.digits = 2  # the most
    memory = torch.empty(kernels.linear_memory(linear, rows), dtype=torch.uint8)
    best = dict.fromkeys((*digits, *dense), float("inf"))
    torch.set_num_threads(threads)
    for _ in range(rounds + 1):
        for name in best:
            start = time.perf_counter()
            if name in dense:
                torch.nn.functional.linear(inputs[name], dense[name])
            else:
                weight.linear.digits = digits[name]
                kernels.linear_run(linear, x.data_ptr(), dtype, rows, y.data_ptr(), dtype, memory.data_ptr(), threads)
            best[name] = min(best[name], time.perf_counter() - start)
    torch.set_num_threads(before)
    speed = {name: 2e-9 * rows * shape[0] * shape[1] / seconds for name, seconds in best.items()}
    return {
        "kind": kind, "shape": shape, "threads": threads, "instruction_set": isa, "rows": rows,
        "gflop_per_second": {name: round(value, 1) for name, value in speed.items()},
        "of_torch": {f"{name} / {peer}": round(speed[name] / speed[peer], 2) for name in digits for peer in dense},
    }  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", default="1,2", help="separated by commas")
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of them")
    parser.add_argument("--instruction-sets", default=instruction_sets.chosen(), help="separated by commas")
    parser.add_argument("--rows", type=int, default=1, help="of the activations")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    unknown = set(arguments.instruction_sets.split(",")) - set(instruction_sets.available())
    if unknown:
        parser.error(f"--instruction-sets: this machine has {', '.join(instruction_sets.available())}")
    read, results = reader(), []
    for kind in arguments.kinds.split(","):
        for shape in SHAPES[: arguments.shapes]:
            for threads, isa in (
                (int(t), i) for t in arguments.threads.split(",") for i in arguments.instruction_sets.split(",")
            ):
                if arguments.rows > 1:
                    results.append(measure_rows(kind, shape, arguments.rows, threads, arguments.rounds, isa))
                    speeds = "  ".join(f"{name} {value}" for name, value in results[-1]["gflop_per_second"].items())
                    print(f"{isa} {kind} {shape[0]}x{shape[1]}, {threads} threads: GFLOP/s {speeds}", flush=True)
                    continue
                result = measure(kind, shape, threads, arguments.rounds, read, isa)
                results.append(result)
                speeds = "  ".join(f"{name} {value:.1f}" for name, value in result["gb_per_second"].items())
                shares = "  ".join(f"{name} {value:.0%}" for name, value in result["of_reading"].items())
                print(
                    f"{isa} {kind} {shape[0]}x{shape[1]}, {threads} threads: GB/s {speeds}; of reading {shares}",
                    flush=True,
                )
    if arguments.output:
        cell = lambda r: (r["kind"], tuple(r["shape"]), r["threads"], r["instruction_set"], r.get("rows", 1))  # noqa: E731
        before = json.loads(arguments.output.read_text())["results"] if arguments.output.exists() else []
        measured = {cell(r): r for r in (*before, *results) if "instruction_set" in r}
        data = {
            "cpu": cpu_name(), "cores": os.cpu_count(), "commit": commit(), "rounds": arguments.rounds,
            "load_average": os.getloadavg()[0], "results": list(measured.values()),
        }  # fmt: skip
        arguments.output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
