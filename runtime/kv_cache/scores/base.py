"""Scores: how much each cached token matters to the queries to come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from runtime.config.settings import Count, Natural, OddCount, Settings
from runtime.kv_cache.observation import Observation

if TYPE_CHECKING:
    from runtime.kv_cache.shape import Shape

#: A score of tokens that leave whatever the budget is (heads that keep a constant number of them).
NEVER = torch.finfo(torch.float32).min


class Score(Settings, ABC):
    """One method. A file each in this folder: a frozen dataclass, whose fields are the recipe's.

    A field that must be calibrated is `calibrated(...)`; then the class has a static method `calibrate(view)`, which is given a
    `compress.kv_cache.view.CalibrationView` and returns {field: (value, facts for the report)}.

    Attributes:
        name: in recipes.
        wants: what an observation holds beside keys, values and queries: "positions" (where in its sequence each token was), "hidden"
            (inputs of the attention module, and the module itself with its weights; so also queries before their rotation).
        sums_only: of keys, values and queries it asks for no more than `Observation.received` by all that are there, as many as
            `window` says: engines that have no such tensors can compute it.
    """

    name: ClassVar[str]
    wants: ClassVar[frozenset[str]] = frozenset()
    sums_only: ClassVar[bool] = False

    def window(self, count: int) -> int:
        """How many of the newest queries it looks at, of `count` that there are."""
        return 1

    def kept(self) -> int:
        """Tokens that it keeps of a head whatever the budget, at most (the newest, the first); a budget must be larger."""
        return 1

    def average(self, tokens: int) -> int:
        """Tokens that a head keeps on average with a budget of `tokens`."""
        return tokens

    @abstractmethod
    def __call__(self, seen: Observation) -> torch.Tensor:
        """Importance, float32 `[batch, kv_heads, n]`, higher is kept longer; infinity: always kept; minus infinity: no token there."""

    def check_shape(self, shape: Shape) -> None:
        """ValueError, "NAME.FIELD ..." in one sentence, where the settings do not fit a model of this shape."""


@dataclass(frozen=True)
class Accumulating(Score):
    """A score that sums over all queries there ever were; the sums are kept token by token, the queries are not.

    Attributes:
        recent: newest tokens that are always kept.
    """

    recent: Natural = 32

    def window(self, count: int) -> int:
        return count

    def kept(self) -> int:
        return self.recent

    @abstractmethod
    def added(self, seen: Observation) -> torch.Tensor:
        """What these queries add, float32 `[batch, kv_heads, n]`."""

    def total(self, seen: Observation) -> torch.Tensor:
        """What all queries have added."""
        return self.added(seen) if seen.mass is None else seen.mass


@dataclass(frozen=True)
class Windowed(Score):
    """A score that looks at an observation window, which it always keeps, and pools over neighbours.

    Attributes:
        observe: queries of the window, which is always kept.
        kernel: neighbours that are averaged, odd.
    """

    observe: Count = 32
    kernel: OddCount = 5

    def window(self, count: int) -> int:
        return min(self.observe, count)

    def kept(self) -> int:
        return self.observe

    def observed(self, seen: Observation) -> tuple[Observation, int]:
        """The same with the queries of the window alone, and how many these are."""
        newest = seen.newest(self.observe)
        return newest, newest.queries.shape[2]

    def pooled(self, score: torch.Tensor) -> torch.Tensor:
        """The mean over neighbours, along the last of three axes."""
        return functional.avg_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)
