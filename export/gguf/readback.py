"""Reading the file back: every tensor dequantized by the `gguf` package and compared with the artifact's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch

from export.gguf import grids, metadata, permute, writer
from export.gguf.plan import DENSE_BYTES, Planned
from export.source import Source
from export.target import Job
from runtime.errors import CompressError

_ROWS = 4096  # dequantized at once


def compare(path: Path, job: Job, tensors: list[Planned]) -> dict[str, Any]:
    """`tensors` and `weights` (how many values) that are bit for bit the artifact's `(q - z) * scale`, `rounded` tensors, and the
    largest `error` of those.

    Raises:
        CompressError: a tensor is missing, one too many, or not what was written; a rounded one is further off than recorded.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    expected = {tensor.name for tensor in tensors}
    if metadata.rope_factors(job.source) is not None:
        expected.add(metadata.ROPE_FREQS)
    if set(found) != expected:
        raise CompressError(
            f"{path.name} has other tensors than were to be written: {sorted(set(found) ^ expected)[:3]}"
        )
    job.progress.phase("reading back", len(tensors))
    exact = weights = rounded = 0
    worst = 0.0
    for tensor in tensors:
        stored = found[tensor.name]
        if stored.tensor_type.name != tensor.type or tuple(int(n) for n in reversed(stored.shape)) != tuple(
            tensor.shape
        ):
            raise CompressError(f"{tensor.name} was read back as {stored.tensor_type.name} of {stored.shape.tolist()}")
        error = _error(job.source, tensor, stored.data)
        recorded = job.losses.get(tensor.module or tensor.parameter, 0.0)
        if error > recorded * (1 + 1e-6):
            raise CompressError(
                f"{tensor.name} is {error:.3g} away from the artifact's {tensor.parameter}, allowed {recorded:.3g}"
            )
        exact, rounded = exact + (error == 0), rounded + (error > 0)
        weights += stored.n_elements if error == 0 else 0
        worst = max(worst, error)
        job.progress.step(tensor.name)
    return {"tensors": exact, "weights": int(weights), "rounded": rounded, "error": worst}


def _error(source: Source, tensor: Planned, data: Any) -> float:
    """||W' - W|| / ||W|| of a stored tensor; 0 exactly where every value is the artifact's."""
    order = None if tensor.heads is None else permute.rows(tensor.shape[0], tensor.heads)
    changed = total = 0.0
    wanted = _wanted(source, tensor)
    if order is not None:
        wanted = wanted[order]
    rows = data.reshape(tensor.shape[0], -1)
    for start in range(0, tensor.shape[0], _ROWS):
        value = _dequantized(rows[start : start + _ROWS], tensor)
        reference = wanted[start : start + _ROWS].float().view(value.shape)
        if not torch.equal(value, reference):
            changed += float((value - reference).double().square().sum())
        total += float(reference.double().square().sum())
    return (changed / total) ** 0.5 if total else float(changed > 0)


def _wanted(source: Source, tensor: Planned) -> torch.Tensor:
    """The artifact's values, `tensor.shape`, in a dtype that holds them."""
    if tensor.module is None:
        return source.dense(tensor.parameter)
    weight = source.weight(tensor.module)
    if tensor.type in DENSE_BYTES and tensor.exact:
        return torch.cat([value.to(writer.DTYPES[tensor.type]) for _, value in grids.values(weight)])
    return torch.cat([value for _, value in grids.values(weight)])


def _dequantized(data: Any, tensor: Planned) -> torch.Tensor:
    raw = torch.from_numpy(numpy.array(data).view(numpy.uint8))  # a copy: the reader's arrays are the file itself
    if tensor.type in writer.DTYPES:
        return raw.view(writer.DTYPES[tensor.type]).float()
    return writer.decode(raw, tensor.type)
