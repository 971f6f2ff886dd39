"""AdaKV: the heads of a layer share one budget, and the best tokens of all of them are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Probability
from runtime.kv_cache.budgets.base import HeadBudget
from runtime.kv_cache.scores.base import NEVER


@dataclass(frozen=True)
class AdaptiveHeads(HeadBudget):
    """Tokens of all heads compete by score; a head keeps at least a share of the mean (AdaKV, arXiv 2407.11550).

    Attributes:
        safeguard: share of the mean that each head keeps at least.
    """

    name: ClassVar[str] = "adaptive"
    safeguard: Probability = 0.2

    def counts(self, score: torch.Tensor, mean: torch.Tensor, least: int) -> torch.Tensor:
        there = score > NEVER
        safe = torch.minimum((mean * self.safeguard).long().clamp(min=least)[:, None], there.sum(-1))
        rank = score.argsort(-1, descending=True).argsort(-1)
        # Each head's safe tokens come before anything else; the total is then what the best of all heads make of it.
        ranked = score.masked_fill(rank < safe.unsqueeze(-1), float("inf")).masked_fill(~there, float("-inf"))
        total = torch.minimum((mean.double().clamp(min=least) * score.shape[1]).round().long(), there.sum((1, 2)))
        among = ranked.flatten(1).argsort(-1, descending=True).argsort(-1)
        return (among < total[:, None]).view_as(score).sum(-1)
