"""A reader of the GPTQ layout that shares no code with its writer: numpy, bit by bit, for the proof.

It reads config.json for the checkpoint format only; bits and groups are told by the shapes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

PARTS = ("qweight", "qzeros", "scales", "g_idx")


class Folder:
    """A GPTQ checkpoint: `modules` are the names that have a `qweight`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        quantization = json.loads((path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        self.zero_offset = {"gptq": 1, "gptq_v2": 0}[quantization["checkpoint_format"]]
        self.files: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            with _open(file) as stream:
                self.files |= dict.fromkeys(stream.keys(), file)
        self.modules = [name.removesuffix(".qweight") for name in self.files if name.endswith(".qweight")]

    def get(self, name: str) -> np.ndarray:
        """A stored tensor, as it lies in its file."""
        with _open(self.files[name]) as stream:
            return np.asarray(stream.get_tensor(name))

    def dequantize(self, module: str) -> np.ndarray:
        """float32 `[out, in]`."""
        qweight, qzeros, scales, g_idx = (self.get(f"{module}.{part}") for part in PARTS)
        return dequantize(qweight, qzeros, scales, g_idx, self.zero_offset)


def dequantize(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray, zero_offset: int
) -> np.ndarray:
    """float32 `[out, in]` out of the four tensors; `zero_offset` is what the format takes off its zero points."""
    columns, rows = g_idx.shape[0], scales.shape[1]
    bits = qweight.shape[0] * 32 // columns
    codes = unpack(qweight.T, bits, columns)  # [out, in]
    zeros = unpack(qzeros, bits, rows) + zero_offset  # [groups, out]
    return ((codes - zeros[g_idx].T) * scales.astype(np.float32)[g_idx].T).astype(np.float32)


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """int32 words `[n, w]` -> unsigned codes `[n, count]`: bit j of code i is bit i * bits + j of the row, low bits first."""
    rows = np.ascontiguousarray(words.astype("<i4")).view(np.uint8)
    stream = np.unpackbits(rows, axis=1, bitorder="little")[:, : count * bits]
    return stream.reshape(len(words), count, bits).astype(np.int64) @ (1 << np.arange(bits))


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(str(file), framework="numpy")
