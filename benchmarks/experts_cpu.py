#!/usr/bin/env python
"""Experts of a mixture in C: bytes a second of decode beside plain reading of the same weights, and times beside the Python loop.

    python benchmarks/experts_cpu.py --output benchmarks/results/experts_cpu.json

32 experts, 4 chosen, W4 with groups of 128, random weights: speed only. A decode step takes one token through its experts; active bytes
are the codes and scales of those. Every round reads those very bytes, computes them in C, and in the Python loop, in turn; a ratio is the
median of the ratios within the rounds, or of the best times. Steps go through the experts of several layers, more than caches hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode_cpu import last_level_cache
from product_bandwidth import reader
from torch import nn
from where import commit, cpu_name

from runtime.formats.grid import GridScheme
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import Scheme
from runtime.kernels.base import Choice, Layer
from runtime.kernels.cpu import experts as c_experts
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import IntegerKernel
from runtime.kernels.cpu.panels import W4
from runtime.layers.compressed_linear import CompressedLinear
from runtime.layers.native_experts import NativeExperts
from runtime.modeling.experts import Experts, unfuse

EXPERTS, CHOSEN, GROUP = 32, 4, 128
SHAPES = ((1024, 512), (2048, 768), (2048, 1024))  # hidden size, width of an expert


def layer(hidden: int, inner: int, fast: bool) -> tuple[Experts, torch.Tensor]:
    """Experts of a Qwen3-MoE layer in bfloat16, weights in panels without a stored form, and the memory that they all lie in."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    with torch.device("meta"):
        config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=EXPERTS)
        parent = nn.ModuleDict({"experts": Qwen3MoeExperts(config).bfloat16()})
    unfuse(parent)
    experts = parent["experts"]
    assert isinstance(experts, Experts)
    entry = ModuleEntry(Scheme(GridScheme(4, "int", True, "group", GROUP)), "pack-quantized", None)
    kernel = IntegerKernel("int4-c-fast" if fast else "int4-c", W4, fast)
    places: list[tuple[CompressedLinear, str, torch.Tensor]] = []
    for expert in experts.one_by_one():
        for name in experts.layout.projections:
            old: Any = expert.get_submodule(name)
            module = CompressedLinear(entry, (old.out_features, old.in_features), False, torch.bfloat16, "meta")
            module._buffers.clear()
            sample = kernel.sample(Layer(entry, module.shape, torch.bfloat16, torch.device("cpu")))
            places += [(module, f"prepared_{key}", value) for key, value in sample.items() if key != "sums"]
            module.choice = Choice(kernel, kernel, kernel)
            setattr(expert, name, module)
    memory, at = torch.empty(sum(value.nbytes for *_, value in places), dtype=torch.uint8), 0
    for module, key, value in places:
        part = memory[at : at + value.nbytes].view(value.dtype).view(value.shape)
        module.register_buffer(key, part.copy_(value))
        at += value.nbytes
    experts.compute = NativeExperts()
    return experts, memory


def timed(calls: dict[str, Callable[[int], Any]], steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each, by round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            for i in range(steps):
                call(i)
            if turn:  # the first is for the pages
                found[name].append((time.perf_counter() - start) / steps)
    return found


@torch.inference_mode()
def measure(shape: tuple[int, int], threads: int, fast: bool, rounds: int, read: Any) -> dict[str, Any]:
    """Decode and prefill of one layer; of as many as four last-level caches hold, one after another."""
    hidden, inner = shape
    layers = [layer(hidden, inner, fast)]
    total = layers[0][1].nbytes
    layers += [layer(hidden, inner, fast) for _ in range(-(-4 * last_level_cache() // total))]
    steps, active = EXPERTS // CHOSEN, total // EXPERTS * CHOSEN
    order = torch.arange(EXPERTS).view(steps, 1, CHOSEN)  # neighbours in memory, so that they are read in one call
    shares, x = torch.full((1, CHOSEN), 1 / CHOSEN), torch.randn(1, hidden).bfloat16()
    ready = []
    for experts, _ in layers:
        experts(x, order[0], shares)
        assert isinstance(experts.compute, NativeExperts)
        assert experts.compute._ready is not None
        ready.append(experts.compute._ready[0])

    def loop(experts: Experts, *operands: torch.Tensor) -> None:
        compute, experts.compute = experts.compute, None
        experts(*operands)
        experts.compute = compute

    def at(i: int) -> int:
        return i % len(layers)

    decode = timed(
        {
            "read": lambda i: read(layers[at(i)][1].data_ptr() + i // len(layers) * active, active, threads),
            "c": lambda i: c_experts.run(ready[at(i)], x, order[i // len(layers)], shares),
            "module": lambda i: layers[at(i)][0](x, order[i // len(layers)], shares),
            "loop": lambda i: loop(layers[at(i)][0], x, order[i // len(layers)], shares),
        },
        steps * len(layers), rounds,
    )  # fmt: skip
    rows = torch.randn(256, hidden).bfloat16()
    index, weights = torch.rand(256, EXPERTS).topk(CHOSEN)[1], torch.rand(256, CHOSEN)
    prefill = timed(
        {"c": lambda i: layers[i][0](rows, index, weights), "loop": lambda i: loop(layers[i][0], rows, index, weights)},
        1, max(3, rounds // 2),
    )  # fmt: skip

    def ratio(times: dict[str, list[float]], of: str) -> float:
        return round(statistics.median(a / b for a, b in zip(times[of], times["c"], strict=True)), 3)

    return {
        "hidden": hidden, "inner": inner, "threads": threads, "activations": "fast" if fast else "exact",
        "active_megabytes": round(active / 1e6, 2), "read_gb_per_second": round(active / 1e9 / min(decode["read"]), 2),
        "decode": {
            "of_reading": ratio(decode, "read"), "of_best_reading": round(min(decode["read"]) / min(decode["c"]), 3),
            "times_faster_than_loop": ratio(decode, "loop"),
            "microseconds": {k: round(statistics.median(v) * 1e6, 1) for k, v in decode.items()},
            "best_microseconds": {k: round(min(v) * 1e6, 1) for k, v in decode.items()},
        },
        "prefill_256": {
            "times_faster_than_loop": ratio(prefill, "loop"), "milliseconds": {k: round(min(v) * 1e3, 2) for k, v in prefill.items()},
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="numbers of shapes")
    arguments = parser.parse_args()
    native, read, cells = library.load(), reader(), []
    assert native is not None
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for number in arguments.shapes:
            for fast in (False, True):
                cell = measure(SHAPES[number], threads, fast, arguments.rounds, read)
                print(json.dumps(cell), flush=True)
                cells.append(cell)
    found = {
        "cpu": cpu_name(), "commit": commit(), "instruction_set": native.isa_name().decode(), "experts": EXPERTS, "chosen": CHOSEN,
        "group": GROUP, "cells": cells,
    }  # fmt: skip
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
