"""Layer-DefensiveKV: layers compete for one budget by the worst-case importance of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Probability
from runtime.kv_cache.budgets.base import LayerBudget, LayerFacts
from runtime.kv_cache.scores.base import NEVER


@dataclass(frozen=True)
class DefensiveLayers(LayerBudget):
    """A layer gets as much as it has tokens among the best of all layers (Layer-DefensiveKV, arXiv 2510.13334).

    Budgets cascade: the layers that the prompt has gone through share the whole budget, and give way to later ones that deserve it
    more. What a layer has lost by then is not among the best of more layers either, so that in the end each has as many tokens as
    if all scores had been ranked at once.

    Scores are compared as shares of the total of their layer's tokens, those that have left counted too, so that a layer of large
    values does not take everything; the paper's code compares them as they are, its values' norms being shares of all heads'.

    Attributes:
        safeguard: share of the mean that every layer gets at least; 0 in the paper.
    """

    name: ClassVar[str] = "defensive"
    cascades: ClassVar[bool] = True
    sums_only: ClassVar[bool] = True
    safeguard: Probability = 0.2

    def shares(self, facts: list[LayerFacts], layers: int, mean: torch.Tensor, least: int) -> list[torch.Tensor]:
        heads = facts[0].score.shape[1]
        whole = (mean.clamp(min=least) * heads * layers).round().long()
        safe = (mean * self.safeguard).clamp(min=least) * heads
        claims = [self._claims(fact, safe.round().long()) for fact in facts]
        ranked = torch.cat(claims, 1).sort(-1, descending=True).values
        bar = ranked.gather(1, (whole - 1).clamp(0, ranked.shape[1] - 1)[:, None])
        counts = torch.stack([(claim > bar).sum(-1) for claim in claims])
        # Of equal claims those of the first layers go before; minus infinity is no claim.
        ties = torch.stack([((claim == bar) & (claim > float("-inf"))).sum(-1) for claim in claims])
        left = whole - counts.sum(0) - (ties.cumsum(0) - ties)
        counts = counts + torch.minimum(left.clamp(min=0), ties)
        # What a short prompt does not need is there for what is decoded, in all layers alike.
        spare = (whole - counts.sum(0)).clamp(min=0) / len(facts)
        return list((counts + spare) / (mean * heads).clamp(min=1e-9))

    @staticmethod
    def _claims(fact: LayerFacts, safe: torch.Tensor) -> torch.Tensor:
        """What a layer's tokens compete with, float32 `[batch, kv_heads * n]`: infinity for the `safe[batch]` best of them."""
        score = fact.score.flatten(1)
        there = score > NEVER
        score = (score / fact.total.clamp(min=1e-20)[:, None]).masked_fill(~there, float("-inf"))
        rank = score.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return score.masked_fill((rank < safe[:, None]) & there, float("inf"))
