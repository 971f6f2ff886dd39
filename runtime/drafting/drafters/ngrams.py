"""Base of drafters that look up n-grams of the sequence, and maybe of earlier outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from runtime.drafting.drafters.base import Ask, Drafter, Text, Verified
from runtime.drafting.drafters.tables.occurrences import History, Occurrences
from runtime.drafting.drafters.tables.odds import Guesses, Odds
from runtime.drafting.drafters.tables.token_trie import Reader
from runtime.sampling.tree import Tree


@dataclass(eq=False)
class Lookups:
    """One sequence.

    Attributes:
        text: it. index: where its n-grams occurred.
        odds: of guesses for it. guesses: what was proposed last.
        seen: how much of it is counted elsewhere, which `reader` reads on.
    """

    text: Text
    index: Occurrences
    odds: Odds
    guesses: Guesses = field(default_factory=Guesses)
    seen: int = 0
    reader: Reader = field(default_factory=Reader)


class NgramDrafter(Drafter):
    """A drafter that indexes each sequence as it grows, and learns how often its guesses are right."""

    _history: History | None = None

    def index(self, lengths: Iterable[int], kinds: int, weight: float = 4.0, memory: float = 64.0) -> None:
        """To be called first.

        Args:
            lengths: of n-grams. kinds: of guesses, whose odds are learned apart.
            weight, memory: of a sequence's own odds (`Odds`).
        """
        self._lengths, self._kinds, self._weight, self._memory = tuple(lengths), kinds, weight, memory
        self._odds = Odds(kinds)
        self._sequences: dict[int, Lookups] = {}

    def remember(self, window: int) -> History:
        """Keep earlier outputs, at most so many tokens, too."""
        self._history = History(window, self._lengths)
        return self._history

    def begin(self, text: Text) -> Lookups:
        index = Occurrences(text.tokens, self._lengths)
        index.catch_up()
        odds = Odds(self._kinds, self._weight, self._memory, self._odds)
        state = Lookups(text, index, odds, seen=text.prompt)
        self._sequences[id(state)] = state
        return state

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        trees = []
        for ask in asks:
            state: Lookups = ask.state
            state.index.follow(ask.text.tokens)
            state.guesses = self.guess(state, ask)
            state.guesses.length = len(ask.text.tokens)
            trees.append(state.guesses.tree)
        return trees

    def guess(self, state: Lookups, ask: Ask) -> Guesses:
        """What may follow a sequence whose index is complete."""
        raise NotImplementedError

    def learn(self, state: Lookups, verified: Verified) -> None:
        tokens = verified.text.tokens
        state.index.follow(tokens)
        state.guesses.settle(state.odds, len(tokens) - len(verified.new), verified.new)

    def end(self, state: Lookups) -> None:
        if self._sequences.pop(id(state), None) is not None and self._history is not None:
            self._history.add(state.text.tokens[state.text.prompt :])

    def forget(self) -> None:
        if self._history is not None:
            self._history.clear()

    def reset(self) -> None:
        self.forget()
        self._odds.reset()

    @property
    def memory_bytes(self) -> int:
        earlier = 0 if self._history is None else self._history.memory_bytes
        return earlier + sum(state.index.memory_bytes for state in self._sequences.values())
