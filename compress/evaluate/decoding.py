"""Decoding measured over several calls of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from runtime.decoding.stats import GenerationStats

_COUNTS = ("steps", "new_tokens", "sequences", "drafted_tokens", "accepted_tokens", "draft_rounds", "decode_seconds")
_BY_DEPTH = ("reached_by_depth", "accepted_by_depth")


def add(totals: GenerationStats, stats: Mapping[str, Any]) -> None:
    """One more call's `Model.stats` to the sums of others."""
    for name in _COUNTS:
        setattr(totals, name, getattr(totals, name) + stats[name])
    for name in _BY_DEPTH:
        pairs = zip_longest(getattr(totals, name), stats[name], fillvalue=0)
        setattr(totals, name, [one + other for one, other in pairs])


def decode(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, batch_size: int, temperature: float = 0.0
) -> tuple[list[list[int]], GenerationStats]:
    """What a model writes after prompts, `batch_size` at a time, and the sums of what that took.

    Its drafter begins without the texts of earlier calls, which may have been the very same.
    """
    if model.speculation is not None:
        model.speculation.drafter.forget()
    texts: list[list[int]] = []
    totals = GenerationStats()
    for start in range(0, len(prompts), batch_size):
        part = [list(ids) for ids in prompts[start : start + batch_size]]
        texts += model.generate(part, max_new_tokens=new_tokens, temperature=temperature, ignore_eos=True)
        add(totals, model.stats)
    return texts, totals
