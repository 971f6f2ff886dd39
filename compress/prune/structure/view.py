"""What a ranking sees of the units that it compares."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from compress.core.statistics import Statistics


@dataclass
class Routing:
    """What the experts of one layer were sent over calibration text, and what they gave.

    Attributes:
        tokens: in all, padding left out.
        used: float32 `[experts]`: tokens that each was sent.
        weight: float32 `[experts]`: sum over its tokens of the weight that the router gave it.
        output: float32 `[experts]`: sum over its tokens of that weight times the Euclidean norm of what it gave; 0 unless needed.
    """

    tokens: int
    used: torch.Tensor
    weight: torch.Tensor
    output: torch.Tensor


@dataclass
class View:
    """Units of one layer, of one stack of layers, of the hidden state, or of the vocabulary.

    Attributes:
        count: units. kept: how many of them will be.
        columns: float32 `[out, units * each]`: the weight of the layer that reads them; None where no single layer does.
        weights: float32 `[units, numbers]` of each tensor that has slices of the units, the reader's first.
        statistics: of the reader's input; None unless the method needs it.
        sensitivity: float32 `[units]`: mean square of the derivative of a loss by a factor on the unit; None unless needed.
        influence: float32 `[units]`: how much a layer changes the hidden states, 0 to 2; None unless needed.
        states: float32 `[units]`: mean size of each dimension of the hidden states as layers read them; None unless needed.
        routing: what the experts were sent; None unless needed.
        occurrences: int64 `[units]`: how often a token is in the calibration text; None unless needed.
        generator: for what is random.
        notes: what a ranking wants to tell the report.
    """

    count: int
    kept: int
    generator: torch.Generator
    columns: torch.Tensor | None = None
    weights: list[torch.Tensor] = field(default_factory=list)
    statistics: Statistics | None = None
    sensitivity: torch.Tensor | None = None
    influence: torch.Tensor | None = None
    states: torch.Tensor | None = None
    routing: Routing | None = None
    occurrences: torch.Tensor | None = None
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def each(self) -> int:
        """Columns of a unit."""
        assert self.columns is not None
        return self.columns.shape[1] // self.count
