"""The candidates for one text's tree, of which the best ones become the tree when the draft has said enough."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

import torch

from runtime.drafting.drafters.base import Ask
from runtime.drafting.drafters.parts.tried import Tried
from runtime.sampling.tree import ROOT, Tree


class Growing:
    """Every node has a worth: of a guess how likely it is right, of what was drawn how likely it comes to be tried. It is never more than
    its parent's, nor more than that of what was drawn before it, so that the nodes of most worth are a tree, the one of the largest sum.

    What was drawn is worth the reach of its parent times how likely none of the draws before it is accepted. That is said before the draw,
    and everything that depends on the token drawn (its children, its later siblings, and whether it is read before others) is worth no
    more: whether a node is kept never depends on its own token, so leaving out the others changes nothing of what is sampled.

    Args:
        ask: the text's turn.
        tried: what is known of the draft's chances.
    """

    def __init__(self, ask: Ask, tried: Tried) -> None:
        self._ask, self._tried = ask, tried
        self.tree = Tree()
        self._worth: list[float] = []
        self._reach: list[float] = []
        self._depths: list[int] = []
        self._unread: list[int] = []

    def offer(
        self, parent: int, tokens: Sequence[int], chances: Sequence[float], drawn_from: torch.Tensor | None = None
    ) -> None:
        """Children of a node, or of `ROOT`: guesses, the likeliest first, or drawn one after another from a distribution `[vocab]`."""
        before, depth = (1.0, 1) if parent == ROOT else (self._reach[parent], self._depths[parent] + 1)
        left, rates = 1.0, self._tried.rates(chances, drawn_from is not None)
        for token, chance, rate in zip(tokens, chances, rates, strict=True):
            reach = before * left * rate
            node = self.tree.add(token, parent, chance)
            self._worth.append(reach if drawn_from is None else before * left)
            self._reach.append(reach)
            left *= 1.0 - rate
            self._depths.append(depth)
            if depth < self._ask.depth and self._reach[node] >= self._ask.least:
                self._unread.append(node)
        if drawn_from is not None:
            self.tree.proposals[parent] = drawn_from

    def take(self, count: int) -> list[int]:
        """Up to `count` nodes that the draft should read next, the likeliest of those whose children could be among the best."""
        bar = nlargest(self._ask.nodes, self._worth)[-1] if len(self._worth) >= self._ask.nodes else -1.0
        # What is below the bar stays below it.
        self._unread = [node for node in self._unread if self._reach[node] > bar]
        taken = nlargest(count, self._unread, key=self._reach.__getitem__)
        self._unread = [node for node in self._unread if node not in taken]
        return taken

    def best(self) -> Tree:
        """The nodes of most worth, in that order: its first ones are again the best."""
        order = sorted(range(len(self.tree)), key=lambda node: (-self._worth[node], node))
        return self.tree.keep(order[: self._ask.nodes])
