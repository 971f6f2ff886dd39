"""Drafters around others: compositions of several, and the limits of one with a draft model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from runtime.config.settings import NonNegative, built
from runtime.drafting.draft_cache import position_bytes
from runtime.drafting.drafters.base import Ask, Drafter, Text, Verified, drafted_where
from runtime.drafting.drafters.draft_model import DraftModel
from runtime.drafting.drafters.tables.growth import join
from runtime.engines.base import Engine
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
class Fallback(Composed):
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
            trees = drafter.draft([replace(asks[place], state=asks[place].state[index]) for place in waiting])
            for place, tree in zip(waiting, trees, strict=True):
                found = expected(tree)
                if found > worth[place]:
                    best[place], worth[place] = tree, found
            self.overhead += drafter.overhead
            waiting = [place for place in waiting if worth[place] < self.least]
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
    found = Tree(list(first.tokens), list(first.parents), list(first.chances) if more.chances else [])
    join(found, more, len(first) + len(more))
    return found


# ---------------------------------------------------------------- limits of a draft model
#: When a cache grows, what it held and what it will hold, up to twice as much, are in memory together.
GROWTH = 3


def within(drafter: Drafter, draft: DraftModel, target: Engine) -> Drafter:
    """The drafter, kept to the limits that its draft model has and its target has not.

    Args:
        draft: that it drafts with. target: the engine that verifies, whose prefix the draft reads too.
    """
    engine, own = draft.engine, draft.engine.context_length
    context = None if target.context_length is None else target.context_length + len(target.prefix)
    shorter = own is not None and (context is None or own < context)
    if not shorter and draft.cache_bytes is None:
        return drafter
    positions = None
    if draft.cache_bytes is not None:
        caches = len(getattr(drafter, "drafters", ())) or 1
        positions = draft.cache_bytes // (GROWTH * caches * position_bytes(engine))
    return Limited(drafter, own if shorter else None, positions, 1 if engine.lockstep else engine.page_size)


@dataclass(eq=False)
class _Limits:
    """One sequence.

    Attributes:
        text: it. state: the drafter's; None: it holds nothing of it.
        positions: of the draft's cache that it may have.
    """

    text: Text
    state: Any = None
    positions: int = 0


class Limited(Composed):
    """A drafter with a model whose context or memory is limited. What it has of a sequence that becomes too long is given back.

    Args:
        drafter: that drafts.
        context: tokens of a sequence that the model can read; None: any number.
        positions: tokens that its cache may hold, over all sequences; None: any number.
        page: tokens that it gives memory for at a time.
    """

    name = "limited"

    def __init__(self, drafter: Drafter, context: int | None, positions: int | None, page: int = 1) -> None:
        super().__init__((drafter,))
        self.drafter = drafter
        self.name, self.draws = drafter.name, drafter.draws  # type: ignore[misc]
        self._context, self._positions, self._page = context, positions, page
        self._taken = 0

    def begin(self, text: Text) -> _Limits:
        return _Limits(text)

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        self.overhead = 0.0
        # A model reads the sequence and of a branch all but the last token.
        limited = [replace(ask, depth=self._depth(ask)) for ask in asks]
        return drafted_where(limited, lambda ask: self._holds(ask.state, self._ahead(ask)), self._draft)

    def _draft(self, asks: Sequence[Ask]) -> list[Tree]:
        trees = self.drafter.draft([replace(ask, state=ask.state.state) for ask in asks])
        self.overhead = self.drafter.overhead
        return trees

    def learn(self, state: _Limits, verified: Verified) -> None:
        if self._holds(state, 0):
            self.drafter.learn(state.state, verified)

    def read(self, state: _Limits, start: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        if self._holds(state, 0):
            self.drafter.read(state.state, start, tokens, hidden)

    def end(self, state: _Limits) -> None:
        self._release(state)

    def describe(self) -> str:
        return self.drafter.describe()

    # ---------------------------------------------------------------- what fits
    def _depth(self, ask: Ask) -> int:
        """Tokens of a branch for which the context has room."""
        if self._context is None:
            return ask.depth
        return min(ask.depth, self._context - len(ask.text.tokens) + 1)

    def _ahead(self, ask: Ask) -> int | None:
        """Most tokens of a draft that the cache holds beside the sequence; None: the context has room for none."""
        if ask.depth <= 0:
            return None
        level = getattr(self.drafter, "level", None)  # of trees: nodes that are read in a pass
        return max(ask.nodes, ask.depth) if level is None else level * ask.depth

    def _holds(self, state: _Limits, ahead: int | None) -> bool:
        """Whether there is room for the sequence and so many tokens after it (None: there is not), which is taken or given back."""
        length = len(state.text.tokens)
        if ahead is None or (self._context is not None and length > self._context):
            self._release(state)
            return False
        wanted = max(state.positions, -(-(length + ahead) // self._page) * self._page)
        if self._positions is not None and self._taken - state.positions + wanted > self._positions:
            self._release(state)
            return False
        self._taken += wanted - state.positions
        state.positions = wanted
        if state.state is None:
            state.state = self.drafter.begin(state.text)
        return True

    def _release(self, state: _Limits) -> None:
        if state.state is not None:
            self.drafter.end(state.state)
        self._taken -= state.positions
        state.state, state.positions = None, 0
