"""Layer-DefensiveKV: layers compete for one budget by the worst-case importance of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.kv_cache.budgets.base import LayerFacts, NoPreference
from runtime.kv_cache.scores.base import NEVER


@dataclass(frozen=True)
class DefensiveLayers(NoPreference):
    """A layer gets as much as it has tokens among the best of all layers seen so far (Layer-DefensiveKV).

    Scores are compared as shares of their layer's total, so that a layer of large values does not take everything; budgets cascade,
    since what later layers deserve is known only when the prompt has reached them.

    Attributes:
        safeguard: share of the mean that every layer gets at least.
    """

    name: ClassVar[str] = "defensive"
    cascades: ClassVar[bool] = True
    safeguard: float = 0.2

    def shares(self, facts: list[LayerFacts], layers: int, mean: torch.Tensor, least: int) -> list[torch.Tensor]:
        heads = facts[0].score.shape[1]
        # Of the whole budget, what is not yet asked for by layers to come is theirs at an equal share.
        total = mean * heads * len(facts)
        flat = [fact.score.flatten(1) for fact in facts]
        normed = []
        for score in flat:
            chosen = score.masked_fill(~score.isfinite() | (score <= NEVER), 0.0)
            normed.append(
                (chosen / chosen.sum(-1, keepdim=True).clamp(min=1e-20)).masked_fill(
                    score == float("inf"), float("inf")
                )
            )
        every = torch.cat(normed, 1)
        ranked = every.sort(-1, descending=True).values
        place = (total.long() - 1).clamp(0, ranked.shape[1] - 1)
        bar = ranked.gather(1, place[:, None])
        counts = torch.stack([(score >= bar.clamp(min=1e-30)).sum(-1) for score in normed]).double()
        counts = counts.clamp(min=0) + self.safeguard * mean * heads / (1 - self.safeguard)
        return list((counts * len(facts) / counts.sum(0)).float())
