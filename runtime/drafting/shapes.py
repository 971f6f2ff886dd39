"""Shapes of draft trees whose nodes are ranks of candidates, fitted to how often these turned out right.

Source: Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, arXiv 2401.10774, section 2.3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from runtime.sampling.tree import ROOT

#: How often the candidate of each rank is right where the ranks before it were: of the path of ranks from the root.
After = Callable[[tuple[int, ...]], Sequence[float]]


@dataclass(frozen=True)
class Shape:
    """A tree of ranks, its nodes in falling order of how likely they are reached, so that parents come before their children.

    Attributes:
        parents: of each node, the index of the one before it, or `ROOT`.
        ranks: of each node among its siblings' candidates, 0: the likeliest.
        depths: of each node, 1 for children of the root.
        reach: of each node, how likely it and all before it are right.
    """

    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    reach: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def expected(self) -> float:
        """Tokens that are expected to be accepted: of all nodes the chance of being reached, summed."""
        return sum(self.reach)


def fitted(rates: Sequence[Sequence[float]] | After, nodes: int, depth: int | None = None, least: float = 0.0) -> Shape:
    """The tree of at most `nodes` nodes of which most tokens are expected to be accepted.

    A node adds the chance that it is reached, the product of the rates on its path, whatever else is in the tree. No rate is above 1, so
    no node is likelier than its parent: the likeliest nodes of all are a tree, and no other tree of as many has a larger sum. Taken one
    after another, always the likeliest whose parent is there, they are found without looking at the others.

    Args:
        rates: by depth and rank, where depths do not depend on each other (as Medusa takes it) or each is of places where those before it
            were right; or of a path of ranks, where they do. In [0, 1]; siblings together at most 1, as one token follows.
        nodes: at most; what is never right is left out.
        depth: most nodes of a path; None: as many as there are rates (a function may end a path by no rates).
        least: paths do not go on from nodes that are reached less likely.
    """
    after: After = rates if callable(rates) else lambda path: rates[len(path)] if len(path) < len(rates) else ()
    parents: list[int] = []
    ranks: list[int] = []
    paths: list[tuple[int, ...]] = []
    reach: list[float] = []
    heap: list[tuple[float, int, int, tuple[int, ...]]] = []  # minus the reach, order of arrival, parent, path
    arrival = count()

    def offer(parent: int, path: tuple[int, ...], chance: float) -> None:
        if chance < least or (depth is not None and len(path) >= depth):
            return
        for rank, rate in enumerate(after(path)):
            if chance * rate > 0:
                heappush(heap, (-chance * rate, next(arrival), parent, (*path, rank)))

    offer(ROOT, (), 1.0)
    while heap and len(ranks) < nodes:
        negative, _, parent, path = heappop(heap)
        parents.append(parent)
        ranks.append(path[-1])
        paths.append(path)
        reach.append(-negative)
        offer(len(ranks) - 1, path, -negative)
    return Shape(tuple(parents), tuple(ranks), tuple(map(len, paths)), tuple(reach))


def widened(rates: Sequence[Sequence[float]], width: int) -> list[list[float]]:
    """Rates of `width` ranks a depth; each that was not measured is half of the one before."""
    found = []
    for ranks in rates:
        row = list(ranks[:width]) or [0.5]
        while len(row) < width:
            row.append(row[-1] / 2)
        found.append(row)
    return found


class Rates:
    """How often candidates are right by depth and rank, where the depths before were right: known beforehand, refined while texts are
    written.

    Args:
        start: by depth and rank, as measured when the draft was trained.
        weight: places that these count as much as.
        memory: places of a depth after which older ones count less and less.
    """

    def __init__(self, start: Sequence[Sequence[float]], weight: float = 64.0, memory: float = 1024.0) -> None:
        self._start = [list(ranks) for ranks in start]
        self._weight, self._memory = weight, memory
        self.reset()

    def reset(self) -> None:
        """As at first."""
        self._right = [[0.0] * len(ranks) for ranks in self._start]
        self._seen = [0.0] * len(self._start)

    def observe(self, depth: int, rank: int | None) -> None:
        """At a depth (0: the first), all before it being right, the candidate of this rank was right; None: none was."""
        if self._seen[depth] >= self._memory:
            self._seen[depth] /= 2
            self._right[depth] = [each / 2 for each in self._right[depth]]
        self._seen[depth] += 1
        if rank is not None:
            self._right[depth][rank] += 1

    def __call__(self) -> list[list[float]]:
        """The rates as far as they are known."""
        return [
            [(right + self._weight * start) / (seen + self._weight) for right, start in zip(ranks, starts, strict=True)]
            for ranks, seen, starts in zip(self._right, self._seen, self._start, strict=True)
        ]
