"""Draft model that drafts a tree, which grows where it is most likely to be reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import count
from typing import ClassVar

import torch

from runtime.config.settings import Count, built
from runtime.drafting.config.target import UnfitError
from runtime.drafting.draft_cache import Slot
from runtime.drafting.drafters.base import Ask, Verified
from runtime.drafting.drafters.model import ModelDrafter
from runtime.drafting.rates import Rates
from runtime.sampling.tree import ROOT, Tree

_BINS = 10
_PRIOR = 8.0  # tokens that the draft's own confidence counts as
_KEEP = 0.998
_RANKS = 3  # first child, second, further ones


class Tried(Rates):
    """Rates of acceptance of a node's children, each given that those before it were not accepted.

    They start from the draft's own probabilities, which are not the rates: a guess is right more often than its probability says where
    the target is surer, or takes the likeliest; and of drawn tokens the target accepts as many as the two distributions have in common,
    the unlikely ones among them.
    """

    def __init__(self) -> None:
        super().__init__(_PRIOR, _KEEP)

    def rates(self, chances: Sequence[float], drawn: bool) -> list[float]:
        """Of a node's children in their order.

        Args:
            chances: that the draft gives them. drawn: from its distribution; else they are guesses.
        """
        given = enumerate(_given(chances))
        return [self.rate(_kind(drawn, rank, chance), chance) for rank, chance in given]

    def observe(self, tree: Tree, path: Sequence[int]) -> None:
        """What the target made of a tree: the nodes that it accepted, from the root down."""
        children = tree.children() if tree.chances else {}
        for depth, node in enumerate([ROOT, *path]):
            options = children.get(node, ())
            accepted = path[depth] if depth < len(path) else None
            for rank, chance in enumerate(_given([tree.chances[each] for each in options])):
                self.add(_kind(node in tree.proposals, rank, chance), options[rank] == accepted)
                if options[rank] == accepted:
                    break


def _given(chances: Sequence[float]) -> list[float]:
    """Of each its chance where it is none of those before it."""
    found, left = [], 1.0
    for chance in chances:
        found.append(min(1.0, chance / left) if left > 0 else 1.0)
        left = max(0.0, left - chance)
    return found


def _kind(drawn: bool, rank: int, chance: float) -> tuple[bool, int, int]:
    return drawn, min(rank, _RANKS - 1), min(int(_BINS * chance), _BINS - 1)


class Growing:
    """Every node has a worth: of a guess how likely it is right, of what was drawn how likely it comes to be tried. It is never more than
    its parent's, nor more than that of what was drawn before it, so that the nodes of most worth are a tree, the one of the largest sum.

    What was drawn is worth the reach of its parent times how likely none of the draws before it is accepted. That is said before the draw,
    and everything that depends on the token drawn (its children, its later siblings, and whether it is read before others) is worth no
    more: whether a node is kept never depends on its own token, so leaving out the others changes nothing of what is sampled.

    Args:
        ask: the sequence's turn.
        tried: what is known of the draft's chances.
    """

    def __init__(self, ask: Ask, tried: Tried) -> None:
        self.ask, self._tried = ask, tried
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
            if depth < self.ask.depth and self._reach[node] >= self.ask.least:
                self._unread.append(node)
        if drawn_from is not None:
            self.tree.proposals[parent] = drawn_from

    def take(self, most: int) -> list[int]:
        """Up to `most` nodes that the draft should read next, the likeliest of those whose children could be among the best."""
        bar = nlargest(self.ask.nodes, self._worth)[-1] if len(self._worth) >= self.ask.nodes else -1.0
        # What is below the bar stays below it.
        self._unread = [node for node in self._unread if self._reach[node] > bar]
        taken = nlargest(most, self._unread, key=self._reach.__getitem__)
        self._unread = [node for node in self._unread if node not in taken]
        return taken

    def best(self) -> Tree:
        """The nodes of most worth, in that order: its first ones are again the best."""
        return self.tree.best(self.ask.nodes, self._worth)


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
        level: most nodes of a sequence that are read in one pass of the draft.
    """

    name: ClassVar[str] = "dynamic-tree"
    confidence: float = built(0.0)
    width: Count = 8
    level: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cache.trees:
            text = f"{self.name} needs a draft whose engine computes trees, such as the decoder in C"
            raise UnfitError(("method",), text)
        self._tried = Tried()

    def learn(self, state: Slot, verified: Verified) -> None:
        self._tried.observe(verified.tree, verified.path)

    def reset(self) -> None:
        self._tried.reset()

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        for ask in asks:
            ask.state.memory = []  # nodes that were read after the sequence
        growing = [Growing(ask, self._tried) for ask in asks]
        level = min(self.level, self.cache.most_rows)
        reading, rows = [(each, [ROOT]) for each in growing], list(self.start(asks).split(1))
        for depth in count(1):
            for (each, nodes), logits in zip(reading, rows, strict=True):
                self._offer(each, nodes, logits)
            unfinished = [each for each, _ in reading if depth < each.ask.depth]
            reading = [(each, nodes) for each in unfinished if (nodes := each.take(level))]
            if not reading:
                break
            rows = self._read(reading)
        return [each.best() for each in growing]

    def _offer(self, growing: Growing, nodes: Sequence[int], logits: torch.Tensor) -> None:
        """Children of nodes that were read; `logits` `[nodes, vocab]` are those after them."""
        ask, tree = growing.ask, growing.tree
        most = min(self.width, ask.nodes)
        if ask.draw is None:
            for node, tokens, chances in zip(nodes, *self.candidates.best(logits, most), strict=True):
                growing.offer(node, tokens, chances)
            return
        for node, row in zip(nodes, logits, strict=True):
            branch = [tree.tokens[each] for each in tree.path(node)]
            q = self.candidates.distribution(row, ask.draw, [*ask.text.tokens, *branch])
            drawn = self.candidates.draw(q, ask.draw, most)
            growing.offer(node, drawn, q[drawn].tolist(), q)

    def _read(self, wanted: Sequence[tuple[Growing, Sequence[int]]]) -> list[torch.Tensor]:
        """Logits after nodes of trees, `[nodes, vocab]` each; the nodes that were read before stay where they are in the slot."""
        slots, tokens, parents = [], [], []
        for growing, nodes in wanted:
            slot, tree = growing.ask.state, growing.tree
            slot.memory += nodes
            place = {ROOT: ROOT} | {node: index for index, node in enumerate(slot.memory)}
            slots.append(slot)
            tokens.append([tree.tokens[node] for node in nodes])
            parents.append([place[tree.parents[node]] for node in slot.memory])
        return self.cache.branch(slots, tokens, parents)


@dataclass(eq=False)
class LargeTree(DynamicTree):
    """A tree as large as the budget allows, of the most probable continuations: for targets whose weights are read from disk or over a
    bus, where hundreds of tokens take no longer than one. It holds guesses, also under sampling.

    Source: Svirschevski et al., SpecExec: Massively Parallel Speculative Decoding for Interactive LLM Inference on Consumer Devices,
    arXiv 2406.02532.
    """

    name: ClassVar[str] = "large-tree"
    draws = False
    level: Count = 32

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        return super().draft([replace(ask, draw=None) for ask in asks])
