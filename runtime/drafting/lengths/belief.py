"""Calibration of a drafter's confidence against the acceptance that followed."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.sampling.tree import ROOT, Tree

_BINS = 12
_PRIOR = 4.0  # tokens that a drafter's own word weighs as much as
_FORGET = 0.99
_DEPTHS = 64
_FIRST = 0.6  # how likely a token is right of a drafter that says nothing


class Belief:
    """Rates of acceptance: of nodes by what the drafter said of them, and of any child by depth.

    Args:
        parent: where a new text starts from; None: from the drafter's own word.
    """

    def __init__(self, parent: Belief | None = None) -> None:
        self._parent = parent
        self._right = [0.0] * _BINS
        self._seen = [0.0] * _BINS
        self._deep_right = [0.0] * _DEPTHS
        self._deep_seen = [0.0] * _DEPTHS

    def chance(self, said: float) -> float:
        """How likely a node is right of which the drafter says so."""
        place = _bin(said)
        start = said if self._parent is None else self._parent.chance(said)
        return (self._right[place] + _PRIOR * start) / (self._seen[place] + _PRIOR)

    def rate(self, depth: int) -> float:
        """How likely some token of this depth (1: the first) is right where those before it are."""
        place = min(depth, _DEPTHS) - 1
        if self._parent is not None:
            start = self._parent.rate(depth)
            if place:
                # Other texts may have been hopeless at this depth; the depth before, which is tried in this text too, speaks for it.
                start = 0.5 * (start + self.rate(place))
        else:
            start = _FIRST if place == 0 else self.rate(place)
        return (self._deep_right[place] + _PRIOR * start) / (self._deep_seen[place] + _PRIOR)

    def reach(self, tree: Tree) -> list[float]:
        """Of each node, how likely it and all before it are right."""
        reach: list[float] = []
        if tree.chances:
            known = {said: self.chance(said) for said in set(tree.chances)}
            for parent, said in zip(tree.parents, tree.chances, strict=True):
                reach.append(known[said] * (1.0 if parent == ROOT else reach[parent]))
            return reach
        first = set()
        depths = tree.depths()
        for parent, depth in zip(tree.parents, depths, strict=True):
            # Of siblings about which nothing is said the first gets all of what is left.
            chance = self.rate(depth) if parent not in first else 0.0
            first.add(parent)
            reach.append(chance * (1.0 if parent == ROOT else reach[parent]))
        return reach

    def observe(self, tree: Tree, new: Sequence[int]) -> None:
        """What followed: nodes on the way are right, their siblings wrong, what comes after a wrong one is not known."""
        if not len(tree):
            return
        children, node = tree.children(), ROOT
        for depth, token in enumerate(new):
            options = children.get(node)
            if not options:
                return
            node = -2
            for option in options:
                right = tree.tokens[option] == token
                if right:
                    node = option
                if tree.chances:
                    self._add(self._right, self._seen, _bin(tree.chances[option]), right)
            self._add(self._deep_right, self._deep_seen, min(depth, _DEPTHS - 1), node >= 0)
            if node < 0:
                return

    @staticmethod
    def _add(right: list[float], seen: list[float], place: int, is_right: bool) -> None:
        right[place] = _FORGET * right[place] + is_right
        seen[place] = _FORGET * seen[place] + 1


def _bin(said: float) -> int:
    """Finer towards 1, where a small difference changes long branches most."""
    return min(int(_BINS * said * said), _BINS - 1) if said > 0 else 0
