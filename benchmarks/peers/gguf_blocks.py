"""GGUF files with quantized blocks of types that the `gguf` package may not know: those of ik_llama.cpp, for one.

A large model with random weights takes some quantizers an hour. How fast its products are depends on no value, only on the type of every
tensor, so `enlarge` fills it with blocks that a quantizer made of a small model.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

#: Bytes of a value of metadata, by its type.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # fmt: skip
_STRING, _ARRAY = 8, 9
BF16 = 30  # ggml's number of the type


class Tensor(NamedTuple):
    """Columns first, as the file says; `kind` is ggml's number of the type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class Gguf:
    """Metadata as bytes, and the tensors."""

    def __init__(self, file: Path) -> None:
        self.data = np.memmap(file, np.uint8, "r")
        self._at = 8  # behind magic and version
        count, values = self._take("<QQ")
        self.metadata_start, alignment = self._at, 32
        for _ in range(values):
            key = self._string()
            (kind,) = self._take("<I")
            if key == b"general.alignment":
                (alignment,) = struct.unpack_from("<I", self.data, self._at)
            self._skip(kind)
        self.metadata = bytes(self.data[self.metadata_start : self._at])
        self.tensors = [self._tensor() for _ in range(count)]
        self.alignment = alignment
        self.start = math.ceil(self._at / alignment) * alignment

    def bytes_of(self, tensor: Tensor, row: int) -> np.ndarray:
        """Rows of `row` bytes, uint8 `[rows, row]`."""
        rows = math.prod(tensor.shape[1:])
        begin = self.start + tensor.offset
        return self.data[begin : begin + rows * row].reshape(rows, row)

    def _take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(layout, self.data, self._at)
        self._at += struct.calcsize(layout)
        return found

    def _string(self) -> bytes:
        (length,) = self._take("<Q")
        self._at += length
        return bytes(self.data[self._at - length : self._at])

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            inner, length = self._take("<IQ")
            if inner in _SIZES:
                self._at += length * _SIZES[inner]
            else:
                for _ in range(length):
                    self._skip(inner)
        else:
            self._at += _SIZES[kind]

    def _tensor(self) -> Tensor:
        name = self._string().decode()
        (dimensions,) = self._take("<I")
        shape = self._take(f"<{dimensions}Q")
        kind, offset = self._take("<IQ")
        return Tensor(name, shape, kind, offset)


def enlarge(
    request: dict[str, Any], row_size: Callable[[int, int], int], block_size: Callable[[int], int]
) -> dict[str, Any]:
    """Write `request["output"]`: the model `large`, whose matrices in blocks get the types that they have in the model `small`.

    Args:
        row_size: bytes of a row of so many values of a type; of none: what ik_llama.cpp puts before the blocks of a row.
        block_size: values of a block of a type.
    """
    small, large = Gguf(Path(request["small"])), Gguf(Path(request["large"]))
    sources = {t.name: t for t in small.tensors if t.name.startswith("blk.") and len(t.shape) > 1}
    draw, infos, parts, offset = np.random.default_rng(0), [], [], 0
    for tensor in large.tensors:
        source = sources.get(tensor.name)
        kind = tensor.kind if source is None else source.kind
        row = row_size(kind, tensor.shape[0])
        if source is None:
            data = large.bytes_of(tensor, row)
        else:
            before, size = row_size(kind, 0), block_size(kind)
            rows = small.bytes_of(source, row_size(kind, source.shape[0]))
            blocks = rows[:, before:].reshape(-1, row_size(kind, size) - before)
            count = math.prod(tensor.shape[1:])
            chosen = blocks[draw.integers(len(blocks), size=count * tensor.shape[0] // size)]
            data = np.concatenate(
                [rows[draw.integers(len(rows), size=count), :before], chosen.reshape(count, -1)], axis=1
            )
        name = tensor.name.encode()
        infos.append(struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.shape)))
        infos[-1] += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape) + struct.pack("<IQ", kind, offset)
        parts.append(data)
        offset += math.ceil(data.size / large.alignment) * large.alignment
    head = bytes(large.data[: large.metadata_start]) + large.metadata + b"".join(infos)
    with Path(request["output"]).open("wb") as file:
        file.write(head.ljust(math.ceil(len(head) / large.alignment) * large.alignment, b"\0"))
        for data in parts:
            file.write(data.tobytes().ljust(math.ceil(data.size / large.alignment) * large.alignment, b"\0"))
    stored = sum(data.size for data, tensor in zip(parts, large.tensors, strict=True) if tensor.name in sources)
    weights = sum(math.prod(tensor.shape) for tensor in large.tensors if tensor.name in sources)
    return {
        "types": sorted({sources[tensor.name].kind for tensor in large.tensors if tensor.name in sources}),
        "bits": 8 * stored / weights,
    }
