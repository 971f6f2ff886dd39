"""A smaller model drafts a tree: it grows where it is most likely to be reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from runtime.config.ranges import COUNT, bounded
from runtime.drafting.caches.lanes import Lane, TreeLanes
from runtime.drafting.drafters.base import Ask, Verified
from runtime.drafting.drafters.model import ModelDrafter
from runtime.drafting.drafters.parts.growing import Growing
from runtime.drafting.drafters.parts.tried import Tried
from runtime.errors import RequestError
from runtime.sampling.tree import ROOT, Tree


@dataclass(eq=False)
class DynamicTree(ModelDrafter):
    """The tree of the largest expected number of accepted tokens: deep where the draft is sure, wide where it is not. Each pass of the
    draft reads the likeliest nodes that it has not read yet, and their children are candidates for the tree; there are at most as many
    passes as the tree may be deep. Under sampling the children of a node are drawn one after another without replacement, and a draw is
    worth the reach of its node times the mass of what was not drawn before it. How often tokens of such a mass were accepted so far
    corrects these estimates.

    Source: Xiong et al., DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure, arXiv 2410.11744 (its greedy growth, with
    several nodes a pass).

    Attributes:
        width: most children of a node.
        level: most nodes of a text that are read in one pass of the draft.
    """

    name: ClassVar[str] = "dynamic-tree"
    lanes: TreeLanes
    width: int = bounded(8, COUNT)
    level: int = bounded(4, COUNT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.lanes, TreeLanes):
            raise RequestError(f"{self.name} needs a draft whose engine computes trees, such as the decoder in C")
        self._tried = Tried()

    def learn(self, state: Lane, verified: Verified) -> None:
        self._tried.observe(verified.tree, verified.path)

    def reset(self) -> None:
        super().reset()
        self._tried = Tried()

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        for ask in asks:
            ask.state.notes = []
        growing = [Growing(ask, self._tried) for ask in asks]
        level = min(self.level, self.lanes.most_rows)
        read = [(index, [ROOT]) for index in range(len(asks))]  # which nodes of which text
        rows = list(self.start(asks).split(1))
        passes = 1
        while read:
            for (index, nodes), logits in zip(read, rows, strict=True):
                self._offer(asks[index], growing[index], nodes, logits)
            open_ = [index for index, _ in read if passes < asks[index].depth]
            read = [(index, nodes) for index in open_ if (nodes := growing[index].take(level))]
            if read:
                rows = self._read([(asks[index].state, growing[index].tree, nodes) for index, nodes in read])
                passes += 1
        return [each.best() for each in growing]

    def _offer(self, ask: Ask, growing: Growing, nodes: Sequence[int], logits: torch.Tensor) -> None:
        """Children of nodes that were read; `logits` `[nodes, vocab]` are those after them."""
        count = min(self.width, ask.nodes)
        if ask.draw is None:
            for node, tokens, chances in zip(nodes, *self.candidates.best(logits, count), strict=True):
                growing.offer(node, tokens, chances)
            return
        tree = growing.tree
        for node, row in zip(nodes, logits, strict=True):
            branch = [] if node == ROOT else [tree.tokens[each] for each in tree.path(node)]
            q = self.candidates.distribution(row, ask.draw, [*ask.text.tokens, *branch])
            drawn = self.candidates.draw(q, ask.draw, count)
            growing.offer(node, drawn, q[drawn].tolist(), q)

    def _read(self, wanted: Sequence[tuple[Lane, Tree, Sequence[int]]]) -> list[torch.Tensor]:
        """Logits after nodes of trees, `[nodes, vocab]` each; the nodes that were read before stay where they are in the lane."""
        parents = []
        for lane, tree, nodes in wanted:
            lane.notes += nodes
            place = {ROOT: ROOT} | {node: index for index, node in enumerate(lane.notes)}
            parents.append([place[tree.parents[node]] for node in lane.notes])
        tokens = [[tree.tokens[node] for node in nodes] for _, tree, nodes in wanted]
        return self.lanes.branch([lane for lane, _, _ in wanted], tokens, parents)


@dataclass(eq=False)
class LargeTree(DynamicTree):
    """A tree as large as the budget allows, of the most probable continuations: for targets whose weights are read from disk or over a
    bus, where hundreds of tokens take no longer than one. It holds guesses, also under sampling.

    Source: Svirschevski et al., SpecExec: Massively Parallel Speculative Decoding for Interactive LLM Inference on Consumer Devices,
    arXiv 2406.02532.
    """

    name: ClassVar[str] = "large-tree"
    draws = False
    level: int = bounded(32, COUNT)

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        return super().draft([replace(ask, draw=None) for ask in asks])
