"""Hierarchical drafting: n-grams of this sequence, then of what the model wrote before, then of a corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval

from runtime.config.settings import Count
from runtime.drafting.drafters.base import Ask
from runtime.drafting.drafters.ngrams import Lookups, NgramDrafter
from runtime.drafting.drafters.tables.continuations import continuations, indexed
from runtime.drafting.drafters.tables.growth import grow, join
from runtime.drafting.drafters.tables.occurrences import BORDER, Match, Occurrences
from runtime.drafting.drafters.tables.odds import Guesses
from runtime.errors import RequestError


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


_PLACES = 16  # of an n-gram in a store, the latest ones, that are looked at
_MOST_STATISTICS = 1 << 24


@dataclass(eq=False)
class Hierarchy(NgramDrafter):
    """Stores of n-grams in the order of temporal locality: this sequence, earlier outputs of the model, a corpus. What followed the longest
    match is taken from the first, and as long as that is not enough, from the next (Hierarchy Drafting: Cho et al., arXiv 2502.05609).

    All three are the same store (`Occurrences`). The one of earlier outputs keeps the latest tokens, so that an n-gram which is
    written again is kept for as long again, and the least recently written ones go first.

    Attributes:
        longest: most last tokens of the sequence that are looked up.
        shortest: fewest.
        width: most continuations that are taken of one place in a store.
        enough: tokens that are proposed where the sequence asks for no fewer; later stores are not asked once they are found.
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
        self.index(indexed(self.longest))
        corpus = [] if self.statistics is None else token_ids(self.statistics, "hierarchy.statistics", _MOST_STATISTICS)
        self.vocabulary = max(corpus, default=-1) + 1 or None
        self._corpus = Occurrences(corpus, self._lengths)
        self._earlier = self.remember(self.history)

    def guess(self, state: Lookups, ask: Ask) -> Guesses:
        wanted = min(ask.nodes, self.enough)
        found = Guesses()
        for store, (tokens, match) in enumerate(self._matches(state.index)):
            if match.length < self.shortest:
                continue
            followers = continuations(tokens, match, state.odds, store, self.width)
            more = grow(match.places, followers, wanted, ask.depth, ask.least)
            for node, part in join(found.tree, more.tree, wanted):
                found.kinds.append(more.kinds[node])
                found.estimates.append(part * more.estimates[node])
            if len(found.tree) >= wanted:
                break
        return found

    def _matches(self, index: Occurrences) -> Iterator[tuple[list[int], Match]]:
        """Of each store its tokens and the longest match, the store that is nearest first."""
        yield index.tokens, index.match(_PLACES)
        for other in (self._earlier.index, self._corpus):
            yield other.tokens, other.match(_PLACES, index)

    @property
    def memory_bytes(self) -> int:
        return super().memory_bytes + self._corpus.memory_bytes + 40 * len(self._corpus.tokens)
