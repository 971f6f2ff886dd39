"""PyramidKV: much for the first layers, little for the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.kv_cache.budgets.base import LayerFacts, NoPreference


@dataclass(frozen=True)
class Pyramid(NoPreference):
    """Budgets fall linearly with depth (PyramidKV, arXiv 2406.02069).

    Attributes:
        beta: the last layer keeps 1 / beta of the mean; the first as much more.
    """

    name: ClassVar[str] = "pyramid"
    beta: float = 20.0

    def shares(self, facts: list[LayerFacts], layers: int) -> list[torch.Tensor]:
        low = 1 / self.beta
        steps = max(1, layers - 1)
        slope = [1.0 if layers == 1 else (2 - low) - (2 - 2 * low) * index / steps for index in range(layers)]
        return [fact.preference * slope[index] for index, fact in enumerate(facts)]
