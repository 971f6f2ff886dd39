"""DefensiveKV: the worst case over the observed queries instead of their mean, corrected by a prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Fraction
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.base import Windowed


@dataclass(frozen=True)
class Defensive(Windowed):
    """Largest pooled attention weight over the window, at least the head's mean, times the value's length (DefensiveKV, arXiv 2510.13334).

    A mean forgets a token that one query needed badly; the maximum, over the queries of the window and the query heads of a key
    head, does not. Each query's weights are first averaged over neighbours, and sum up to what they did. The floor keeps what the
    window happened not to look at from counting as worthless. An evicted token takes weight times value out of the output, so the
    value's length counts.

    The paper's code weighs by the L1 norm of the value after the output projection, as a share of all heads' at that token. Scores
    see keys, values and queries, no weights of the model: here it is the value's own L2 norm, to which the L1 norm after a random
    projection is proportional. Nor is there CriticalKV's first stage, which before all others takes the tokens that make up 90 %
    of the mean attention, as many as the budget has room for: it needs the budget, which no score sees.

    Attributes:
        observe: queries of the window, which is always kept.
        kernel: neighbours that are averaged, odd.
        prior: share of the mean of a head's worst cases that every token has at least; 1 in the paper.
    """

    name: ClassVar[str] = "defensive"
    prior: Fraction = 1.0

    def __call__(self, seen: Observation) -> torch.Tensor:
        newest, width = self.observed(seen)
        past = seen.ages >= width  # the window is kept anyway, and what it gives itself is left out
        before = past[:, :, None, None]
        worst = torch.zeros(seen.keys.shape[:3], device=seen.keys.device)
        for _, weights in newest.weights():
            own = weights.masked_fill(~before, 0.0)
            pooled = self.pooled(own.flatten(0, 3)[:, None])
            pooled = pooled.view_as(own).masked_fill(~before, 0.0)
            # Pooling loses weight at both ends.
            pooled *= own.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp(min=1e-30)
            worst = torch.maximum(worst, pooled.amax((2, 3)))
        mean = worst.sum(-1, keepdim=True) / past.sum(-1, keepdim=True).clamp(min=1)
        risk = torch.maximum(worst, self.prior * mean)
        return seen.finish(risk * seen.values.float().norm(dim=-1), width)
