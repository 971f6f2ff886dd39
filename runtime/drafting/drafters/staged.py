"""Staged speculation: a draft model that n-grams of the sequence draft for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from runtime.config.settings import Count, built
from runtime.drafting.draft_cache import AheadDraftCache, Slot
from runtime.drafting.drafters.base import Ask, Text
from runtime.drafting.drafters.model import ModelDrafter
from runtime.sampling.tree import Tree

_LONGEST = 3  # tokens that are looked up


class _Grams:
    """Where the latest tokens of a text stood last, so that what followed them there can be guessed to follow again."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: list[dict[tuple[int, ...], int]] = [{} for _ in range(_LONGEST)]

    def follow(self, tokens: Sequence[int]) -> None:
        """The text has become longer."""
        start = len(self.tokens)
        self.tokens += tokens[start:]
        # The place after the last token is known only when something stands there.
        for place in range(max(1, start), len(self.tokens)):
            for length in range(1, min(_LONGEST, place) + 1):
                self._last[length - 1][tuple(self.tokens[place - length : place])] = place

    def guess(self, drafted: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow the text and what was drafted after it."""
        recent = [*self.tokens[-_LONGEST:], *drafted][-_LONGEST:]
        for length in range(len(recent), 0, -1):
            place = self._last[length - 1].get(tuple(recent[-length:]))
            if place is not None:
                return self.tokens[place : place + count]
        return []


@dataclass(eq=False)
class _Own:
    """What is remembered of one text."""

    slot: Slot
    grams: _Grams


@dataclass(eq=False)
class Staged(ModelDrafter):
    """Before the draft model says its next token, n-grams of the text guess several; the draft reads them in one pass and keeps those that
    it would have said itself. Its chain is the one it would have drafted alone, in fewer passes.

    Source: Spector and Re, Accelerating LLM Inference with Staged Speculative Decoding, arXiv 2308.04623.

    Attributes:
        guesses: most tokens that are guessed at a time.
    """

    name: ClassVar[str] = "staged"
    cache: AheadDraftCache = built()
    guesses: Count = 4

    def begin(self, text: Text) -> Any:
        return _Own(self.cache.open(), _Grams())

    def end(self, state: Any) -> None:
        super().end(state.slot)

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        for ask in asks:
            ask.state.grams.follow(ask.text.tokens)
        states = [ask.state for ask in asks]
        inner = [replace(ask, state=ask.state.slot) for ask in asks]
        trees = [Tree() for _ in asks]
        reach = [1.0] * len(asks)
        missing = self.missing(inner)
        alive = list(range(len(asks)))
        while alive:
            guessed = [self._guess(states[index], trees[index], inner[index]) for index in alive]
            rows = self.cache.ahead(
                [inner[index].state for index in alive], [missing[index] for index in alive], guessed
            )
            following = []
            for index, logits, guess in zip(alive, rows, guessed, strict=True):
                ask, tree = inner[index], trees[index]
                right = 0
                for row in logits:
                    token, chance = self.choose(row, ask, tree)
                    tree.add(token, len(tree) - 1, chance)
                    reach[index] *= chance
                    sure = chance >= self.confidence and reach[index] >= ask.least
                    if not sure or len(tree) >= min(ask.nodes, ask.depth):
                        break
                    if right == len(guess) or guess[right] != token:
                        following.append(index)
                        break
                    right += 1
                self.cache.keep(ask.state, guess[:right])
                missing[index] = tree.tokens[-1:]
            alive = following
        return trees

    def _guess(self, state: _Own, tree: Tree, ask: Ask) -> list[int]:
        """What may follow the text and what is drafted already."""
        room = min(self.guesses, min(ask.nodes, ask.depth) - len(tree) - 1)
        return state.grams.guess(tree.tokens, room) if room > 0 else []
