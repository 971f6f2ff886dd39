"""DefensiveKV: the worst case over the observed queries instead of their mean, corrected by a prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.windowed import Windowed


@dataclass(frozen=True)
class Defensive(Windowed):
    """Largest attention weight over the window, at least a share of the head's mean, times the value's length (DefensiveKV).

    A mean forgets a token that one query needed badly; the maximum does not. The floor keeps what the window happened not to look
    at from counting as worthless. An evicted token takes weight times value out of the output, so the value's norm counts.

    Attributes:
        observe: queries of the window, which is always kept.
        kernel: neighbours over which the largest is taken too, odd.
        prior: share of the head's mean weight that every token has at least.
    """

    name: ClassVar[str] = "defensive"
    prior: float = 0.1

    def __call__(self, seen: Observation) -> torch.Tensor:
        newest = seen.newest(self.observe)
        width = newest.queries.shape[2]
        worst = torch.zeros(seen.keys.shape[:3], device=seen.keys.device)
        for _, weights in newest.weights():
            worst = torch.maximum(worst, weights.amax((2, 3)))
        worst = worst.masked_fill((seen.ages < width) & seen.held, 0.0)
        tokens = seen.held.sum(-1, keepdim=True).clamp(min=1)
        floor = self.prior * worst.sum(-1, keepdim=True) / tokens
        risk = functional.max_pool1d(torch.maximum(worst, floor), self.kernel, stride=1, padding=self.kernel // 2)
        lengths = seen.values.float().norm(dim=-1).masked_fill(~seen.held, 0.0)
        return seen.finish(risk * lengths, width)
