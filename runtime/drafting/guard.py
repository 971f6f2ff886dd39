"""Guards around drafters: the limits of a draft model's context and cache, and a thread for drafters of other packages."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from runtime.drafting.drafters.base import Ask, Drafter, Text, Verified, drafted_where
from runtime.drafting.drafters.draft_model import DraftModel
from runtime.drafting.drafters.first_of import Composed
from runtime.sampling.tree import Tree

#: When a cache grows, what it held and what it will hold, up to twice as much, are in memory together.
GROWTH = 3


def within(drafter: Drafter, draft: DraftModel, context: int | None) -> Drafter:
    """The drafter, kept to the limits that its draft model has and its target has not.

    Args:
        draft: that it drafts with. context: of the target; None: it has no limit.
    """
    own = draft.context_length
    shorter = own is not None and (context is None or own < context)
    if not shorter and draft.cache_bytes is None:
        return drafter
    positions = None
    if draft.cache_bytes is not None:
        caches = len(getattr(drafter, "models", ())) or 1
        positions = draft.cache_bytes // (GROWTH * caches * draft.position_bytes)
    return Limited(drafter, own if shorter else None, positions, draft.page_size)


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


Result = TypeVar("Result")

PATIENCE = 10.0  # seconds; a drafter that thinks longer than this over a few tokens is of no use


class StalledError(Exception):
    """A drafter did not answer in time."""


class Watch:
    """Runs functions in a thread of its own, one after another, and stops waiting for one that takes too long.

    A thread cannot be ended from outside: the one that hangs is left alone (it does not keep the process from ending), and nothing
    runs here any more.

    Args:
        patience: seconds.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._calls: queue.SimpleQueue[Any] | None = None

    def run(self, what: Callable[..., Result], *arguments: Any) -> Result:
        """What the function gives or raises.

        Raises:
            StalledError: it took too long.
        """
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="drafter", daemon=True).start()
        answer: Future[Result] = Future()
        self._calls.put((answer, what, arguments))
        if not wait([answer], self.patience).done:
            self._calls = None
            raise StalledError(f"it did not answer within {self.patience:g} seconds")
        return answer.result()


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    while True:
        answer, what, arguments = calls.get()
        try:
            answer.set_result(what(*arguments))
        except Exception as error:
            answer.set_exception(error)
