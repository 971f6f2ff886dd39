"""How often drafted tokens are right where the target comes to try them, learned from what became of them."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.sampling.tree import ROOT, Tree

_BINS = 10
_PRIOR = 8.0  # tokens that the draft's own word weighs as much as
_FORGET = 0.998
_RANKS = 3  # first child, second, further ones


class Tried:
    """Rates of acceptance of a node's children, each given that those before it were not accepted.

    What the draft says of them is where they start from. It is not what comes of them: a guess is right more often than its probability
    says where the target is surer, or takes the likeliest; and of drawn tokens the target accepts as many as the two distributions
    have in common, the unlikely ones among them.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[bool, int, int], tuple[float, float]] = {}  # right ones, and all

    def rates(self, chances: Sequence[float], drawn: bool) -> list[float]:
        """Of a node's children in their order.

        Args:
            chances: that the draft gives them. drawn: from its distribution; else they are guesses.
        """
        found = []
        for rank, said in enumerate(_given(chances)):
            right, tried = self._seen.get(_place(drawn, rank, said), (0.0, 0.0))
            found.append((right + _PRIOR * said) / (tried + _PRIOR))
        return found

    def observe(self, tree: Tree, path: Sequence[int]) -> None:
        """What the target made of a tree: the nodes that it accepted, from the root down."""
        children = tree.children() if tree.chances else {}
        for depth, node in enumerate([ROOT, *path]):
            options = children.get(node, ())
            accepted = path[depth] if depth < len(path) else None
            drawn = node in tree.proposals
            for rank, said in enumerate(_given([tree.chances[each] for each in options])):
                place, is_right = _place(drawn, rank, said), options[rank] == accepted
                right, tried = self._seen.get(place, (0.0, 0.0))
                self._seen[place] = (_FORGET * right + is_right, _FORGET * tried + 1)
                if is_right:
                    break


def _given(chances: Sequence[float]) -> list[float]:
    """Of each its chance where it is none of those before it."""
    found, left = [], 1.0
    for chance in chances:
        found.append(min(1.0, chance / left) if left > 0 else 1.0)
        left = max(0.0, left - chance)
    return found


def _place(drawn: bool, rank: int, said: float) -> tuple[bool, int, int]:
    return drawn, min(rank, _RANKS - 1), min(int(_BINS * said), _BINS - 1)
