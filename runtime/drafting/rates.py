"""Success rates of guesses by kind, learned while sequences are decoded."""

from __future__ import annotations

import math
from collections.abc import Hashable


class Rates:
    """How often guesses of each kind are right: a rate expected beforehand, corrected by what was observed.

    Args:
        weight: observations that the expected rate counts as.
        keep: share of the weight of earlier observations of a kind that is left after another.
        memory: weight of a kind's observations from which on it is halved.
        parent: rates of all sequences together: they are what is expected, and learn of every observation too.
    """

    def __init__(self, weight: float, keep: float = 1.0, memory: float = math.inf, parent: Rates | None = None) -> None:
        self.weight, self.keep, self.memory, self.parent = weight, keep, memory, parent
        self.reset()

    def reset(self) -> None:
        """Forget all observations."""
        self._observed: dict[Hashable, tuple[float, float]] = {}  # right ones, and all

    def rate(self, kind: Hashable, expected: float) -> float:
        """The rate of a kind; `expected` is its rate as long as nothing was observed."""
        if self.parent is not None:
            expected = self.parent.rate(kind, expected)
        right, count = self._observed.get(kind, (0.0, 0.0))
        return (right + self.weight * expected) / (count + self.weight)

    def add(self, kind: Hashable, right: float, count: float = 1.0) -> None:
        """One observation: `right` of `count` guesses."""
        old_right, old_count = self._observed.get(kind, (0.0, 0.0))
        all_right, all_count = self.keep * old_right + right, self.keep * old_count + count
        if all_count > self.memory:
            all_right, all_count = all_right / 2, all_count / 2
        self._observed[kind] = all_right, all_count
        if self.parent is not None:
            self.parent.add(kind, right, count)
