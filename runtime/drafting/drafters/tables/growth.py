"""Trees of guesses: grown from the root, the likeliest node first, and joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import TypeVar

from runtime.drafting.drafters.tables.odds import Guesses, Odds
from runtime.sampling.tree import ROOT, Tree

Context = TypeVar("Context")

#: Of a token that may follow: its id, its chance there, its kind and estimate (see `Guesses`), and what its own followers are found by.
Candidate = tuple[int, float, int, float, Context]


def grow(
    root: Context,
    followers: Callable[[Context, int], Iterable[Candidate[Context]]],
    nodes: int,
    depth: int,
    least: float = 0.0,
) -> Guesses:
    """The `nodes` nodes that are most likely reached, by the product of the chances on the way.

    Args:
        followers: of a context at a depth (0: the root), candidates of distinct tokens.
        least: branches do not go on from nodes that are reached less likely.
    """
    found = Guesses()
    # Minus the reach, the order of arrival, parent, candidate.
    heap: list[tuple[float, int, int, Candidate[Context]]] = []
    depths = {ROOT: 0}
    arrived = 0
    parent, reach, context = ROOT, 1.0, root
    while len(found.tree) < nodes:
        if depths[parent] < depth and reach >= least:
            for candidate in followers(context, depths[parent]):
                heappush(heap, (-reach * candidate[1], arrived, parent, candidate))
                arrived += 1
        if not heap:
            break
        negative, _, above, (token, chance, kind, estimate, context) = heappop(heap)
        reach = -negative
        parent = found.add(token, above, chance, kind, estimate)
        depths[parent] = depths[above] + 1
    return found


def grow_levels(levels: Sequence[Sequence[Candidate[None]]], nodes: int, depth: int, least: float = 0.0) -> Guesses:
    """`grow`, of candidates that depend on the depth alone."""
    return grow(None, lambda _, level: levels[level] if level < len(levels) else (), nodes, depth, least)


class Shapes:
    """Trees whose tokens are ranks of candidates, grown from learned rates and grown anew after some steps.

    Args:
        refit: steps after which they are grown anew.
        odds: of candidates, whose kind is `width` times the depth and the rank; depths from the last of `depths` on are one.
        rates: for a number of depths, how likely the candidates of each rank are right.
    """

    def __init__(
        self, refit: int, odds: Odds, width: int, depths: int, rates: Callable[[int], Sequence[Sequence[float]]]
    ) -> None:
        self._refit, self._odds, self._width, self._depths, self._rates = refit, odds, width, depths, rates
        self.reset()

    def kind(self, depth: int, rank: int) -> int:
        """Kind of the candidate of a rank at a depth, both from 0."""
        return min(depth, self._depths - 1) * self._width + rank

    def reset(self) -> None:
        """Grow all of them anew."""
        self._known: dict[tuple[int, int], Guesses] = {}
        self._steps = 0

    def step(self) -> None:
        """Count one more verified step."""
        self._steps += 1
        if self._steps % self._refit == 0:
            self._known.clear()

    def fill(
        self, nodes: int, depth: int, least: float, choose: Callable[[Guesses, int, int, int], tuple[int, float] | None]
    ) -> Guesses:
        """The tree of a shape.

        Args:
            least: branches do not go on from nodes that are reached less likely.
            choose: token and estimate for (the tree so far, the node above, rank, kind); None: there is none.
        """
        shape, found = self.of(nodes, depth), Guesses()
        place, reach = {ROOT: ROOT}, {ROOT: 1.0}
        for node, (parent, rank) in enumerate(zip(shape.tree.parents, shape.tree.tokens, strict=True)):
            above = place.get(parent)
            if above is None or reach[above] < least:
                continue
            candidate = choose(found, above, rank, shape.kinds[node])
            if candidate is not None:
                token, estimate = candidate
                chance = self._odds.chance(shape.kinds[node], estimate)
                place[node] = new = found.add(token, above, chance, shape.kinds[node], estimate)
                reach[new] = reach[above] * chance
        return found

    def of(self, nodes: int, depth: int) -> Guesses:
        """The shape of at most so many nodes that is most likely reached."""
        if (nodes, depth) not in self._known:
            levels = [
                [(rank, rate, self.kind(level, rank), rate, None) for rank, rate in enumerate(rates) if rate > 0]
                for level, rates in enumerate(self._rates(depth))
            ]
            self._known[nodes, depth] = grow_levels(levels, nodes, depth)
        return self._known[nodes, depth]


def join(first: Tree, more: Tree, nodes: int) -> list[tuple[int, float]]:
    """Add to `first` what of `more` it does not have, up to so many nodes in all. Both have chances, or `first` has none.

    What comes beside other tokens can only be right where they are not: its chance is the part of its own that they leave.

    Returns:
        Of each node that was added, in order, its index in `more` and that part.
    """
    tells, known = bool(first.chances or not first.tokens), {}
    left: dict[int, float] = {}
    for node, (parent, token) in enumerate(zip(first.parents, first.tokens, strict=True)):
        known[parent, token] = node
        left[parent] = left.get(parent, 1.0) - (first.chances[node] if tells else 0.0)
    place = {ROOT: ROOT}
    added = []
    for node, (parent, token) in enumerate(zip(more.parents, more.tokens, strict=True)):
        above = place.get(parent)
        if above is None:
            continue
        if (above, token) in known:
            place[node] = known[above, token]
        elif len(first) < nodes:
            part = max(0.0, left.get(above, 1.0))
            place[node] = first.add(token, above, part * more.chances[node] if tells else None)
            added.append((node, part))
    return added
