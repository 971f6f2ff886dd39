"""PyramidKV: much for the first layers, little for the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt

from runtime.kv_cache.budgets.base import LayerBudget, LayerFacts


@dataclass(frozen=True)
class Pyramid(LayerBudget):
    """Budgets fall linearly with depth (PyramidKV, arXiv 2406.02069).

    Attributes:
        beta: the last layer keeps 1 / beta of the mean, the first as much more; all keep the mean where 1 / beta of it is less than what a
            head always keeps.
    """

    name: ClassVar[str] = "pyramid"
    sums_only: ClassVar[bool] = True
    beta: Annotated[float, Gt(1)] = 20.0

    def shares(self, facts: list[LayerFacts], layers: int, mean: torch.Tensor, least: int) -> list[torch.Tensor]:
        # What the first layer cannot use, since it has no more tokens, the last ones get.
        there = (facts[-1].score > float("-inf")).sum(-1).amax(1).double()  # the last one is not cut yet
        most = torch.minimum(torch.full_like(mean, 2 - 1 / self.beta), (there / mean.clamp(min=1)).clamp(min=1))
        # A pyramid whose top would be less than what every head keeps anyway is none.
        most = torch.where(mean * (2 - most) >= least, most, 1.0)
        slope = [2 * (most - 1) * index / max(1, layers - 1) for index in range(layers)]
        return [
            fact.preference if layers == 1 else (fact.preference * (most - slope[index])).float()
            for index, fact in enumerate(facts)
        ]
