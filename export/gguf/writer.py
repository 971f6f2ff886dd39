"""Writer of a GGUF file, one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import torch

from export.gguf import families, grids, metadata, tokenizer
from export.gguf.plan import DTYPES, Planned
from export.gguf.tokenizer import Vocabulary
from export.source import Source
from export.target import Job
from runtime.errors import RequestError


def write(path: Path, job: Job, tensors: list[Planned], vocabulary: Vocabulary | None) -> None:
    """Metadata and what every tensor will be first, then the tensors one by one.

    Raises:
        RequestError: a value does not fit the type that was asked for.
    """
    import gguf

    source, factors = job.source, metadata.rope_factors(job.source)
    with closing(gguf.GGUFWriter(path, families.find(source).architecture)) as writer:
        metadata.write(writer, source, tensors)
        tokenizer.write(writer, vocabulary)
        if factors is not None:
            _announce(writer, metadata.ROPE_FREQS, tuple(factors.shape), "F32", factors.numel() * 4)
        for tensor in tensors:
            _announce(writer, tensor.name, tensor.shape, tensor.type, tensor.bytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors.numpy())
        job.progress.phase("writing tensors", len(tensors))
        for tensor in tensors:
            data, error = encode(source, tensor)
            if error:
                job.losses[tensor.module or tensor.parameter] = error
            writer.write_tensor_data(data.numpy())
            job.progress.step(tensor.name)


def encode(source: Source, tensor: Planned) -> tuple[torch.Tensor, float]:
    """The tensor's bytes (uint8, rows in GGUF's order) and the relative error ||W' - W|| / ||W|| of its values."""
    import gguf

    if tensor.module is None:
        stored = source.dense(tensor.parameter)
        data = cast(stored, tensor)
        error = 0.0 if _holds(stored.dtype, tensor.type) else loss([(stored.float(), decode(data, tensor.type))])
    else:
        weight = source.weight(tensor.module)
        if tensor.type in DTYPES:
            data = torch.cat([cast(value, tensor) for _, value in grids.values(weight)])
        elif tensor.anew:
            kind = gguf.GGMLQuantizationType[tensor.type]
            parts = [gguf.quants.quantize(value.numpy(), kind) for _, value in grids.values(weight)]
            data = torch.from_numpy(numpy.concatenate(parts))
        else:
            data = grids.pack(weight, tensor.type)
        # What the artifact has in a dense type is no loss: it is what loading it in that type gives.
        pairs = ((value, decode(data[rows], tensor.type)) for rows, value in grids.values(weight))
        error = 0.0 if tensor.exact else loss(pairs)
    if tensor.heads is not None:
        data = data[families.permuted_rows(tensor.shape[0], tensor.heads)]
    return data.contiguous(), error


def cast(value: torch.Tensor, tensor: Planned) -> torch.Tensor:
    """A float tensor as bytes of `tensor.type`: uint8 `[rows, bytes of a row]`, one row for a vector's every value."""
    result = value.to(DTYPES[tensor.type])
    # only a narrower type can lose a value; looking for one takes memory, so it is not done otherwise
    if not _holds(value.dtype, tensor.type) and bool(value.isfinite().all()) and not bool(result.isfinite().all()):
        raise RequestError(f"{tensor.parameter} has values beyond {tensor.type}; choose dense=f32 or dense=bf16")
    return result.contiguous().view(-1, result.shape[-1] if result.ndim > 1 else 1).view(torch.uint8)


def decode(data: torch.Tensor, kind: str) -> torch.Tensor:
    """Float32 values of rows of bytes; of blocks by the `gguf` package (which has llama.cpp's own definition)."""
    import gguf

    if kind in DTYPES:
        return data.view(DTYPES[kind]).float()
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind]))


def _holds(dtype: torch.dtype, kind: str) -> bool:
    return kind == "F32" or DTYPES[kind] == dtype


def loss(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """||W' - W|| / ||W|| over parts of a matrix (W, W'), float32; 0 exactly where all values are equal."""
    changed = total = 0.0
    for before, after in pairs:
        after = after.view(before.shape)
        if not torch.equal(before, after):
            changed += float((after - before).double().square().sum())
        total += float(before.double().square().sum())
    return (changed / total) ** 0.5 if total else float(changed > 0)


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: str, size: int) -> None:
    import gguf

    # The package reads the shape of a byte array as bytes: rows keep theirs, the last dimension is what a row takes.
    as_bytes = (*shape[:-1], size // math.prod(shape[:-1]))
    writer.add_tensor_info(name, as_bytes, numpy.dtype(numpy.uint8), size, gguf.GGMLQuantizationType[kind])
