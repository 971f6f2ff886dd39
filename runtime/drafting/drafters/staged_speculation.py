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
from runtime.drafting.drafters.tables.occurrences import Occurrences
from runtime.sampling.tree import Tree

_LENGTHS = (1, 2, 3)  # of n-grams that are looked up


@dataclass(eq=False)
class StagedSpeculation(ModelDrafter):
    """Before the draft model proposes its next token, n-grams of the sequence propose several; the draft model reads them in one pass and
    keeps those that it would have proposed itself. Its chain is the one it would have drafted alone, in fewer passes.

    Source: Spector and Re, Accelerating LLM Inference with Staged Speculative Decoding, arXiv 2308.04623.

    Attributes:
        guesses: most tokens that the n-grams propose at a time.
    """

    name: ClassVar[str] = "staged"
    guesses: Count = 4

    def begin(self, text: Text) -> Slot:
        slot = super().begin(text)
        slot.memory = Occurrences([], _LENGTHS)
        return slot

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        for ask in asks:
            index = ask.state.memory
            index.tokens += ask.text.tokens[len(index.tokens) : -1]  # what follows the last token is not known yet
            index.catch_up()
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
        count, known = min(self.guesses, chain.room - 1), chain.ask.text.tokens
        end = Occurrences([*known[-_LENGTHS[-1] :], *chain.tree.tokens][-_LENGTHS[-1] :], _LENGTHS)
        places = chain.ask.state.memory.match(1, end).places if count > 0 else []
        return known[places[0] + 1 : places[0] + 1 + count] if places else []

    def _extend(self, chain: Chain, logits: torch.Tensor, guess: Sequence[int]) -> bool:
        """Add the draft model's tokens as far as they are those guessed, and one more; whether the chain goes on."""
        goes_on, right = True, 0
        for row in logits:
            token, chance = self.candidates.next(row, chain)
            goes_on = chain.add(token, chance, self.confidence)
            if not goes_on or right == len(guess) or guess[right] != token:
                break
            right += 1
        chain.ask.state.tokens += guess[:right]
        return goes_on
