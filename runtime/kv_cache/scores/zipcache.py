"""ZipCache's saliency: attention that a token gets on average from the probe queries that could see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Count
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.base import Score


@dataclass(frozen=True)
class Normalized(Score):
    """Attention summed over probe queries, divided by how many of them could look at a token (ZipCache, arXiv 2405.14256).

    The plain sum favours early tokens, which more queries see. Probes are the newest queries, which is what stays in memory while
    the prompt's own attention runs fused.

    Attributes:
        observe: probe queries, the newest.
    """

    name: ClassVar[str] = "normalized"
    sums_only: ClassVar[bool] = True
    observe: Count = 64

    def window(self, count: int) -> int:
        return min(self.observe, count)

    def __call__(self, seen: Observation) -> torch.Tensor:
        newest = seen.newest(self.observe)
        lookers = (seen.ages + 1).clamp(1, newest.queries.shape[2])
        return seen.finish(newest.received() / lookers, 1)
