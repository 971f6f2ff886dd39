"""Which tokens stay: those that must, then the best ranked, each with all that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def closed(tokens: Iterable[int], parts: Callable[[int], Iterable[int]], within: set[int] | None = None) -> set[int]:
    """The tokens with all that they are made of, and those parts with theirs; `within`: what is there already is not followed."""
    found: set[int] = set()
    left = list(tokens)
    while left:
        token = left.pop()
        if token not in found and (within is None or token not in within):
            found.add(token)
            left.extend(parts(token))
    return found


def choose(ranked: Sequence[int], keep: int, required: set[int], parts: Callable[[int], Iterable[int]]) -> set[int]:
    """Exactly `keep` tokens.

    Args:
        ranked: all ids, those that matter most first. keep: at least `len(required)` and at most `len(ranked)`.
        required: closed under parts.
    """
    kept = set(required)
    while len(kept) < keep:
        for token in ranked:  # one that was too much with its parts may fit when these are there
            if token in kept:
                continue
            more = closed([token], parts, kept)
            if len(kept) + len(more) <= keep:
                kept |= more
            if len(kept) == keep:
                break
    return kept
