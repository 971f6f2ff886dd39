"""Staged speculation: n-grams of the sequence propose tokens to a draft model, which verifies them before the target does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Count
from runtime.drafting.draft_cache import Slot
from runtime.drafting.drafters.base import Ask, Text
from runtime.drafting.drafters.model import Chain, ModelDrafter
from runtime.sampling.tree import Tree

_LONGEST = 3  # tokens that are looked up


class Grams:
    """Where the latest n-grams of a sequence occurred last, so that what followed them there can be proposed again."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # the place after an n-gram

    def follow(self, tokens: Sequence[int]) -> None:
        """The sequence has become longer."""
        start = len(self._tokens)
        self._tokens += tokens[start:]
        # The place after the last token is known only when a token is there.
        for place in range(max(1, start), len(self._tokens)):
            for length in range(1, min(_LONGEST, place) + 1):
                self._last[tuple(self._tokens[place - length : place])] = place

    def guess(self, drafted: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow the sequence and what was drafted after it."""
        recent = [*self._tokens[-_LONGEST:], *drafted][-_LONGEST:]
        for start in range(len(recent)):
            place = self._last.get(tuple(recent[start:]))
            if place is not None:
                return self._tokens[place : place + count]
        return []


@dataclass(eq=False)
class Staged(ModelDrafter):
    """Before the draft model proposes its next token, n-grams of the sequence propose several; the draft model reads them in one pass and
    keeps those that it would have proposed itself. Its chain is the one it would have drafted alone, in fewer passes.

    Source: Spector and Re, Accelerating LLM Inference with Staged Speculative Decoding, arXiv 2308.04623.

    Attributes:
        guesses: most tokens that the n-grams propose at a time.
    """

    name: ClassVar[str] = "staged"
    guesses: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._grams: dict[Slot, Grams] = {}

    def begin(self, text: Text) -> Slot:
        slot = super().begin(text)
        self._grams[slot] = Grams()
        return slot

    def end(self, state: Slot) -> None:
        self._grams.pop(state, None)
        super().end(state)

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        for ask in asks:
            self._grams[ask.state].follow(ask.text.tokens)
        chains = [Chain(ask) for ask in asks]
        alive, missing = chains, self.missing(asks)
        while alive:
            guessed = [self._guess(chain) for chain in alive]
            rows = self.cache.ahead([chain.ask.state for chain in alive], missing, guessed)
            alive = [
                chain
                for chain, logits, guess in zip(alive, rows, guessed, strict=True)
                if self._extend(chain, logits, guess)
            ]
            missing = [chain.tree.tokens[-1:] for chain in alive]
        return [chain.tree for chain in chains]

    def _guess(self, chain: Chain) -> list[int]:
        """What may follow the sequence and what is drafted already; the last token is the draft model's own."""
        count = min(self.guesses, chain.room - 1)
        return self._grams[chain.ask.state].guess(chain.tree.tokens, count) if count > 0 else []

    def _extend(self, chain: Chain, logits: torch.Tensor, guess: Sequence[int]) -> bool:
        """Add the draft model's tokens as far as they are those guessed, and one more; whether the chain goes on."""
        goes_on, right = True, 0
        for row in logits:
            token, chance = self.candidates.next(row, chain)
            goes_on = chain.add(token, chance, self.confidence)
            if not goes_on or right == len(guess) or guess[right] != token:
                break
            right += 1
        self.cache.keep(chain.ask.state, guess[:right])
        return goes_on
