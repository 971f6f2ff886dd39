"""An export's `kernels/` of made-up binaries, and a driver that writes down what it is asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from runtime import formats
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import GridScheme, Scheme
from runtime.kernels.base import Layer
from runtime.kernels.triton import jit
from runtime.kernels.triton.aot import CudaDriver
from runtime.kernels.triton.base import ROWS
from runtime.kernels.triton.linear import W4A16Triton
from runtime.kernels.triton.signature import Variant, of

CPU = torch.device("cpu")


class FakeDriver(CudaDriver):
    """Tensors on the CPU count as the GPU's."""

    device_type = "cpu"

    def __init__(self, capability: int = 90) -> None:
        self.number = capability
        self.loaded: list[tuple[bytes, str, int, int]] = []
        self.launches: list[dict[str, Any]] = []

    def capability(self, device: int) -> int:
        return self.number

    def current(self) -> tuple[int, int]:
        return 0, 7

    def load(self, device: int, cubin: bytes, name: str, shared: int, threads: int) -> int:
        self.loaded.append((cubin, name, shared, threads))
        return len(self.loaded)

    def launch(
        self, device: int, function: int, grid: Any, threads: int, shared: int, stream: int, slots: bytearray
    ) -> None:
        self.launches.append(
            {"function": function, "grid": tuple(grid), "threads": threads, "shared": shared, "stream": stream,
             "slots": bytes(slots)}
        )  # fmt: skip


def write_kernels(directory: Path, variants: Iterable[Variant], architecture: str = "sm_90a", **changes: Any) -> Path:
    """`kernels/` with a made-up cubin for each variant; `changes` to every entry of the index."""
    folder = directory / "kernels"
    folder.mkdir(parents=True)
    entries = []
    for number, variant in enumerate(variants):
        data = b"\x7fELF" + variant.describe().encode()
        (folder / f"{number}.cubin").write_bytes(data)
        entry = {
            "file": f"{number}.cubin", "sha256": hashlib.sha256(data).hexdigest(), "architecture": architecture,
            "kernel": variant.kernel, "source": jit.Entry.known[variant.kernel].source, "symbol": f"kernel_{number}",
            "arguments": dict(variant.arguments), "options": dict(variant.options),
            "num_warps": 4, "shared": 1024 + number, "scratch_pointers": 2,
        }  # fmt: skip
        entries.append(entry | changes)
    (folder / "index.json").write_text(json.dumps({"schema_version": 2, "triton": "3.6.0", "kernels": entries}))
    return directory


def w4_layer(rows: int = 48, columns: int = 256, group: int = 32) -> Layer:
    """A layer of 4-bit weights, on the CPU."""
    scheme = Scheme(GridScheme(4, "int", True, "group", group))
    return Layer(ModuleEntry(scheme, "pack-quantized", None), (rows, columns), torch.bfloat16, CPU)


def w4_tensors(layer: Layer) -> tuple[W4A16Triton, dict[str, torch.Tensor]]:
    """The kernel for CPU tensors, and a random weight as it reads it."""
    from runtime.formats.scheme import CompressedWeight

    torch.manual_seed(0)
    groups = layer.entry.scheme.weights.groups(layer.shape[1])  # type: ignore[union-attr]
    values = torch.randint(-8, 8, layer.shape, dtype=torch.int8)
    weight = CompressedWeight(
        values, torch.rand(layer.shape[0], groups).bfloat16(), None, None, layer.entry.scheme, torch.bfloat16
    )
    kernel = W4A16Triton("cpu")
    return kernel, kernel.prepare(formats.get("pack-quantized").pack(weight), layer)


def w4_variants(layer: Layer, scale: torch.dtype | None = None, bias: bool = False) -> list[Variant]:
    """The default launches of the layer, with scales stored in `scale`."""
    kernel = W4A16Triton("cpu")
    with jit.recording() as launches:
        for rows in ROWS:
            x = torch.empty(rows, layer.shape[1], dtype=layer.dtype, device="meta")
            added = torch.empty(layer.shape[0], dtype=layer.dtype, device="meta") if bias else None
            kernel.compute(x, kernel.blank(layer, scale), layer, added)
    return list(dict.fromkeys(of(launch) for launch in launches))
