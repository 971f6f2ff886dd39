"""Tree of drafted tokens: alternatives that may follow a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

ROOT = -1  # the parent of nodes that follow the text itself


@dataclass(slots=True)
class Tree:
    """Tokens in an order in which parents come before their children, and of siblings the first to be tried before the others.

    Attributes:
        tokens: ids, one a node.
        parents: of each node, the index of the one before it; `ROOT`: it follows the text.
        chances: of each node, how likely the drafter takes it to be right where its parent is, in [0, 1]; empty: it does not say.
        proposals: {node or ROOT: distribution, float32 `[vocab]` on the CPU, that its children were drawn from, one after another
            without replacement}. Children of others are guesses, as good as the drafter could make them. Whoever draws must not look
            at a child to decide whether it is proposed: dropping an unlikely one afterwards changes what is sampled.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    proposals: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def chain(cls, tokens: Sequence[int], chances: Sequence[float] = ()) -> Tree:
        """Tokens one after another."""
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), list(chances))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every token follows the one before it."""
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    def add(self, token: int, parent: int, chance: float | None = None) -> int:
        """One more node; returns its index. Either all nodes of a tree have a chance or none has."""
        self.tokens.append(token)
        self.parents.append(parent)
        if chance is not None:
            self.chances.append(chance)
        return len(self.tokens) - 1

    def depths(self) -> list[int]:
        """Of each node, how many tokens after the text it is; 1 for children of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def children(self) -> dict[int, list[int]]:
        """{node or ROOT: its children, first to be tried first}; leaves have no entry."""
        found: dict[int, list[int]] = {}
        for index, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(index)
        return found

    def path(self, node: int) -> list[int]:
        """Indices from the root's child down to `node` itself."""
        found = []
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def reach(self) -> list[float]:
        """Of each node, how likely it and all before it are right; needs `chances`."""
        reach: list[float] = []
        for parent, chance in zip(self.parents, self.chances, strict=True):
            reach.append(chance if parent == ROOT else reach[parent] * chance)
        return reach

    # ---------------------------------------------------------------- smaller trees
    def first(self, count: int, depth: int | None = None) -> Tree:
        """The first `count` nodes, of these the ones no deeper than `depth`. Both looks at no token, so what is drawn stays exact."""
        indices = range(min(count, len(self)))
        if depth is not None:
            depths = self.depths()
            indices = [index for index in indices if depths[index] <= depth]  # type: ignore[assignment]
        return self if len(indices) == len(self) else self.keep(indices)

    def best(self, count: int, worth: Sequence[float] | None = None) -> Tree:
        """The `count` nodes of most worth, in falling order, so that its first ones are again the best.

        Args:
            worth: of each node, never more than its parent's; None: how likely it is reached, which is for trees of guesses (no
                `proposals`) with `chances`.
        """
        worth = self.reach() if worth is None else worth
        # Of equals the earlier, so that parents come first.
        return self.keep(sorted(range(len(self)), key=lambda index: (-worth[index], index))[:count])

    def main_chain(self) -> Tree:
        """One branch, for engines that verify nothing else: at each node the likeliest of guesses, the first of what was drawn."""
        children, chain, node = self.children(), [], ROOT
        while node in children:
            drawn = node in self.proposals or not self.chances
            node = children[node][0] if drawn else max(children[node], key=self.chances.__getitem__)
            chain.append(node)
        return self.keep(sorted(chain))

    def keep(self, indices: Sequence[int]) -> Tree:
        """The nodes of these indices, in this order; the parent of each must come before it."""
        place = {old: new for new, old in enumerate(indices)}
        place[ROOT] = ROOT
        parents = [place[self.parents[index]] for index in indices]
        used = set(parents)
        return Tree(
            [self.tokens[index] for index in indices],
            parents,
            [self.chances[index] for index in indices] if self.chances else [],
            {place[node]: value for node, value in self.proposals.items() if place.get(node, -2) in used},
        )
