"""Sampling: pure functions from `[batch, vocab]` float32 logits to the next token, in torch, and in numpy for logits in CPU memory.

A removed token has logit -inf. Every filter keeps the most likely token, so that something can always be drawn. The order of
application is the one of transformers: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.errors import CompressError
from runtime.sampling.options import GenerationOptions

# The next token of rows in CPU memory: the same definitions as in `sampling.py`, several times faster.
#
# numpy finds maxima, partitions and sorts with vector instructions where torch does not, and after a filter only the tokens that
# are left are worked on. A row is drawn alone, so that it cannot depend on its batch.

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


def draw_on_cpu(row: Floats, options: GenerationOptions, uniform: float) -> int:
    """A token of `[vocab]` logits, which temperature and penalty are already in, at `uniform` in [0, 1); -1 if a logit is NaN."""
    top = row.max()
    if not np.isfinite(top):
        return -1
    left = candidates(row, top, options)
    values = row if left is None else row[left]
    cumulative = _sums(np.exp(values - top))
    total = cumulative[-1]
    # "right" finds the first entry above the target: a token of probability 0 adds nothing and is never that entry.
    place = int(np.searchsorted(cumulative, min(uniform * total, np.nextafter(total, 0.0)), side="right"))
    return place if left is None else int(left[place])


def candidates(row: Floats, top: np.float32, options: GenerationOptions) -> NDArray[np.int64] | None:
    """Ids, ascending, of the tokens that top-k, top-p and min-p keep; None: all of them."""
    left: NDArray[np.int64] | None = None
    values = row
    if options.top_k is not None and options.top_k < len(row):
        threshold = np.partition(row, -options.top_k)[-options.top_k]
        left = np.flatnonzero(row >= threshold)
        values = row[left]
    if options.top_p < 1.0:
        chosen = _nucleus(values, top, options.top_p)
        left = chosen if left is None else left[chosen]
        values = values[chosen]
    if options.min_p > 0.0:
        chosen = np.flatnonzero(np.exp(values - top) >= options.min_p)
        left = chosen if left is None else left[chosen]
    return left


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
    if surplus:  # the last of those that are as likely as the last one that stays
        ties = np.flatnonzero(values[chosen] == last)
        chosen = np.delete(chosen, ties[len(ties) - surplus :])
    return chosen


def _sums(weights: Floats) -> NDArray[np.float64]:
    """Running sums, in float64: in float32 a large vocabulary would lose its unlikely tokens. torch is three times as fast here."""
    return torch.from_numpy(weights).cumsum(0, dtype=torch.float64).numpy()


REMOVED = float("-inf")
# Below it, dividing logits (they reach some 1e4) could leave the range of float32.
_TINY_TEMPERATURE = 1e-20
_BROKEN = "the model produced NaN logits: its weights or activations are broken"


def repetition_penalty(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Make tokens that occurred less likely: positive logits are divided by `penalty`, negative ones multiplied.

    Args:
        logits: float `[batch, vocab]`.
        seen: bool `[batch, vocab]`, True where the token is in the prompt or the output so far.
        penalty: > 0; 1 changes nothing.

    Source: Keskar et al., CTRL, arXiv 1909.05858, section 4.1.
    """
    if penalty == 1.0:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def scale(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits over `temperature` (> 0). A tiny one is right too: what is below the maximum is then removed."""
    if temperature >= _TINY_TEMPERATURE:
        return logits / temperature
    return ((logits - logits.amax(dim=-1, keepdim=True)).double() / temperature).float()


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Remove all but the `k` largest logits of each row (ties with the k-th stay)."""
    if k >= logits.shape[-1]:
        return logits
    threshold = torch.topk(logits, k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, REMOVED)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the fewest most likely tokens whose probabilities sum to at least `p`.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration, arXiv 1904.09751.
    """
    if p >= 1.0:
        return logits
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(ordered, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    remove = before >= p
    remove[..., 0] = False
    return logits.masked_fill(torch.zeros_like(remove).scatter(-1, order, remove), REMOVED)


def keep_min_p(logits: torch.Tensor, minimum: float) -> torch.Tensor:
    """Remove tokens whose probability is below `minimum` times the largest one.

    Source: Nguyen et al., Turning Up the Heat: Min-p Sampling, arXiv 2407.01082.
    """
    if minimum <= 0.0:
        return logits
    probabilities = torch.softmax(logits, dim=-1)
    return logits.masked_fill(probabilities < minimum * probabilities.amax(dim=-1, keepdim=True), REMOVED)


def process(logits: torch.Tensor, seen: torch.Tensor | None, options: GenerationOptions) -> torch.Tensor:
    """All of `options` applied to float `[batch, vocab]` logits; `seen` is needed only for the repetition penalty."""
    if seen is not None:
        logits = repetition_penalty(logits, seen, options.repetition_penalty)
    if options.temperature == 0:
        return logits
    logits = scale(logits, options.temperature)
    if options.top_k is not None:
        logits = keep_top_k(logits, options.top_k)
    logits = keep_top_p(logits, options.top_p)
    return keep_min_p(logits, options.min_p)


def draw(logits: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Draw one token a row, int64 `[batch]`, by inverting the cumulative distribution at one uniform number a row.

    Row i consumes one number of `generators[i]` (CPU generators) and looks at no other row, so a sequence does not depend on
    the batch it is in. float64 throughout: a float32 cumulative sum over a large vocabulary loses the unlikely tokens.
    """
    uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators]).to(logits.device)
    return tokens_at(torch.softmax(logits.double(), dim=-1), uniform)


