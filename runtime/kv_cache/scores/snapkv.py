"""SnapKV: what the last queries of the prompt look at, smoothed over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.base import Windowed


@dataclass(frozen=True)
class SnapKV(Windowed):
    """Attention of an observation window, averaged over its queries and the heads of a group, then pooled (SnapKV, arXiv 2404.14469).

    Attributes:
        observe: queries of the window, which is always kept.
        kernel: neighbours that are averaged, odd.
    """

    name: ClassVar[str] = "snapkv"
    sums_only: ClassVar[bool] = True

    def __call__(self, seen: Observation) -> torch.Tensor:
        newest, width = self.observed(seen)
        # The window is kept anyway, and what it gives itself must not leak into its neighbours' average.
        score = (newest.received() / width).masked_fill(seen.ages < width, 0.0)
        return seen.finish(self.pooled(score), width)
