"""The next token of rows in CPU memory: the same definitions as in `sampling.py`, several times faster.

numpy finds maxima, partitions and sorts with vector instructions where torch does not, and after a filter only the tokens that
are left are worked on. A row is drawn alone, so that it cannot depend on its batch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.decoding.options import GenerationOptions

Floats = NDArray[np.float32]

_HEAD = 512  # top-p mostly keeps fewer tokens than this, and finding the largest ones is quicker than sorting them all


def greedy(logits: torch.Tensor) -> tuple[list[int], bool]:
    """The most likely token of each row, the first of several, and whether any row holds a NaN."""
    values = logits.numpy()
    tokens = values.argmax(axis=-1).tolist()  # stops at the first NaN
    broken = False
    for row, token in zip(values, tokens, strict=True):
        chosen = row[token]
        broken |= bool(chosen != chosen)
    return tokens, broken


def draw(row: Floats, options: GenerationOptions, uniform: float) -> int:
    """A token of `[vocab]` logits, which temperature and penalty are already in, at `uniform` in [0, 1); -1 if a logit is NaN."""
    top = row.max()
    if not np.isfinite(top):
        return -1
    kept = candidates(row, top, options)
    values = row if kept is None else row[kept]
    cumulative = _sums(np.exp(values - top))
    total = cumulative[-1]
    # "right" finds the first entry above the target: a token of probability 0 adds nothing and is never that entry.
    place = int(np.searchsorted(cumulative, min(uniform * total, np.nextafter(total, 0.0)), side="right"))
    return place if kept is None else int(kept[place])


def candidates(row: Floats, top: np.float32, options: GenerationOptions) -> NDArray[np.int64] | None:
    """Ids, ascending, of the tokens that top-k, top-p and min-p keep; None: all of them."""
    kept: NDArray[np.int64] | None = None
    values = row
    if options.top_k is not None and options.top_k < len(row):
        threshold = np.partition(row, -options.top_k)[-options.top_k]
        kept = np.flatnonzero(row >= threshold)
        values = row[kept]
    if options.top_p < 1.0:
        chosen = _nucleus(values, top, options.top_p)
        kept = chosen if kept is None else kept[chosen]
        values = values[chosen]
    if options.min_p > 0.0:
        chosen = np.flatnonzero(np.exp(values - top) >= options.min_p)
        kept = chosen if kept is None else kept[chosen]
    return kept


def _nucleus(values: Floats, top: np.float32, p: float) -> NDArray[np.int64]:
    """Places of the fewest largest values whose probabilities sum to at least `p`; of equal ones at the end, the first."""
    wanted = p * np.exp(values - top).sum(dtype=np.float64)
    for size in (_HEAD, len(values)):
        if size < len(values):
            ordered = np.sort(np.partition(values, -size)[-size:])[::-1]
        else:
            ordered = np.sort(values)[::-1]
        cumulative = _sums(np.exp(ordered - top))
        if size >= len(values) or cumulative[-1] >= wanted:
            break
    count = min(int(np.searchsorted(cumulative, wanted, side="left")) + 1, len(ordered))
    last = ordered[count - 1]
    chosen = np.flatnonzero(values >= last)
    surplus = len(chosen) - count
    if surplus:  # the last of those that are as likely as the last one kept
        ties = np.flatnonzero(values[chosen] == last)
        chosen = np.delete(chosen, ties[len(ties) - surplus :])
    return chosen


def _sums(weights: Floats) -> NDArray[np.float64]:
    """Running sums, in float64: in float32 a large vocabulary would lose its unlikely tokens. torch is three times as fast here."""
    return torch.from_numpy(weights).cumsum(0, dtype=torch.float64).numpy()
