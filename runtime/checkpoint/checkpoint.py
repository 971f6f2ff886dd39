"""Checkpoint: a Hugging Face directory whose tensors are read one at a time.

Opening one reads and checks headers only. Any layout of safetensors files works: one `model.safetensors`, shards with
an index, or shards without. Pickles are never opened.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint.config_fields import check_config
from runtime.checkpoint.guard import is_guard
from runtime.checkpoint.headers import Header, TensorEntry, read_header
from runtime.checkpoint.locate import check_inside, reading, resolve
from runtime.errors import ArtifactError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MAXIMUM_JSON_BYTES = 256_000_000
SAMPLE_BYTES = 64 * 1024
SAMPLES = 16
_PAGE = 4096  # bytes that a disk reads at least


class Checkpoint:
    """Tensors of a checkpoint directory (or hub id), found by name and read lazily.

    Attributes:
        path: the directory.
        config: config.json as a dictionary.
        headers: {file name relative to `path`: checked header}.

    Raises:
        ArtifactError: anything about the directory that makes it unusable; the message says which file and tensor.
    """

    def __init__(self, path: str | Path, trust_remote_code: bool = False) -> None:
        self.path = resolve(path, trust_remote_code)
        self.config = self._read_config()
        files, index = self._find_files()
        self.headers: dict[str, Header] = {name: read_header(self.path / name) for name in files}
        self._tensors = self._merge(index)
        self.total_bytes = sum(entry.nbytes for entry in self._tensors.values())

    # ---------------------------------------------------------------- what is there
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return list(self._tensors)

    def has(self, name: str) -> bool:
        """Whether a tensor of this name is stored."""
        return name in self._tensors

    def entry(self, name: str) -> TensorEntry:
        """Header entry of a tensor; `ArtifactError` without one."""
        try:
            return self._tensors[name]
        except KeyError:
            raise ArtifactError(f"{self.path} has no tensor {name}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor; `ArtifactError` without one."""
        return self.entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a stored tensor; `ArtifactError` without one."""
        return self.entry(name).dtype

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor in its file."""
        return self.entry(name).nbytes

    def held_bytes(self, name: str) -> int:
        """Bytes of the tensor once it is read: of 8-bit floats with scales, those of the weights that they stand for."""
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def files(self) -> list[Path]:
        """The safetensors files, sorted by name."""
        return [self.path / name for name in self.headers]

    # ---------------------------------------------------------------- content
    def get(self, name: str) -> torch.Tensor:
        """Read one tensor into memory of its own (CPU, the dtype and shape on disk).

        By reads and not by mmap: memory is allocated and freed as counted, and a file that shrinks meanwhile raises an
        error instead of SIGBUS.
        """
        return self._read(self.entry(name))

    def get_item(self, name: str, index: int) -> torch.Tensor:
        """Item `index` of a tensor along its first dimension; nothing else is read."""
        entry = self.entry(name)
        size = entry.nbytes // entry.shape[0]
        return self._read(replace(entry, shape=entry.shape[1:], offset=entry.offset + index * size, nbytes=size))

    def get_part(self, name: str, index: Sequence[slice]) -> torch.Tensor:
        """Part of a tensor, a slice without a step for each dimension.

        Rows outside of it are not read; nor are columns of a matrix, unless those of the part are so few that the disk reads the others
        all the same.
        """
        entry = self.entry(name)
        (first, stop, _), *_ = (each.indices(size) for each, size in zip(index, entry.shape, strict=True))
        row, count = entry.nbytes // max(1, entry.shape[0]), max(0, stop - first)
        rows = replace(entry, shape=(count, *entry.shape[1:]), offset=entry.offset + first * row, nbytes=count * row)
        if len(index) == 2:
            begin, end, _ = index[1].indices(entry.shape[1])
            size = row // max(1, entry.shape[1])
            if count and _PAGE <= (end - begin) * size < row:
                return self._read(rows, (begin * size, end * size))
        found = self._read(rows)
        part = found[(slice(None), *index[1:])]
        return found if part.shape == found.shape else part.clone(memory_format=torch.contiguous_format)

    def _read(self, entry: TensorEntry, span: tuple[int, int] | None = None) -> torch.Tensor:
        """A tensor; of a matrix only the bytes `span` of each row, if given."""
        rows, row = (1, entry.nbytes) if span is None else (entry.shape[0], entry.nbytes // entry.shape[0])
        begin, end = span or (0, row)
        buffer = torch.empty(rows * (end - begin), dtype=torch.uint8)
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        with reading(entry.file), entry.file.open("rb", buffering=0) as stream:
            for number in range(rows):
                stream.seek(entry.offset + number * row + begin)
                done, wanted = number * (end - begin), (number + 1) * (end - begin)
                while done < wanted:
                    count = stream.readinto(view[done:wanted])
                    if not count:
                        text = f"{entry.file} is truncated: it ended while tensor {entry.name} was being read"
                        raise ArtifactError(text)
                    done += count
        return buffer.view(entry.dtype).reshape(entry.shape if span is None else (rows, -1))

    def fingerprint(self) -> str:
        """SHA-256 (hex) of config.json, all headers, all file sizes and up to 16 samples of 64 KiB of each file's data.

        Equal content gives equal fingerprints wherever the directory lies; large checkpoints take milliseconds too.
        """
        digest = hashlib.sha256()
        _feed(digest, (self.path / "config.json").read_bytes())
        for name, header in self.headers.items():
            _feed(digest, name.encode())
            _feed(digest, str(header.size).encode())
            _feed(digest, header.raw)
            with header.file.open("rb") as stream:
                for start in _sample_starts(header.data_start, header.size):
                    stream.seek(start)
                    _feed(digest, stream.read(SAMPLE_BYTES))
        return digest.hexdigest()

    # ---------------------------------------------------------------- reading the directory
    def _read_config(self) -> dict[str, Any]:
        file = self.path / "config.json"
        if not file.is_file():
            nested = sorted(p.parent for p in self.path.glob("*/config.json"))
            hint = f"; {nested[0]} has one" if nested else ""
            raise ArtifactError(f"{self.path} is no checkpoint: it has no config.json{hint}")
        config = read_json(file)
        check_config(config, str(file))
        return config

    def _find_files(self) -> tuple[list[str], dict[str, str] | None]:
        """Names of the safetensors files, and {tensor: file} where an index says so."""
        # The order of transformers: a single file wins over an index.
        if (self.path / SINGLE).exists() or (self.path / SINGLE).is_symlink():
            return [SINGLE], None
        if (self.path / INDEX).exists():
            index = self._read_index()
            return sorted(set(index.values())), index
        files = sorted(p.name for p in self.path.glob("*.safetensors"))
        if not files:
            raise ArtifactError(self._nothing_found())
        return files, None

    def _read_index(self) -> dict[str, str]:
        content = read_json(self.path / INDEX)
        index = content.get("weight_map")
        if not isinstance(index, dict) or not index or not all(isinstance(v, str) for v in index.values()):
            raise ArtifactError(f"{self.path / INDEX} has no weight_map of tensor names to file names")
        for name, tensor in {name: tensor for tensor, name in index.items()}.items():
            check_inside(name, f"{self.path / INDEX}, tensor {tensor},")
            if not (self.path / name).exists():
                raise ArtifactError(f"{self.path}: shard {name} is missing: the index names it for tensor {tensor}")
        return index

    def _nothing_found(self) -> str:
        pickles = sorted({p.name for pattern in PICKLES for p in self.path.glob(pattern)})
        if not pickles:
            return f"{self.path} has no weights: no *.safetensors file is in it"
        return (
            f"{self.path} holds its weights as pickle ({pickles[0]}), which can run code when opened and is refused; "
            "convert it with: "
            "from transformers import AutoModelForCausalLM; "
            f"AutoModelForCausalLM.from_pretrained({str(self.path)!r}, weights_only=True)"
            f".save_pretrained({str(self.path) + '-safetensors'!r})"
        )

    def _merge(self, index: dict[str, str] | None) -> dict[str, TensorEntry]:
        tensors: dict[str, TensorEntry] = {}
        passed: dict[str, TensorEntry] = {}
        for header in self.headers.values():
            for name, entry in header.tensors.items():
                if is_guard(entry.shape, entry.dtype):
                    passed[name] = entry
                    continue
                if name in tensors:
                    files = f"{tensors[name].file.name} and {entry.file.name}"
                    raise ArtifactError(f"{self.path}: tensor {name} is stored twice, in {files}")
                tensors[name] = entry
        for name, file in (index or {}).items():
            entry_of = tensors.get(name) or passed.get(name)
            if entry_of is None or entry_of.file != self.path / file:
                raise ArtifactError(
                    f"{self.path}: tensor {name} is missing: the index says it is in {file}, which does not have it"
                )
        if not tensors:
            raise ArtifactError(f"{self.path}: its safetensors files hold no tensor")
        return dict(sorted(tensors.items()))


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from disk, or ArtifactError."""
    content = read_json_value(file)
    if not isinstance(content, dict):
        raise ArtifactError(f"{file} must hold a JSON object, it holds a {type(content).__name__}")
    return content


def read_json_value(file: Path) -> Any:
    """The content of a JSON file, whatever it is, or ArtifactError."""
    try:
        with reading(file):
            if file.stat().st_size > MAXIMUM_JSON_BYTES:
                raise ArtifactError(f"{file} is larger than {MAXIMUM_JSON_BYTES} bytes, which no such file is")
            return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{file} is no valid JSON: {error}") from error


def _feed(digest: Any, content: bytes) -> None:
    digest.update(len(content).to_bytes(8, "little"))  # lengths keep neighbouring fields apart
    digest.update(content)


def _sample_starts(begin: int, end: int) -> list[int]:
    """Evenly spaced, the first at `begin` and the last touching `end`."""
    last = max(begin, end - SAMPLE_BYTES)
    return sorted({begin + (last - begin) * i // (SAMPLES - 1) for i in range(SAMPLES)})
