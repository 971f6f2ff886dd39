"""Hierarchical drafting: n-grams of this text, then of what the model wrote before, then of a corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Interval

from runtime.config.settings import Count
from runtime.drafting.drafters.base import Ask, Drafter, Text, Verified
from runtime.drafting.drafters.tables.continuations import KINDS, OTHER, OWN, continuations, indexed
from runtime.drafting.drafters.tables.growth import grow, join
from runtime.drafting.drafters.tables.occurrences import BORDER, History, Match, Occurrences
from runtime.drafting.drafters.tables.odds import Guesses, Odds
from runtime.errors import RequestError
from runtime.sampling.tree import Tree


def token_ids(source: str | Path | Sequence[int], where: str, most: int) -> list[int]:
    """The ids, in order.

    Args:
        source: ids, or the path of a `.npy` file with one row of integers.
        where: says in errors whose corpus it is.
        most: ids that are allowed.

    Raises:
        RequestError: the file cannot be read, or these are not at most `most` token ids.
    """
    name = repr(str(source)) if isinstance(source, (str, Path)) else "what is given"
    try:
        found = (
            np.load(source, mmap_mode="r", allow_pickle=False) if isinstance(source, (str, Path)) else np.array(source)
        )
    except (OSError, ValueError, OverflowError) as error:
        raise RequestError(f"{where}: {name} cannot be read as a .npy file of token ids: {error}") from None
    if not isinstance(found, np.ndarray) or found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise RequestError(f"{where} must be one row of token ids, which {name} is not")
    if len(found) > most:
        raise RequestError(f"{where} may have at most {most} token ids, but {name} has {len(found)}")
    if len(found) and not (int(found.min()) >= 0 and int(found.max()) < BORDER):
        raise RequestError(
            f"{where} must be token ids, at least 0 and below {BORDER}, which {name} does not hold throughout"
        )
    return [int(token) for token in found]


_STORES = 3
_PLACES = 16  # of an n-gram in a store, the latest ones, that are looked at
_MOST_STATISTICS = 1 << 24


@dataclass(eq=False)
class Hierarchy(Drafter):
    """Stores of n-grams in the order of temporal locality: this text, earlier outputs of the model, a corpus. What followed the longest
    match is taken from the first, and as long as that is not enough, from the next (Hierarchy Drafting: Cho et al., arXiv 2502.05609).

    All three are the same store (`Occurrences`). The one of earlier outputs keeps the latest tokens, so that an n-gram which is
    written again is kept for as long again, and the least recently written ones go first.

    Attributes:
        longest: most last tokens of the text that are looked up.
        shortest: fewest.
        width: most continuations that are taken of one place in a store.
        enough: tokens that are proposed where the text asks for no fewer; later stores are not asked once they are found.
        history: most tokens of earlier outputs that are kept.
        statistics: token ids of a corpus, or a `.npy` file of them; None: there is no such store.
    """

    name: ClassVar[str] = "hierarchy"
    longest: Annotated[int, Interval(ge=1, le=256)] = 16
    shortest: Annotated[int, Interval(ge=1, le=256)] = 1
    width: Count = 4
    enough: Count = 64
    history: Annotated[int, Interval(ge=0, le=1 << 24)] = 1 << 17
    statistics: str | Path | Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.longest:
            raise ValueError(
                f"hierarchy.shortest must be at most hierarchy.longest, which is {self.longest}, not {self.shortest}"
            )
        self._lengths = indexed(self.longest)
        corpus = [] if self.statistics is None else token_ids(self.statistics, "hierarchy.statistics", _MOST_STATISTICS)
        self.vocabulary = max(corpus, default=-1) + 1 or None
        self._corpus = Occurrences(corpus, self._lengths)
        self._corpus.catch_up()
        self._earlier = History(self.history, self._lengths)
        self._odds = Odds(_STORES * KINDS)
        self._texts: dict[int, _Stored] = {}

    def begin(self, text: Text) -> Any:
        index = Occurrences(text.tokens, self._lengths)
        index.catch_up()
        state = _Stored(text, index, Odds(_STORES * KINDS, memory=64.0, parent=self._odds))
        self._texts[id(state)] = state
        return state

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Tree:
        state: _Stored = ask.state
        state.index.follow(ask.text.tokens)
        wanted = min(ask.nodes, self.enough)
        found = Guesses()
        for store, (tokens, match) in enumerate(self._matches(state.index)):
            if match.length < self.shortest:
                continue
            slope = OTHER if store else OWN
            followers = continuations(tokens, match, state.odds, store, slope, self.width)
            more = grow(match.places, followers, wanted, ask.depth, ask.least)
            for node, part in join(found.tree, more.tree, wanted):
                found.kinds.append(more.kinds[node])
                found.estimates.append(part * more.estimates[node])
            if len(found.tree) >= wanted:
                break
        found.length = len(ask.text.tokens)
        state.guesses = found
        return found.tree

    def _matches(self, index: Occurrences) -> Iterator[tuple[list[int], Match]]:
        """Of each store its tokens and the longest match, the store that is nearest first."""
        yield index.tokens, index.own_match(_PLACES)
        for other in (self._earlier.index, self._corpus):
            yield other.tokens, other.match(index.suffix(), _PLACES)

    def learn(self, state: Any, verified: Verified) -> None:
        state.index.follow(verified.text.tokens)
        state.guesses.settle(state.odds, len(verified.text.tokens) - len(verified.new), verified.new)

    def end(self, state: Any) -> None:
        if self._texts.pop(id(state), None) is not None:
            self._earlier.add(state.text.tokens[state.text.prompt :])

    def forget(self) -> None:
        self._earlier.clear()

    def reset(self) -> None:
        self.forget()
        self._odds.reset()

    @property
    def memory_bytes(self) -> int:
        texts = sum(state.index.memory_bytes for state in self._texts.values())
        return texts + self._earlier.memory_bytes + self._corpus.memory_bytes + 40 * len(self._corpus.tokens)


@dataclass(eq=False)
class _Stored:
    """What is known of a text, and what was proposed last."""

    text: Text
    index: Occurrences
    odds: Odds
    guesses: Guesses = field(default_factory=Guesses)
