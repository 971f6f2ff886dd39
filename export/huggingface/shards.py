"""Safetensors files written tensor by tensor: a header made from what is known beforehand, then every part where it belongs.

safetensors' own writer wants all tensors of a file in memory. Here a part (one module, one tensor) is made, written and let go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from export.source import Source
from runtime.checkpoint.checkpoint import INDEX, SINGLE
from runtime.checkpoint.headers import pack_header
from runtime.errors import CompressError
from runtime.formats import TensorSpec

LIMIT = 5_000_000_000


@dataclass(frozen=True)
class Part:
    """Tensors that are made together.

    Attributes:
        specs: {full name: shape and dtype}.
        make: makes them; they must be as `specs` says.
    """

    specs: Mapping[str, TensorSpec]
    make: Callable[[], Mapping[str, torch.Tensor]]

    @property
    def bytes(self) -> int:
        """Size of all tensors of the part, bytes."""
        return sum(spec.bytes for spec in self.specs.values())


def stored_part(source: Source, name: str, spec: TensorSpec | None = None) -> Part:
    """A tensor of the artifact as it is stored."""
    checkpoint = source.artifact.checkpoint
    spec = spec or TensorSpec(tuple(checkpoint.shape(name)), checkpoint.dtype(name))
    return Part({name: spec}, lambda: {name: checkpoint.get(name)})


def write(folder: Path, parts: Sequence[Part], done: Callable[[str], None], limit: int = LIMIT) -> dict[str, str]:
    """Write all parts into files of at most `limit` bytes (a larger part has a file of its own); returns {tensor: file}.

    One file is `model.safetensors`; several are numbered as transformers does, with an index. `done` is called after each part
    with the name of its first tensor.
    """
    files = _divide(parts, limit)
    where: dict[str, str] = {}
    for number, members in enumerate(files, 1):
        name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / name, members, done)
        where |= {tensor: name for part in members for tensor in part.specs}
    if len(files) > 1:
        size = sum(part.bytes for part in parts)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return where


def _divide(parts: Sequence[Part], limit: int) -> list[list[Part]]:
    files: list[list[Part]] = [[]]
    size = 0
    for part in parts:
        if files[-1] and size + part.bytes > limit:
            files.append([])
            size = 0
        files[-1].append(part)
        size += part.bytes
    return files


def _write_file(path: Path, parts: Sequence[Part], done: Callable[[str], None]) -> None:
    specs = {name: spec for part in parts for name, spec in part.specs.items()}
    header, starts = pack_header({name: (spec.shape, spec.dtype) for name, spec in specs.items()})
    with path.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + sum(part.bytes for part in parts))
        for part in parts:
            tensors = part.make()
            for name, spec in part.specs.items():
                tensor = tensors[name].contiguous()
                if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                    raise CompressError(
                        f"tensor {name} was made as {tensor.dtype} {list(tensor.shape)}, planned was {spec.dtype} "
                        f"{list(spec.shape)}; this is a bug"
                    )
                stream.seek(starts[name])
                if tensor.numel():
                    stream.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
            done(next(iter(part.specs)))
