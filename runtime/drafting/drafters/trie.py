"""Lookahead's trie: branches of earlier outputs and of the prompt that go on from the sequence's last tokens, as one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Interval

from runtime.config.settings import Count
from runtime.drafting.drafters.base import Ask
from runtime.drafting.drafters.ngrams import Lookups, NgramDrafter
from runtime.drafting.drafters.tables.continuations import following
from runtime.drafting.drafters.tables.growth import Candidate, grow
from runtime.drafting.drafters.tables.occurrences import Occurrences
from runtime.drafting.drafters.tables.odds import Guesses, bucket
from runtime.drafting.drafters.tables.token_trie import TokenTrie, blended

Context = int | list[int]  # a node of the trie of outputs, or places in the sequence
_PLACES = 32  # of an n-gram in the sequence, the latest ones, that are counted


@dataclass(eq=False)
class Trie(NgramDrafter):
    """N-grams of all outputs are kept in a trie, those of a sequence, its prompt included, as long as it is written. Branches that follow
    the sequence's last tokens, from the longest prefix to the shortest, are merged into one tree by their frequencies (Lookahead: Zhao
    et al., arXiv 2312.12728). The sequence's own branches are read off hash chains (`Occurrences`), which long prompts need; of each n-gram
    the latest occurrences count.

    Attributes:
        branch: most tokens of an n-gram in the trie of outputs, prefix and continuation together.
        prefix: most last tokens of the sequence that are looked up.
        width: most branches that go on from a token.
        capacity: most nodes of the trie of outputs; beyond it branches that are not seen again are pruned.
    """

    name: ClassVar[str] = "trie"
    branch: Annotated[int, Interval(ge=2, le=64)] = 10
    prefix: Count = 4
    width: Count = 4
    capacity: Annotated[int, Interval(ge=1 << 10, le=1 << 24)] = 1 << 17

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix >= self.branch:
            raise ValueError(f"trie.prefix must be below trie.branch, which is {self.branch}, not {self.prefix}")
        self._outputs = self.trie = TokenTrie(self.branch, self.capacity)
        self.index(range(1, self.prefix + 1))

    def guess(self, state: Lookups, ask: Ask) -> Guesses:
        contexts, longest = self._contexts(state.index)
        own, outputs = state.index.tokens, self._outputs

        def followers(found: list[Context], depth: int) -> list[Candidate[list[Context]]]:
            counts: list[Sequence[tuple[int, float, Context]]] = [
                outputs.followers(at) if isinstance(at, int) else following(own, at) for at in found
            ]
            kind = bucket(longest + depth)
            return [
                (token, state.odds.chance(kind, estimate), kind, estimate, after)
                for token, estimate, after in blended(counts, self.width)
            ]

        return grow(contexts, followers, ask.nodes, ask.depth, ask.least)

    def _contexts(self, index: Occurrences) -> tuple[list[Context], int]:
        """Places in the sequence and nodes of the trie of its last tokens, the longest first; and how long that is."""
        tail, longest = index.tokens[-self.prefix :], 0
        contexts: list[Context] = []
        for length in range(len(tail), 0, -1):
            places, node = index.places(length - 1, _PLACES), self._outputs.find(tail[-length:])
            if places:
                contexts.append(places)
            if node is not None:
                contexts.append(node)
            if contexts and not longest:
                longest = length
        return contexts, longest
