"""Budgets: how many tokens each head keeps, as a share of its layer times a share within the layer; by default all as many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Settings
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.base import NEVER


@dataclass(frozen=True)
class LayerFacts:
    """What a budget may look at, of one layer.

    Attributes:
        score: float32 `[batch, kv_heads, n]`, of the tokens that the layer still has: all, if it was not cut yet.
        preference: float32 `[batch]`, of the budget's own making.
        total: float32 `[batch]`, the sum of the finite scores of all tokens, before any was evicted.
    """

    score: torch.Tensor
    preference: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, score: torch.Tensor, preference: torch.Tensor) -> LayerFacts:
        """Of a layer that was not cut yet."""
        counted = score.isfinite() & (score > NEVER)
        return cls(score, preference, score.masked_fill(~counted, 0.0).sum((1, 2)))


class LayerBudget(Settings, ABC):
    """How the budget is spread over layers: a frozen dataclass, whose fields are the recipe's.

    Attributes:
        name: in recipes.
        cascades: what layers get depends on later layers, so that earlier ones are cut again while the prompt goes through.
        sums_only: `prefer` asks for no keys, values and queries, as `Score.sums_only`.
    """

    name: ClassVar[str]
    cascades: ClassVar[bool] = False
    sums_only: ClassVar[bool] = False

    def prefer(self, seen: Observation) -> torch.Tensor:
        """A layer's claim, float32 `[batch]`; layers are alike unless a budget says otherwise."""
        return torch.ones(seen.keys.shape[0], device=seen.keys.device)

    @abstractmethod
    def shares(self, facts: list[LayerFacts], layers: int, mean: torch.Tensor, least: int) -> list[torch.Tensor]:
        """For each layer seen so far a factor `[batch]` of the mean budget of a layer; over all layers they average 1 (or less).

        A budget that cascades may give the layers seen so far what is there for all; they are cut again.

        Args:
            facts: of the layers that the prompt has gone through.
            layers: of the model that share the budget.
            mean: tokens that a head of the model keeps on average, float64 `[batch]`.
            least: tokens that every head keeps, whatever its share.
        """


class HeadBudget(Settings, ABC):
    """How a layer's budget is spread over its key heads."""

    name: ClassVar[str]

    @abstractmethod
    def counts(self, score: torch.Tensor, mean: torch.Tensor, least: int) -> torch.Tensor:
        """Tokens that each head keeps, int64 `[batch, kv_heads]`.

        Args:
            score: float32 `[batch, kv_heads, n]`, minus infinity where there is no token, NEVER where it leaves anyway.
            mean: float64 `[batch]`, tokens of a head on average.
            least: that every head gets if it has them.
        """


@dataclass(frozen=True)
class UniformLayers(LayerBudget):
    """Every layer keeps as much."""

    name: ClassVar[str] = "uniform"
    sums_only: ClassVar[bool] = True

    def shares(self, facts: list[LayerFacts], layers: int, mean: torch.Tensor, least: int) -> list[torch.Tensor]:
        return [fact.preference for fact in facts]


@dataclass(frozen=True)
class EqualHeads(HeadBudget):
    """Every head of a layer keeps as much."""

    name: ClassVar[str] = "equal"

    def counts(self, score: torch.Tensor, mean: torch.Tensor, least: int) -> torch.Tensor:
        there = (score > NEVER).sum(-1)
        return torch.minimum(mean.round().long().clamp(min=least)[:, None].expand_as(there), there)
