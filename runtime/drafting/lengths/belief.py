"""Calibration of a drafter's confidence against the acceptance that followed."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.drafting.rates import Rates
from runtime.sampling.tree import ROOT, Tree

_BINS = 12
_PRIOR = 4.0  # tokens that a drafter's own confidence counts as
_KEEP = 0.99
_DEPTHS = 64
_FIRST = 0.6  # how likely a token is right of a drafter that states no confidence


class Belief:
    """Rates of acceptance: of nodes by the drafter's confidence in them, and of any child by depth.

    Args:
        parent: where a new sequence starts from; None: from the drafter's own confidence.
    """

    def __init__(self, parent: Belief | None = None) -> None:
        self._parent = parent
        self._nodes = Rates(_PRIOR, _KEEP)
        self._depths = Rates(_PRIOR, _KEEP)

    def chance(self, said: float) -> float:
        """How likely a node is right of which the drafter says so."""
        return self._nodes.rate(_bin(said), said if self._parent is None else self._parent.chance(said))

    def rate(self, depth: int) -> float:
        """How likely some token of this depth (1: the first) is right where those before it are."""
        depth = min(depth, _DEPTHS)
        before = self.rate(depth - 1) if depth > 1 else _FIRST
        if self._parent is None:
            expected = before
        elif depth == 1:
            expected = self._parent.rate(depth)
        else:
            # Other sequences may have been hopeless at this depth; the depth before, which this one tries too, speaks for it.
            expected = 0.5 * (self._parent.rate(depth) + before)
        return self._depths.rate(depth, expected)

    def reach(self, tree: Tree) -> list[float]:
        """Of each node, how likely it and all before it are right."""
        if tree.chances:
            known = {said: self.chance(said) for said in set(tree.chances)}
            chances = [known[said] for said in tree.chances]
        else:
            # Of siblings without confidence the first gets all of what is left.
            first = {options[0] for options in tree.children().values()}
            chances = [self.rate(depth) if node in first else 0.0 for node, depth in enumerate(tree.depths())]
        return Tree(tree.tokens, tree.parents, chances).reach()

    def observe(self, tree: Tree, new: Sequence[int]) -> None:
        """What followed: nodes on the way are right, their siblings wrong, what comes after a wrong one is not known."""
        children, node = tree.children(), ROOT
        for depth, token in enumerate(new):
            options = children.get(node, ())
            right = [option for option in options if tree.tokens[option] == token]
            for option in options if tree.chances else ():
                self._nodes.add(_bin(tree.chances[option]), option in right)
            if options:
                self._depths.add(min(depth + 1, _DEPTHS), bool(right))
            if not right:
                return
            node = right[-1]


def _bin(said: float) -> int:
    """Finer towards 1, where a small difference changes long branches most."""
    return min(int(_BINS * said * said), _BINS - 1) if said > 0 else 0
