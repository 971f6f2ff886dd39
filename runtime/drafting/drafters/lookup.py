"""Prompt lookup and CopySpec: copies of what followed the last tokens where they occurred before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Interval

from runtime.config.settings import Count, built
from runtime.drafting.drafters.base import Ask
from runtime.drafting.drafters.ngrams import Lookups, NgramDrafter
from runtime.drafting.drafters.tables.occurrences import Match, Occurrences
from runtime.drafting.drafters.tables.odds import Guesses, bucket, likely


@dataclass(eq=False)
class Lookup(NgramDrafter):
    """Copies what followed the latest earlier occurrence of the sequence's last tokens, of the longest that occurs (prompt lookup: Saxena,
    github.com/apoorvumang/prompt-lookup-decoding; LLMA: Yang et al., arXiv 2304.04487). With `longest` equal to `shortest` this is
    CopySpec (Dumitru et al., arXiv 2502.08923), which matches a fixed number of tokens by their hash.

    A copy may run into itself: what repeats with a period shorter than the copy goes on doing so. How likely a copied token is right
    is learned by how many tokens before it agree, those copied before it among them.

    Attributes:
        longest: most tokens that are looked up.
        shortest: fewest tokens that are looked up.
        candidates: of the latest places where all of the `longest` tokens occurred, how many are compared; the one that agrees with
            the sequence for longest is copied, the latest of those.
    """

    name: ClassVar[str] = "lookup"
    longest: Annotated[int, Interval(ge=1, le=64)] = 8
    shortest: Annotated[int, Interval(ge=1, le=64)] = 1
    candidates: Count = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.longest:
            raise ValueError(
                f"lookup.shortest must be at most lookup.longest, which is {self.longest}, not {self.shortest}"
            )
        self.index(range(self.shortest, self.longest + 1), weight=2.0, memory=32.0)

    def guess(self, state: Lookups, ask: Ask) -> Guesses:
        found, guesses = state.index.match(self.candidates), Guesses()
        if not found.places:
            return guesses
        agreeing, place = self._most_promising(state.index, found)
        reach = 1.0
        for node, token in enumerate(copied(ask.text.tokens, place + 1, min(ask.nodes, ask.depth))):
            if reach < ask.least:
                break
            estimate, kind = likely(agreeing + node), bucket(agreeing + node)
            chance = state.odds.chance(kind, estimate)
            guesses.add(token, node - 1, chance, kind, estimate)
            reach *= chance
        return guesses

    def _most_promising(self, index: Occurrences, found: Match) -> tuple[int, int]:
        """How many tokens agree, and where."""
        if found.length < self.longest:  # all agree over as many
            return found.length, found.places[0]
        best = (0, 0)
        for place in found.places:
            agreeing = index.agreement(place, found.length, _TRUSTED)
            if agreeing > best[0]:
                best = agreeing, place
            if agreeing == _TRUSTED:
                break
        return best


_TRUSTED = 64  # tokens; that more of them agree says nothing new


@dataclass(eq=False)
class CopySpec(Lookup):
    """Copies what followed the latest earlier occurrence of the sequence's last three tokens.

    Source: Dumitru et al., CopySpec, arXiv 2502.08923.
    """

    name: ClassVar[str] = "copyspec"
    longest: int = built(3)
    shortest: int = built(3)


def copied(tokens: list[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on, and beyond the end of the sequence the copied ones over again."""
    found = tokens[start : start + count]
    while found and len(found) < count:
        found += found[: count - len(found)]
    return found
