"""Estimate of the time of products with 4- and 8-bit weights on GPUs that are not here: a roofline over the compiler's output.

    python benchmarks/gpu_estimate.py [--output benchmarks/results/gpu_estimate.json]     some minutes, without a GPU

A launch takes at least as long as its bytes at the memory's bandwidth, the instructions of its main loop at one a cycle on each scheduler,
and its multiply-adds on tensor cores, rows that fill up a block included. The longest of the three is the estimate; what they keep each
other waiting for, and what starts and ends a launch, is left out, so a GPU will be slower.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_launches

from runtime.kernels.triton.jit import Launch

ROWS = (1, 2, 16, 64, 512)
KINDS = ("w4a16", "w8a16", "nvfp4", "codebook", "q4_k")


@dataclass(frozen=True)
class Gpu:
    """What data sheets say: compute capability, bytes/s, multiprocessors (four schedulers each), clock in Hz, dense bfloat16 FLOP/s."""

    name: str
    capability: int
    bandwidth: float
    multiprocessors: int
    clock: float
    flops: float


GPUS = (
    Gpu("A100 SXM 80 GB", 80, 2.039e12, 108, 1.41e9, 312e12),
    Gpu("H100 SXM", 90, 3.35e12, 132, 1.755e9, 989e12),
)


def estimate(gpu: Gpu, launch: Launch, instructions: float, rows: int) -> dict[str, Any]:
    """Microseconds that memory, instructions and tensor cores take for a product, which is the longest, and how much faster than a bfloat16
    product at its own limits that is.

    Args:
        launch: of the kernel, with `rows` rows.
        instructions: of its main loop, a weight.
    """
    given = launch.arguments
    n, k = given["N"], given["K"]
    block = given.get("BLOCK_M", rows)  # a matrix-vector product reads and dequantizes a weight once for all rows
    blocks, weights = -(-rows // block), n * k
    split = given["SPLIT_K"]
    read = ("words", "scale", "zero") if given["CODES"] == "table" else ("words", "scale")
    operands = sum(given[name].numel() * given[name].element_size() for name in read)
    moved = (
        operands + 2 * rows * (k + n) + (8 * split * rows * n if split > 1 else 0)
    )  # float32 parts, written and read
    times = {
        "memory": moved / gpu.bandwidth,
        "instructions": blocks * weights * instructions / 32 / (4 * gpu.multiprocessors * gpu.clock),
        "tensor_cores": 2 * blocks * block * weights / gpu.flops if "BLOCK_M" in given else 0.0,
    }
    bound = max(times, key=lambda name: times[name])
    plain = max(2 * (weights + rows * (k + n)) / gpu.bandwidth, 2 * rows * weights / gpu.flops)
    return {
        **{f"{name}_us": round(1e6 * taken, 2) for name, taken in times.items()},
        "bound_by": bound, "times_bfloat16": round(plain / times[bound], 2),
    }  # fmt: skip


def measure(name: str, gpu: Gpu, rows: int) -> dict[str, Any]:
    """The estimate of a launch of `gpu_launches.hot_launches`."""
    launch = next(
        one
        for one in gpu_launches.record(gpu_launches.hot_launches()[name][0], gpu.capability)
        if one.kernel.__name__ in ("matvec_kernel", "matmul_kernel")
    )
    kernel = gpu_launches.build(launch, gpu.capability)
    instructions = gpu_launches.instructions_a_weight(launch, kernel)
    return {"instructions_a_weight": round(instructions, 2), **estimate(gpu, launch, instructions, rows)}


def main() -> None:
    """Command line."""
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    known = gpu_launches.hot_launches()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    found: dict[str, Any] = {"versions": versions, "gpus": {}}
    for gpu in GPUS:
        table = {}
        for name in (f"{kind} {rows}" for kind in KINDS for rows in ROWS):
            if name in known:
                print(f"{gpu.name}: {name}", file=sys.stderr, flush=True)
                table[name] = measure(name, gpu, int(name.rpartition(" ")[2]))
        found["gpus"][gpu.name] = {**asdict(gpu), "products": table}
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
