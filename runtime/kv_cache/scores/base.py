"""What a score is: how much each cached token matters to the queries to come."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from runtime.kv_cache.observation import Observation


class Score(Protocol):
    """One method. A file each in this folder; its fields are those of the recipe.

    Attributes:
        name: in recipes.
    """

    name: ClassVar[str]

    def window(self, count: int) -> int:
        """How many of the newest queries it looks at, of `count` that there are."""

    def kept(self) -> int:
        """Newest tokens that it keeps whatever they score; a budget must be larger."""

    def __call__(self, seen: Observation) -> torch.Tensor:
        """Importance, float32 `[batch, kv_heads, n]`, higher is kept longer; infinity: always kept; minus infinity: no token there."""
