"""H2O: heavy hitters, the tokens that have gathered most attention over all queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.ranges import check_bounds
from runtime.kv_cache.observation import Observation


@dataclass(frozen=True)
class H2O:
    """Attention summed over all queries that were observed (H2O, arXiv 2306.14048).

    Attributes:
        recent: newest tokens that are always kept.
        normalize: divide by how many of the queries could look at a token; the paper's sum favours early ones.
    """

    name: ClassVar[str] = "h2o"
    recent: int = 32
    normalize: bool = False

    def __post_init__(self) -> None:
        check_bounds(self)

    def window(self, count: int) -> int:
        return count

    def kept(self) -> int:
        return self.recent

    def added(self, seen: Observation) -> torch.Tensor:
        total = torch.zeros(seen.keys.shape[:3], device=seen.keys.device)
        for _, weights in seen.weights():
            total += weights.sum(3).mean(2)
        return total

    def __call__(self, seen: Observation) -> torch.Tensor:
        score = self.added(seen) if seen.mass is None else seen.mass
        if self.normalize:
            score = score / (seen.ages + 1).clamp(min=1)
        return seen.finish(score, self.recent)
