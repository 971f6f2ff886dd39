"""Embeddings and rotations of a program, computed by the model's own modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from runtime.engines.program.operations import Program


def embed(program: Program, model: nn.Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What the first layer reads of tokens at positions, float32 `[rows, hidden]`, a tensor of its own."""
    found: torch.Tensor | None = None
    for table in program.embeddings:
        module = model.get_submodule(table.module)
        places = ids if table.offset is None else positions + table.offset
        plain = isinstance(module, nn.Embedding)  # whatever else it multiplies by is in `scale`
        rows = (functional.embedding(places, module.weight) if plain else module(places)).float()  # type: ignore[arg-type]
        rows = rows if table.scale == 1.0 else rows * table.scale
        found = rows if found is None else found + rows
    assert found is not None
    return found.contiguous()


def rotation_tables(program: Program, model: nn.Module, positions: int) -> list[torch.Tensor]:
    """Cosines and sines of the first rotation, of the second, ..., float32 `[positions, rotary / 2]`."""
    found = []
    for rotation in program.rotations:
        module: Any = model.get_submodule(rotation.module)
        device = next(module.buffers()).device
        with torch.inference_mode():
            like = torch.empty(0, dtype=torch.float32, device=device)
            both = cosines_and_sines(module(like, torch.arange(positions, device=device)[None], *rotation.arguments))
        assert both is not None
        found += [once(each[0], rotation.repeats).contiguous() for each in both]
    return found


def cosines_and_sines(given: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Float32 `[batch, positions, ...]` each, of what a rotary module gives: both, or complex numbers; None: neither."""
    if isinstance(given, torch.Tensor) and given.is_complex():
        return given.real.float(), given.imag.float()
    if isinstance(given, tuple) and len(given) == 2:
        return given[0].float(), given[1].float()
    return None


def once(table: torch.Tensor, repeats: str) -> torch.Tensor:
    """Cosines or sines `[..., rotary / 2]` without the repetition that a model's have (`Rotation.repeats`)."""
    half = table.shape[-1] // 2
    return table[..., ::2] if repeats == "each" else table[..., :half] if repeats == "half" else table
