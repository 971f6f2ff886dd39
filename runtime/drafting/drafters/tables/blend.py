"""Probabilities of what follows, out of counts after longer and shorter contexts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

After = TypeVar("After")


def blended(contexts: Iterable[Sequence[tuple[int, float, After]]], most: int) -> list[tuple[int, float, list[After]]]:
    """Tokens, their probabilities, and what each context has after them; the likeliest first.

    After a context that was followed n times, by t different tokens, one that came c times has c / (n + t), and what the next context
    says is weighted with the t / (n + t) that are left for others (Witten and Bell, The zero-frequency problem, IEEE Transactions on
    Information Theory 37(4), 1991, method C; with all counts blended, as in their interpolation).

    Args:
        contexts: from the one that is trusted most, of each the tokens that came after it, how often, and anything.
        most: tokens that are wanted.
    """
    chances: dict[int, float] = {}
    places: dict[int, list[After]] = {}
    left = 1.0
    for followers in contexts:
        if not followers:
            continue
        total = len(followers) + sum([count for _, count, _ in followers])
        share = left / total
        for token, count, after in followers:
            if token in chances:
                chances[token] += share * count
                places[token].append(after)
            else:
                chances[token] = share * count
                places[token] = [after]
        left *= len(followers) / total
    best = sorted(chances, key=chances.__getitem__, reverse=True)[:most]
    return [(token, chances[token], places[token]) for token in best]
