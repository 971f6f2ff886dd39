"""Safetensors headers, read and checked before anything is allocated.

A file from elsewhere may be truncated, half downloaded or made to harm: sizes are compared with the length of the file,
ranges must lie inside it and cover it without overlap, so that a later read of one tensor can trust what it finds here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.errors import ArtifactError

MAXIMUM_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself

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
    try:
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise ArtifactError(f"{file} is no regular file")
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if prefix == b"version " and size < 1024:
                raise ArtifactError(
                    f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"
                )
            if len(prefix) < 8:
                raise ArtifactError(f"{file} is truncated: {size} bytes are too few for a safetensors file")
            length = int.from_bytes(prefix, "little")
            if length > MAXIMUM_HEADER_BYTES:
                raise ArtifactError(
                    f"{file} is no safetensors file: its header would have {length} bytes, "
                    f"at most {MAXIMUM_HEADER_BYTES} are allowed"
                )
            if length > size - 8:
                raise ArtifactError(
                    f"{file} is truncated: its header has {length} bytes, the file ends after {size} bytes"
                )
            raw = stream.read(length)
    except OSError as error:
        raise ArtifactError(f"{file} cannot be read: {error.strerror or error}") from error
    entries, metadata = _parse(file, raw)
    data_start = 8 + length
    _check_layout(file, entries, size - data_start)
    tensors = {
        name: TensorEntry(name, file, dtype, shape, data_start + begin, end - begin)
        for name, (dtype, shape, begin, end) in entries.items()
    }
    return Header(file, size, data_start, raw, tensors, metadata)


_Entry = tuple[torch.dtype, tuple[int, ...], int, int]


def _parse(file: Path, raw: bytes) -> tuple[dict[str, _Entry], dict[str, str]]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{file} is no safetensors file or is damaged: its header cannot be read ({error})"
        ) from error
    if not isinstance(header, dict):
        raise ArtifactError(f"{file} is no safetensors file: its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ArtifactError(f"{file}: __metadata__ in the header is not a JSON object")
    return {name: _entry(file, name, value) for name, value in header.items()}, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} is there twice")
        result[key] = value
    return result


def _entry(file: Path, name: str, value: Any) -> _Entry:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise ArtifactError(f"{file}: tensor {name} has no dtype, shape and data_offsets in the header")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise ArtifactError(f"{file}: tensor {name} has dtype {value['dtype']!r}; allowed are {', '.join(DTYPES)}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _naturals(shape):
        raise ArtifactError(f"{file}: tensor {name} has shape {shape!r}; a list of integers >= 0 is needed")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ArtifactError(f"{file}: tensor {name} has data_offsets {offsets!r}; [begin, end] is needed")
    expected = dtype.itemsize
    for extent in shape:
        expected *= extent
    if offsets[1] - offsets[0] != expected:
        raise ArtifactError(
            f"{file}: tensor {name} of shape {shape} and dtype {value['dtype']} needs {expected} bytes, "
            f"its data_offsets give it {offsets[1] - offsets[0]}"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)


def _check_layout(file: Path, entries: dict[str, _Entry], available: int) -> None:
    """Tensors must cover the data area exactly: no overlap (aliases hide corruption), no gap, nothing past the end."""
    position, previous = 0, ""
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: (item[1][2], item[1][3])):
        if end > available:
            raise ArtifactError(
                f"{file} is truncated: tensor {name} ends at byte {end} of the data, the file has {available} of them"
            )
        if begin < position:
            raise ArtifactError(f"{file}: tensors {previous} and {name} overlap")
        if begin > position:
            raise ArtifactError(f"{file}: {begin - position} bytes before tensor {name} belong to no tensor")
        position, previous = end, name
    if position != available:
        raise ArtifactError(f"{file}: the last {available - position} bytes belong to no tensor")
