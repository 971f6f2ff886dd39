"""Phrases of error messages: a value, a list of names, the name that was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.system import describe


def plain(name: str) -> str:
    """A name without case, hyphens, underscores and spaces: "Layer-DefensiveKV" is "layerdefensivekv"."""
    return re.sub(r"[-_\s]", "", name.lower())


def nearest(word: object, names: Iterable[str]) -> str | None:
    """The most similar of `names`; None when none is close."""
    by_plain = {plain(name): name for name in names}
    found = difflib.get_close_matches(plain(str(word)), list(by_plain), n=1, cutoff=0.6)
    return by_plain[found[0]] if found else None


def did_you_mean(word: object, names: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` or an empty string, to be put into a sentence."""
    found = nearest(word, names)
    return f"; did you mean '{found}'?" if found else ""


def listing(names: Iterable[str], limit: int = 40) -> str:
    """`a, b, c`, cut after `limit` names."""
    names = list(names)
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text}, ... ({len(names)} in all)"


def show(value: Any) -> str:
    """A value as a message names it, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"a mapping with {listing(map(str, value), 4)}" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return describe.show(value)
