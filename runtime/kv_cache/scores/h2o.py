"""H2O: heavy hitters, the tokens that have gathered most attention over all queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.base import Accumulating


@dataclass(frozen=True)
class H2O(Accumulating):
    """Attention summed over all queries that were observed (H2O, arXiv 2306.14048).

    Attributes:
        recent: newest tokens that are always kept.
        normalize: divide by how many of the queries could look at a token; the paper's sum favours early ones.
    """

    name: ClassVar[str] = "h2o"
    sums_only: ClassVar[bool] = True
    normalize: bool = False

    def added(self, seen: Observation) -> torch.Tensor:
        return seen.received()

    def __call__(self, seen: Observation) -> torch.Tensor:
        score = self.total(seen)
        if self.normalize:
            score = score / (seen.ages + 1).clamp(min=1)
        return seen.finish(score, self.recent)
