"""Embeddings and rotations of a program."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from runtime.engines.program.operations import Program, Rotation
from runtime.layers.compressed_module import CompressedModule


def embed(program: Program, model: nn.Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What the first layer reads of tokens at positions, float32 `[rows, hidden]`, a tensor of its own."""
    found: torch.Tensor | None = None
    for table in program.embeddings:
        module = model.get_submodule(table.module)
        places = ids if table.offset is None else positions + table.offset
        packed = isinstance(module, CompressedModule)
        # Not called where it is plain: whatever else a model's own class multiplies by is in `scale`.
        rows = (module(places) if packed else functional.embedding(places, module.weight)).float()  # type: ignore[arg-type]
        rows = rows if table.scale == 1.0 else rows * table.scale
        found = rows if found is None else found + rows
    assert found is not None
    return found.contiguous()


def rotation_tables(program: Program, positions: int, device: torch.device) -> list[torch.Tensor]:
    """Cosines and sines of the first rotation, of the second, ..., float32 `[positions, rotary / 2]`."""
    places = torch.arange(positions, device=device)
    return [table for rotation in program.rotations for table in tables_at(rotation, places)]


def tables_at(rotation: Rotation, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines at positions `[...]`, float32 `[..., rotary / 2]`, every step rounded as transformers does."""
    frequencies = torch.tensor(rotation.frequencies, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * frequencies
    return angles.cos() * rotation.scale, angles.sin() * rotation.scale


def cosines_and_sines(given: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Float32 `[batch, positions, ...]` each, of what a rotary module gives: both, or complex numbers; None: neither."""
    if isinstance(given, torch.Tensor) and given.is_complex():
        return given.real.float(), given.imag.float()
    if isinstance(given, tuple) and len(given) == 2:
        return given[0].float(), given[1].float()
    return None


def find_rotation(
    module: nn.Module, positions: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> Rotation | None:
    """What a rotary module computes: it gave this for positions `[batch, tokens]`, of which the first is 0; None: something else.

    Cosines and sines `[batch, tokens, ...]` are `rotary / 2` numbers, or these twice: one after another, or each beside itself.
    """
    for frequencies in module.buffers():
        rotation = Rotation(tuple(frequencies.flatten().tolist()), float(cosine[0, 0, 0]))
        tables = tables_at(rotation, positions.to(cosine.device))
        for seen in (lambda x: x, lambda x: torch.cat((x, x), -1), lambda x: x.repeat_interleave(2, -1)):
            made = [seen(each) for each in tables]
            if made[0].shape[-1] == cosine.shape[-1] and all(
                torch.allclose(own, other, rtol=0.0, atol=1e-5) for own, other in zip(made, (cosine, sine), strict=True)
            ):
                return rotation
    return None
