"""Continuations counted after places in a list of tokens: how often each, and how likely it follows again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from runtime.drafting.drafters.tables.growth import Candidate
from runtime.drafting.drafters.tables.occurrences import BORDER, Match
from runtime.drafting.drafters.tables.odds import BUCKETS, Odds, bucket, likely

#: Occurrences from which on a frequency is trusted more: as if so many times as many tokens agreed.
_AGAIN = (1, 2, 4)
#: Kinds of guesses out of one list of tokens, by how many tokens agree and how often that occurred.
KINDS = BUCKETS * len(_AGAIN)
#: Of `likely`: what follows in the sequence itself, and in another.
_OWN, _OTHER = 0.4, 0.2


def following(tokens: list[int], places: list[int]) -> list[tuple[int, float, list[int]]]:
    """Token, how often it comes after these places, and where it is; nothing beyond the end or a border."""
    if len(places) == 1:  # most often, so worth a quick way
        place = places[0] + 1
        return [(tokens[place], 1.0, [place])] if place < len(tokens) and tokens[place] != BORDER else []
    groups: dict[int, list[int]] = {}
    for place in places:
        if place + 1 < len(tokens):
            groups.setdefault(tokens[place + 1], []).append(place + 1)
    groups.pop(BORDER, None)
    return [(token, float(len(after)), after) for token, after in groups.items()]


def continuations(
    tokens: list[int], match: Match, odds: Odds, store: int, most: int | None = None
) -> Callable[[list[int], int], list[Candidate[list[int]]]]:
    """For `grow`, from the places of a match: a token's estimate is its share of all that followed, times how likely any of it
    follows again after so long a match.

    Args:
        store: 0: the sequence itself; 1, ...: others. Guesses from each are counted on their own, as `KINDS` kinds.
        most: candidates, the most frequent ones, of equals those that occurred last.
    """
    slope = _OTHER if store else _OWN

    def followers(places: list[int], depth: int) -> list[Candidate[list[int]]]:
        agreeing = match.length + depth
        kind = store * KINDS + bucket(agreeing) * len(_AGAIN)
        found = []
        groups = following(tokens, places)
        if most is not None and len(groups) > most:
            groups = sorted(groups, key=lambda group: -group[1])[:most]
        for token, count, after in groups:
            again = (count >= _AGAIN[1]) + (count >= _AGAIN[2])
            estimate = count / len(places) * likely(agreeing * _AGAIN[again], slope)
            found.append((token, odds.chance(kind + again, estimate), kind + again, estimate, after))
        return found

    return followers


def indexed(longest: int) -> tuple[int, ...]:
    """Lengths of n-grams to index for matches of up to `longest` tokens: powers of two below it, and itself."""
    return tuple(chain((1 << power for power in range((longest - 1).bit_length())), (longest,)))
