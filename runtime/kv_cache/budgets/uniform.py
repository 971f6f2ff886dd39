"""Uniform budgets: the same for every layer, the same for every head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.kv_cache.budgets.base import HeadBudget, LayerBudget, LayerFacts
from runtime.kv_cache.scores.base import NEVER


@dataclass(frozen=True)
class UniformLayers(LayerBudget):
    """Every layer keeps as much."""

    name: ClassVar[str] = "uniform"

    def shares(self, facts: list[LayerFacts], layers: int, mean: torch.Tensor, least: int) -> list[torch.Tensor]:
        return [fact.preference for fact in facts]


@dataclass(frozen=True)
class EqualHeads(HeadBudget):
    """Every head of a layer keeps as much."""

    name: ClassVar[str] = "equal"

    def counts(self, score: torch.Tensor, mean: torch.Tensor, least: int) -> torch.Tensor:
        there = (score > NEVER).sum(-1)
        return torch.minimum(mean.round().long().clamp(min=least)[:, None].expand_as(there), there)
