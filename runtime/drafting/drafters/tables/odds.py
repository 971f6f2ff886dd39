"""Hit rates of guesses by kind, learned while sequences are decoded, and the hits in a tree."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.drafting.rates import Rates
from runtime.sampling.tree import ROOT, Tree

_LEAST, _MOST = 0.001, 0.999  # no guess is certain, and none impossible


class Odds(Rates):
    """Of each kind of guess, how many times as often it is right as was estimated beforehand.

    Args:
        weight: how many right guesses the estimates themselves are worth.
        memory: expected right guesses of a kind after which older ones count less and less.
        parent: what all sequences together taught; None: the estimates are the start.
    """

    def __init__(self, weight: float = 4.0, memory: float = 256.0, parent: Odds | None = None) -> None:
        super().__init__(weight, memory=memory, parent=parent)

    def chance(self, kind: int, estimate: float) -> float:
        """How likely a guess of this kind is right that was estimated so."""
        found = estimate * self.rate(kind, 1.0)
        return _LEAST if found < _LEAST else _MOST if found > _MOST else found

    def count(self, kind: int, estimate: float, right: bool) -> None:
        """One more guess was verified."""
        self.add(kind, right, estimate)


@dataclass(slots=True)
class Guesses:
    """A tree of guesses, and of each node what kind of guess it is and how likely it was estimated before experience."""

    tree: Tree = field(default_factory=Tree)
    kinds: list[int] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)
    length: int = -1  # of the sequence that it follows

    def add(self, token: int, parent: int, chance: float, kind: int, estimate: float) -> int:
        """One more node; returns its index."""
        self.kinds.append(kind)
        self.estimates.append(estimate)
        return self.tree.add(token, parent, chance)

    def settle(self, odds: Odds, length: int, new: Sequence[int]) -> None:
        """Count which guesses were right. The verified tree may be smaller, or another drafter's: what counts is that `new` followed.

        Args:
            length: of the sequence before `new`.
        """
        if length != self.length:
            return
        depth_of = {ROOT: 0}
        tokens = self.tree.tokens
        for node, parent in enumerate(self.tree.parents):
            depth = depth_of.get(parent)
            if depth is None or depth >= len(new):
                continue
            right = tokens[node] == new[depth]
            odds.count(self.kinds[node], self.estimates[node], right)
            if right:
                depth_of[node] = depth + 1
        self.length = -1


def bucket(length: int) -> int:
    """Which of `BUCKETS` kinds a match of this many tokens is: each of its own at first, then coarser."""
    return bisect_right(_EDGES, length) - 1


_EDGES = [*range(9), 10, 12, 16, 20, 24, 32, 48, 64]
BUCKETS = len(_EDGES)


def likely(agreeing: int, slope: float = 0.4) -> float:
    """How likely the token that followed an earlier occurrence of the last `agreeing` tokens follows again: an estimate to begin with,
    about right for prose and for code."""
    return 1 - 1 / (1 + slope * agreeing)
