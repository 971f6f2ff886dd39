"""Suggestions: the nearest valid name to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The most similar of `names`, or None when nothing is close."""
    by_lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(str(word).lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`"; did you mean 'x'"` or an empty string, to be put into a sentence."""
    found = nearest(word, names)
    return f"; did you mean '{found}'?" if found else ""


def listing(names: Iterable[str], limit: int = 40) -> str:
    """`a, b, c`, cut after `limit` names."""
    names = list(names)
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text}, ... ({len(names)} in all)"
