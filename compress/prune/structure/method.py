"""Ranking method of structure pruning, and the view that it has of the units that it compares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from compress.core.statistics import Statistics
from compress.prune.structure.config import Remove, StructureConfig

# Of a view, what a method does not need: it is declared in `StructureMethod.needs`, and collected for those methods alone.
_UNKNOWN: Any = None
Need = Literal["hessian", "ranges", "gradients", "influence", "states", "routing", "expert_outputs", "occurrences"]


@dataclass
class Routing:
    """What the experts of one layer were sent over calibration sequences, and what they gave.

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

    @classmethod
    def none(cls, experts: int) -> Routing:
        """Of no tokens yet."""
        return cls(0, torch.zeros(experts), torch.zeros(experts), torch.zeros(experts))


@dataclass
class View:
    """Units of one layer, of one stack of layers, of the hidden state, or of the vocabulary.

    Attributes:
        count: units. kept: how many of them will be.
        generator: for what is random.
        columns: float32 `[out, units * each]`: the weight of the layer that reads them; None where no single layer does.
        weights: float32 `[units, numbers]` of each tensor that has slices of the units, the reader's first; read as they are iterated.
        statistics: of the reader's input; None unless the method needs it.
        sensitivity: float32 `[units]`: mean square of the derivative of a loss by a factor on the unit; None unless needed.
        influence: float32 `[units]`: how much a layer changes the hidden states, 0 to 2; None unless needed.
        states: float32 `[units]`: mean size of each dimension of the hidden states as layers read them; None unless needed.
        routing: what the experts were sent; None unless needed.
        occurrences: int64 `[units]`: how often a token is in the calibration sequences; None unless needed.
        notes: what a ranking wants to tell the report.
    """

    count: int
    kept: int
    generator: torch.Generator
    columns: torch.Tensor = _UNKNOWN
    weights: Iterable[torch.Tensor] = ()
    statistics: Statistics = _UNKNOWN
    sensitivity: torch.Tensor = _UNKNOWN
    influence: torch.Tensor = _UNKNOWN
    states: torch.Tensor = _UNKNOWN
    routing: Routing = _UNKNOWN
    occurrences: torch.Tensor = _UNKNOWN
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def each(self) -> int:
        """Columns of a unit."""
        return self.columns.shape[1] // self.count


@dataclass(frozen=True)
class StructureMethod:
    """One method of `compress.prune.structure.METHODS`.

    Attributes:
        config: of its fields, the first of which, `method`, says its name. summary, paper: as of `compress.core.method.Method`.
        rank: `(view, config) -> [units]` float, larger for what matters more; the units with the least are removed.
        removes: the axes whose units it can rank.
        needs: what must be known: of the readers' inputs "ranges" or "hessian"; "gradients" of a loss by each unit; "influence" of each
            layer; "states", the hidden states; "routing", what experts are sent; "expert_outputs", what they give; "occurrences" of tokens.
        pairwise: every unit is compared with every other, in matrices of channels by channels.
    """

    config: type[StructureConfig]
    rank: Callable[[View, Any], torch.Tensor]
    summary: str
    paper: str
    removes: Collection[Remove]
    needs: Collection[Need] = ()
    pairwise: bool = False

    @property
    def name(self) -> str:
        """As a recipe says it."""
        return str(self.config.model_fields["method"].default)
