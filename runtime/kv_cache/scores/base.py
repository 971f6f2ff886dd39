"""What a score is: how much each cached token matters to the queries to come."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

import torch

from runtime.kv_cache.observation import Observation

#: A score of tokens that leave whatever the budget is (heads that keep a constant number of them).
NEVER = torch.finfo(torch.float32).min


class Score(Protocol):
    """One method. A file each in this folder; its fields are those of the recipe.

    Attributes:
        name: in recipes.
    """

    name: ClassVar[str]

    def window(self, count: int) -> int:
        """How many of the newest queries it looks at, of `count` that there are."""

    def kept(self) -> int:
        """Tokens that it keeps of a head whatever the budget, at most (the newest, the first); a budget must be larger."""

    def __call__(self, seen: Observation) -> torch.Tensor:
        """Importance, float32 `[batch, kv_heads, n]`, higher is kept longer; infinity: always kept; minus infinity: no token there."""


@runtime_checkable
class Accumulating(Score, Protocol):
    """A score that sums over all queries there ever were; the sums are kept token by token, the queries are not."""

    def added(self, seen: Observation) -> torch.Tensor:
        """What these queries add, float32 `[batch, kv_heads, n]`; the score itself then looks at `seen.mass`."""


@runtime_checkable
class Placed(Score, Protocol):
    """A score that asks where in its sequence each token was: `Observation.positions`, which layers then keep token by token.

    Attributes:
        placed: True.
    """

    placed: ClassVar[bool]
