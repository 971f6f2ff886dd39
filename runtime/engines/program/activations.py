"""Activation functions, told apart by what they make of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from runtime.engines.program.operations import Place

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
"""By name; the order is that of elementwise.h."""

_SAMPLE = 96  # columns that are looked at


@dataclass(frozen=True)
class Activated:
    """activation(gate) * other."""

    activation: str
    gate: Place
    other: Place | None


def find_activation(x: torch.Tensor, nodes: Sequence[tuple[str, torch.Tensor]]) -> Activated | None:
    """How numbers `[2, tokens, width]` come of the rows of nodes; None: in no known way."""
    width = x.shape[-1]
    columns = torch.linspace(0, width - 1, min(width, _SAMPLE)).long()
    wanted = x[..., columns].double()
    parts: list[tuple[Place, torch.Tensor]] = []
    for name, rows in nodes:
        parts += [
            (Place(name, at), rows[..., at + columns].double())
            for at in range(0, rows.shape[-1], width)
            if rows.shape[-1] % width == 0
        ]
    best: tuple[float, Activated] | None = None
    for activation, compute in ACTIVATIONS.items():
        for place, gate in parts:
            made = compute(gate)
            for other, up in [(None, None), *parts]:
                if other == place:
                    continue
                error = _error(made if up is None else made * up, wanted)
                if error < (1e-5 if best is None else best[0]):
                    best = error, Activated(activation, place, other)
    return None if best is None else best[1]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((found - wanted).norm(dim=-1) / (wanted.norm(dim=-1) + 1e-30)).max())
