"""Outlier tokens, whose activations dwarf all others: PrefixQuant puts them before every prompt (2024, arXiv 2410.05265)."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.kv_cache.statistics import Observer, activations_shown
from compress.model.hidden_states import HiddenStates
from runtime.kv_cache.policy.calibrated import fingerprint

if TYPE_CHECKING:
    from compress.core.progress import Reporter
    from compress.model.context import Context

RATIO = 64.0
SELDOM = 0.1  # a lone candidate in fewer rows than this share is chance


@dataclass
class OutlierTokens(Observer):
    """Observes tokens whose largest activation exceeds `ratio` times the median of their row (PrefixQuant, arXiv 2410.05265).

    Every block is looked at in two places: its input, and the input of its down projection, where the paper looks. All batches may pass
    through the model one after the other, or through each block before the next.
    """

    ratio: float = RATIO
    counts: dict[str, int] = field(default_factory=dict)
    found: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    initial: int = 0
    largest: float = 0.0
    _seen: Counter[str] = field(default_factory=Counter)  # batches, by site
    _batches: dict[int, torch.Tensor] = field(default_factory=dict)  # where outliers are, at any site

    def activations(self, site: str, maxima: torch.Tensor) -> None:
        ratios = maxima / maxima.median(1, keepdim=True).values.clamp(min=1e-30)
        self.largest = max(self.largest, float(ratios.max()))
        outliers, number = (ratios > self.ratio).cpu(), self._seen[site]
        self._batches[number] = self._batches[number] | outliers if number in self._batches else outliers
        self._seen[site] += 1
        self.counts[site] = self.counts.get(site, 0) + int(outliers.sum())

    def batch_done(self, ids: torch.Tensor) -> None:
        anywhere = self._batches.pop(min(self._batches))
        self.found.update(ids.cpu()[:, 1:][anywhere[:, 1:]].tolist())
        self.initial += int(anywhere[:, 0].sum())
        self.rows += len(ids)

    def finish(self, start: int | None) -> tuple[list[int], dict[str, Any]]:
        """The prefix of a model whose texts begin with token `start` (None: with any), and facts for the report.

        As many of the most frequent outlier tokens as a row has outliers at most, rounded up, first tokens of rows not counted.

        Returns:
            Ids to put before prompts, BOS first; empty: none. Facts: "outliers", mean number of outlier tokens in a row, at the place of
            the model with the most; "initial", share of the rows whose first token is one; "frequent", [id, times] of the other outlier
            tokens, most frequent first (in however many blocks one is, it counts once); "largest", the largest ratio of a token's maximum
            to the median of its row's; "reason", why the prefix is what it is.
        """
        rows = max(1, self.rows)
        outliers, initial = max(self.counts.values(), default=0) / rows, self.initial / rows
        # Sorted so that equal counts give the same prefix whatever was seen first.
        frequent = sorted(self.found.items(), key=lambda pair: (-pair[1], pair[0]))
        chosen = frequent[: math.ceil(outliers)]
        if len(frequent) == 1 and frequent[0][1] < SELDOM * rows:
            chosen = []
        tokens = [token for token, _ in chosen if token != start]
        reason = f"{outliers:.1f} outlier tokens a row"
        if outliers == 0:
            reason = f"no token's activations exceed {self.ratio:g} times the median (at most {self.largest:.1f} times)"
        elif start is not None:
            tokens = [start, *tokens]
        elif tokens:
            reason += "; the tokenizer has no token that texts begin with"
        elif initial:
            reason = "outlier tokens are first tokens only, and the tokenizer has none that texts begin with"
        else:
            reason = "the only outlier token is too rare"
        return tokens, {
            "outliers": round(outliers, 3),
            "initial": round(initial, 3),
            "frequent": [list(pair) for pair in frequent[:16]],
            "largest": round(self.largest, 2),
            "reason": reason,
        }


def first_token(tokenizer: Any) -> int | None:
    """The token that texts begin with; families without one have been trained to see their end-of-text token there."""
    if tokenizer is None:
        return None
    bos: int | None = tokenizer.bos_token_id
    return tokenizer.eos_token_id if bos is None else bos


@torch.inference_mode()
def find_before_compression(context: Context, spill: Path | None, reporter: Reporter) -> dict[str, Any]:
    """Prefix tokens of a model that is not compressed yet, one block in memory at a time; like `compress.kv_cache.calibrate.calibrate`.

    Args:
        spill: directory of hidden states; None: they stay in memory.
    """
    began, streamed, batches = time.perf_counter(), context.streamed, context.batches
    outliers, states = OutlierTokens(), HiddenStates(len(batches), spill)
    reporter.phase("outlier tokens", len(streamed.blocks))
    with streamed.outside(head=False):
        streamed.prelude(batches, states)
    for index in range(len(streamed.blocks)):
        with streamed.loaded_block(index), activations_shown(streamed.model, [outliers]):
            for number, batch in enumerate(batches):
                states.put(number, streamed.advance(index, states.get(number), batch))
        reporter.step(f"block {index}")
    states.drop()
    for ids, _ in batches:
        outliers.batch_done(ids)
    tokens, facts = outliers.finish(first_token(context.tokenizer))
    return {
        "fingerprint": fingerprint(streamed.config),
        "prefix_tokens": tokens,
        "seconds": {"prefix_tokens": round(time.perf_counter() - began, 2)},
        "facts": {"prefix_tokens": facts},
    }
