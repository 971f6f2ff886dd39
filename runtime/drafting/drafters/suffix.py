"""SuffixDecoding: of what followed the longest match in this sequence and in earlier outputs, as much as is likely, as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Interval

from runtime.config.settings import Count
from runtime.drafting.drafters.base import Ask
from runtime.drafting.drafters.ngrams import Lookups, NgramDrafter
from runtime.drafting.drafters.tables.continuations import continuations, indexed
from runtime.drafting.drafters.tables.growth import grow
from runtime.drafting.drafters.tables.occurrences import Match
from runtime.drafting.drafters.tables.odds import Guesses


@dataclass(eq=False)
class Suffix(NgramDrafter):
    """The longest end of the sequence that occurred before is looked up in the sequence itself and in earlier outputs of the model; from
    each a tree of what followed is grown, the most frequent first, and the better of the two is proposed (SuffixDecoding: Oliaro et al.,
    arXiv 2411.04975). A node's chance is its parent's times C(node) / C(parent), where C counts occurrences, times how often such
    guesses were right so far; a tree's score is the sum over its nodes. A tree has at most `factor` * match length + `offset` nodes.

    What a suffix tree would answer is read off hash chains (`Occurrences`): a token costs the same however long the sequence is, counts
    are over the latest `occurrences` places, and what is oldest can be forgotten.

    Attributes:
        factor: nodes for each token that matches (the paper's alpha).
        offset: nodes besides.
        longest: most tokens of a match.
        patterns: how many ends are tried of the sequence and of earlier outputs: the longest that occurs, then shorter ones.
        occurrences: most places of an end that are counted.
        history: most tokens of earlier outputs that are kept.
    """

    name: ClassVar[str] = "suffix"
    factor: Annotated[float, Interval(ge=0, le=64)] = 4.0
    offset: Annotated[float, Interval(ge=0, le=4096)] = 8.0
    longest: Annotated[int, Interval(ge=1, le=256)] = 32
    patterns: Count = 2
    occurrences: Annotated[int, Interval(ge=1, le=4096)] = 32
    history: Annotated[int, Interval(ge=0, le=1 << 24)] = 1 << 17

    def __post_init__(self) -> None:
        super().__post_init__()
        self.index(indexed(self.longest))
        self._earlier = self.remember(self.history)

    def guess(self, state: Lookups, ask: Ask) -> Guesses:
        best, most = Guesses(), 0.0
        for store, tokens, match in self._matches(state):
            nodes = min(ask.nodes, int(self.factor * match.length + self.offset))
            followers = continuations(tokens, match, state.odds, store)
            guesses = grow(match.places, followers, nodes, ask.depth, ask.least)
            score = sum(guesses.tree.reach())
            if score > most:
                best, most = guesses, score
        return best

    def _matches(self, state: Lookups) -> Iterator[tuple[int, list[int], Match]]:
        """Of each store its tokens and the longest match, then those of shorter indexed lengths that occur more often."""
        for store, index, end in ((0, state.index, None), (1, self._earlier.index, state.index)):
            match = index.match(self.occurrences, end)
            level = len([length for length in self._lengths if length < match.length])
            for _ in range(self.patterns):
                if not match.places:
                    break
                yield store, index.tokens, match
                count = len(match.places)
                if count == self.occurrences:
                    break
                while len(match.places) <= count and level > 0:
                    level -= 1
                    match = Match(self._lengths[level], index.places(level, self.occurrences, end))
                if len(match.places) <= count:
                    break
