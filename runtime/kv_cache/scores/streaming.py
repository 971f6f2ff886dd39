"""StreamingLLM: the first tokens, which attention sinks into, and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Natural
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.base import Score


@dataclass(frozen=True)
class Streaming(Score):
    """Sinks and recent tokens (StreamingLLM, arXiv 2309.17453).

    Attributes:
        sinks: first tokens of a sequence that are always kept.
    """

    name: ClassVar[str] = "streaming"
    sums_only: ClassVar[bool] = True
    sinks: Natural = 4

    def kept(self) -> int:
        return self.sinks

    def __call__(self, seen: Observation) -> torch.Tensor:
        # The oldest that are there are the first ever: they were always kept.
        oldest = seen.ages.amax(-1, keepdim=True)
        order = seen.ages.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        score = (oldest - seen.ages).float().masked_fill(order < self.sinks, float("inf"))
        return seen.finish(score, 1)
