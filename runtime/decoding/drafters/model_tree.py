"""A smaller model drafts a tree: it grows where it is most likely to be reached."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.decoding.drafters.base import Ask
from runtime.decoding.drafters.model import ModelDrafter
from runtime.decoding.tree import ROOT, Tree
from runtime.errors import RequestError
from runtime.kv_cache.bounds import COUNT, bounded


@dataclass(eq=False)
class DynamicTree(ModelDrafter):
    """Level after level, every node that is likely enough to be reached gets children, the likeliest of the whole tree first, until the
    tree has as many nodes as it may. Under sampling the children of a node are drawn one after another without replacement, and what a
    draw is worth is the probability left to it: reach times the mass of what was not drawn yet.

    Source: Xiong et al., DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure, arXiv 2410.11744 (its batched growth,
    a level at a time).

    Attributes:
        width: most children of a node.
        level: most nodes that get children in one pass of the draft.
    """

    name: ClassVar[str] = "dynamic-tree"
    width: int = bounded(4, COUNT)
    level: int = bounded(8, COUNT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lanes.trees:
            raise RequestError(f"{self.name} needs a draft whose engine computes trees, such as the decoder in C")

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        logits = self.start(asks)
        return [self._grown(ask, row[None]) for ask, row in zip(asks, logits, strict=True)]

    def _grown(self, ask: Ask, logits: torch.Tensor) -> Tree:
        """The tree of one text; `logits` are those after it."""
        tree, level = Tree(), [ROOT]
        reach: list[float] = []
        for _ in range(ask.depth):
            added = self._children(ask, tree, level, reach, logits)
            if len(tree) >= ask.nodes or not added:
                break
            # Of the new nodes those that are likeliest to be reached go on.
            level = heapq.nlargest(
                self.level, (node for node in added if reach[node] >= ask.least), key=reach.__getitem__
            )
            level.sort()
            if not level or max(tree.depths(), default=0) >= ask.depth:
                break
            logits = self._read(ask, tree, level)
        return tree

    def _children(
        self, ask: Ask, tree: Tree, level: Sequence[int], reach: list[float], logits: torch.Tensor
    ) -> list[int]:
        """The best children of all nodes of a level together, as many as there is room for; returns the new nodes."""
        room = ask.nodes - len(tree)
        offers: list[tuple[float, int, int, int, float]] = []  # worth, order, parent, token, chance
        for row, parent in enumerate(level):
            before = 1.0 if parent == ROOT else reach[parent]
            if ask.draw is None:
                tokens, chances = self.candidates.best(logits[row : row + 1], min(self.width, room))
                offered = list(zip(tokens[0], chances[0], chances[0], strict=True))
            else:
                branch = [] if parent == ROOT else [tree.tokens[node] for node in tree.path(parent)]
                q = self.candidates.distribution(logits[row], ask.draw, [*ask.text.tokens, *branch])
                tree.proposals[parent] = q
                offered, left = [], 1.0
                for token in self.candidates.draw(q, ask.draw, min(self.width, room)):
                    # What a draw is worth must not depend on what is drawn, or dropping it would change the distribution.
                    offered.append((token, float(q[token]), left))
                    left -= float(q[token])
            offers += [
                (before * worth, order, parent, token, chance) for order, (token, chance, worth) in enumerate(offered)
            ]
        offers.sort(key=lambda offer: (-offer[0], offer[1]))
        kept = sorted(offers[:room], key=lambda offer: (offer[2], offer[1]))
        added = []
        for _, _, parent, token, chance in kept:
            added.append(tree.add(token, parent, chance))
            reach.append(chance * (1.0 if parent == ROOT else reach[parent]))
        used = set(tree.parents)
        for parent in level:
            if parent not in used:
                tree.proposals.pop(parent, None)
        return added

    def _read(self, ask: Ask, tree: Tree, level: Sequence[int]) -> torch.Tensor:
        """Logits after the nodes of a level; the nodes that were read before stay where they are."""
        lane = ask.state
        read: list[int] = lane.notes
        place = {node: index for index, node in enumerate(read)} | {ROOT: ROOT}
        for node in level:
            place[node] = len(read)
            read.append(node)
        parents = [place[tree.parents[node]] for node in read]
        return self.lanes.branch(lane, [tree.tokens[node] for node in level], parents)

    def start(self, asks: Sequence[Ask]) -> torch.Tensor:
        for ask in asks:
            ask.state.notes = []
        return super().start(asks)


@dataclass(eq=False)
class LargeTree(DynamicTree):
    """A tree as large as the budget allows, of the most probable continuations: for targets whose weights are read from disk or over a
    bus, where hundreds of tokens take no longer than one. A beam of the likeliest nodes goes on at every depth; of all candidates seen the
    likeliest to be reached make the tree.

    Source: Svirschevski et al., SpecExec: Massively Parallel Speculative Decoding for Interactive LLM Inference on Consumer Devices,
    arXiv 2406.02532.
    """

    name: ClassVar[str] = "large-tree"
    width: int = bounded(8, COUNT)
    level: int = bounded(32, COUNT)

    def _grown(self, ask: Ask, logits: torch.Tensor) -> Tree:
        if ask.draw is not None:  # what is dropped after it was drawn would change the distribution: guesses are exact
            ask = Ask(ask.state, ask.text, ask.nodes, ask.depth, None, ask.least)
        tree, level = Tree(), [ROOT]
        reach: list[float] = []
        for depth in range(1, ask.depth + 1):
            added = []
            for row, parent in enumerate(level):
                before = 1.0 if parent == ROOT else reach[parent]
                tokens, chances = self.candidates.best(logits[row : row + 1], self.width)
                for token, chance in zip(tokens[0], chances[0], strict=True):
                    added.append(tree.add(token, parent, chance))
                    reach.append(before * chance)
            # A node that would not be among the best does not need children.
            bar = heapq.nlargest(ask.nodes, reach)[-1] if len(reach) > ask.nodes else 0.0
            open_ = [node for node in added if reach[node] >= max(bar, ask.least)]
            level = sorted(heapq.nlargest(self.level, open_, key=reach.__getitem__))
            if not level or depth == ask.depth:
                break
            logits = self._read(ask, tree, level)
        return tree.best(ask.nodes)
