"""Compositions of drafters: one after another until one has enough to say, or all of them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from runtime.config.settings import NonNegative, built
from runtime.drafting.drafters.base import Ask, Drafter, Text, Verified
from runtime.drafting.drafters.tables.growth import join
from runtime.sampling.tree import Tree


@dataclass(eq=False)
class Composed(Drafter):
    """Drafters of which each is told all that happens, whoever proposed.

    Attributes:
        drafters: the first to be asked first.
    """

    source: ClassVar[str] = "drafters"
    drafters: Sequence[Drafter] = built()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drafters:
            raise ValueError(f"{self.name}.drafters must be at least one drafter")
        self.drafters = tuple(self.drafters)
        self.wants = frozenset[str]().union(*(drafter.wants for drafter in self.drafters))
        known = [drafter.vocabulary for drafter in self.drafters if drafter.vocabulary is not None]
        self.vocabulary = max(known, default=None)
        self.inside = any(drafter.inside for drafter in self.drafters)

    def begin(self, text: Text) -> Any:
        return [drafter.begin(text) for drafter in self.drafters]

    def read(self, state: Any, start: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        for drafter, own in zip(self.drafters, state, strict=True):
            drafter.read(own, start, tokens, hidden)

    def learn(self, state: Any, verified: Verified) -> None:
        for drafter, own in zip(self.drafters, state, strict=True):
            drafter.learn(own, verified)

    def end(self, state: Any) -> None:
        for drafter, own in zip(self.drafters, state, strict=True):
            drafter.end(own)

    def forget(self) -> None:
        for drafter in self.drafters:
            drafter.forget()

    def reset(self) -> None:
        for drafter in self.drafters:
            drafter.reset()

    @property
    def watched(self) -> bool:
        return any(drafter.watched for drafter in self.drafters)

    @property
    def memory_bytes(self) -> int:
        return sum(drafter.memory_bytes for drafter in self.drafters)

    def describe(self) -> str:
        return f"{self.name}({', '.join(drafter.describe() for drafter in self.drafters)})"


@dataclass(eq=False)
class FirstOf(Composed):
    """Asks one drafter after another, the cheapest first, until one expects enough of its tree; the best tree otherwise. A tree that
    says nothing of its chances is enough, and so is one that was drawn, which must not be judged by what is in it.

    Attributes:
        drafters: the first to be asked first; model-free ones cost little and go before models.
        least: tokens that a tree must be expected to bring, so that the next drafter is not asked.
    """

    name: ClassVar[str] = "first"
    least: NonNegative = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draws = any(drafter.draws for drafter in self.drafters)

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        best = [Tree() for _ in asks]
        worth = [0.0] * len(asks)
        waiting = list(range(len(asks)))
        self.overhead = 0.0
        for index, drafter in enumerate(self.drafters):
            if not waiting:
                break
            trees = drafter.draft([replace(asks[text], state=asks[text].state[index]) for text in waiting])
            for text, tree in zip(waiting, trees, strict=True):
                found = expected(tree)
                if found > worth[text]:
                    best[text], worth[text] = tree, found
            self.overhead += drafter.overhead
            waiting = [text for text in waiting if worth[text] < self.least]
        return best


@dataclass(eq=False)
class Merged(Composed):
    """Asks all drafters, and of all that they guess takes what is most likely reached, as one tree. Where a token comes from two of
    them the first's word counts. All of them guess, also those that could draw: a token is drawn from one distribution or from none.
    """

    name: ClassVar[str] = "merged"

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        merged = [Tree() for _ in asks]
        for index, drafter in enumerate(self.drafters):
            trees = drafter.draft([replace(ask, state=ask.state[index], draw=None) for ask in asks])
            merged = [both(before, tree) for before, tree in zip(merged, trees, strict=True)]
        self.overhead = sum(drafter.overhead for drafter in self.drafters)
        return [
            tree.best(ask.nodes) if tree.chances else tree.first(ask.nodes)
            for ask, tree in zip(asks, merged, strict=True)
        ]


def expected(tree: Tree) -> float:
    """How many of its tokens are expected to be right; infinite where that cannot be said or must not be asked."""
    if not len(tree):
        return 0.0
    if tree.proposals or not tree.chances:
        return math.inf
    return sum(tree.reach())


def both(first: Tree, more: Tree) -> Tree:
    """The union of both trees, with probabilities only if both have them."""
    if not len(first) or not len(more):
        return first if len(first) else more
    if not first.chances or not more.chances:
        return first.merged(more)
    found = Tree(list(first.tokens), list(first.parents), list(first.chances))
    join(found, more, len(first) + len(more))
    return found
