"""How often drafts with some halves left out are accepted, as the report has it of every draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compress.distill.skip_trials import DraftTrials
from runtime.engines.llama import LlamaEngine
from runtime.engines.llama_view import View

_ROWS = 8  # whose keys and values are in memory at once


def evenly(layers: int, count: int) -> list[int]:
    """`count` of `layers` layers, evenly spread: what is left out by who has not searched."""
    return [(2 * index + 1) * layers // (2 * count) for index in range(count)]


def measure_views(
    engine: LlamaEngine, views: Mapping[str, View], rows: Mapping[str, torch.Tensor], places: int, tokens: int
) -> dict[str, dict[str, Any]]:
    """{name of the view: {kind: what `compress.distill.acceptance.measure_acceptance` returns}}, of greedy drafts after texts.

    Args:
        views: parts of the engine, by name.
        rows: {kind: int64 `[n, s]`}, texts.
        places: drafts begin in each, fewer in short ones. tokens: of a draft.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in views}
    for kind, ids in rows.items():
        counts: dict[str, list[torch.Tensor]] = {name: [] for name in views}
        for part in ids.split(_ROWS):
            trials = DraftTrials(engine, part, min(places, part.shape[1] - 1), tokens)
            for name, view in views.items():
                counts[name].append(trials.accepted(view))
        for name, each in counts.items():
            greedy = _record(torch.cat(each), tokens)
            found[name][kind] = {"length": tokens, "text": None, "continuations": {"greedy": greedy}}
    return found


def _record(counts: torch.Tensor, tokens: int) -> dict[str, Any]:
    """Of drafts of which so many tokens were accepted, int64 `[n]`; as in `measure_acceptance`."""
    rates = []
    for place in range(tokens):
        reached = int((counts >= place).sum())
        rates.append(float((counts > place).sum()) / reached if reached else None)
    accepted = float(counts.double().mean())
    return {
        "acceptance": rates[0], "by_position": rates, "accepted": accepted, "tokens": accepted + 1, "steps": len(counts),
    }  # fmt: skip
