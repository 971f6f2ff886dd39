"""Witten-Bell smoothing, counted plainly."""

from __future__ import annotations


# ---------------------------------------------------------------- blend
def witten_bell(contexts: list[dict[int, float]]) -> dict[int, float]:
    """By the recursion: p(w | longer) = (c(w) + t p(w | shorter)) / (n + t)."""
    if not contexts:
        return {}
    counts, shorter = contexts[0], witten_bell(contexts[1:])
    n, t = sum(counts.values()), len(counts)
    if not t:
        return shorter
    return {w: (counts.get(w, 0) + t * shorter.get(w, 0)) / (n + t) for w in {*counts, *shorter}}
