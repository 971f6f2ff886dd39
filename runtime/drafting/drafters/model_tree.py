"""Draft model that drafts a tree, which grows where it is most likely to be reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from pathlib import Path
from typing import Any, ClassVar

import torch

from runtime.config.settings import Count, built
from runtime.drafting.config.target import UnfitError
from runtime.drafting.draft_cache import Slot, TreeDraftCache, draft_cache_of
from runtime.drafting.drafters.base import Ask, Drafter, Verified
from runtime.drafting.drafters.draft_model import DraftModel
from runtime.drafting.drafters.model import Candidates, ModelDrafter
from runtime.errors import RequestError
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
    cache: TreeDraftCache = built()
    confidence: float = built(0.0)
    width: Count = 8
    level: Count = 4

    @classmethod
    def over(cls, draft: DraftModel, directory: Path, candidates: Candidates, **settings: Any) -> Drafter:
        if not isinstance(draft_cache_of(draft.engine), TreeDraftCache):
            reason = f"{cls.name} needs a draft whose engine computes trees, such as the decoder in C"
            raise UnfitError(("method",), f"{reason}; this one runs on {draft.engine.description}")
        return super().over(draft, directory, candidates, **settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.cache, TreeDraftCache):
            raise RequestError(f"{self.name} needs a draft whose engine computes trees, such as the decoder in C")
        self._tried = Tried()

    def learn(self, state: Slot, verified: Verified) -> None:
        self._tried.observe(verified.tree, verified.path)

    def reset(self) -> None:
        super().reset()
        self._tried = Tried()

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        for ask in asks:
            ask.state.notes = []
        growing = [Growing(ask, self._tried) for ask in asks]
        level = min(self.level, self.cache.most_rows)
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

    def _read(self, wanted: Sequence[tuple[Slot, Tree, Sequence[int]]]) -> list[torch.Tensor]:
        """Logits after nodes of trees, `[nodes, vocab]` each; the nodes that were read before stay where they are in the slot."""
        parents = []
        for slot, tree, nodes in wanted:
            slot.notes += nodes
            place = {ROOT: ROOT} | {node: index for index, node in enumerate(slot.notes)}
            parents.append([place[tree.parents[node]] for node in slot.notes])
        tokens = [[tree.tokens[node] for node in nodes] for _, tree, nodes in wanted]
        return self.cache.branch([slot for slot, _, _ in wanted], tokens, parents)


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