def tokens_at(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens, int64 `[batch]`, of distributions `[batch, vocab]` (float64, of any sum) at numbers `[batch]` in [0, 1)."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # right=True finds the first entry above the target: a token of probability 0 adds nothing and is never that entry.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def next_tokens(
    logits: torch.Tensor,
    seen: torch.Tensor | None,
    options: GenerationOptions,
    generators: Sequence[torch.Generator],
) -> torch.Tensor:
    """The next token of each row, int64 `[batch]`: the most likely one at temperature 0, else a draw.

    Raises:
        CompressError: a logit is NaN, which argmax and draws would turn into nonsense without a word.
    """
    if seen is not None:
        logits = repetition_penalty(logits, seen, options.repetition_penalty)
    if logits.device.type != "cpu":
        check_numbers(logits)
        logits = process(logits, None, options)
        return logits.argmax(dim=-1) if options.temperature == 0 else draw(logits, generators)
    if options.temperature == 0:
        tokens, broken = greedy(logits)
    else:
        rows = scale(logits, options.temperature).numpy()
        numbers = [float(torch.rand((), generator=g, dtype=torch.float64)) for g in generators]
        tokens = [draw_on_cpu(row, options, number) for row, number in zip(rows, numbers, strict=True)]
        broken = -1 in tokens
    if broken:
        raise CompressError(_BROKEN)
    return torch.tensor(tokens)


def check_numbers(logits: torch.Tensor) -> None:
    """Raise a CompressError where a logit of `[batch, vocab]` is NaN."""
    if bool(torch.isnan(logits.amax(dim=-1)).any()):  # the maximum of a row with NaN is NaN
        raise CompressError(_BROKEN)


def generators(options: GenerationOptions, seeds: Sequence[int]) -> list[torch.Generator | None]:
    """A source of random numbers for each sequence; None where nothing is drawn."""
    if options.temperature == 0:
        return [None] * len(seeds)
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def seen_tokens(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Bool `[vocab]`, on the device of `logits`: which of them are in `tokens` (a model may read tokens that it never writes)."""
    width = logits.shape[-1]
    seen = torch.zeros(width, dtype=torch.bool)
    seen[torch.tensor([token for token in tokens if token < width], dtype=torch.int64)] = True
    return seen.to(logits.device)
