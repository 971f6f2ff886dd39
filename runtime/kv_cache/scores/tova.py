"""TOVA: what the very last query looks at, all heads of a layer together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.base import Score


@dataclass(frozen=True)
class Tova(Score):
    """Attention of the last token, averaged over all heads of the layer (TOVA, arXiv 2401.06104).

    Heads hold the same tokens only while their budgets are equal; where they are not, a head's own average counts.
    """

    name: ClassVar[str] = "tova"
    sums_only: ClassVar[bool] = True

    def __call__(self, seen: Observation) -> torch.Tensor:
        return seen.finish(seen.over_heads(seen.newest(1).received()), 1)
