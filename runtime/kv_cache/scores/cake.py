"""CAKE's indicator: what the last queries of the prompt look at, and what they look at unevenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import NonNegative
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.base import Windowed


@dataclass(frozen=True)
class CakeIndicator(Windowed):
    """Mean of a window's attention plus gamma times its variance over the queries, pooled over neighbours (CAKE, arXiv 2503.12491).

    A token that some queries need and others do not may be needed again, although its mean is small; so it counts for more than
    with SnapKV, which is what gamma = 0 gives.

    Attributes:
        observe: queries of the window, which is always kept.
        kernel: neighbours that are averaged, odd.
        gamma: weight of the variance; 200 as in the paper's code, since variances of attention are small.
    """

    name: ClassVar[str] = "cake"
    gamma: NonNegative = 200.0

    def __call__(self, seen: Observation) -> torch.Tensor:
        newest, width = self.observed(seen)
        shape = (*seen.keys.shape[:2], seen.groups, seen.keys.shape[2])
        total = torch.zeros(shape, device=seen.keys.device)
        square = torch.zeros_like(total)
        for _, weights in newest.weights():
            total += weights.sum(3)
            square += weights.square().sum(3)
        mean = total / width
        variance = (square - width * mean.square()).clamp(min=0) / max(1, width - 1)  # unbiased; none of a single query
        score = (mean + self.gamma * variance).mean(2)
        # The window is kept anyway, and what it gives itself must not leak into its neighbours' average.
        score = score.masked_fill(seen.ages < width, 0.0)
        return seen.finish(self.pooled(score), width)
