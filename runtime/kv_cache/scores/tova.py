"""TOVA: what the very last query looks at, all heads of a layer together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.kv_cache.observation import Observation


@dataclass(frozen=True)
class Tova:
    """Attention of the last token, averaged over all heads of the layer (TOVA, arXiv 2401.06104).

    Heads hold the same tokens only while their budgets are equal; where they are not, a head's own average counts.
    """

    name: ClassVar[str] = "tova"

    def window(self, count: int) -> int:
        return 1

    def kept(self) -> int:
        return 1

    def __call__(self, seen: Observation) -> torch.Tensor:
        _, weights = next(seen.newest(1).weights())
        score = weights[..., 0, :].mean(2)
        alike = bool((seen.ages == seen.ages[:, :1]).all())
        if alike:
            score = score.mean(1, keepdim=True).expand_as(score)
        return seen.finish(score, 1)
