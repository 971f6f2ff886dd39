"""Kernels of linear layers and the fused operations between them: against float64, then against cuBLAS and peers.

Shapes are Llama-3-8B's. Every launch reads another copy of the weight, together more than twice the L2 cache, so nothing is served from
it (the fused operations reuse theirs, as a decode step does), and all are replayed from a CUDA graph, as in a decode loop.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_sections import product_peers
from gpu_sections.bench import Bench, Row, said
from gpu_sections.kernel_cases import (
    block_weight,
    cases,
    codebook_weight,
    codes8,
    error_of,
    float8s,
    int_weight,
    k_quant_weight,
    sparse_weight,
)

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TINY = {"down": (32, 256)}
ROWS = (1, 16, 64, 256, 2048)
MOST_PROCESSES, PROCESS_BYTES = 8, int(6e9)  # of the check, and what one may take of the device's memory
PEER_COPIES = 16  # of a peer's weight, which may be slow to pack


def check(bench: Bench) -> None:
    """Every kernel against its reference, and a second call against the first. Hundreds are compiled, so several processes share them."""
    count = bench.pick(min(MOST_PROCESSES, (os.cpu_count() or 1) // 2, bench.free_bytes() // PROCESS_BYTES), 2)
    spawn = multiprocessing.get_context("spawn")  # of a forked process CUDA is unusable
    with ProcessPoolExecutor(max(1, count), mp_context=spawn) as pool:
        files = [bench.file.with_suffix(f".{number}.json") for number in range(max(1, count))]
        parts = [
            pool.submit(check_part, bench.dry, bench.left() - 5, file, i, len(files)) for i, file in enumerate(files)
        ]
        for file, part in zip(files, parts, strict=True):
            try:
                bench.merge(part.result())
            except Exception as error:  # a process that died takes the others' results along, but not their files
                if file.exists():
                    bench.merge(json.loads(file.read_text(encoding="utf-8")))
                bench.fail(f"{file.stem}: {said(error)}")


def check_part(dry: bool, seconds: float, file: Path, number: int, count: int) -> Row:
    """What is recorded of every `count`-th case, in a process of its own."""
    if dry:
        from triton_interpreter import repair

        repair()
    bench = Bench(dry, seconds, file, file.parent)
    torch.manual_seed(number)
    for case in itertools.islice(cases(bench.device.type, bench.dry), number, None, count):
        if not bench.enough(f"{case.name} and each {count}th after it"):
            break
        try:
            bench.case(case.name, error_of(case), case.tolerance)
        except Exception as error:
            bench.fail(f"{case.name}: {said(error)}")
            bench.recover()
    return bench.record


def timing(bench: Bench) -> None:
    """Products of one row first: decoding is what most users wait for."""
    bandwidth, operations = bench.limits()
    for rows in bench.pick(ROWS, (1, 16)):
        for layer, shape in bench.pick(LAYERS, TINY).items():
            if bench.enough(f"{layer}, {rows} rows", 8):
                row = {"layer": layer, "shape": shape, "rows": rows, **products(bench, shape, rows)}
                annotate(row, bandwidth, operations)
                bench.add(row)
    for tokens in bench.pick((1, 16, 2048), (1, 3)):
        if bench.enough(f"fused operations, {tokens} tokens"):
            for row in fused_rows(bench, tokens):
                bench.add(row)


def weight_bytes(weight: Any) -> int:
    """Bytes that a product with this weight must read."""
    return sum(part.nbytes for part in vars(weight).values() if isinstance(part, torch.Tensor))


def products(bench: Bench, shape: tuple[int, int], rows: int) -> Row:
    """Seconds of one layer at one number of rows: ours in every format, cuBLAS, peers; bytes that ours read."""
    from runtime.kernels.triton import linear, rounded, sparse24_w4, w8a8

    (n, k), device = shape, bench.device.type
    x = torch.randn(rows, k, device=device).bfloat16()
    row: Row = {"bytes": {}}

    def ours(name: str, weights: list[Any], call: Callable[[Any], Any], size: int) -> None:
        bench.ours(row, name, lambda: bench.seconds([partial(call, w) for w in weights]))
        row["bytes"][name] = size + 2 * rows * (n + k)

    count = bench.copies(n * k // 2)
    fours = [int_weight(n, k, 128, 4, device, seed=i) for i in range(min(count, 4))]
    fours += [  # the same codes elsewhere in memory
        type(w)(w.words.clone(), w.scale.clone(), None, w.shape, w.group, w.field)
        for w in (fours * -(-count // len(fours)))[: count - len(fours)]
    ]
    ours("w4a16", fours, lambda w: linear.multiply(x, w), weight_bytes(fours[0]))

    def of_tokens(w: Any) -> Any:
        codes, scale, _ = w8a8.quantize(x, False, 4)
        return rounded.product(codes, scale[:, None], w, 0, torch.bfloat16)

    ours("w4a4", fours, of_tokens, weight_bytes(fours[0]))
    if k % 128 == 0:
        ours(
            "w4a4_groups",
            fours,
            lambda w: rounded.product(*w8a8.quantize_groups(x, False, 128, 4), w, 128, torch.bfloat16),
            weight_bytes(fours[0]),
        )
    del fours
    eights = [int_weight(n, k, 0, 8, device, seed=i) for i in range(min(8, bench.copies(n * k)))]
    ours("w8a16", eights, lambda w: linear.multiply(x, w), weight_bytes(eights[0]))
    del eights
    for kind, bits in (("mxfp4", 4), ("nvfp4", 4), ("mxfp8", 8)):
        floats = [block_weight(n, k, kind, device, seed=i) for i in range(min(24, bench.copies(n * k * bits // 8)))]
        ours(f"{kind}a16", floats, lambda w: linear.multiply(x, w), weight_bytes(floats[0]))
        del floats
    levels = [codebook_weight(n, k, 0, device, seed=i) for i in range(min(24, bench.copies(n * k // 2)))]
    ours("codebook4", levels, lambda w: linear.multiply(x, w), weight_bytes(levels[0]))
    del levels
    if k % 256 == 0:
        minima = [k_quant_weight(n, k, "q4_k", device, seed=i) for i in range(min(24, bench.copies(n * k // 2)))]
        ours("q4_k", minima, lambda w: linear.multiply(x, w), weight_bytes(minima[0]))
        del minima
    sparse = [sparse_weight(n, k, 128, device, seed=i) for i in range(min(24, bench.copies(n * k * 3 // 8)))]
    ours("sparse24_w4", sparse, lambda w: sparse24_w4.linear(x, w), weight_bytes(sparse[0]))
    del sparse
    for float8 in float8s(device):
        codes = [codes8((n, k), float8, device) for _ in range(min(8, bench.copies(n * k)))]
        scale = torch.full((n,), 0.01, dtype=torch.bfloat16, device=device)

        def product(w: torch.Tensor, float8: bool = float8, scale: torch.Tensor = scale) -> Any:
            quantized, scales, _ = w8a8.quantize(x, float8)  # quantizing the input is part of the price
            return w8a8.product(quantized, scales, w, scale, torch.bfloat16)

        ours(f"w8a8_{'float8' if float8 else 'int8'}", codes, product, codes[0].nbytes)
        del codes
    dense = [torch.randn(n, k, device=device).bfloat16() for _ in range(min(8, bench.copies(2 * n * k)))]
    row["cublas_bf16"] = bench.seconds([partial(torch.nn.functional.linear, x, w) for w in dense])
    halves, half = [w.half() for w in dense], x.half()
    del dense
    row["cublas_fp16"] = bench.seconds([partial(torch.nn.functional.linear, half, w) for w in halves])
    del halves
    for name, peer in product_peers.PEERS.items():
        bench.peer(row, name, lambda p=peer: bench.seconds(p(shape, x, min(count, PEER_COPIES))))
    return row


def annotate(row: Row, bandwidth: float, operations: float) -> None:
    """Beside seconds: times as fast as each peer, and the share of what the chip does with so many bytes and bf16 products."""
    (n, k), rows = row["shape"], row["rows"]
    peers = [name for name in ("cublas_bf16", "cublas_fp16", *product_peers.PEERS) if row.get(name)]
    for name, size in row["bytes"].items():
        if row[name]:
            row[f"{name}_times_as_fast_as"] = {peer: row[peer] / row[name] for peer in peers}
            row[f"{name}_gb_per_second"] = size / row[name] / 1e9
            row[f"{name}_tflops"] = 2 * rows * n * k / row[name] / 1e12
            row[f"{name}_share_of_bf16_limit"] = max(size / bandwidth, 2 * rows * n * k / operations) / row[name]


def fused_rows(bench: Bench, tokens: int) -> list[Row]:
    """Norms and activations of Llama-3-8B, beside the same operations in torch."""
    from runtime.engines.cuda import ops
    from runtime.kernels.triton import fused

    hidden, inner = bench.pick((4096, 14336), (64, 96))
    x, residual = torch.randn(2, tokens, hidden, device=bench.device).bfloat16()
    w, both = torch.ones(hidden, device=bench.device).bfloat16(), torch.randn(tokens, 2 * inner, device=bench.device)
    both = both.bfloat16()
    pairs = {
        "rms_norm": (partial(fused.rms_norm, x, w, 1e-5, residual), partial(ops.rms_norm, x, w, 1e-5, residual)),
        "swiglu": (partial(fused.swiglu, both), partial(ops.swiglu, [both])),
    }
    found = []
    for name, (ours, theirs) in pairs.items():
        row: Row = {"operation": name, "tokens": tokens}
        bench.ours(row, "ours", lambda f=ours: bench.seconds([f] * 8))
        row["torch"] = bench.seconds([theirs] * 8)
        found.append(row)
    return found
