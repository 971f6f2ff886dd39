"""PrefixQuant: tokens whose activations dwarf all others, to be put before every prompt, where the cache keeps them as floats."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from compress.kv_cache.statistics import Observer
from compress.kv_cache.view import CalibrationView, Found

RATIO = 64.0
SELDOM = 0.1  # a lone candidate in fewer rows than this share is chance


@dataclass(frozen=True)
class Prefix:
    """What was found.

    Attributes:
        tokens: ids to put before prompts, BOS first; empty: none.
        outliers: mean number of outlier tokens in a row, at the place of the model with the most.
        initial: share of the rows whose first token is one.
        frequent: (id, times) of the other outlier tokens, most frequent first; in however many blocks one is, it counts once.
        largest: the largest ratio of a token's maximum to the median of its row's.
        reason: why `tokens` is what it is.
    """

    tokens: list[int]
    outliers: float
    initial: float
    frequent: list[tuple[int, int]]
    largest: float
    reason: str

    def facts(self) -> dict[str, Any]:
        """For the report, JSON-able."""
        return {
            "outliers": round(self.outliers, 3),
            "initial": round(self.initial, 3),
            "frequent": [list(pair) for pair in self.frequent[:16]],
            "largest": round(self.largest, 2),
            "reason": self.reason,
        }


@dataclass
class OutlierTokens(Observer):
    """Observes tokens whose largest activation exceeds `ratio` times the median of their row (PrefixQuant, arXiv 2410.05265).

    Every block is looked at in two places: its input, and the input of its down projection, where the paper looks.
    """

    ratio: float = RATIO
    counts: dict[str, int] = field(default_factory=dict)
    found: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    initial: int = 0
    largest: float = 0.0
    _batch: dict[str, torch.Tensor] = field(default_factory=dict)

    def activations(self, site: str, maxima: torch.Tensor) -> None:
        ratios = maxima / maxima.median(1, keepdim=True).values.clamp(min=1e-30)
        self.largest = max(self.largest, float(ratios.max()))
        self._batch[site] = (ratios > self.ratio).cpu()

    def batch_done(self, ids: torch.Tensor) -> None:
        anywhere = torch.zeros(ids.shape, dtype=torch.bool)
        for site, outliers in self._batch.items():
            self.counts[site] = self.counts.get(site, 0) + int(outliers.sum())
            anywhere |= outliers
        self.found.update(ids.cpu()[:, 1:][anywhere[:, 1:]].tolist())
        self.initial += int(anywhere[:, 0].sum())
        self.rows += len(ids)
        self._batch = {}

    def finish(self, start: int | None) -> Prefix:
        """The prefix of a model whose texts begin with token `start` (None: with any).

        As many of the most frequent outlier tokens as a row has outliers at most, rounded up, first tokens of rows not counted.
        """
        rows = max(1, self.rows)
        outliers = max(self.counts.values(), default=0) / rows
        # Sorted so that equal counts give the same prefix whatever was seen first.
        frequent = sorted(self.found.items(), key=lambda pair: (-pair[1], pair[0]))
        initial = self.initial / rows

        def result(tokens: list[int], reason: str) -> Prefix:
            return Prefix(tokens, outliers, initial, frequent, self.largest, reason)

        if outliers == 0:
            return result(
                [], f"no token's activations exceed {self.ratio:g} times the median (at most {self.largest:.1f} times)"
            )
        room = math.ceil(outliers)
        chosen = frequent[:room]
        if len(frequent) == 1 and frequent[0][1] < SELDOM * rows:
            chosen = []
        tokens = [token for token, _ in chosen if token != start]
        if start is not None:
            return result([start, *tokens], f"{outliers:.1f} outlier tokens a row")
        if not tokens:
            text = "outlier tokens are first tokens only, and the tokenizer has none that texts begin with"
            return result([], text if initial else "the only outlier token is too rare")
        return result(tokens, f"{outliers:.1f} outlier tokens a row; the tokenizer has no token that texts begin with")


def calibrate(view: CalibrationView) -> Found:
    """Prefix tokens of a `CalibrationView`."""
    outliers = OutlierTokens(view.options.ratio)
    view.observe(outliers)
    found = outliers.finish(_start(view.tokenizer))
    return {"prefix_tokens": (found.tokens, found.facts())}


def _start(tokenizer: Any) -> int | None:
    """The token that texts begin with; families without one have been trained to see their end-of-text token there."""
    if tokenizer is None:
        return None
    bos: int | None = tokenizer.bos_token_id
    return tokenizer.eos_token_id if bos is None else bos
