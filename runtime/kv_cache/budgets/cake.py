"""CAKE: each layer's slice by how spread out and how changeable its attention is, cut again as later layers are seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Count, Positive
from runtime.kv_cache.budgets.base import LayerBudget, LayerFacts
from runtime.kv_cache.observation import Observation


@dataclass(frozen=True)
class Cake(LayerBudget):
    """Preference = entropy^(1/tau1) * variance^(1/tau2) of the window's attention; budgets cascade (CAKE, arXiv 2503.12491).

    Entropy is each query's over the tokens before the window, variance each such token's over the queries; both are summed up.

    Attributes:
        observe: queries of the window.
        entropy_temperature: tau1; larger flattens the effect of how attention is spread over tokens.
        variance_temperature: tau2; larger flattens the effect of how it changes from query to query.
    """

    name: ClassVar[str] = "cake"
    cascades: ClassVar[bool] = True
    observe: Count = 32
    entropy_temperature: Positive = 1.0
    variance_temperature: Positive = 1.0

    def prefer(self, seen: Observation) -> torch.Tensor:
        newest = seen.newest(self.observe)
        width = newest.queries.shape[2]
        past = (seen.ages >= width).unsqueeze(2)
        shape = (*seen.keys.shape[:2], seen.groups, seen.keys.shape[2])
        mean = torch.zeros(shape, device=seen.keys.device)
        square, spread = torch.zeros_like(mean), torch.zeros_like(mean)
        for _, weights in newest.weights():
            mean += weights.sum(3) / width
            square += weights.square().sum(3) / width
            spread -= torch.special.xlogy(weights, weights).sum(3) / width  # 0 log 0 is 0
        entropy = spread.masked_fill(~past, 0.0).sum(-1).mean((1, 2))
        change = (square - mean.square()).clamp(min=0).masked_fill(~past, 0.0).sum(-1).mean((1, 2))
        preferred: torch.Tensor = entropy.clamp(min=1e-6) ** (1 / self.entropy_temperature)
        return preferred * change.clamp(min=1e-9) ** (1 / self.variance_temperature)

    def shares(self, facts: list[LayerFacts], layers: int, mean: torch.Tensor, least: int) -> list[torch.Tensor]:
        total = torch.stack([fact.preference for fact in facts]).sum(0)
        return [layers * fact.preference / total for fact in facts]
