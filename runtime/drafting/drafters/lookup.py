"""Prompt lookup and CopySpec: what followed the same words earlier in the text follows again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from runtime.config.settings import Count, built
from runtime.drafting.drafters.base import Ask, Drafter, Text, Verified
from runtime.drafting.drafters.tables.occurrences import Match, Occurrences
from runtime.drafting.drafters.tables.odds import BUCKETS, Guesses, Odds, bucket, likely
from runtime.sampling.tree import Tree


@dataclass(eq=False)
class Lookup(Drafter):
    """Copies what followed the latest earlier occurrence of the text's last tokens, of the longest that occurs (prompt lookup: Saxena,
    github.com/apoorvumang/prompt-lookup-decoding; LLMA: Yang et al., arXiv 2304.04487). With `longest` equal to `shortest` this is
    CopySpec (Dumitru et al., arXiv 2502.08923), which matches a fixed number of tokens by their hash.

    A copy may run into itself: what repeats with a period shorter than the copy goes on doing so. How likely a copied token is right
    is learned by how many tokens before it agree, those copied before it among them.

    Attributes:
        longest: most tokens that are looked up.
        shortest: fewest tokens that are looked up.
        candidates: of the latest places where all of the `longest` tokens occurred, how many are compared; the one that agrees with
            the text for longest is copied, the latest of those.
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
        self._odds = Odds(BUCKETS)
        self._texts: dict[int, _Copied] = {}

    def begin(self, text: Text) -> Any:
        index = Occurrences(text.tokens, range(self.shortest, self.longest + 1))
        index.catch_up()
        state = _Copied(index, Odds(BUCKETS, weight=2.0, memory=32.0, parent=self._odds))
        self._texts[id(state)] = state
        return state

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Tree:
        state: _Copied = ask.state
        state.index.follow(ask.text.tokens)
        found = state.index.own_match(self.candidates)
        if not found.places:
            return Tree()
        agreeing, place = self._most_promising(state.index, found)
        guesses = state.guesses = Guesses(length=len(ask.text.tokens))
        reach = 1.0
        for node, token in enumerate(copied(ask.text.tokens, place + 1, min(ask.nodes, ask.depth))):
            if reach < ask.least:
                break
            estimate, kind = likely(agreeing + node), bucket(agreeing + node)
            chance = state.odds.chance(kind, estimate)
            guesses.add(token, node - 1, chance, kind, estimate)
            reach *= chance
        return guesses.tree

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

    def learn(self, state: Any, verified: Verified) -> None:
        state.index.follow(verified.text.tokens)
        state.guesses.settle(state.odds, len(verified.text.tokens) - len(verified.new), verified.new)

    def end(self, state: Any) -> None:
        self._texts.pop(id(state), None)

    def reset(self) -> None:
        self._odds.reset()

    @property
    def memory_bytes(self) -> int:
        return sum(state.index.memory_bytes for state in self._texts.values())


_TRUSTED = 64  # tokens; that more of them agree says nothing new


@dataclass(eq=False)
class CopySpec(Lookup):
    """Copies what followed the latest earlier occurrence of the text's last three tokens (CopySpec: Dumitru et al., arXiv 2502.08923)."""

    name: ClassVar[str] = "copyspec"
    longest: int = built(3)
    shortest: int = built(3)


@dataclass(eq=False)
class _Copied:
    """What is known of a text, and what was copied last."""

    index: Occurrences
    odds: Odds
    guesses: Guesses = field(default_factory=Guesses)


def copied(tokens: list[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on, and where the text ends those that were just copied, again and again."""
    found = tokens[start : start + count]
    while found and len(found) < count:
        found += found[: count - len(found)]
    return found
