#!/usr/bin/env python
"""Experts of a mixture in C: bytes a second of decode beside plain reading of the same weights, and times beside the Python loop.

    python benchmarks/experts_cpu.py --output benchmarks/results/experts_cpu.json

32 experts, 4 chosen, W4 with groups of 128, random weights: speed only. A decode step takes one token through its experts; active bytes
are the codes and scales of those. Every round reads those very bytes, computes them in C, and in the Python loop, in turn; a ratio is the
median of the ratios within the rounds. Steps choose other experts one after another, so that the caches hold none of them.
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
from product_bandwidth import reader
from torch import nn
from where import commit, cpu_name

from runtime.formats.grid import GridScheme
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import Scheme
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import IntegerKernel
from runtime.kernels.base import Choice
from runtime.kernels.cpu.panels import W4
from runtime.layers.compressed_linear import CompressedLinear
from runtime.layers.native_experts import NativeExperts
from runtime.modeling.experts import Experts, unfuse

EXPERTS, CHOSEN, GROUP = 32, 4, 128
SHAPES = ((1024, 512), (2048, 768), (2048, 1024))  # hidden size, width of an expert


def layer(hidden: int, inner: int, fast: bool) -> Experts:
    """Experts of a Qwen3-MoE layer in bfloat16, weights in panels without a stored form."""
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
    for expert in experts.one_by_one():
        for name in experts.layout.projections:
            old: Any = expert.get_submodule(name)
            module = CompressedLinear(entry, (old.out_features, old.in_features), False, torch.bfloat16, "meta")
            module._buffers.clear()
            for key, value in kernel.sample(module_layer(module)).items():
                if key != "sums":
                    module.register_buffer(f"prepared_{key}", value)
            module.choice = Choice(kernel, kernel, kernel)
            setattr(expert, name, module)
    experts.compute = NativeExperts()
    return experts


def module_layer(module: CompressedLinear) -> Any:
    """What a kernel is told of a module that has no tensors yet."""
    from runtime.kernels.base import Layer

    return Layer(module.entry, module.shape, module.dtype, torch.device("cpu"))


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
    """Decode and prefill of one layer."""
    hidden, inner = shape
    experts = layer(hidden, inner, fast)
    tensors = [[t for t in expert.buffers()] for expert in experts.one_by_one()]
    active = sum(t.nbytes for t in tensors[0]) * CHOSEN
    steps = EXPERTS // CHOSEN
    order = torch.randperm(EXPERTS).view(steps, CHOSEN)
    shares = torch.full((1, CHOSEN), 1 / CHOSEN)
    x = torch.randn(1, hidden).bfloat16()

    def loop(rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        compute, experts.compute = experts.compute, None
        experts(rows, index, weights)
        experts.compute = compute

    def reading(i: int) -> None:
        for expert in order[i].tolist():
            for tensor in tensors[expert]:
                read(tensor.data_ptr(), tensor.nbytes, threads)

    decode = timed(
        {"read": reading, "c": lambda i: experts(x, order[i : i + 1], shares), "loop": lambda i: loop(x, order[i : i + 1], shares)},
        steps, rounds,
    )  # fmt: skip
    rows = torch.randn(256, hidden).bfloat16()
    index, weights = torch.rand(256, EXPERTS).topk(CHOSEN)[1], torch.rand(256, CHOSEN)
    prefill = timed(
        {"c": lambda _: experts(rows, index, weights), "loop": lambda _: loop(rows, index, weights)}, 1, max(2, rounds // 3)
    )

    def ratio(times: dict[str, list[float]], of: str) -> float:
        return round(statistics.median(a / b for a, b in zip(times[of], times["c"], strict=True)), 3)

    return {
        "hidden": hidden, "inner": inner, "threads": threads, "activations": "fast" if fast else "exact",
        "active_megabytes": round(active / 1e6, 2),
        "decode": {
            "of_reading": ratio(decode, "read"), "of_loop": ratio(decode, "loop"),
            "microseconds": {k: round(statistics.median(v) * 1e6, 1) for k, v in decode.items()},
            "best_microseconds": {k: round(min(v) * 1e6, 1) for k, v in decode.items()},
        },
        "prefill_256": {
            "of_loop": ratio(prefill, "loop"), "milliseconds": {k: round(min(v) * 1e3, 2) for k, v in prefill.items()},
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
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
