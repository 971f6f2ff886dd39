"""Bases of drafters that guess from token statistics, and of those that look up n-grams of the sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.drafting.drafters.base import Ask, Drafter, Text, Verified
from runtime.drafting.drafters.tables.occurrences import History, Occurrences
from runtime.drafting.drafters.tables.odds import Guesses, Odds
from runtime.drafting.drafters.tables.token_trie import Reader, TokenTrie
from runtime.sampling.tree import Tree


@dataclass(eq=False, kw_only=True)
class Guessed:
    """One sequence.

    Attributes:
        odds: of guesses for it. guesses: what was proposed last.
        seen: how much of it is in a trie of outputs, where `reader` reads on.
    """

    odds: Odds
    guesses: Guesses = field(default_factory=Guesses)
    seen: int = 0
    reader: Reader = field(default_factory=Reader)


class GuessDrafter(Drafter):
    """A drafter that learns how often each kind of its guesses is right, and maybe what was written.

    Attributes:
        trie: n-grams of all that is written, as soon as it is; None: it keeps none.
    """

    trie: TokenTrie | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._odds = Odds()

    def begin(self, text: Text) -> Guessed:
        return Guessed(odds=self._odds, seen=text.prompt)

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        for ask in asks:
            ask.state.guesses = self.guess(ask.state, ask)
            ask.state.guesses.length = len(ask.text.tokens)
        return [ask.state.guesses.tree for ask in asks]

    def guess(self, state: Any, ask: Ask) -> Guesses:
        """What may follow a sequence."""
        raise NotImplementedError

    def learn(self, state: Any, verified: Verified) -> None:
        state.guesses.settle(state.odds, len(verified.text.tokens) - len(verified.new), verified.new)
        if self.trie is not None:
            self.trie.read(state.reader, verified.text.tokens[state.seen :])
            state.seen = len(verified.text.tokens)

    def forget(self) -> None:
        if self.trie is not None:
            self.trie.clear()

    def reset(self) -> None:
        self.forget()
        self._odds.reset()

    @property
    def memory_bytes(self) -> int:
        return 0 if self.trie is None else self.trie.memory_bytes


@dataclass(eq=False, kw_only=True)
class Lookups(Guessed):
    """One sequence.

    Attributes:
        text: it. index: where its n-grams occurred.
    """

    text: Text
    index: Occurrences


class NgramDrafter(GuessDrafter):
    """A drafter that indexes the n-grams of each sequence as it grows, and maybe of earlier outputs."""

    _history: History | None = None

    def index(self, lengths: Iterable[int], weight: float = 4.0, memory: float = 64.0) -> None:
        """To be called first.

        Args:
            lengths: of n-grams.
            weight, memory: of a sequence's own odds (`Odds`).
        """
        self._lengths, self._weight, self._memory = tuple(lengths), weight, memory
        self._sequences: dict[int, Lookups] = {}

    def remember(self, window: int) -> History:
        """Also index earlier outputs, at most so many tokens."""
        self._history = History(window, self._lengths)
        return self._history

    def begin(self, text: Text) -> Lookups:
        index = Occurrences(text.tokens, self._lengths)
        odds = Odds(self._weight, self._memory, self._odds)
        state = Lookups(odds=odds, text=text, index=index, seen=text.prompt)
        self._sequences[id(state)] = state
        return state

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        for ask in asks:
            ask.state.index.follow(ask.text.tokens)
        return super().draft(asks)

    def learn(self, state: Lookups, verified: Verified) -> None:
        state.index.follow(verified.text.tokens)
        super().learn(state, verified)

    def end(self, state: Lookups) -> None:
        if self._sequences.pop(id(state), None) is not None and self._history is not None:
            self._history.add(state.text.tokens[state.text.prompt :])

    def forget(self) -> None:
        super().forget()
        if self._history is not None:
            self._history.clear()

    @property
    def memory_bytes(self) -> int:
        kept = super().memory_bytes + (0 if self._history is None else self._history.memory_bytes)
        return kept + sum(state.index.memory_bytes for state in self._sequences.values())
