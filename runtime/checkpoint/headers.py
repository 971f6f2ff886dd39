"""Safetensors headers, read and checked before anything is allocated.

A file from elsewhere may be truncated, half downloaded or made to harm: the safetensors library compares sizes with the length of
the file and wants ranges that cover it without gap or overlap, so that a later read of one tensor can trust what it finds here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from runtime.checkpoint.locate import reading
from runtime.errors import ArtifactError

_SHOWN = 200  # characters of what the library says

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `nbytes` bytes at byte `offset` of `file`."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The checked header of one file of `size` bytes; tensor data begins at byte `data_start`."""

    file: Path
    size: int
    data_start: int
    raw: bytes
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_header(file: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        ArtifactError: the file is missing, truncated, no safetensors file, or inconsistent with itself.
    """
    with reading(file), file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if prefix == b"version " and size < 1024:
            raise ArtifactError(
                f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"
            )
        try:
            with safe_open(file, "np"):  # checks sizes and ranges; "pt" would map all of it writable
                length = int.from_bytes(prefix, "little")
        except SafetensorError as error:
            reason = str(error).removeprefix("Error while deserializing header: ")[:_SHOWN]
            raise ArtifactError(f"{file} is truncated, damaged or no safetensors file: {reason}") from error
        raw = stream.read(length)
    header = json.loads(raw)
    metadata = header.pop("__metadata__", None) or {}
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ArtifactError(f"{file}: tensor {name} has dtype {entry['dtype']}; allowed are {', '.join(DTYPES)}")
        begin, end = entry["data_offsets"]
        shape, place = tuple(entry["shape"]), 8 + length + begin
        tensors[name] = TensorEntry(name, file, DTYPES[entry["dtype"]], shape, place, end - begin)
    return Header(file, size, 8 + length, raw, tensors, metadata)


def pack_header(tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> tuple[bytes, dict[str, int]]:
    """What a safetensors file begins with, and where in it the data of each tensor begin.

    The format: 8 bytes of header length (little endian), the header as JSON padded with spaces to a multiple of 8, then the data
    without holes (https://github.com/huggingface/safetensors). Wider dtypes lie first, so that every tensor is aligned to its own.
    The file ends with the last tensor's data.

    Args:
        tensors: {name: shape and dtype}.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = dict[str, int](), 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name)):
        shape, dtype = tensors[name]
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    packed = len(text).to_bytes(8, "little") + text
    return packed, {name: len(packed) + start for name, start in starts.items()}
